"""Who may call: exactly who is listed, by exactly what was asked of him."""

import contextvars
import hmac
from dataclasses import replace

import pytest

from kvpool.client.remote import salted
from kvpool.errors import ConfigError, UsageError
from kvpool.metrics import Metrics
from kvpool.server.access import Credential, TenantAccess, tenant_salt
from kvpool.server.tenancy import Tenancy
from kvpool.server.tenant import Tenant, calling_tenant
from kvpool.testing.blocks import SMALL_LAYOUT, namespace

SECRET = "s" * 64
RED, BLUE = "r" * 64, "b" * 64


def _access() -> TenantAccess:
    return TenantAccess(
        [
            Credential(tenant=Tenant(name="red", operator=False), token=RED),
            Credential(tenant=Tenant(name="blue", operator=False), token=BLUE),
            Credential(tenant=Tenant(name="green"), certificate_names=("green.pool", "g2")),
            Credential(tenant=Tenant(name="both"), token="x" * 64, certificate_names=("both",)),
        ],
        SECRET,
    )


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_makes_its_tenant() -> None:
    access = _access()
    assert access.authenticate(_bearer(RED), ()).name == "red"
    assert access.authenticate({"authorization": f"bearer {BLUE}"}, ("some",)).name == "blue"


def test_a_certificate_makes_its_tenant() -> None:
    assert _access().authenticate({}, ("other", "g2")).name == "green"


def test_who_must_show_both_does() -> None:
    access = _access()
    assert access.authenticate(_bearer("x" * 64), ("both",)).name == "both"
    for metadata, names in (
        ({}, ("both",)),
        (_bearer("x" * 64), ()),
        (_bearer(RED[:-1]), ("both",)),
    ):
        with pytest.raises(UsageError):
            access.authenticate(metadata, names)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer "},
        {"authorization": RED},
        {"authorization": f"Basic {RED}"},
        {"authorization": f"Bearer {RED} "},
        {"authorization": f"Bearer {RED[:-1]}"},
        {"authorization": f"Bearer {RED}x"},
        {"authorization": "Bearer \udcff\0../"},
        {"authorization": "Bearer " + "x" * 100_000},
        {"x-tenant": "red"},
    ],
)
def test_nobody_else_comes_in_and_no_secret_is_said(metadata: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        _access().authenticate(metadata, ("RED", "red", "green"))
    assert RED not in str(caught.value)
    assert RED not in repr(_access().__dict__["_credentials"])


def test_a_salt_follows_from_the_tenant_and_the_secret_alone() -> None:
    access = _access()
    red = access.authenticate(_bearer(RED), ()).salt
    assert red == tenant_salt(SECRET, "red")
    salts = {tenant_salt(secret, name) for secret in (SECRET, RED) for name in ("red", "blue")}
    assert len(salts) == 4
    assert all(len(salt) == 32 for salt in salts)


def test_contradictions_are_refused() -> None:
    red = Credential(tenant=Tenant(name="red"), token=RED)
    for listed, secret, said in (
        ([red, red], SECRET, "listed twice"),
        ([red, replace(red, tenant=Tenant(name="blue"))], SECRET, "one token"),
        ([red, Credential(tenant=Tenant(name="blue"), token=BLUE)], "", "secret_file"),
        ([Credential(tenant=Tenant(name="red"))], SECRET, "would be everybody"),
        ([Credential(tenant=Tenant(name=""), token=RED)], SECRET, "no name of a tenant"),
        ([Credential(tenant=Tenant(name="a\0b"), token=RED)], SECRET, "no name of a tenant"),
        ([Credential(tenant=Tenant(name="\u00fc" * 33), token=RED)], SECRET, "no name of a tenant"),
    ):
        with pytest.raises(ConfigError, match=said):
            TenantAccess(listed, secret)


def test_what_the_servers_own_user_stores_has_names_that_no_tenant_can_make() -> None:
    """Else a tenant that leaves its salt out could read it, and put other bytes under its names."""
    own = _access().own()
    salts = [tenant_salt(SECRET, name) for name in ("red", "blue", "green", "both")]
    assert own.salt not in (b"", *salts)
    assert own.operator
    assert not own.name
    assert _access().own() == own  # the same on every server
    context = contextvars.copy_context()

    def enter() -> None:
        with Tenancy(Metrics()).gate(_access(), local=True)({}, ()):
            pass

    context.run(enter)
    assert context[calling_tenant] == own


def test_one_tenant_without_a_secret_shares_with_the_servers_own_user() -> None:
    access = TenantAccess([Credential(tenant=Tenant(name="red"), token=RED)], "")
    assert access.own().salt == access.authenticate(_bearer(RED), ()).salt == b""


def test_salts_are_as_the_formats_say() -> None:
    """Whoever speaks to a server in another language makes the same names."""
    said = hmac.new(SECRET.encode(), b"kvpool-salt-1\x00red", "sha256").digest()
    assert tenant_salt(SECRET, "red") == said
    of = namespace(SMALL_LAYOUT, "mine")
    assert salted(of, said).salt == f"{said.hex()}:mine"
    assert salted(of, b"") == of
