"""Mutations: every small change of a source file, one at a time.

Owns what counts as a small change. Only what functions do is changed: not their texts, annotations
or defaults. Who calls it: `test_mutations.py`.
"""

import ast
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Final

_COMPARES: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
_NAMES: Final = {
    "minimum": "maximum",
    "maximum": "minimum",
    "min": "max",
    "max": "min",
    "argmin": "argmax",
    "any": "all",
    "bisect_right": "bisect_left",
    "READY": "DRAINING",
    "DEAD": "DRAINING",
}
# Steps of `while` after which a mutant is stopped; no rule needs a thousand.
_STEPS_MAX: Final = 20_000
STEP: Final = "mutation_step"


@dataclass(frozen=True)
class Mutation:
    """One changed source: where, the line as it is, what one node of it became; and its code."""

    function: str
    line: str
    node: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.function}: {self.line}   with   {self.node}"


def mutations(source: str, name: str) -> Iterator[Mutation]:
    """Yield every mutation of a source, compiled as the module ``name``."""
    functions = list(_functions(ast.parse(source)))
    for at, function in enumerate(functions):
        for place, node in enumerate(_body(function)):
            for which in range(len(_changes(node))):
                tree = ast.parse(source)
                changed = _body(list(_functions(tree))[at])[place]
                _changes(changed)[which]()
                yield Mutation(
                    function.name,
                    source.splitlines()[getattr(node, "lineno", 1) - 1].strip(),
                    _shown(changed),
                    compile(_bounded(tree), name, "exec"),
                )


def stepper() -> Callable[[], None]:
    """Return what a mutant's module must have under the name `STEP`: it stops endless loops."""
    steps = itertools.count()

    def step() -> None:
        if next(steps) > _STEPS_MAX:
            raise AssertionError("the mutant loops")

    return step


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.If | ast.While):
        return ast.unparse(node.test)
    return ast.unparse(node).partition("\n")[0]


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _body(function: ast.FunctionDef) -> list[ast.AST]:
    """List all nodes in a function's body, but those of texts and annotations."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.FunctionDef):
            continue
        found.append(node)
        for name, child in ast.iter_fields(node):
            children = child if isinstance(child, list) else [child]
            if name != "annotation":
                waiting += [one for one in reversed(children) if isinstance(one, ast.AST)]
    return found


def _changes(node: ast.AST) -> list[Callable[[], None]]:
    """List the ways to change one node in place."""
    changed: tuple[str, object] | None = None
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARES:
        changed = "ops", [_COMPARES[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        changed = "op", _OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        changed = "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        changed = "test", ast.UnaryOp(op=ast.Not(), operand=node.test)
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
        changed = "op", ast.UAdd()
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        changed = "value", node.value + 1
    elif isinstance(node, ast.Attribute) and node.attr in _NAMES:
        changed = "attr", _NAMES[node.attr]
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        changed = "id", _NAMES[node.id]
    if changed is None:
        return []
    name, value = changed
    return [lambda: setattr(node, name, value)]


def _bounded(tree: ast.Module) -> ast.Module:
    """Count the steps of each loop that could be endless."""
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            call = ast.Call(func=ast.Name(id=STEP, ctx=ast.Load()), args=[], keywords=[])
            node.body.insert(0, ast.Expr(value=call))
    return ast.fix_missing_locations(tree)
