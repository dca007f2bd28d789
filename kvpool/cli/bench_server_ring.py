"""kvpool's side of the server rows: servers in processes of their own, and a client here.

Owns how the servers are started and what one sample does. Who calls it: ``bench_server``.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.base import BlockPool, Chain
from kvpool.block import BlockLayout, Namespace
from kvpool.cli.bench import Timer
from kvpool.cli.bench_tiers import aligned_room
from kvpool.client.cluster import ClusterPool
from kvpool.client.connect import connect
from kvpool.config import TransferConfig
from kvpool.errors import InternalError, UsageError
from kvpool.memory import BlockView, Span

_TIMEOUT_S: Final = 60.0
_STOP_S: Final = 10.0
_LOOK_S: Final = 0.02


class Servers:
    """Servers of one ring on loopback, one process each.

    Args:
        stack: Ends them.
        count: How many.
        dram_bytes: What each has.
    """

    def __init__(self, stack: ExitStack, count: int, dram_bytes: int) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-")))
        self.addresses = [f"127.0.0.1:{_free_port()}" for _ in range(count)]
        listed = "\n".join(
            f'[[ring.members]]\nname = "n{number}"\naddress = "{address}"'
            for number, address in enumerate(self.addresses)
        )
        started: list[subprocess.Popen[str]] = []
        for number, address in enumerate(self.addresses):
            config = folder / f"n{number}.toml"
            config.write_text(
                f'[node]\nname = "n{number}"\nrun_dir = "{folder / f"n{number}"}"\n'
                f"[pool]\ndram = {dram_bytes}\nlease_bytes_max = {dram_bytes}\n"
                f'[listen]\naddress = "{address}"\n[transfer]\nucx = true\n{listed}\n'
            )
            started.append(_start(stack, config))
        for process in started:
            _wait_ready(process)

    def connect(self, stack: ExitStack, layout: BlockLayout, config: TransferConfig) -> ClusterPool:
        """Return a pool over all of them."""
        pool = stack.enter_context(connect(self.addresses, layout, _TIMEOUT_S, config=config))
        give_up = time.monotonic() + _TIMEOUT_S
        while len(pool.nodes()) < len(self.addresses):
            if time.monotonic() > give_up:
                raise UsageError("the servers do not find each other: run one by hand to see why")
            time.sleep(_LOOK_S)
        return pool


def _start(stack: ExitStack, config: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvpool.server.main", "--die-with", str(os.getpid())),
            *("--config", str(config)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _wait_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _TIMEOUT_S)
    if not readable or "ready" not in process.stdout.readline():
        raise UsageError("kvpool-server did not start: what it says is above")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Prompts:
    """Prompts that are stored and loaded, all of a buffer a sample, so many blocks a call.

    Args:
        pool: Where.
        buffer_bytes: What one sample moves, a multiple of a call's bytes.
        blocks: Of one call.
        timer: What the time is taken with.

    Attributes:
        source: What is stored.
    """

    def __init__(self, pool: BlockPool, buffer_bytes: int, blocks: int, timer: Timer) -> None:
        self._pool = pool
        self._timer = timer
        self._blocks = blocks
        layout = pool.layout
        self.source, self._dest_room = aligned_room(buffer_bytes), aligned_room(buffer_bytes)
        self.source.view()[:] = np.random.default_rng(0).bytes(buffer_bytes)
        self._from = BlockView.of_buffer(layout, self.source)
        self._to = BlockView.of_buffer(layout, self._dest_room)
        self._chains: list[Chain] = []
        self._number = 0

    def put(self) -> float:
        """Store the whole buffer under new names; return seconds."""
        self._chains.clear()
        took_s = 0.0
        for begin in range(0, len(self._from), self._blocks):
            self._number += 1
            chain = new_chain(self._pool, self._number, self._blocks)
            source = self._from.take(begin, begin + self._blocks)
            began = self._timer()
            done = self._pool.store(chain, source, deadline_s=_TIMEOUT_S).wait(_TIMEOUT_S)
            took_s += self._timer() - began
            if done.new != self._blocks:
                raise InternalError(f"stored {done.new} of {self._blocks} blocks: {done.refused}")
            self._chains.append(chain)
        for chain in self._chains:
            wait_matched(self._pool, chain)
        return took_s

    def get(self) -> float:
        """Match, lease, load and give back what was stored last; return seconds."""
        took_s = 0.0
        self._dest_room.view()[:] = bytes(self._dest_room.size)
        for number, chain in enumerate(self._chains):
            dest = self._to.take(number * self._blocks, (number + 1) * self._blocks)
            began = self._timer()
            with self._pool.lease(self._pool.match(chain), _TIMEOUT_S) as lease:
                good = self._pool.load(lease, dest, deadline_s=_TIMEOUT_S).wait(_TIMEOUT_S)
            took_s += self._timer() - began
            if good != self._blocks:
                raise InternalError(f"loaded {good} of {self._blocks} blocks")
        require_equal(self._dest_room, self.source)
        return took_s


def new_chain(pool: BlockPool, number: int, blocks: int) -> Chain:
    """Return a chain that shares no block with one of another number."""
    namespace = Namespace(
        model="bench",
        weights=str(number),
        compute_dtype="bfloat16",
        kv_dtype="bfloat16",
        block_tokens=pool.layout.block_tokens,
    )
    return pool.chain(namespace, range(blocks * pool.layout.block_tokens))


def wait_matched(pool: BlockPool, chain: Chain) -> None:
    """Wait until the directory has heard of all of a chain."""
    give_up = time.monotonic() + _TIMEOUT_S
    while pool.match(chain).blocks < len(chain):
        if time.monotonic() > give_up:
            raise InternalError(f"{pool.match(chain).blocks} of {len(chain)} blocks are found")
        time.sleep(_LOOK_S)


def require_equal(found: Span, wanted: Span) -> None:
    """Raise InternalError if bytes differ."""
    one, other = (np.frombuffer(span.view(), dtype=np.uint8) for span in (found, wanted))
    if not np.array_equal(one, other):
        raise InternalError("other bytes came back than were stored")
