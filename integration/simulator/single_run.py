"""One load on one cluster, as the command line describes it; no figure of a paper.

Owns the table of such a run. Who calls it: ``kvpool simulate --figure run``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpool.integration.conductor.cost import CostModel
from kvpool.integration.conductor.planner import Planner, PlannerOptions
from kvpool.integration.conductor.snapshot import Objectives
from kvpool.integration.simulator.figure import Chart, Figure, Series
from kvpool.integration.simulator.job import End
from kvpool.integration.simulator.setting import ClusterSetting
from kvpool.integration.simulator.simulation import Simulation
from kvpool.integration.simulator.trace import Arrival

_SAMPLES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleRun:
    """What to simulate.

    Attributes:
        name: Of the load, for people.
        requests: The load, in order of arrival, drawn once.
        seconds: About how long its arrivals take: says how often the cluster is sampled.
        cost: Of the machine.
        objectives: What requests are held against.
    """

    name: str
    requests: Iterable[Arrival]
    seconds: float
    planner: PlannerOptions
    cluster: ClusterSetting
    seed: int
    cost: CostModel
    objectives: Objectives


def single_run(run: SingleRun, tell: Callable[[int], None]) -> Figure:
    """Simulate; ``tell`` is told now and then how many requests have arrived."""
    cost, objectives = run.cost, run.objectives
    sample_s = max(run.seconds / _SAMPLES, 0.1)
    planner = Planner(run.planner, cost)
    simulation = Simulation(run.cluster, planner, cost, objectives, run.seed, sample_s)
    outcome = simulation.run(run.requests, tell)
    cluster, planner_options, pressure = run.cluster, run.planner, outcome.pressure
    moments = list(pressure.at_s)
    return Figure(
        name="run",
        title=f"{run.name} on {cluster.prefill_count}P + {cluster.decode_count}D",
        printed_in="",
        columns=[
            *("load", "prefill", "decode", "policy", "admission", "requests", "rejected"),
            *("after_prefill", "effective_share", "mean_ttft_s", "mean_tbt_s", "hit_rate"),
            *("mean_prefill_s", "sent_bytes"),
        ],
        rows=[
            [
                *(run.name, cluster.prefill_count, cluster.decode_count),
                *(planner_options.policy, planner_options.admission, len(outcome)),
                *(outcome.count(End.REJECTED), outcome.count(End.DROPPED)),
                *(outcome.effective_share(objectives), outcome.mean_ttft_s()),
                *(outcome.mean_tbt_s(), outcome.hit_rate(), outcome.mean_prefill_s()),
                outcome.sent_bytes,
            ]
        ],
        charts=[
            Chart(
                title=f"load: share of TTFT {objectives.ttft_s:g} s and TBT {objectives.tbt_s:g} s",
                kind="lines",
                x_label="s",
                y_label="load",
                series=[
                    Series(name="prefill", xs=moments, ys=list(pressure.prefill)),
                    Series(name="decode", xs=moments, ys=list(pressure.decode)),
                ],
            )
        ],
        text=f"A run that the command line described. Objectives: TTFT {objectives.ttft_s:g} s, TBT "
        f"{objectives.tbt_s:g} s.",
    )
