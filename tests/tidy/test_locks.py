"""Every lock is in the table of docs/architecture.md, which has an order without circles."""

import ast

from tests.tidy import locks
from tests.tidy.mirror import ROOT

ROWS = locks.order((ROOT / "docs" / "architecture.md").read_text())


def test_every_lock_is_in_the_table() -> None:
    assert {lock for lock, _ in ROWS} == locks.locks()


def test_locks_are_taken_downwards() -> None:
    assert not locks.disorder(ROWS)


def test_a_lock_is_seen_and_a_wrong_order_too() -> None:
    tree = ast.parse("self._a = threading.Lock()\nself._b = threading.Condition(self._a)\nc = 1")
    assert list(locks.made(tree)) == ["_a"]
    table = "| `a.py` `_x` | what | none |\n| `b.py` `_y` | what | `a.py` `_x` |\n"
    assert locks.disorder(locks.order(table)) == ["('a.py', '_x') under ('b.py', '_y')"]
