"""kvpool/_native.pyi names what was compiled, and what it says of numbers is so."""

import ast
import inspect
from pathlib import Path

import kvpool
from kvpool._native import lib

STUB = ast.parse((Path(inspect.getfile(kvpool)).parent / "_native.pyi").read_text())


def stub_class() -> ast.ClassDef:
    return next(node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == "Lib")


def test_names() -> None:
    functions = {node.name for node in stub_class().body if isinstance(node, ast.FunctionDef)}
    constants = {
        node.target.id
        for node in stub_class().body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert functions | constants == set(dir(lib))


def test_constants() -> None:
    for node in stub_class().body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert isinstance(node.value, ast.Constant)
            assert getattr(lib, node.target.id) == node.value.value
