"""What a prefill and a decode worker have in common: their parts, their options and their process.

Owns how a worker starts, says what it holds, and ends: at SIGTERM, or with its parent. What a worker
does is in ``prefill.py`` and ``decode.py``. Who calls it: those two; ``kvpool-serve`` starts them.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from kvpool._native import lib
from kvpool.base import BlockPool, Chain, StoreResult
from kvpool.block import BlockLayout
from kvpool.client.connect import connect
from kvpool.client.rpc_service import Service
from kvpool.completion import Completion, Deadline
from kvpool.config import RuntimeConfig, TransferConfig, parse_size
from kvpool.errors import ConfigError, KVPoolError, PeerUnreachableError, UsageError
from kvpool.events import EventSink, NullSink, TraceSink
from kvpool.integration.process import leave
from kvpool.integration.runtime.blocks import Blocks, Room
from kvpool.integration.runtime.handoff import STATUS, Empty, WorkerStatus
from kvpool.integration.runtime.model import LoadedModel, load_model
from kvpool.integration.runtime.runner import ModelRunner
from kvpool.standard_streams import never_wait_for_readers
from kvpool.tiers.gpu import GpuTier
from kvpool.transfer.base import Transport
from kvpool.transfer.choice import (
    TRANSPORT_KINDS,
    TransportKind,
    listen_address,
    open_transport,
)
from kvpool.transfer.layerwise import StreamHub

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]

# Staging of layer slices: a few hundred slices of a small model, tens of a large one.
OUTBOX_BYTES: Final = 64 << 20
# Running calls get this long at SIGTERM before they are cancelled.
# Pause between two attempts to reach a pool that is not there yet.
_POOL_RETRY_S: Final = 0.2
_GRACE_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process.

    Attributes:
        name: Names its sockets in the run directory.
        model: Folder of the model.
        run_dir: Folder of the sockets of all processes of one ``kvpool-serve``.
        runtime: Sizes, limits and waits.
        outbox_bytes: Staging of layer slices that a prefill worker holds out.
        threads: Threads that compute.
        trace: File that events are written to, or None.
        transport: How bytes come and go; the same in all processes of one ``kvpool-serve``.
        ucx_library: Path of the libucp to load; ``""``: chosen.
        launcher: The process that starts it and without which it ends, or None.
    """

    name: str
    model: Path
    run_dir: Path
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    outbox_bytes: int = OUTBOX_BYTES
    threads: int = 1
    trace: Path | None = None
    transport: TransportKind = "host"
    ucx_library: str = ""
    launcher: int | None = None

    @property
    def address(self) -> str:
        """Where the worker's control socket is, for gRPC."""
        return f"unix:{self.run_dir / self.name}.sock"

    @property
    def transport_address(self) -> str:
        """Where the worker's transport is to listen."""
        return listen_address(self.transport, self.run_dir / f"{self.name}.transport.sock")


def parse_arguments(role: Role, argv: Sequence[str] | None) -> WorkerConfig:
    """Read a worker's command line. Raises ConfigError, or exits with 2 as argparse does."""
    defaults = RuntimeConfig()
    parser = argparse.ArgumentParser(
        prog=f"python -m kvpool.integration.runtime.{role}",
        description=f"One {role} worker. kvpool-serve starts it; it ends with its parent.",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the sockets")
    parser.add_argument("--name", required=True, help="names the worker's sockets, say p0")
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--dtype", default=defaults.dtype)
    parser.add_argument("--block-tokens", type=int, default=defaults.block_tokens)
    parser.add_argument("--kv-bytes", default=str(defaults.gpu_bytes), help="paged KV cache")
    parser.add_argument("--outbox-bytes", default=str(OUTBOX_BYTES), help="staging of slices")
    parser.add_argument("--chunk-tokens", type=int, default=defaults.chunk_tokens)
    parser.add_argument("--running-max", type=int, default=defaults.running_max)
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    parser.add_argument("--trace", type=Path, help="write events to this file")
    parser.add_argument("--transport", choices=TRANSPORT_KINDS, default="host")
    parser.add_argument("--ucx-library", default="", metavar="PATH", help="the libucp to load")
    parser.add_argument("--die-with", type=int, metavar="PID", help="the process that starts it")
    options = parser.parse_args(argv)
    if options.threads < 1:
        raise ConfigError(f"threads is {options.threads}: use 1 or more", key="threads")
    runtime = RuntimeConfig(
        device=options.device,
        dtype=options.dtype,
        block_tokens=options.block_tokens,
        gpu_bytes=parse_size(options.kv_bytes, key="kv-bytes"),
        chunk_tokens=options.chunk_tokens,
        running_max=options.running_max,
    )
    return WorkerConfig(
        name=options.name,
        model=options.model,
        run_dir=options.run_dir.absolute(),
        runtime=runtime,
        outbox_bytes=parse_size(options.outbox_bytes, key="outbox-bytes"),
        threads=options.threads,
        trace=options.trace,
        transport=options.transport,
        ucx_library=options.ucx_library,
        launcher=options.die_with,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a worker is made of. Whoever made the parts closes them.

    Attributes:
        config: The worker's.
        runner: The model over the gpu tier.
        room: The gpu tier's slots.
        transport, hub: Ways to other workers, and the layer streams on them.
        pool: Where full blocks are found and kept.
        threads: For calls that block for a bounded time.
        loop: The worker's.
    """

    config: WorkerConfig
    runner: ModelRunner
    room: Room
    transport: Transport
    hub: StreamHub
    pool: BlockPool
    threads: ThreadPoolExecutor
    loop: asyncio.AbstractEventLoop

    def store(
        self, chain: Chain, blocks: Blocks, first: int, end: int
    ) -> Completion[StoreResult] | None:
        """Store full blocks ``first`` to ``end`` into the pool, in the background.

        The blocks stay held until the pool no longer reads them. A pool that cannot take them is
        no error: they are a cache. Returns None if nothing was begun.
        """
        try:
            done = self.pool.store(
                chain,
                blocks.view(first, end),
                first=first,
                deadline_s=self.config.runtime.pool_timeout_s,
            )
        except KVPoolError as error:
            logger.debug("blocks %d..%d were not stored: %s", first, end, error)
            return None
        blocks.hold()
        done.add_done_callback(blocks.drop)
        return done

    def status(
        self, role: Role, running: int, waiting: int, outbox: tuple[int, int, int]
    ) -> WorkerStatus:
        """Say what the worker holds."""
        return WorkerStatus(
            role=role,
            running=running,
            waiting=waiting,
            blocks=self.room.total,
            blocks_free=self.room.free,
            outbox_slots=outbox[0],
            outbox_free=outbox[1],
            outbox_quarantined=outbox[2],
            forwards=self.runner.forwards,
            tokens=self.runner.tokens,
        )


def assemble(
    config: WorkerConfig,
    role: Role,
    loaded: LoadedModel,
    transport: Transport,
    pool: BlockPool,
    loop: asyncio.AbstractEventLoop,
    sink: EventSink,
) -> Parts:
    """Put a worker's parts together.

    Raises:
        ConfigError: ``gpu_bytes`` has no room for one block.
    """
    runtime = config.runtime
    layout = loaded.spec.layout(runtime.block_tokens)
    count = runtime.gpu_bytes // layout.block_bytes
    if count < 1:
        raise ConfigError(
            f"kv-bytes is {runtime.gpu_bytes}: one block of this model has {layout.block_bytes}",
            key="kv-bytes",
        )
    tier = GpuTier(layout, count, device=runtime.device)
    return Parts(
        config=config,
        runner=ModelRunner(loaded.model, loaded.spec, tier, role=role, sink=sink),
        room=Room(tier, loop, holders_max=runtime.running_max, waiting_max=runtime.waiting_max),
        transport=transport,
        hub=StreamHub(sink),
        pool=pool,
        threads=ThreadPoolExecutor(runtime.running_max, thread_name_prefix=f"kvpool-{role}-io"),
        loop=loop,
    )


class Tasks:
    """Work of one loop that outlives the call that began it. Nothing is ever left running."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start work and keep it until it ends. Its error is its awaiter's, or is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, timeout_s: float) -> None:
        """Wait for the work that is left, then cancel it."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, KVPoolError) else logging.ERROR
            logger.log(level, "ended with %r", error)


class Served(Protocol):
    """A prefill or decode worker, as its process sees it."""

    def add_methods(self, service: Service) -> None:
        """Add the worker's own methods."""
        ...

    def status(self) -> WorkerStatus:
        """Say what it holds."""
        ...

    async def close(self) -> None:
        """End what runs. Idempotent, bounded to a second."""
        ...


def reach_pool(
    run_dir: Path, layout: BlockLayout, transport: Transport, timeout_s: float
) -> BlockPool:
    """Connect to the pool, which may be starting or stopped: it is tried until the time is up.

    The first to ask has the pool touch every page of its arena: a second a GiB or so. Raises as
    ``connect``.
    """
    deadline = Deadline(timeout_s)
    while True:
        try:
            return connect(run_dir, layout, deadline.remaining_s(), transport=transport)
        except PeerUnreachableError:
            if deadline.passed():
                raise
        time.sleep(min(_POOL_RETRY_S, deadline.remaining_s()))


@contextlib.asynccontextmanager
async def opened_parts(config: WorkerConfig, role: Role) -> AsyncIterator[Parts]:
    """Load the model, connect to the pool, and close everything at the end."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(config.threads)
    disable_progress_bar()  # several processes share one terminal
    loop = asyncio.get_running_loop()
    sink: EventSink = TraceSink(config.trace) if config.trace else NullSink()
    loaded = await asyncio.to_thread(
        load_model, config.model, dtype=config.runtime.dtype, device=config.runtime.device
    )
    with contextlib.ExitStack() as stack:
        settings = TransferConfig(ucx_library=config.ucx_library)
        transport = stack.enter_context(
            open_transport(config.transport, f"kvpool-{config.name}", settings)
        )
        layout = loaded.spec.layout(config.runtime.block_tokens)
        pool = stack.enter_context(
            await asyncio.to_thread(
                reach_pool, config.run_dir, layout, transport, config.runtime.start_timeout_s
            )
        )
        parts = assemble(config, role, loaded, transport, pool, loop, sink)
        stack.callback(parts.hub.close)
        stack.callback(parts.threads.shutdown, wait=False, cancel_futures=True)
        yield parts


async def serve(config: WorkerConfig, role: Role, make: Callable[[Parts], Served]) -> None:
    """Run one worker until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with opened_parts(config, role) as parts:
        worker = make(parts)
        service = Service()

        async def status(_: Empty) -> WorkerStatus:
            return worker.status()

        service.add(STATUS, status)
        worker.add_methods(service)
        await service.start(config.address)
        logger.info("%s worker %s is ready: %d blocks", role, config.name, parts.room.total)
        await stop.wait()
        await service.stop(_GRACE_S)
        await worker.close()


def run(role: Role, make: Callable[[Parts], Served], argv: Sequence[str] | None) -> int:
    """Be a worker process. Returns the exit code: 2 for what the caller must fix."""
    # The first thing: a launcher that dies meanwhile must not leave this process behind.
    lib.kvp_die_with_parent(signal.SIGKILL)
    never_wait_for_readers()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role} %(levelname)s %(message)s")
    try:
        config = parse_arguments(role, argv)
        if config.launcher not in (None, os.getppid()):
            return 1  # it died before the kernel was asked
        asyncio.run(serve(config, role, make))
        leave(0)
    except UsageError as error:
        print(f"{role} worker: {error}", file=sys.stderr)
        return 2
    except KVPoolError as error:
        print(f"{role} worker: {error}", file=sys.stderr)
        return 1
