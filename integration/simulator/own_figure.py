"""Beyond the papers: our planner setting against theirs, where theirs serves 90 % in time.

Owns how that load is found, and the ablation. Who calls it: ``kvpool simulate``.
"""

from dataclasses import replace
from typing import Final

from kvpool.integration.conductor.patience import PatienceOptions
from kvpool.integration.conductor.planner import Admission, PlannerOptions
from kvpool.integration.simulator.figure import Chart, Check, Figure, Series
from kvpool.integration.simulator.job import End
from kvpool.integration.simulator.outcome import Outcome
from kvpool.integration.simulator.suite import (
    CLUSTER,
    OBJECTIVES,
    OWN,
    PAPERS,
    Half,
    Scenario,
    Suite,
    own_cluster,
)

_PAPERS_SHARE: Final = 0.9
_WAYS: Final[tuple[Admission, ...]] = ("baseline", "early", "predicted")
# The load is looked for between these speeds, to 6 %, with the two ways that serve most.
_SPEEDS: Final = (1.1, 2.6)
_STEPS: Final = 4
_SEARCHED: Final[tuple[Admission, ...]] = ("baseline", "early")


def own(suite: Suite) -> Figure:
    """Draw the share inside both objectives, ours and the papers', on the second half."""
    rows: list[list[str | float | int]] = []
    checks: list[Check] = []
    charts: list[Chart] = []
    for trace in suite.traces:
        way, speed = _load_of_the_papers(suite, trace, "second")
        shares: dict[str, float] = {}
        for name, scenario in _variants(trace, way, speed).items():
            outcome = suite.run(scenario, f"own {trace} {name}")
            shares[name] = outcome.effective_share(OBJECTIVES)
            rows.append([trace, speed, name, shares[name], *_ends(outcome)])
        papers, ours = shares[f"papers, {way}"], shares["ours"]
        text = f"{trace}: ours {ours:.1%}, the papers' ({way}) {papers:.1%} at {speed:.2f} x"
        checks.append(Check(text, ours > papers))
        charts.append(
            Chart(
                title=f"{trace}, second half, {speed:.2f} x",
                kind="bars",
                x_label="setting",
                y_label="share inside both objectives",
                series=[Series(name="second half", xs=list(shares), ys=list(shares.values()))],
            )
        )
    return Figure(
        name="own",
        title="Ours against the papers' algorithm",
        printed_in="",
        columns=[
            *("trace", "speed", "setting", "effective_share"),
            *("rejected", "after_prefill", "mean_ttft_s", "mean_tbt_s"),
        ],
        rows=rows,
        charts=charts,
        checks=checks,
        text="At the speed where the better of the papers' two best ways to reject still serves 90 % of the "
        "second half inside TTFT 30 s and TBT 0.1 s. Ours was tuned on the first half only. What "
        "it does: a request that finds decode full waits for its turn while its TTFT objective "
        "allows (patience), decode batches take no more than TBT allows, and prefill weighs its "
        "own wait against the work it makes for others (slack-aware). The other rows leave one "
        "of these out.",
    )


def _papers(trace: str, way: Admission, speed: float, half: Half) -> Scenario:
    return Scenario(trace=trace, planner=replace(PAPERS, admission=way), speed=speed, half=half)


def _variants(trace: str, way: Admission, speed: float) -> dict[str, Scenario]:
    """Name what is compared: the papers' ways, ours, and ours with one part left out."""
    held = own_cluster(CLUSTER, OBJECTIVES)
    slack_only = replace(OWN.planner, admission=way)

    def ours(planner: PlannerOptions | PatienceOptions, waits: bool = True) -> Scenario:
        cluster = held if waits else CLUSTER
        return Scenario(trace=trace, planner=planner, cluster=cluster, speed=speed, half="second")

    return {
        **{f"papers, {one}": _papers(trace, one, speed, "second") for one in _WAYS},
        "ours": ours(OWN),
        "ours, no slack": ours(replace(OWN, planner=PAPERS)),
        "ours, no patience": ours(slack_only, waits=False),
        "ours, no holding": ours(OWN, waits=False),
    }


def _load_of_the_papers(suite: Suite, trace: str, half: Half) -> tuple[Admission, float]:
    """Find the highest speed at which the best of the papers' ways still serves 90 % in time."""
    slow, fast = _SPEEDS
    best: Admission = "early"
    for step in range(_STEPS):
        speed = (slow * fast) ** 0.5
        label = f"own {trace} looking for the load, {step + 1} of {_STEPS}"
        shares: dict[Admission, float] = {
            way: suite.run(_papers(trace, way, speed, half), label).effective_share(OBJECTIVES)
            for way in _SEARCHED
        }
        way = max(_SEARCHED, key=shares.__getitem__)
        if shares[way] >= _PAPERS_SHARE:
            slow, best = speed, way
        else:
            fast = speed
    return best, slow


def _ends(outcome: Outcome) -> tuple[int, int, float, float]:
    return (
        outcome.count(End.REJECTED),
        outcome.count(End.DROPPED),
        outcome.mean_ttft_s(),
        outcome.mean_tbt_s(),
    )
