"""kvpool-server: one process that keeps KV blocks for the processes of this host, and of others.

Owns the process: flags, umask, run directory, exit status. What runs in it is in
``kvpool/server/daemon.py``. Who calls it: operators, and whoever starts workers on one machine.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpool._native import lib
from kvpool.errors import ConfigError, KVPoolError
from kvpool.events import TraceSink
from kvpool.server.daemon import serve
from kvpool.server.from_settings import parts_of
from kvpool.server.options import arguments_of, settings_of
from kvpool.server.run_dir import RunDir
from kvpool.server.settings_file import render_file
from kvpool.standard_streams import never_wait_for_readers
from kvpool.transfer.choice import TransportKind


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server until SIGTERM or SIGINT; return the exit status."""
    arguments = arguments_of(argv)
    if arguments.print_config:
        print(render_file(), end="")
        return 0
    os.umask(0o077)
    never_wait_for_readers()
    try:
        if arguments.die_with:
            lib.kvp_die_with_parent(signal.SIGTERM)
            if os.getppid() != arguments.die_with:  # it died before the kernel was asked
                return 1
        settings = settings_of(arguments)
        logging.basicConfig(
            level=settings.node.log_level.upper(), format="kvpool-server %(levelname)s %(message)s"
        )
        kinds: list[TransportKind] = ["ucx"] if settings.transfer.ucx else []
        if arguments.transport != "ucx":
            kinds.append("host")
        elif not kinds:
            kinds.append("ucx")
        folder = Path(settings.node.run_dir) if settings.node.run_dir else None
        with RunDir(folder) as run_dir:
            parts = parts_of(settings, run_dir.path)
            asyncio.run(serve(parts, run_dir, kinds, _tracer(arguments.trace)))
    except KVPoolError as error:
        print(f"kvpool-server: {error}", file=sys.stderr)
        return 2
    return 0


def _tracer(path: Path | None) -> TraceSink | None:
    if path is None:
        return None
    try:
        return TraceSink(path)
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error}", key="--trace") from error


if __name__ == "__main__":
    sys.exit(main())
