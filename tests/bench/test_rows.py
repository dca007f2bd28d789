"""Every row that needs no model opens, and both of its sides do their work. No figure is judged."""

import time

import pytest

from kvpool.cli import bench, bench_tiers
from kvpool.cli.bench import Case, Sides

ROWS = [
    case for subject in ("tiers", "index", "transfer") for case in bench.cases_of(subject, True)
]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_both_sides_run(case: Case) -> None:
    with case.open(time.perf_counter) as sides:
        assert sides.value() > 0
        assert sides.reference() > 0


def test_a_copy_made_twice_shows_in_the_row() -> None:
    """The planted slow-down, in CPU time, which other programs change little."""
    (case,) = [one for one in bench_tiers.cases(True) if one.name == "tiers.dram.load.2MiB"]

    class Slowed:
        ceiling: float | None = None

        def __init__(self, sides: Sides) -> None:
            self._sides = sides

        def value(self) -> float:
            return 1 / (1 / self._sides.value() + 1 / self._sides.value())

        def reference(self) -> float:
            return self._sides.value()

    with case.open(time.process_time) as sides:
        row = bench.measure(case, Slowed(sides), bench.PAIRS, lambda what: None)
    assert 0.3 < row.ratio < 0.75
