"""Who may call a server: tenants by bearer token, by the name in a certificate, or by both.

Owns the comparison of what a call shows with what the configuration says, and the salt of each
tenant, which follows from who it is and from the pool's secret alone. Listens nowhere, reads no file.
Who calls it: the RPC edge, for each call.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvpool.errors import ConfigError, UsageError
from kvpool.server.tenant import Tenant

# What a caller that may not come in is told, whatever is wrong: it learns nothing about tenants.
_REFUSED: Final = (
    "this server lets nobody in without a valid token or certificate: give the token file "
    "(token_file) or the certificate (certificate_file, key_file) of one of its tenants"
)
_BEARER: Final = "bearer "
TENANT_NAME_BYTES_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """How one tenant shows who it is: by everything that is set here together.

    Attributes:
        tenant: Who it then is; its salt is made here.
        token: Secret; empty: none is asked for.
        certificate_names: Any of these must be a name of the caller's verified certificate (its
            common name, or a DNS name in it); empty: none is asked for.
    """

    tenant: Tenant
    token: str = ""
    certificate_names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Say whose it is, and no secret."""
        return f"Credential(tenant={self.tenant.name!r})"


class TenantAccess:
    """Lets in whom the configuration lists, and nobody else. Immutable: safe from any thread.

    Args:
        credentials: Of the tenants; each name once.
        secret: Of the pool, the same on every server: salts are made from it. Empty only where
            there is one tenant, whose blocks then need no salt.

    Raises:
        ConfigError: They contradict each other.
    """

    def __init__(self, credentials: Iterable[Credential], secret: str) -> None:
        listed = list(credentials)
        _check(listed, secret)
        self._credentials = tuple(
            replace(credential, tenant=_salted(credential.tenant, secret))
            for credential in sorted(listed, key=_conditions, reverse=True)
        )
        # No tenant has an empty name: none can name what processes of the server's user store.
        self._own = _salted(Tenant(), secret)
        self._digests = tuple(_digest(credential.token) for credential in self._credentials)

    def authenticate(self, metadata: Mapping[str, str], peer_names: tuple[str, ...]) -> Tenant:
        """Return the tenant of one call. Raises UsageError: it is nobody that may call."""
        shown = metadata.get("authorization", "")
        token = shown[len(_BEARER) :] if shown[: len(_BEARER)].lower() == _BEARER else ""
        digest = _digest(token)
        found: Tenant | None = None
        # All are compared, whatever is found: the time says nothing about who is listed.
        for credential, expected in zip(self._credentials, self._digests, strict=True):
            same = hmac.compare_digest(digest, expected)
            names = credential.certificate_names
            if (
                (same if credential.token else True)
                and (not names or not set(names).isdisjoint(peer_names))
                and found is None
            ):
                found = credential.tenant
        if found is None:
            raise UsageError(_REFUSED)
        return found

    def own(self) -> Tenant:
        """Return who a process of the server's own user is: an operator with a salt of its own."""
        return self._own


def _conditions(credential: Credential) -> int:
    """Count what must be shown: who asks for both comes before who asks for one of them."""
    return bool(credential.token) + bool(credential.certificate_names)


def tenant_salt(secret: str, name: str) -> bytes:
    """Return the salt of a tenant: nobody without the pool's secret can make another's."""
    return hmac.digest(secret.encode(), b"kvpool-salt-1\0" + name.encode(), "sha256")


def _salted(tenant: Tenant, secret: str) -> Tenant:
    return replace(tenant, salt=tenant_salt(secret, tenant.name) if secret else b"")


def _digest(token: str) -> bytes:
    # The tokens are long and random: a plain hash hides them and makes their lengths equal.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _check(listed: list[Credential], secret: str) -> None:
    names = [credential.tenant.name for credential in listed]
    for name in names:
        if not name or len(name.encode()) > TENANT_NAME_BYTES_MAX or not name.isprintable():
            raise ConfigError(
                f"{name[:80]!r} is no name of a tenant: use 1 to {TENANT_NAME_BYTES_MAX} bytes of "
                "printable text",
                key="tenants.name",
            )
    if len(set(names)) != len(names):
        raise ConfigError("a tenant is listed twice: give each its own name", key="tenants.name")
    tokens = [credential.token for credential in listed if credential.token]
    if len(set(tokens)) != len(tokens):
        raise ConfigError("two tenants have one token: give each its own", key="tenants.token_file")
    for credential in listed:
        if not credential.token and not credential.certificate_names:
            raise ConfigError(
                f"tenant {credential.tenant.name} would be everybody: give it a token_file or "
                "certificate_names",
                key="tenants.token_file",
            )
    if len(listed) > 1 and not secret:
        raise ConfigError(
            "several tenants need a salt each: name a file with the pool's secret in "
            "access.secret_file, the same on every server",
            key="access.secret_file",
        )
