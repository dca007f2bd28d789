"""kvpool/_native*.pyi name what was compiled, and what they say of numbers is so."""

import ast
import inspect
from pathlib import Path

import kvpool
from kvpool._native import lib

FOLDER = Path(inspect.getfile(kvpool)).parent
CLASSES = {
    node.name: node
    for path in sorted(FOLDER.glob("_native*.pyi"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.ClassDef)
}


def members() -> list[ast.stmt]:
    """Return what ``Lib`` and the classes that it is made of declare."""
    bases = [base.id for base in CLASSES["Lib"].bases if isinstance(base, ast.Name)]
    return [node for name in ("Lib", *bases) for node in CLASSES[name].body]


def test_names() -> None:
    functions = {node.name for node in members() if isinstance(node, ast.FunctionDef)}
    constants = {
        node.target.id
        for node in members()
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert functions | constants == set(dir(lib))


def test_constants() -> None:
    for node in members():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert isinstance(node.value, ast.Constant)
            assert getattr(lib, node.target.id) == node.value.value
