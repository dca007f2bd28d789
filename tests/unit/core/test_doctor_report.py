"""How kvpool doctor shows what it found, and how it compares versions."""

import pytest

from kvpool.cli.doctor_report import Check, size, table
from kvpool.cli.doctor_requirements import fits


@pytest.mark.parametrize(
    ("version", "bounds", "fit"),
    [
        ("5.24.0", ">=5.19,<5.25", True),
        ("5.25", "<5.25,>=5.19", False),
        ("5.3", ">=5.19", False),
        ("5.19", ">=5.19.0", True),
        ("2.13.0+cu128", ">=2.6", True),
        ("1.0", "", True),
    ],
)
def test_version_bounds(version: str, bounds: str, fit: bool) -> None:
    assert fits(version, bounds) is fit


def test_the_table_is_aligned_and_keeps_paths_whole() -> None:
    path = "/some-where/" + "long-name/" * 9 + "libucp.so"
    check = Check(name="a.b", status="warn", found=f"UCX at {path}", remedy="do " + "this " * 30)
    lines = list(table([check]))
    assert lines[0].startswith("warn  a.b ")
    assert [line for line in lines if line.endswith(path)]
    column = lines[0].index("UCX")
    assert all(line[:column].isspace() for line in lines[1:-1])
    assert sum("-> do this" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1536 << 20, "1.5 GiB"), (8 << 20, "8 MiB"), (1024, "1 KiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
