"""The public interface as text, so that a change of it shows in a change's diff.

make api        # writes tests/tidy/api_snapshot.txt anew
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.source import modules, parse

SNAPSHOT = Path(__file__).with_name("api_snapshot.txt")

# What engines, operators' tools and other languages are written against.
CONTRACTS = (
    "kvpool",
    "kvpool.errors",
    "kvpool.block",
    "kvpool.memory",
    "kvpool.arena",
    "kvpool.completion",
    "kvpool.clock",
    "kvpool.events",
    "kvpool.config",
    "kvpool.base",
    "kvpool.pool",
    "kvpool.client.protocol",
    "kvpool.tiers.base",
    "kvpool.transfer.base",
    "kvpool.integration.runtime.handoff",
)


# Module-level names that every module may have and nobody imports.
_PLUMBING = frozenset(("logger", "T", "Held", "Request", "Reply"))


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{kind} {node.name}({ast.unparse(node.args)}){result}"


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def _members(body: list[ast.stmt], indent: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            for decorator in node.decorator_list:
                yield f"{indent}@{ast.unparse(decorator)}"
            yield indent + _signature(node)
        elif isinstance(node, ast.ClassDef) and _is_public(node.name):
            for decorator in node.decorator_list:
                yield f"{indent}@{ast.unparse(decorator)}"
            bases = [ast.unparse(base) for base in (*node.bases, *node.keywords)]
            yield f"{indent}class {node.name}({', '.join(bases)})"
            yield from _members(node.body, indent + "    ")
        elif isinstance(node, ast.AnnAssign) and _is_public(ast.unparse(node.target)):
            yield indent + ast.unparse(node)
        elif isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
            if any(_is_public(name) and name not in _PLUMBING for name in names):
                yield f"{indent}{' = '.join(names)} = {ast.unparse(node.value)}"


def _exports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvpool."):
            yield from (f"{alias.asname or alias.name} from {node.module}" for alias in node.names)


def render(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield the public interface of one module, a line each."""
    yield f"[{module}]"
    if module == "kvpool":
        yield from sorted(set(_exports(tree)))
    yield from _members(tree.body, "")
    yield ""


def snapshot() -> str:
    """Return the interface of every contract module."""
    lines = (line for name in CONTRACTS for line in render(name, parse(modules()[name])))
    return "\n".join(lines)


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
    print(f"wrote {SNAPSHOT}")
