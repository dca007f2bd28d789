"""How long files and functions are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.source import parse, shown

SOFT_LINES = 400
HARD_LINES = 600
FUNCTION_LINES = 70

# A C function as this project lays it out: the brace that opens it and the one that ends it stand
# alone in the first column.
_C_FUNCTION = re.compile(
    r"^(?P<head>[A-Za-z_][^;{}]*\))\n\{\n(?P<body>.*?)^\}", re.MULTILINE | re.DOTALL
)


def is_code(path: Path) -> bool:
    """Say whether the limits hold for a file."""
    return path.suffix in {".py", ".pyi", ".c", ".h"}


def line_count(path: Path) -> int:
    """Count the lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each function's name and length in lines, its docstring included."""
    if path.suffix in {".c", ".h"}:
        for found in _C_FUNCTION.finditer(path.read_text(encoding="utf-8")):
            name = re.findall(r"(\w+)\s*\(", found["head"])
            yield (name[-1] if name else "?"), found[0].count("\n") + 1
        return
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def too_long(path: Path) -> Iterator[str]:
    """Yield what is over a hard limit in a file."""
    if (count := line_count(path)) > HARD_LINES:
        yield f"{shown(path)}: {count} lines; split it, at most {HARD_LINES} are allowed"
    for name, length in functions(path):
        if length > FUNCTION_LINES:
            yield f"{shown(path)}: {name} has {length} lines, at most {FUNCTION_LINES} are allowed"
