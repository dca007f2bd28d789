"""What runs in a kvpool-server: transports, gRPC, the node of the ring, and the order of their ends.

Owns that order: at SIGTERM the node leaves the ring, running calls get their grace, then transports
close, once what waits for the SSD is written, then the pool. Whatever hangs, the process ends inside
``stop_timeout_s``. Who calls it: the server's main.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from typing import Final

from kvpool.client import protocol
from kvpool.client.rpc_service import Methods, Service
from kvpool.clock import SystemClock
from kvpool.config import ServerConfig
from kvpool.events import Event, EventSink, LogSink, TraceSink
from kvpool.metrics import Metrics
from kvpool.server.from_settings import Parts
from kvpool.server.grpc_health import GrpcHealth
from kvpool.server.http import Health, HttpServer
from kvpool.server.node import Node
from kvpool.server.run_dir import RunDir
from kvpool.server.service import PoolService
from kvpool.server.tenancy import Tenancy
from kvpool.server.upkeep import Upkeep
from kvpool.transfer.base import Transport
from kvpool.transfer.choice import TransportKind, listen_address, open_transport

logger = logging.getLogger(__name__)

# Threads for what blocks: one opens the arena, the others check reported blocks.
_THREADS: Final = 4
# Part of the stop time that running requests get to end by themselves.
_GRACE_S: Final = 0.2
# Parts of the stop time that leaving the ring and writing to the SSD may take.
_LEAVE_SHARE: Final = 0.3
_FLUSH_SHARE: Final = 0.3
# How often that is looked at.
_LOOK_S: Final = 0.02


class _Sinks:
    """Hands every event to several sinks."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self._sinks = sinks

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)


async def serve(
    parts: Parts, run_dir: RunDir, kinds: Sequence[TransportKind], tracer: TraceSink | None
) -> None:
    """Run a server until SIGTERM or SIGINT.

    Args:
        parts: What it is made of; its membership is closed at the end.
        run_dir: Where its sockets are.
        kinds: Of its transports, one or more.
        tracer: Told every event, and closed at the end.

    Raises:
        KVPoolError: It cannot start; the message says what to do.
    """
    config = parts.config
    stopping = _stop_at_signals(config, run_dir)
    metrics = Metrics()
    sinks: list[EventSink] = [metrics, LogSink(), *([tracer] if tracer is not None else [])]
    health = Health(SystemClock())
    executor = ThreadPoolExecutor(_THREADS, "kvpool-server")
    async with AsyncExitStack() as ends:
        ends.callback(executor.shutdown, wait=False, cancel_futures=True)
        if tracer is not None:
            ends.callback(tracer.close)
        if parts.http is not None:
            ends.callback(HttpServer(*parts.http, metrics, health).close)
        transports = _transports(kinds, config)
        tenancy = Tenancy(metrics)
        node = _node(parts, transports[kinds[0]], executor, metrics)
        pool = PoolService(
            config,
            transports,
            executor,
            metrics=metrics,
            events=_Sinks(sinks),
            clock=SystemClock(),
            holdings=node,
            tenancy=tenancy,
        )
        ends.callback(pool.close)
        if parts.membership is not None:
            ends.callback(parts.membership.close)
        for kind, transport in transports.items():
            ends.push_async_callback(_aside, executor, transport)
            path = run_dir.path / protocol.TRANSPORT_SOCKET
            address = listen_address(kind, path, config.transfer)
            pool.addresses[kind] = transport.listen(address, pool.sessions.on_connect)
        ends.push_async_callback(_flush, pool, config)
        probes = GrpcHealth()
        await probes.starting()
        local = Service(config.calls_max, gate=tenancy.gate(parts.authenticator, local=True))
        others = Service(config.calls_max, gate=tenancy.gate(parts.authenticator, local=False))
        _add_all((local, others), probes, pool, node)
        ends.push_async_callback(pool.calls.stop, _GRACE_S)
        ends.push_async_callback(local.stop, _GRACE_S)
        await local.start(f"unix:{run_dir.path / protocol.CONTROL_SOCKET}")
        if config.listen:
            ends.push_async_callback(others.stop, _GRACE_S)
            port = others.listen(config.listen, parts.credentials)
            await others.start()
            if node is not None:
                host = config.listen.rpartition(":")[0]
                node.join(config.advertise or f"{host}:{port}")
                ends.push_async_callback(node.leave, config.stop_timeout_s * _LEAVE_SHARE)
        health.not_ready = ""
        await probes.ready()
        print(f"kvpool-server ready in {run_dir.path}", flush=True)
        await _run(config, pool, node, Upkeep(metrics, health, SystemClock()), stopping)
        health.not_ready = "it is stopping"
        await probes.stopping()


def _add_all(
    services: Sequence[Service], probes: GrpcHealth, pool: PoolService, node: Node | None
) -> None:
    for service in services:
        probes.add(service)
        pool.serve(service)
    methods: list[Methods] = [*services, pool.calls]
    for each in methods:
        if node is not None:
            node.serve(each)
        else:
            each.add(protocol.MEMBERS, _nobody_else)
    if node is not None:
        node.serve_prompts(pool.calls)


async def _run(
    config: ServerConfig,
    pool: PoolService,
    node: Node | None,
    upkeep: Upkeep,
    stopping: asyncio.Event,
) -> None:
    tasks = {**pool.upkeep(), **(node.upkeep() if node is not None else {})}
    wait_s = config.lease_check_s if node is None else config.announce_interval_s
    while not stopping.is_set():
        upkeep.run(tasks)
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), min(wait_s, config.lease_check_s))


def _transports(
    kinds: Sequence[TransportKind], config: ServerConfig
) -> dict[TransportKind, Transport]:
    """Open the transports of one process: UCX first, whose incarnation the other takes."""
    opened: dict[TransportKind, Transport] = {}
    try:
        for kind in sorted(kinds, reverse=True):
            incarnation = next((one.incarnation for one in opened.values()), None)
            opened[kind] = open_transport(
                kind, "kvpool-server", config.transfer, incarnation=incarnation
            )
    except BaseException:
        for transport in opened.values():
            transport.close()
        raise
    return opened


def _node(
    parts: Parts, transport: Transport, executor: ThreadPoolExecutor, metrics: Metrics
) -> Node | None:
    if parts.membership is None:
        return None
    return Node(
        parts.config,
        transport.incarnation,
        parts.membership,
        executor,
        metrics=metrics,
        access=parts.access,
    )


async def _nobody_else(request: protocol.Done) -> protocol.MembersReply:
    """Name the nodes of the ring of a server that is in none."""
    return protocol.MembersReply()


async def _flush(pool: PoolService, config: ServerConfig) -> None:
    """Wait until what is to be on the SSD is there, as far as the time goes."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + config.stop_timeout_s * _FLUSH_SHARE
    pool.hurry()
    while (left := pool.backlog()) and loop.time() < give_up:
        await asyncio.sleep(_LOOK_S)
    if left:
        assert config.pool.ssd is not None
        logger.error(
            "%d blocks were not written to %s in time and are lost: see whether that disk is well, or "
            "raise node.stop_timeout_s (%s s)",
            *(left, config.pool.ssd.folder, config.stop_timeout_s),
        )


async def _aside(executor: ThreadPoolExecutor, transport: Transport) -> None:
    """Close a transport beside the loop, which its sessions post to."""
    await asyncio.get_running_loop().run_in_executor(executor, transport.close)


def _stop_at_signals(config: ServerConfig, run_dir: RunDir) -> asyncio.Event:
    stopping = asyncio.Event()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            _end_for_sure(config, run_dir)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping


def _end_for_sure(config: ServerConfig, run_dir: RunDir) -> None:
    """See to it that the process ends in time, even while the arena is being opened."""

    def end() -> None:
        logger.error("not stopped within %s s: ending anyway", config.stop_timeout_s)
        run_dir.close()
        os._exit(1)

    timer = threading.Timer(config.stop_timeout_s - _GRACE_S, end)
    timer.daemon = True
    timer.start()
