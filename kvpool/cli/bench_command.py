"""``kvpool bench``: its arguments, its table, its progress.

Owns what a person sees; the measuring is in ``kvpool.cli.bench``. Who calls it: ``kvpool``.
"""

import argparse
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

import msgspec

from kvpool.cli import bench
from kvpool.cli.bench import Row
from kvpool.errors import UsageError

DESCRIPTION: Final = (
    "Measure this machine against plain references, in pairs. docs/bench.md says how to read a row."
)
HEADER: Final = (
    f"{'row':<28} {'value':>9} {'reference':>10} {'unit':<9} {'ratio':>6} {'low':>6} "
    f"{'spread':>6}  against"
)
_INTERRUPTED: Final = 130  # as a shell says of a program that was interrupted
# Without a terminal, progress is a line now and then.
_LINE_EVERY_S: Final = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvpool bench``."""
    parser.add_argument("subject", choices=sorted(bench.SUBJECTS))
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="*", metavar="GLOB", help="rows to measure, by name")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="for policy: a trace of requests, NAME_trace.jsonl; may be given again",
    )
    parser.add_argument("--quick", action="store_true", help="for a look, never for a bar")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="CPU seconds of this process instead of the wall's: for a busy machine, never for a bar",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return the exit status."""
    pairs = bench.PAIRS_QUICK if arguments.quick else bench.PAIRS
    cases = bench.cases_of(arguments.subject, arguments.quick, arguments.only, arguments.trace)
    if arguments.cpu and not all(case.one_process for case in cases):
        names = ", ".join(case.name for case in cases if not case.one_process)
        raise UsageError(f"--cpu says nothing of {names}: other processes do the work")
    timer = time.process_time if arguments.cpu else time.perf_counter
    progress = Progress(sys.stderr)
    if not arguments.json:
        print(HEADER, flush=True)
    try:
        with closing(bench.run(cases, pairs, timer, progress.tell)) as rows:
            for row in rows:
                progress.clear()
                row = replace(row, valid=row.valid and not arguments.cpu)
                said = line(row, cpu=arguments.cpu)
                shown = msgspec.json.encode(row).decode() if arguments.json else said
                print(shown, flush=True)
    except KeyboardInterrupt:
        progress.clear()
        print("kvpool: stopped; the rows above are whole", file=sys.stderr)
        return _INTERRUPTED
    return 0


def line(row: Row, *, cpu: bool = False) -> str:
    """Return a row of the table for people; ``cpu`` if it was measured in CPU seconds."""
    why = "--quick" if row.pairs < bench.PAIRS else "--cpu" if cpu else "run again"
    mark = "" if row.valid else f"   not valid: {why}"
    return (
        f"{row.name:<28} {row.value:>9.3g} {row.reference_value:>10.3g} {row.unit:<9} "
        f"{row.ratio:>6.2f} {row.low:>6.2f} {row.spread:>6.0%}  {row.reference}{mark}"
    )


class Progress:
    """Says what is measured: on one line of a terminal, else in a line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._next = time.monotonic() + _LINE_EVERY_S
        self._width = 0

    def tell(self, what: str) -> None:
        """Show what is measured now."""
        if self._terminal:
            print(f"\r{what:<{self._width}}", end="", file=self._stream, flush=True)
            self._width = max(self._width, len(what))
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_S
            print(what, file=self._stream, flush=True)

    def clear(self) -> None:
        """Make room for a row."""
        if self._terminal and self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=self._stream, flush=True)
