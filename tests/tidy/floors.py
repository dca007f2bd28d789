"""Which module may import which: DESIGN's floors, as a table and one function."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.tidy.source import imports, parse

# Area -> floor. The longest prefix wins; a module of kvpool that no line names is an error.
FLOORS: Mapping[str, int] = {
    "kvpool.errors": 0,
    "kvpool.block": 0,
    "kvpool.memory": 0,
    "kvpool.config": 0,
    "kvpool.clock": 0,
    "kvpool.host_memory": 0,
    "kvpool.events": 0,
    "kvpool.metrics": 0,
    "kvpool.arena": 0,
    "kvpool.bell": 0,
    "kvpool.completion": 0,
    "kvpool.standard_streams": 0,
    "kvpool._native": 0,
    "kvpool.tiers": 1,
    "kvpool.transfer": 1,
    "kvpool.index": 1,
    "kvpool.base": 2,
    "kvpool.leases": 2,
    "kvpool.operations": 2,
    "kvpool.reservation": 2,
    "kvpool.pool": 2,
    "kvpool.pools": 2,
    "kvpool.client": 2,
    "kvpool.integration": 3,
    "kvpool.server": 4,
    "kvpool.cli": 4,
    "kvpool.testing": 5,
}
# Beside the floors: sees everything up to integration, and only tests see it.
BESIDE = "kvpool.testing"
BESIDE_SEES = 3
# Which other area of the same floor an area may import. Wings have none.
_POOL_PARTS = frozenset({"kvpool.leases", "kvpool.operations", "kvpool.reservation"})
SIDEWAYS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(_POOL_PARTS, frozenset({"kvpool.base"})),
    "kvpool.pool": frozenset({"kvpool.base", *_POOL_PARTS}),
    "kvpool.pools": frozenset({"kvpool.pool"}),
    "kvpool.client": frozenset({"kvpool.base", "kvpool.operations", "kvpool.pool"}),
}
# The facade re-exports names of these floors.
FACADE = "kvpool"
FACADE_SEES = 2

# Only these modules import torch. `import kvpool` loads none of the heavy ones.
TORCH_USERS = ("kvpool.integration", "kvpool.tiers.gpu", "kvpool.tiers.gpu_mover")
HEAVY = ("torch", "grpc", "lmdb", "transformers")


def area(module: str) -> str:
    """Name the area that a module belongs to. Raises KeyError if no floor is given for it."""
    if module == FACADE:
        return FACADE
    fitting = [name for name in FLOORS if f"{module}.".startswith(f"{name}.")]
    if not fitting:
        raise KeyError(f"{module} is on no floor: add it to tests/tidy/floors.py")
    return max(fitting, key=len)


def may_import(module: str, target: str) -> bool:
    """Say whether an import stays inside an area, or goes down (or sideways, where allowed)."""
    here, there = area(module), area(target)
    if here == there:
        return True
    if there in (FACADE, BESIDE):
        return False
    if here == FACADE:
        return FLOORS[there] <= FACADE_SEES
    if here == BESIDE:
        return FLOORS[there] <= BESIDE_SEES
    if FLOORS[here] == FLOORS[there]:
        return FLOORS[here] == 0 or there in SIDEWAYS.get(here, frozenset())
    return FLOORS[there] < FLOORS[here]


def wrong_imports(module: str, tree: ast.AST, known: frozenset[str]) -> Iterator[str]:
    """Yield the imports of one module that the floors forbid."""
    for target, line in imports(tree, known):
        top = target.split(".")[0]
        if top == "kvpool" and not may_import(module, target):
            yield f"{module}:{line} imports {target}, which its floor may not see"
        if top == "torch" and not f"{module}.".startswith(tuple(f"{m}." for m in TORCH_USERS)):
            yield f"{module}:{line} imports torch; only {' and '.join(TORCH_USERS)} may"


def check(sources: Mapping[str, Path]) -> list[str]:
    """Return every forbidden import of the modules, in order."""
    known = frozenset(sources) | {"kvpool._native"}
    return [
        line
        for module, path in sources.items()
        for line in wrong_imports(module, parse(path), known)
    ]
