"""The command ``kvpool``: benchmarks, the doctor, a look into a running server, the version.

Owns arguments and output; what a subcommand does lives elsewhere. Who calls it: people.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from kvpool.cli import (
    bench_command,
    doctor,
    fsck,
    nodes,
    plan,
    profile_command,
    simulate_command,
    tier,
)
from kvpool.errors import KVPoolError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpool", description="A tiered pool of KV cache blocks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    made = commands.add_parser(
        "bench",
        help="measure this machine against plain references",
        description=bench_command.DESCRIPTION,
    )
    bench_command.add_arguments(made)
    made.set_defaults(run=bench_command.run)
    made = commands.add_parser(
        "doctor",
        help="say what this host offers and lacks, and what to do",
        description=doctor.DESCRIPTION,
        epilog=doctor.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_arguments(made)
    made.set_defaults(run=doctor.run)
    made = commands.add_parser(
        "profile",
        help="measure how long a model takes on this machine",
        description=profile_command.DESCRIPTION,
    )
    profile_command.add_arguments(made)
    made.set_defaults(run=profile_command.run)
    made = commands.add_parser(
        "simulate",
        help="simulate a cluster and draw the papers' figures",
        description=simulate_command.DESCRIPTION,
    )
    simulate_command.add_arguments(made)
    made.set_defaults(run=simulate_command.run)
    made = commands.add_parser(
        "fsck", help="check the folder of an SSD tier, and mend it", description=fsck.DESCRIPTION
    )
    fsck.add_arguments(made)
    made.set_defaults(run=fsck.run)
    made = commands.add_parser(
        "tier",
        help="look at the tiers of a running server, check them, make room",
        description=tier.DESCRIPTION,
        epilog=tier.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tier.add_arguments(made)
    made.set_defaults(run=tier.run)
    made = commands.add_parser(
        "plan", help="what a model's KV takes up, and what fits", description=plan.DESCRIPTION
    )
    plan.add_arguments(made)
    made.set_defaults(run=plan.run)
    nodes.add_commands(commands.add_parser)
    made = commands.add_parser("version", help="show the version")
    made.set_defaults(run=_version)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int | None = arguments.run(arguments)
    except KVPoolError as error:
        print(f"kvpool: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130
    return status or 0


def _version(arguments: argparse.Namespace) -> None:
    print(version("kvpool"))


if __name__ == "__main__":
    sys.exit(main())
