"""The benchmark core: cases measured in pairs with a reference, and what a row says of them.

Owns the order of measurement (ABBA), the statistics, and when a row is no evidence; docs/bench.md
explains them. What is measured lives in modules named by ``SUBJECTS``, each with a function
``cases(quick)``. Who calls it: ``bench_command``.
"""

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

from kvpool.errors import UsageError

# Subject -> module with ``cases(quick: bool) -> list[Case]``; loaded when it is asked for. Those of
# ``TRACED`` take the traces as well.
SUBJECTS: Final = {
    "tiers": "kvpool.cli.bench_tiers",
    "index": "kvpool.cli.bench_index",
    "policy": "kvpool.cli.bench_policy",
    "transfer": "kvpool.cli.bench_transfer",
    "server": "kvpool.cli.bench_server",
    "e2e": "kvpool.cli.bench_e2e",
    "peers": "kvpool.cli.bench_peers",
    "engines": "kvpool.cli.bench_engines",
}
TRACED: Final = ("policy",)
PAIRS: Final = 9
PAIRS_QUICK: Final = 3
# A row is no evidence if its paired ratios spread further, or its reference ran slower than it can.
SPREAD_MAX: Final = 0.25
CEILING_SHARE_MIN: Final = 0.8

# Seconds of a clock that only goes forward: of the wall, or of this process's CPUs.
Timer = Callable[[], float]
# Told what is measured now, in a few words.
Tell = Callable[[str], None]


class Sides(Protocol):
    """What a case measures, set up.

    Attributes:
        ceiling: The best figure that the reference's way of working gives on this machine, measured
            while setting up; None if the best sample of the reference stands for it.
    """

    ceiling: float | None

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
        open: Sets up and tears down, given the clock to measure with; what it gives runs either
            side once a call.
        lower_is_better: True for times: the unfavourable bound is then the upper one.
        one_process: False if other processes do the work, so that this one's CPU time says nothing.
    """

    name: str
    unit: str
    reference: str
    open: Callable[[Timer], AbstractContextManager[Sides]]
    lower_is_better: bool = False
    one_process: bool = True


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


def cases_of(subject: str, quick: bool, only: str = "*", traces: Sequence[Path] = ()) -> list[Case]:
    """Return the cases of a subject whose name fits a glob; ``traces`` are for a policy's.

    Raises UsageError if this installation cannot run the subject, or no name fits.
    """
    if subject not in SUBJECTS:
        raise UsageError(f"no subject {subject!r}: choose one of {', '.join(SUBJECTS)}")
    home = SUBJECTS[subject]
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        raise UsageError(f"{subject} cannot be measured here: {error}") from error
    if traces and subject not in TRACED:
        raise UsageError(f"--trace says nothing to {subject}: leave it out")
    offered: list[Case] = module.cases(quick, *traces)
    found = [case for case in offered if fnmatchcase(case.name, only)]
    if not found:
        names = ", ".join(case.name for case in offered)
        raise UsageError(f"no row of {subject} is named like {only!r}: there are {names}")
    return found


def run(cases: Iterable[Case], pairs: int, timer: Timer, tell: Tell) -> Generator[Row, None, None]:
    """Measure cases one after another.

    Raises UsageError at the end, if some could not be set up here, which says what each lacks.
    """
    lacking: list[str] = []
    for case in cases:
        tell(f"{case.name}: setting up")
        with ExitStack() as stack:
            try:
                sides = stack.enter_context(case.open(timer))
            except UsageError as error:
                lacking.append(f"{case.name}: {error}")
                continue
            row = measure(case, sides, pairs, tell)
        yield row
    if lacking:
        raise UsageError("not measured: " + "; ".join(lacking))


def measure(case: Case, sides: Sides, pairs: int, tell: Tell) -> Row:
    """Measure one case in ABBA order, after one run of each that does not count."""
    sides.value()
    sides.reference()
    values: list[float] = []
    references: list[float] = []
    for pair in range(pairs):
        tell(f"{case.name}: pair {pair + 1} of {pairs}")
        if pair % 2:
            references.append(sides.reference())
            values.append(sides.value())
        else:
            values.append(sides.value())
            references.append(sides.reference())
    return summary(case, values, references, sides.ceiling)


def summary(
    case: Case, values: Sequence[float], references: Sequence[float], ceiling: float | None
) -> Row:
    """Turn paired figures into a row. Raises UsageError: one is 0."""
    if not (all(values) and all(references)):
        raise UsageError(
            f"{case.name}: a figure, or that of the reference, is 0: nothing to compare"
        )
    ratios = sorted(value / reference for value, reference in zip(values, references, strict=True))
    ratio = statistics.median(ratios)
    spread = (_quantile(ratios, 0.9) - _quantile(ratios, 0.1)) / (2 * ratio)
    reference = statistics.median(references)
    known = [*references] if ceiling is None else [*references, ceiling]
    best = min(known) if case.lower_is_better else max(known)
    share = best / reference if case.lower_is_better else reference / best
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
        valid=len(ratios) >= PAIRS and spread <= SPREAD_MAX and share >= CEILING_SHARE_MIN,
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
