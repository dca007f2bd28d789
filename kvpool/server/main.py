"""kvpool-server: one process that keeps KV blocks for the processes of this host.

Owns the process: flags, signals, sockets, and the order of start and stop. Who calls it: operators,
and whoever starts workers on one machine.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import prometheus_client

from kvpool._native import lib
from kvpool.client import protocol
from kvpool.client.rpc import Service
from kvpool.clock import SystemClock
from kvpool.config import PoolConfig, ServerConfig, SsdConfig, parse_size
from kvpool.errors import ConfigError, KVPoolError
from kvpool.events import Event, EventSink, LogSink, TraceSink
from kvpool.metrics import Metrics
from kvpool.server.run_dir import RunDir
from kvpool.server.service import PoolService
from kvpool.transfer.choice import (
    TRANSPORT_KINDS,
    TransportKind,
    listen_address,
    open_transport,
)

logger = logging.getLogger(__name__)

# Threads for what blocks: one opens the arena, the others check reported blocks.
_THREADS: Final = 4
# Part of the stop time that running requests get to end by themselves.
_GRACE_S: Final = 0.2


class _Sinks:
    """Hands every event to several sinks."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self._sinks = sinks

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvpool-server",
        description="Keep KV blocks in shared memory for the processes of this host.",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="folder of its sockets, mode 0700 (default: a fresh one)"
    )
    parser.add_argument("--dram", default="1GiB", help="size of the arena (default: %(default)s)")
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
        default="host",
        help="how bytes come and go; ucx: TCP on loopback, where any user of this host who connects"
        " could write to this process's memory (default: %(default)s)",
    )
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="loopback port for Prometheus; 0: none"
    )
    parser.add_argument(
        "--die-with", type=int, metavar="PID", help="stop when this process, the parent, dies"
    )
    parser.add_argument("--trace", type=Path, help="file to append events to, one JSON a line")
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error")
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server until SIGTERM or SIGINT; return the exit status."""
    arguments = _arguments(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), format="kvpool-server %(levelname)s %(message)s"
    )
    os.umask(0o077)
    try:
        if arguments.die_with:
            lib.kvp_die_with_parent(signal.SIGTERM)
            if os.getppid() != arguments.die_with:  # it died before the kernel was asked
                return 1
        with RunDir(arguments.run_dir) as run_dir:
            config = ServerConfig(
                run_dir=run_dir.path,
                pool=PoolConfig(
                    dram_bytes=parse_size(arguments.dram, key="--dram"), ssd=_ssd(arguments)
                ),
                metrics_port=arguments.metrics_port,
            )
            asyncio.run(_serve(config, run_dir, arguments.trace, arguments.transport))
    except KVPoolError as error:
        print(f"kvpool-server: {error}", file=sys.stderr)
        return 2
    return 0


def _ssd(arguments: argparse.Namespace) -> SsdConfig | None:
    if (arguments.ssd is None) != (not arguments.ssd_bytes):
        raise ConfigError("--ssd DIR and --ssd-bytes SIZE go together", key="--ssd")
    if arguments.ssd is None:
        return None
    size = parse_size(arguments.ssd_bytes, key="--ssd-bytes")
    return SsdConfig(folder=arguments.ssd, capacity_bytes=size)


async def _serve(
    config: ServerConfig, run_dir: RunDir, trace: Path | None, kind: TransportKind
) -> None:
    stopping = asyncio.Event()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            _end_for_sure(config, run_dir)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    metrics = Metrics()
    sinks: list[EventSink] = [metrics, LogSink()]
    tracer = _tracer(trace)
    if tracer is not None:
        sinks.append(tracer)
    executor = ThreadPoolExecutor(_THREADS, "kvpool-server")
    transport = open_transport(kind, "kvpool-server", config.transfer)
    control = Service()
    pool = PoolService(
        config,
        {kind: transport},
        executor,
        metrics=metrics,
        events=_Sinks(sinks),
        clock=SystemClock(),
    )
    pool.serve(control)
    try:
        _expose(config, metrics)
        address = listen_address(kind, config.run_dir / protocol.TRANSPORT_SOCKET, config.transfer)
        pool.addresses[kind] = transport.listen(address, pool.sessions.on_connect)
        await control.start(f"unix:{config.run_dir / protocol.CONTROL_SOCKET}")
        print(f"kvpool-server ready in {config.run_dir}", flush=True)
        while not stopping.is_set():
            pool.tick()
            try:
                await asyncio.wait_for(stopping.wait(), config.lease_check_s)
            except TimeoutError:
                continue
    finally:
        await control.stop(_GRACE_S)
        await loop.run_in_executor(executor, transport.close)
        pool.close()
        executor.shutdown(wait=False, cancel_futures=True)
        if tracer is not None:
            tracer.close()


def _tracer(path: Path | None) -> TraceSink | None:
    if path is None:
        return None
    try:
        return TraceSink(path)
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error}", key="--trace") from error


def _expose(config: ServerConfig, metrics: Metrics) -> None:
    if not config.metrics_port:
        return
    try:
        prometheus_client.start_http_server(
            config.metrics_port, addr="127.0.0.1", registry=metrics.registry
        )
    except OSError as error:
        raise ConfigError(
            f"port {config.metrics_port} cannot be had for metrics: {error}", key="--metrics-port"
        ) from error


def _end_for_sure(config: ServerConfig, run_dir: RunDir) -> None:
    """See to it that the process ends in time, even while the arena is being opened."""

    def end() -> None:
        logger.error("not stopped within %s s: ending anyway", config.stop_timeout_s)
        run_dir.close()
        os._exit(1)

    timer = threading.Timer(config.stop_timeout_s - _GRACE_S, end)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
