"""The configuration file says what it may hold, and what is wrong with one that does not fit."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.errors import ConfigError
from kvpool.server.from_settings import parts_of
from kvpool.server.settings import FileSettings
from kvpool.server.settings_file import parse_settings, read_settings, render_file, render_table

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
