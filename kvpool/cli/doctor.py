"""``kvpool doctor``: what this host offers and lacks, and what to do about it.

Owns the list of checks, the flags and the output. A check is a pure function of a ``Host``. Who calls
it: people, before they set a pool up; ``--json`` is for programs.
"""

import argparse
from collections.abc import Callable
from typing import Final

import msgspec

from kvpool.cli import doctor_memory, doctor_system, doctor_transfer
from kvpool.cli.doctor_host import Host, examine
from kvpool.cli.doctor_report import Check, lacking, table
from kvpool.config import parse_size

CHECKS: Final[tuple[Callable[[Host], Check], ...]] = (
    doctor_system.python,
    doctor_system.kernel,
    doctor_system.cpu,
    doctor_memory.dram,
    doctor_memory.hugepages,
    doctor_memory.shared,
    doctor_memory.memlock,
    doctor_memory.descriptors,
    doctor_memory.memfd,
    doctor_memory.pidfd,
    doctor_memory.io_uring,
    doctor_transfer.ucx_library,
    doctor_transfer.ucx_others,
    doctor_transfer.rdma,
    doctor_transfer.network,
    doctor_transfer.bind,
    doctor_system.cuda,
    doctor_system.packages,
    doctor_system.torch,
    doctor_system.serve,
    doctor_system.etcd,
)

DESCRIPTION: Final = """\
Look at this host as kvpool would use it, and say what it offers, what it lacks, and what to do.
Nothing is changed and nothing stays behind; it takes a few seconds, because it tries each UCX
library in a process of its own.
"""
EPILOG: Final = """\
examples:
  kvpool doctor                      a table; "->" says what to do
  kvpool doctor --dram 64GiB         is there room for an arena of this size?
  kvpool doctor --bind 10.0.0.5      may UCX bind to this address, and who could then reach it?
  kvpool doctor --json               one object a line: name, status, essential, found, remedy

ok: as it should be. warn: works, but slower or not as one may expect. lack: not there.
Exit status: 0 if nothing essential is lacking, 1 if something is, 2 for wrong use.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a subcommand's parser the flags of the doctor."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--dram", default="1GiB", help="the arena that is wanted (default: %(default)s)"
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="numeric address that UCX is to bind to (default: %(default)s)",
    )
    parser.add_argument(
        "--ucx-library", metavar="PATH", help="try this libucp instead of the one that is found"
    )
    parser.add_argument(
        "--torch", action="store_true", help="import torch, in another process, and ask it of CUDA"
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine this host and print what was found.

    Returns:
        1 if something essential is lacking, otherwise 0.

    Raises:
        ConfigError: ``--dram`` is no size.
    """
    host = examine(
        dram_bytes=parse_size(arguments.dram, key="--dram"),
        bind=arguments.bind,
        library=arguments.ucx_library,
        ask_torch=arguments.torch,
    )
    checks = [check(host) for check in CHECKS]
    if arguments.json:
        for check in checks:
            print(msgspec.json.encode(check).decode())
    else:
        print("\n".join(table(checks)))
    return 1 if lacking(checks) else 0
