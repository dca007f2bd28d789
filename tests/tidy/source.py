"""Read sources without running them: which there are, what they import, which names they define."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.tidy.mirror import MIRROR, ROOT, links


@cache
def modules() -> dict[str, Path]:
    """Map the dotted name of each module of the package to its source file."""
    found: dict[str, Path] = {}
    for link, source in links().items():
        if link.suffix == ".py":
            dotted = ".".join(link.relative_to(MIRROR).with_suffix("").parts)
            found[dotted.removesuffix(".__init__")] = source
    return found


@cache
def project_files() -> tuple[Path, ...]:
    """List every file of the project that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    paths = (ROOT / name for name in sorted(set(listed)))
    return tuple(path for path in paths if path.is_file())


def shown(path: Path) -> str:
    """Name a file for a message: from the root where it lies under it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def imports(tree: ast.AST, known: frozenset[str] = frozenset()) -> Iterator[tuple[str, int]]:
    """Yield the module that each import names, and its line.

    ``from kvpool import errors`` names ``kvpool.errors`` when that is one of the ``known`` modules.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            submodules = [name for name in inner if name in known]
            for name in submodules:
                yield name, node.lineno
            if len(submodules) < len(inner):
                yield node.module, node.lineno


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that the code chooses, and its line: definitions, arguments, variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
    yield from value_names(tree)


def value_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that hold values: arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def words(name: str) -> list[str]:
    """Split an identifier into lower-case words: ``BlockView`` and ``block_view`` are alike."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.findall(r"[a-z0-9]+", apart.lower())


def called(node: ast.AST) -> str:
    """Name what an expression refers to, dotted: ``os.environ``; empty if it is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = called(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def parse(path: Path) -> ast.Module:
    """Parse a source file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
