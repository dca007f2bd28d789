"""``kvpool simulate``: its arguments, its progress, and where the report lies.

Owns what a person sees; the simulator is ``kvpool.integration.simulator``, which needs the extra
``sim``. Who calls it: ``kvpool``.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpool.cli.bench_command import Progress
from kvpool.errors import UsageError

if TYPE_CHECKING:
    from kvpool.integration.conductor.cost import CostModel
    from kvpool.integration.simulator.figure import Figure

DESCRIPTION: Final = (
    "Simulate a cluster under a trace and draw the figures of the Mooncake papers, or one run. "
    "docs/simulator.md says what is modelled and what is not."
)
_SUITE: Final = "mooncake"
_RUN: Final = "run"
_BAR: Final = 24
_INTERRUPTED: Final = 130  # as a shell shows SIGINT
# Options that only `--figure run` has: the figures have one configuration.
_OF_RUN: Final = {
    "poisson": None,
    "requests": 10_000,
    "prefill": 8,
    "decode": 8,
    "policy": "kvcache-centric",
    "admission": "none",
    "speed": 1.0,
    "profile": None,
    "ttft_s": 30.0,
    "tbt_s": 0.1,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvpool simulate``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--suite", choices=[_SUITE], help="all figures of the papers, and ours (the default)"
    )
    what.add_argument(
        "--figure", metavar="NAME", help="one figure, or 'run': see docs/simulator.md"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        metavar="FILE",
        help="a trace in the public format; more than once for several",
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds write equal tables")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the report")
    run = parser.add_argument_group("of --figure run")
    run.add_argument("--poisson", type=float, metavar="RATE", help="a generated load, per second")
    run.add_argument("--requests", type=int, help="of the generated load")
    run.add_argument("--prefill", type=int, help="prefill nodes")
    run.add_argument("--decode", type=int, help="decode nodes")
    run.add_argument("--policy", help="of the planner (default: %(default)s; docs/planner.md)")
    run.add_argument("--admission", help="of the planner (default: %(default)s)")
    run.add_argument("--speed", type=float, help="times as fast as the trace")
    run.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="of the machine, from `kvpool profile` (default: the papers' machine)",
    )
    run.add_argument("--ttft-s", type=float, help="objective (default: %(default)s)")
    run.add_argument("--tbt-s", type=float, help="objective (default: %(default)s)")
    run.set_defaults(**_OF_RUN)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and write the report; return the exit status."""
    try:
        from kvpool.integration.simulator import report
        from kvpool.integration.simulator.figures import FIGURES
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing: pip install 'kvpool[sim]'") from error
    names = list(FIGURES) if arguments.figure is None else [arguments.figure]
    if not set(names) <= {*FIGURES, _RUN}:
        known = ", ".join([*FIGURES, _RUN])
        raise UsageError(f"no figure is named {arguments.figure!r}: there are {known}")
    _check_used(arguments)
    report.prepare(arguments.out)
    progress = Progress(sys.stderr)
    began = time.monotonic()
    try:
        if names == [_RUN]:
            made = [_single_run(arguments, progress)]
            progress.clear()
            pictures = [report.write_figure(made[0], arguments.out)]
        else:
            made, pictures = _figures(arguments, names, progress)
    except KeyboardInterrupt:
        progress.clear()
        print("kvpool: stopped; the figures named above are written, no report", file=sys.stderr)
        return _INTERRUPTED
    path = report.write_report(made, pictures, _facts(arguments), arguments.out)
    print(f"{path}  ({time.monotonic() - began:.0f} s)")
    return 0


def _check_used(arguments: argparse.Namespace) -> None:
    """Refuse an option that would change nothing, rather than let somebody believe that it did."""
    given = [key for key, default in _OF_RUN.items() if getattr(arguments, key) != default]
    useless = [key for key in given if arguments.figure != _RUN]
    why = f"the figures have one configuration; use it with --figure {_RUN}"
    if arguments.figure == _RUN and arguments.poisson is not None and "speed" in given:
        useless, why = ["speed"], "it is of a trace; give --poisson another rate"
    elif arguments.figure == _RUN and arguments.poisson is None and "requests" in given:
        useless, why = ["requests"], "it is of a generated load; a trace is replayed whole"
    if useless:
        raise UsageError(f"--{useless[0].replace('_', '-')} would change nothing: {why}")


def _figures(
    arguments: argparse.Namespace, names: list[str], progress: Progress
) -> "tuple[list[Figure], list[bytes]]":
    from kvpool.integration.simulator import report
    from kvpool.integration.simulator.figures import FIGURES
    from kvpool.integration.simulator.suite import open_suite

    if not arguments.trace:
        raise UsageError("no load: give --trace FILE, once or more")
    suite = open_suite(arguments.trace, arguments.seed, _bar(progress))
    made: list[Figure] = []
    pictures: list[bytes] = []
    for name in names:
        figure = FIGURES[name](suite)
        pictures.append(report.write_figure(figure, arguments.out))
        made.append(figure)
        progress.clear()
        print(_summary(figure), flush=True)
    return made, pictures


def _single_run(arguments: argparse.Namespace, progress: Progress) -> "Figure":
    from kvpool.integration.conductor.planner import PlannerOptions
    from kvpool.integration.conductor.snapshot import Objectives
    from kvpool.integration.simulator.setting import ClusterSetting
    from kvpool.integration.simulator.single_run import SingleRun, single_run
    from kvpool.integration.simulator.suite import trace_name
    from kvpool.integration.simulator.trace import at_speed, read_trace, spread
    from kvpool.integration.simulator.workload import Workload, generated

    if (arguments.poisson is None) == (not arguments.trace):
        raise UsageError("--figure run needs one load: --trace FILE, or --poisson RATE")
    if arguments.poisson is not None:
        workload = Workload(request_count=arguments.requests, rate_per_s=arguments.poisson)
        name, count = f"poisson {arguments.poisson:g}/s", arguments.requests
        arriving, seconds = generated(workload, arguments.seed), count / arguments.poisson
    else:
        if len(arguments.trace) > 1:
            raise UsageError("--figure run simulates one trace: give --trace once")
        path = arguments.trace[0]
        name = trace_name(path)
        requests = at_speed(spread(read_trace(path), arguments.seed), arguments.speed)
        arriving, count, seconds = iter(requests), len(requests), requests[-1].arrival_s
    tell = _bar(progress)
    cost, port_bytes_per_s = _machine(arguments.profile)
    return single_run(
        SingleRun(
            name=name,
            requests=arriving,
            seconds=seconds,
            planner=PlannerOptions(policy=arguments.policy, admission=arguments.admission),
            cluster=ClusterSetting(
                prefill_count=arguments.prefill,
                decode_count=arguments.decode,
                port_bytes_per_s=port_bytes_per_s,
            ),
            seed=arguments.seed,
            cost=cost,
            objectives=Objectives(ttft_s=arguments.ttft_s, tbt_s=arguments.tbt_s),
        ),
        lambda arrived: tell(name, arrived / count),
    )


def _machine(profile_path: Path | None) -> "tuple[CostModel, float]":
    """Return the costs of a machine, and the bandwidth of its port."""
    from kvpool.integration.conductor.cost import ProfiledCost
    from kvpool.integration.conductor.profile import read_profile
    from kvpool.integration.simulator.machine import papers_machine
    from kvpool.integration.simulator.setting import ClusterSetting

    if profile_path is None:
        return papers_machine(), ClusterSetting().port_bytes_per_s
    profile = read_profile(profile_path)
    return ProfiledCost(profile), profile.transfer.bytes_per_s


def _bar(progress: Progress) -> Callable[[str, float], None]:
    def tell(what: str, share: float) -> None:
        done = round(_BAR * share)
        progress.tell(f"[{'#' * done}{'.' * (_BAR - done)}] {share:>4.0%} {what}")

    return tell


def _summary(figure: "Figure") -> str:
    lines = [f"{figure.name}: {figure.title}"]
    for check in figure.checks:
        lines.append(f"  {'holds        ' if check.holds else 'DOES NOT HOLD'}  {check.text}")
    return "\n".join(lines)


def _facts(arguments: argparse.Namespace) -> list[str]:
    traces = [path.name for path in arguments.trace or ()]
    loads = ", ".join(traces) if traces else f"Poisson, {arguments.poisson:g} a second"
    facts = [f"Loads: {loads}", f"Seed: {arguments.seed}"]
    if arguments.profile is not None:
        facts.append(f"Machine: profile {arguments.profile.name}")
    return facts
