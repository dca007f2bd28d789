"""The command line of kvpool-server: a configuration file, and flags that say more than it.

Owns the flags and how they and the file become one. Who calls it: the server's main.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvpool.config import parse_size
from kvpool.errors import ConfigError
from kvpool.server.settings import FileSettings, Size
from kvpool.server.settings_file import read_settings
from kvpool.transfer.choice import TRANSPORT_KINDS

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_EPILOG: Final = """\
examples:
  kvpool-server --run-dir /run/user/1000/kvpool --dram 8GiB     one host, no network
  kvpool-server --print-config > pool.toml                      every key with its meaning
  kvpool-server --config pool.toml                              one server of a pool over many hosts

Then: kvpool nodes --run-dir DIR. docs/server.md has the rest.
"""


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="kvpool-server",
        description="Keep KV blocks for the processes of this host, and of others.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML; flags go before it")
    parser.add_argument(
        "--print-config", action="store_true", help="print a configuration file with all defaults"
    )
    parser.add_argument(
        "--run-dir", type=Path, help="folder of its sockets, mode 0700 (default: a fresh one)"
    )
    parser.add_argument("--dram", metavar="SIZE", help="size of the arena (default: 1GiB)")
    parser.add_argument(
        "--ssd",
        type=Path,
        metavar="DIR",
        help="keep blocks on a disk, too: a folder of its own there",
    )
    parser.add_argument(
        "--ssd-bytes", default="", metavar="SIZE", help="room that is taken in it, such as 100GiB"
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORT_KINDS,
        help="how bytes come and go; ucx: TCP on loopback, where any user of this host who connects"
        " could write to this process's memory (default: host)",
    )
    parser.add_argument(
        "--ucx-library", metavar="PATH", help="the libucp to load (default: chosen, kvpool doctor)"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="loopback port for Prometheus; 0: none"
    )
    parser.add_argument(
        "--die-with", type=int, metavar="PID", help="stop when this process, the parent, dies"
    )
    parser.add_argument("--trace", type=Path, help="file to append events to, one JSON a line")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="(default: warning)")
    return parser.parse_args(argv)


def settings_of(arguments: argparse.Namespace) -> FileSettings:
    """Return what the file says, where no flag says something else.

    Raises:
        ConfigError: The file, or a flag, is wrong.
    """
    settings = FileSettings() if arguments.config is None else read_settings(arguments.config)
    replace = msgspec.structs.replace
    node, pool, listen = settings.node, settings.pool, settings.listen
    if arguments.run_dir is not None:
        node = replace(node, run_dir=str(arguments.run_dir))
    if arguments.log_level is not None:
        node = replace(node, log_level=arguments.log_level)
    if node.log_level not in LOG_LEVELS:
        raise ConfigError(
            f"node.log_level is {node.log_level!r}: use one of {', '.join(LOG_LEVELS)}",
            key="node.log_level",
        )
    if arguments.dram is not None:
        pool = replace(pool, dram=Size(parse_size(arguments.dram, key="--dram")))
    if (arguments.ssd is None) != (not arguments.ssd_bytes):
        raise ConfigError("--ssd DIR and --ssd-bytes SIZE go together", key="--ssd")
    if arguments.ssd is not None:
        size = Size(parse_size(arguments.ssd_bytes, key="--ssd-bytes"))
        pool = replace(pool, ssd=replace(pool.ssd, folder=str(arguments.ssd), capacity=size))
    if arguments.metrics_port:
        if not 0 < arguments.metrics_port <= 65535:
            port = arguments.metrics_port
            raise ConfigError(
                f"--metrics-port is {port}: a port is 1 to 65535", key="--metrics-port"
            )
        listen = replace(listen, http=f"127.0.0.1:{arguments.metrics_port}")
    transfer = settings.transfer
    if arguments.ucx_library is not None:
        transfer = replace(transfer, ucx_library=arguments.ucx_library)
    return replace(settings, node=node, pool=pool, listen=listen, transfer=transfer)
