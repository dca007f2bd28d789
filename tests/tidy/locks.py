"""Which locks there are, and in which order docs/architecture.md says they are taken."""

import ast
import re
from collections.abc import Iterator

from tests.tidy.source import called, modules, parse, shown

_KINDS = {"threading.Lock", "threading.RLock", "threading.Condition", "threading.Semaphore"}
_LOCK = re.compile(r"`([\w/]+\.py)` `(\w+)`")

Lock = tuple[str, str]


def made(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes that a module binds to a lock of its own."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        # A condition on another lock is that lock.
        if called(node.value.func) in _KINDS and not node.value.args:
            for target in node.targets:
                yield called(target).split(".")[-1]


def locks() -> set[Lock]:
    """Return every lock of the package as (file, attribute)."""
    found: set[Lock] = set()
    for module, path in modules().items():
        if not module.startswith("kvpool.testing"):
            found.update((shown(path), name) for name in made(parse(path)))
    return found


def order(text: str) -> list[tuple[Lock, list[Lock]]]:
    """Read the table: each lock, from the outermost in, with those taken under it."""
    rows: list[tuple[Lock, list[Lock]]] = []
    for line in text.splitlines():
        cells = line.strip("|").split(" | ")
        first = _LOCK.match(cells[0].strip())
        if line.startswith("|") and len(cells) == 3 and first:
            under = [(file, name) for file, name in _LOCK.findall(cells[2])]
            rows.append(((first[1], first[2]), under))
    return rows


def disorder(rows: list[tuple[Lock, list[Lock]]]) -> list[str]:
    """Return what a table says is taken under a lock and stands above it, or nowhere."""
    place = {lock: at for at, (lock, _) in enumerate(rows)}
    return [
        f"{inner} under {lock}"
        for at, (lock, under) in enumerate(rows)
        for inner in under
        if place.get(inner, -1) <= at
    ]
