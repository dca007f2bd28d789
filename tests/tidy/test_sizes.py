"""Files of at most 600 lines (400 is a warning), functions of at most 70."""

from pathlib import Path

import pytest

from tests.tidy import sizes
from tests.tidy.source import project_files


def test_sizes() -> None:
    wrong = [
        line for path in project_files() if sizes.is_code(path) for line in sizes.too_long(path)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("lines", [sizes.HARD_LINES, sizes.HARD_LINES + 1])
@pytest.mark.parametrize("suffix", ["py", "c"])
def test_a_long_file_is_found(tmp_path: Path, suffix: str, lines: int) -> None:
    path = tmp_path / f"long.{suffix}"
    path.write_text("\n" * lines)
    assert bool(list(sizes.too_long(path))) == (lines > sizes.HARD_LINES)


@pytest.mark.parametrize("lines", [sizes.FUNCTION_LINES, sizes.FUNCTION_LINES + 1])
def test_a_long_function_is_found(tmp_path: Path, lines: int) -> None:
    python, c = tmp_path / "long.py", tmp_path / "long.c"
    python.write_text("async def long() -> None:\n" + "    x = 1\n" * (lines - 1))
    c.write_text(
        "static int longest(int a,\n                   int b)\n{\n"
        + "    a++;\n" * (lines - 4)
        + "}\n"
    )
    for path in (python, c):
        assert bool(list(sizes.too_long(path))) == (lines > sizes.FUNCTION_LINES), path


def test_the_c_core_is_read() -> None:
    names = {
        name for path in project_files() if path.suffix == ".c" for name, _ in sizes.functions(path)
    }
    assert {"kvp_arena_open", "kvp_hash_chain", "kvp_copy_blocks"} <= names
