"""``kvpool profile``: measures a model on this machine and writes a profile for the planner.

Owns the arguments, the progress and the summary; the measuring is in
``kvpool.integration.runtime.measure``. Who calls it: ``kvpool``.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from kvpool.cli.bench_command import Progress

DESCRIPTION: Final = (
    "Measure how long a local model takes on this machine to prefill, to decode and to load KV, and "
    "write the profile that the planner and `kvpool simulate` read. docs/planner.md tells the fit."
)
_INTERRUPTED: Final = 130  # as a shell says of a program that was interrupted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvpool profile``."""
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="file to write, JSON")
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--tokens-max", type=int, default=1024, help="longest prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--running-max", type=int, default=8, help="most requests a step (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="the median counts (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds-max",
        type=float,
        default=180.0,
        help="repeat less than that if it would take longer (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, write and tell; return the exit status."""
    # torch and Transformers take seconds to import, and only this command needs them.
    from kvpool.integration.conductor.profile import describe, write_profile
    from kvpool.integration.runtime.measure import Effort, measure

    progress = Progress(sys.stderr)
    try:
        profile = measure(
            arguments.model,
            dtype=arguments.dtype,
            threads=arguments.threads,
            effort=Effort(
                tokens_max=arguments.tokens_max,
                running_max=arguments.running_max,
                repeats=arguments.repeats,
                seconds_max=arguments.seconds_max,
            ),
            tell=progress.tell,
        )
    except KeyboardInterrupt:
        progress.clear()
        print("kvpool: stopped; nothing was written", file=sys.stderr)
        return _INTERRUPTED
    progress.clear()
    write_profile(profile, arguments.out)
    print(f"{profile.model} on {profile.machine}")
    print("\n".join(describe(profile)))
    print(f"written to {arguments.out}")
    return 0
