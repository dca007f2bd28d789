"""The configuration file says what it may hold, and what is wrong with one that does not fit."""

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.errors import ConfigError
from kvpool.server.from_settings import parts_of
from kvpool.server.settings import FileSettings
from kvpool.server.settings_file import parse_settings, read_settings, render_file, render_table
from tests.certificates import Authority

DOCUMENT = Path(__file__).parents[3] / "docs" / "server.md"


def test_what_is_printed_reads_as_the_defaults() -> None:
    assert parse_settings(render_file()) == FileSettings()
    assert parse_settings("") == FileSettings()


def test_every_key_is_printed_and_means_something() -> None:
    for line in render_table().splitlines()[2:]:
        key, meaning = line.split(" | ")[0].strip("| `"), line.split(" | ")[-1]
        assert f"{key.split('.')[-1]} = " in render_file()
        assert len(meaning) > 10, line


def test_the_document_has_the_table_of_the_code() -> None:
    assert render_table() in DOCUMENT.read_text()


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        (
            "[pool]\ndrm = 1",
            "pool.drm",
            "line 2: there is no key pool.drm: did you mean pool.dram?",
        ),
        ("[pool]\ndram = '8 GB/s'", "pool.dram", "line 2: pool.dram: size is '8 GB/s'"),
        ("\n\n[pool.ssd]\nfolders = 'x'", "pool.ssd.folders", "line 4: there is no key"),
        ("[node]\nname = 3", "node.name", "line 2: node.name: Expected `str`, got `int`"),
        (
            "[listen]\ninsecure = 'yes'",
            "listen.insecure",
            "line 2: listen.insecure: Expected `bool`",
        ),
        ("[[tenants]]\ntoken_file = 'x'", "tenants", "line 1: tenants: Object missing required"),
        ("[[tenants]]\nname = 'a'\nlease_bytes_max = -1", "tenants.lease_bytes_max", "line 3: "),
        ("[pool]\ndram = true", "pool.dram", "line 2: pool.dram: Expected a number of bytes"),
        ("pool = 3", "pool", "line 1: pool: Expected `object`"),
        ("nothing = 1", "nothing", "line 1: there is no key nothing: "),
        ("[pool\n", None, "this is no TOML: "),
    ],
)
def test_a_wrong_file_names_the_key_and_the_line(text: str, key: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text)
    assert str(caught.value).startswith(said)
    assert caught.value.key == key


@given(st.text(max_size=200) | st.sampled_from(render_file().splitlines()))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    try:
        parse_settings(text)
    except ConfigError as error:
        assert str(error)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing.toml cannot be read: No such file"):
        read_settings(tmp_path / "missing.toml")
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_settings(path)
    path.write_text("[pool]\ndram = 'x'")
    with pytest.raises(ConfigError, match=r"bad\.toml: line 2: pool\.dram"):
        read_settings(path)


def test_where_the_memory_lies_is_the_pools_to_know(tmp_path: Path) -> None:
    """What the file says of the DRAM tier's memory arrives at the pool; nothing said is nothing chosen."""
    said = parse_settings("[pool]\nnuma_node = 0\nlocked = true")
    for settings, node, locked in ((said, 0, True), (FileSettings(), None, False)):
        pool = parts_of(settings, tmp_path).config.pool
        assert (pool.numa_node, pool.locked) == (node, locked)
    with pytest.raises(ConfigError, match="numactl --hardware") as caught:
        parts_of(parse_settings("[pool]\nnuma_node = -2"), tmp_path)
    assert caught.value.key == "pool.numa_node"


RING = '[node]\nname = "a"\n[[ring.members]]\nname = "a"\naddress = "10.0.0.1:7420"\n[listen]\n'
ETCD = '[node]\nname = "a"\n[ring.etcd]\nendpoints = ["http://127.0.0.1:1"]\n'


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("[node]\nstop_timeout_s = inf", "node.stop_timeout_s", "not infinite"),
        ("[node]\nstop_timeout_s = nan", "node.stop_timeout_s", "above 0"),
        ("[node]\nstop_timeout_s = 0.1", "node.stop_timeout_s", "needs 0.5 s"),
        ("[node]\nclients_max = 0", "node.clients_max", "node.clients_max is 0: "),
        ("[pool]\ndram = 0", "pool.dram", "pool.dram is 0: "),
        ("[pool]\nlease_seconds_max = inf", "pool.lease_seconds_max", "not infinite"),
        ("[ring]\nannounce_interval_s = inf", "ring.announce_interval_s", "not infinite"),
        ("[pool.ssd]\ncapacity = 4096", "pool.ssd.folder", "set pool.ssd.folder"),
        ("[pool.ssd]\nfolder = 'x'", "pool.ssd.capacity", "set pool.ssd.capacity"),
        ("[listen]\naddress = '::1:7420'", "listen.address", "in brackets"),
        ("[listen]\nhttp = '::1:7420'", "listen.http", "in brackets"),
        (
            f"{RING}address = '10.0.0.1:1'\ninsecure = true\nadvertise = 'b:1'",
            "listen.advertise",
            "one thing",
        ),
        (
            RING.replace("10.0.0.1:7420", "nonsense") + "address = 'localhost:1'",
            "ring.members.address",
            "HOST:PORT",
        ),
        (
            RING.replace("10.0.0.1", "[::]") + "address = 'localhost:1'",
            "listen.advertise",
            "cannot reach",
        ),
        (
            f"{ETCD}[listen]\naddress = '0.0.0.0:1'\ninsecure = true",
            "listen.advertise",
            "cannot reach",
        ),
        ("[node]\ncalls_max = 0", "node.calls_max", "above 0"),
        ("[[tenants]]\nname = 'a'\nstores_max = -1", "tenants.stores_max", "an equal share"),
        (f"{ETCD}timeout_s = -1\n[listen]\naddress = 'localhost:1'", "etcd.timeout_s", "above 0"),
        (
            ETCD.replace("http:", "ftp:") + "[listen]\naddress = 'localhost:1'",
            "etcd.endpoints",
            "write http",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_names(
    tmp_path: Path, text: str, key: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        parts_of(parse_settings(text), tmp_path)
    assert caught.value.key == key


def test_tenants_have_equal_shares_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 40)
    (tmp_path / "other").write_text("o" * 40)
    (tmp_path / "secret").write_text("s" * 40)
    for name in ("token", "other", "secret"):
        (tmp_path / name).chmod(0o600)
    text = (
        "[node]\nclients_max = 32\nstores_max = 2\ncalls_max = 99\n"
        f"[access]\nsecret_file = '{tmp_path / 'secret'}'\n"
        f"[[tenants]]\nname = 'red'\ntoken_file = '{tmp_path / 'token'}'\n"
        f"[[tenants]]\nname = 'blue'\ntoken_file = '{tmp_path / 'other'}'\ncalls_max = 50\n"
    )
    authenticator = parts_of(parse_settings(text), tmp_path).authenticator
    shares = []
    for letter in "to":
        tenant = authenticator.authenticate({"authorization": f"Bearer {letter * 40}"}, ())
        shares.append((tenant.clients_max, tenant.stores_max, tenant.calls_max))
    assert shares == [(10, 1, 33), (10, 1, 50)]  # a third each, one at least; or as it says
    own = authenticator.own()
    assert (own.clients_max, own.stores_max, own.calls_max) == (None, None, None)


@pytest.mark.parametrize("row", render_table().splitlines()[2:], ids=lambda row: row.split("`")[1])
def test_a_nul_character_is_refused_in_every_text(row: str) -> None:
    """The operating system cannot be asked for a path with one."""
    key, kind = row.split("`")[1], row.split(" | ")[1]
    if "text" not in kind:
        return
    *section, name = key.split(".")
    header = ".".join(section)
    value = '["a\\u0000b"]' if kind == "list of texts" else '"a\\u0000b"'
    is_list = header in ("tenants", "ring.members")
    text = f"[[{header}]]" if is_list else f"[{header}]"
    with pytest.raises(ConfigError, match="NUL character") as caught:
        parse_settings(f"{text}\n{name} = {value}")
    assert caught.value.key == key


def test_a_node_of_a_list_is_where_the_list_says(tmp_path: Path) -> None:
    """Else its own answer and the others' differ, and clients connect anew with each of them."""
    for address in ("10.0.0.1:7420", "0.0.0.0:7420", "[::]:1"):
        settings = parse_settings(f"{RING}address = '{address}'\ninsecure = true")
        parts = parts_of(settings, tmp_path)
        assert (parts.config.listen, parts.config.advertise) == (address, "10.0.0.1:7420")


@pytest.mark.parametrize("wrong", ["certificate", "key", "pair", "ca"])
def test_pem_files_that_do_not_fit_are_named(tmp_path: Path, wrong: str) -> None:
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    noise = tmp_path / "noise"
    noise.write_text("-----BEGIN CERTIFICATE-----\nzz\n-----END CERTIFICATE-----\n")
    noise.chmod(0o600)
    named = {
        "certificate_file": noise if wrong == "certificate" else one.certificate,
        "key_file": {"key": noise, "pair": other.key}.get(wrong, one.key),
        "client_ca_file": noise if wrong == "ca" else authority.ca,
    }
    lines = "\n".join(f"{key} = '{path}'" for key, path in named.items())
    settings = parse_settings(f"[listen]\naddress = 'localhost:1'\n{lines}")
    key = "listen.client_ca_file" if wrong == "ca" else "listen.key_file"
    with pytest.raises(ConfigError, match="PEM files that fit each other") as caught:
        parts_of(settings, tmp_path)
    assert caught.value.key == key
