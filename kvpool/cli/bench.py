"""The benchmark core: cases measured in pairs with a reference, and what a row says of them.

Owns the order of measurement (ABBA), the statistics, and the two outputs: a table for people, one
JSON object a line for programs. What is measured lives in modules named by ``SUBJECTS``, each with a
function ``cases(quick)``. Who calls it: ``kvpool bench``.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Final, Protocol

from kvpool.errors import UsageError

# Subject -> module with ``cases(quick: bool) -> list[Case]``; loaded when it is asked for.
SUBJECTS: Final = {
    "tiers": "kvpool.cli.bench_tiers",
    "index": "kvpool.cli.bench_index",
    "transfer": "kvpool.cli.bench_transfer",
    "e2e": "kvpool.cli.bench_e2e",
}
PAIRS: Final = 9
PAIRS_QUICK: Final = 3
# A row is no evidence if its paired ratios spread further, or its reference ran slower than it can.
SPREAD_MAX: Final = 0.25
CEILING_SHARE_MIN: Final = 0.8

Measure = Callable[[], float]  # runs once and returns the figure, in the case's unit


class Sides(Protocol):
    """What a case measures, set up."""

    def value(self) -> float:
        """Run kvpool once; return the figure."""
        ...

    def reference(self) -> float:
        """Run the reference once; return the figure."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row to be measured.

    Attributes:
        name: Stable name, dotted.
        unit: Of both figures.
        reference: What it is compared with, for a person.
        open: Sets up and tears down; what it gives runs either side once a call.
        lower_is_better: True for times: the unfavourable bound is then the upper one.
    """

    name: str
    unit: str
    reference: str
    open: Callable[[], AbstractContextManager[Sides]]
    lower_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured.

    Attributes:
        value, reference_value: Medians, in ``unit``.
        ratio: Median of value / reference of the pairs.
        low: The unfavourable 90 % bound of that median: lower, or upper where lower is better. A
            bar is held against it.
        pairs: How many.
        spread: Half the distance of the ratios' 10th and 90th percentile over their median.
        valid: False if it is neither pass nor fail: run again.
    """

    name: str
    value: float
    unit: str
    reference: str
    reference_value: float
    ratio: float
    low: float
    pairs: int
    spread: float
    valid: bool


def cases_of(subject: str, quick: bool) -> list[Case]:
    """Return the cases of a subject. Raises UsageError if this installation cannot run it."""
    if subject not in SUBJECTS:
        raise UsageError(f"no subject {subject!r}: choose one of {', '.join(SUBJECTS)}")
    home = SUBJECTS[subject]
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        raise UsageError(f"{subject} cannot be measured here: {error}") from error
    found: list[Case] = module.cases(quick)
    return found


def run(cases: Iterable[Case], only: str, pairs: int) -> Iterator[Row]:
    """Measure the cases whose name fits the glob, one after another."""
    for case in cases:
        if fnmatchcase(case.name, only):
            with case.open() as sides:
                yield measure(case, sides, pairs)


def measure(case: Case, sides: Sides, pairs: int) -> Row:
    """Measure one case in ABBA order, after one run of each that does not count."""
    sides.value()
    sides.reference()
    values: list[float] = []
    references: list[float] = []
    for pair in range(pairs):
        if pair % 2:
            references.append(sides.reference())
            values.append(sides.value())
        else:
            values.append(sides.value())
            references.append(sides.reference())
    return summary(case, values, references)


def summary(case: Case, values: Sequence[float], references: Sequence[float]) -> Row:
    """Turn paired figures into a row."""
    ratios = sorted(value / reference for value, reference in zip(values, references, strict=True))
    ratio = statistics.median(ratios)
    spread = (_quantile(ratios, 0.9) - _quantile(ratios, 0.1)) / (2 * ratio)
    reference = statistics.median(references)
    if case.lower_is_better:
        near_ceiling = min(references) >= CEILING_SHARE_MIN * reference
    else:
        near_ceiling = reference >= CEILING_SHARE_MIN * max(references)
    return Row(
        name=case.name,
        value=statistics.median(values),
        unit=case.unit,
        reference=case.reference,
        reference_value=reference,
        ratio=ratio,
        low=unfavourable(ratios, case.lower_is_better),
        pairs=len(ratios),
        spread=spread,
        valid=len(ratios) >= PAIRS and spread <= SPREAD_MAX and near_ceiling,
    )


def unfavourable(ratios: Sequence[float], lower_is_better: bool) -> float:
    """Return the one-sided 90 % bound of the median of ascending ratios: a sign test's.

    With n pairs, the k-th smallest ratio lies above the true median with probability
    P(Binomial(n, 1/2) < k); k is the largest with at most 0.1. With 9 pairs that is the third
    smallest. With fewer than 4 there is no such k: the smallest is returned.
    """
    count = len(ratios)
    below, k = 0.0, 0
    while k < count:
        below += math.comb(count, k) / 2**count
        if below > 0.1:
            break
        k += 1
    index = max(k - 1, 0)
    return ratios[count - 1 - index] if lower_is_better else ratios[index]


def _quantile(ascending: Sequence[float], share: float) -> float:
    at = share * (len(ascending) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (at - low)


HEADER: Final = (
    f"{'row':<32} {'value':>9} {'reference':>10} {'unit':<9} {'ratio':>6} {'low':>6} "
    f"{'spread':>6}  against"
)


def line(row: Row) -> str:
    """Return a row of the table for people."""
    mark = "" if row.valid else "   not valid: run again"
    return (
        f"{row.name:<32} {row.value:>9.3g} {row.reference_value:>10.3g} {row.unit:<9} "
        f"{row.ratio:>6.2f} {row.low:>6.2f} {row.spread:>6.0%}  {row.reference}{mark}"
    )
