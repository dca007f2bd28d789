"""The statistics of the benchmark harness, with figures and clocks that a test decides."""

import argparse
import io
import json
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.cli import bench, bench_command, bench_reference
from kvpool.cli.bench import PAIRS, Case, Row, Sides, Timer, measure, summary, unfavourable
from kvpool.errors import UsageError


class Scripted:
    """Sides whose figures are given; notes the order in which they were asked."""

    def __init__(
        self, values: Iterator[float], references: Iterator[float], ceiling: float | None = None
    ) -> None:
        self._values = values
        self._references = references
        self.ceiling = ceiling
        self.order = ""

    def value(self) -> float:
        self.order += "A"
        return next(self._values)

    def reference(self) -> float:
        self.order += "B"
        return next(self._references)


def case(*, lower_is_better: bool = False, sides: Sides | None = None) -> Case:
    @contextmanager
    def opened(timer: Timer) -> Generator[Sides, None, None]:
        assert sides is not None
        yield sides

    return Case(
        name="a.row",
        unit="GB/s",
        reference="a script",
        open=opened,
        lower_is_better=lower_is_better,
    )


def row_of(sides: Scripted, *, lower_is_better: bool = False, pairs: int = PAIRS) -> Row:
    return measure(case(lower_is_better=lower_is_better), sides, pairs, lambda what: None)


@pytest.mark.parametrize(("value", "reference"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_figures_of_nothing_are_no_row(value: float, reference: float) -> None:
    with pytest.raises(UsageError, match="nothing to compare"):
        row_of(Scripted(forever(value), forever(reference)))


def test_a_trace_of_no_request_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(UsageError, match="no request"):
        bench.cases_of("policy", True, traces=[empty])


def forever(*figures: float) -> Iterator[float]:
    while True:
        yield from figures


def test_pairs_are_taken_in_abba_order_after_one_warm_up() -> None:
    sides = Scripted(forever(1.0), forever(1.0))
    row_of(sides, pairs=4)
    assert sides.order == "AB" + "ABBA" * 2


def test_a_subject_slowed_by_a_factor_shows_that_factor() -> None:
    row = row_of(Scripted(forever(5.0, 5.1, 4.9), forever(10.0, 10.1, 9.9)))
    assert row.ratio == pytest.approx(0.5, rel=0.05)
    assert row.low <= row.ratio
    assert row.valid


def test_a_slow_down_planted_in_a_copy_is_reported() -> None:
    """A copy on a clock that counts bytes: the subject copies twice what it should."""
    now = [0.0]

    def copy(times: int) -> float:
        began = now[0]
        for _ in range(times):
            target = bytearray(bytes(1 << 20))
            now[0] += len(target) / 10e9
        return (1 << 20) / (now[0] - began) / 1e9

    class Copies:
        ceiling: float | None = None

        def value(self) -> float:
            return copy(2)

        def reference(self) -> float:
            return copy(1)

    row = measure(case(), Copies(), PAIRS, lambda what: None)
    assert row.ratio == pytest.approx(0.5)
    assert row.reference_value == pytest.approx(10)


def test_a_noisy_row_is_not_valid() -> None:
    row = row_of(Scripted(forever(10.0, 4.0, 16.0), forever(10.0)))
    assert row.spread > bench.SPREAD_MAX
    assert not row.valid


def test_a_reference_below_the_ceiling_is_not_valid() -> None:
    assert row_of(Scripted(forever(7.0), forever(7.0), ceiling=8.0)).valid
    assert not row_of(Scripted(forever(7.0), forever(7.0), ceiling=9.0)).valid
    # A time: the ceiling is the shortest.
    slow = Scripted(forever(7.0), forever(7.0), ceiling=5.0)
    assert not row_of(slow, lower_is_better=True).valid


def test_a_reference_that_was_once_much_better_is_not_valid() -> None:
    references = iter([1.0, 10.0, *[7.0] * 8])  # the first is the warm-up
    row = row_of(Scripted(forever(7.0), references))
    assert row.spread <= bench.SPREAD_MAX
    assert not row.valid


def test_a_row_that_cannot_be_set_up_costs_no_other() -> None:
    def opened(timer: Timer) -> AbstractContextManager[Sides]:
        raise UsageError("it wants a card")

    lame = replace(case(), name="a.lame", open=opened)
    sound = case(sides=Scripted(forever(1.0), forever(1.0)))
    rows: list[str] = []
    with pytest.raises(UsageError, match="not measured: a.lame: it wants a card"):
        rows.extend(row.name for row in bench.run([lame, sound], 1, lambda: 0.0, lambda what: None))
    assert rows == ["a.row"]


def test_few_pairs_are_no_evidence() -> None:
    assert not row_of(Scripted(forever(1.0), forever(1.0)), pairs=bench.PAIRS_QUICK).valid


def test_the_bound_is_the_third_of_nine_on_the_unfavourable_side() -> None:
    ratios = [float(number) for number in range(1, 10)]
    assert unfavourable(ratios, lower_is_better=False) == 3.0
    assert unfavourable(ratios, lower_is_better=True) == 7.0
    assert unfavourable([1.0, 2.0, 3.0], lower_is_better=False) == 1.0
    assert unfavourable([1.0, 2.0, 3.0], lower_is_better=True) == 3.0


def test_a_times_bound_is_above_its_ratio() -> None:
    values = [1.0, 1.1, 1.2, 1.0, 1.1, 1.2, 1.0, 1.1, 1.2]
    row = summary(case(lower_is_better=True), values, [1.0] * 9, None)
    assert row.low == pytest.approx(1.2)
    assert row.ratio == pytest.approx(1.1)


# ---- the command ----------------------------------------------------------------------------------


def arguments(**given: object) -> argparse.Namespace:
    return argparse.Namespace(
        trace=[],
        **{"subject": "x", "json": False, "only": "*", "quick": False, "cpu": False, **given},
    )


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    cases = [case(sides=Scripted(forever(1.0), forever(2.0)))]
    monkeypatch.setattr(bench, "SUBJECTS", {"x": "bench_of_the_test"})

    class Module:
        @staticmethod
        def cases(quick: bool) -> list[Case]:
            return cases

    monkeypatch.setattr(bench, "import_module", lambda name: Module)
    return cases


def test_json_has_the_stable_fields(
    offered: list[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_command.run(arguments(json=True)) == 0
    row = json.loads(capsys.readouterr().out)
    assert list(row) == (
        [
            "name",
            "value",
            "unit",
            "reference",
            "reference_value",
            "ratio",
            "low",
            "pairs",
            "spread",
            "valid",
        ]
    )
    assert (row["ratio"], row["pairs"], row["valid"]) == (0.5, 9, True)


@pytest.mark.parametrize(
    ("asked", "why"), [({"quick": True}, "--quick"), ({"cpu": True}, "--cpu"), ({}, "run again")]
)
def test_the_table_says_why_a_row_is_no_evidence(
    asked: dict[str, bool],
    why: str,
    offered: list[Case],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "SPREAD_MAX", -1.0)  # as on a restless machine
    bench_command.run(arguments(**asked))
    header, line = capsys.readouterr().out.splitlines()
    assert header.startswith("row")
    assert line.startswith("a.row") and line.endswith(f"not valid: {why}")


def test_cpu_time_is_never_evidence(
    offered: list[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    bench_command.run(arguments(json=True, cpu=True))
    assert not json.loads(capsys.readouterr().out)["valid"]


def test_a_name_that_fits_nothing_names_what_there_is(offered: list[Case]) -> None:
    with pytest.raises(UsageError, match=r"there are a\.row"):
        bench_command.run(arguments(only="b.*"))


def test_ctrl_c_closes_the_case_and_keeps_what_was_printed(
    offered: list[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []

    class Interrupted(Scripted):
        def reference(self) -> float:
            raise KeyboardInterrupt

    @contextmanager
    def opened(timer: Timer) -> Generator[Sides, None, None]:
        try:
            yield Interrupted(forever(1.0), forever(1.0))
        finally:
            closed.append("second")

    offered.append(Case(name="b.row", unit="s", reference="none", open=opened))
    assert bench_command.run(arguments()) == 130
    told = capsys.readouterr()
    assert closed == ["second"]
    assert "a.row" in told.out and "b.row" not in told.out
    assert "stopped" in told.err


def test_progress_is_one_line_of_a_terminal_and_is_wiped() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    progress = bench_command.Progress(screen)
    progress.tell("a long text")
    progress.tell("short")
    progress.clear()
    assert screen.getvalue() == f"\ra long text\rshort      \r{'':11}\r"


def test_a_reference_is_compiled_once_and_again_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_reference, "_SOURCES", tmp_path)
    source, built = tmp_path / "thing.c", tmp_path / "built"
    source.write_text("int one(void) { return 1; }\n")
    first = bench_reference.compiled("thing", built)
    made = first.stat().st_mtime_ns
    assert bench_reference.compiled("thing", built) == first
    assert first.stat().st_mtime_ns == made
    source.write_text("int two(void) { return 2; }\n")
    assert bench_reference.compiled("thing", built) != first
    source.write_text("int broken(\n")
    with pytest.raises(UsageError, match="does not compile"):
        bench_reference.compiled("thing", built)
    with pytest.raises(UsageError, match="checkout"):
        bench_reference.compiled("absent", built)


def test_memory_is_four_times_all_caches_of_the_last_level(tmp_path: Path) -> None:
    assert bench_reference.rotate_bytes(tmp_path) == 128 << 20
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for level, size in ((2, "512K"), (3, "40960K")):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    assert bench_reference.rotate_bytes(tmp_path) == 384 << 20  # 320 MiB, in steps of 128
