"""Rows of the peers that live on: what a read of one gets while another one dies, or hangs.

Two endpoints of one engine: a lively owner that is read, and another one of which reads are under way
when it is killed or stopped. What is compared is the lively one's rate with the other at rest. Who
calls it: ``bench_transfer``.
"""

import contextlib
import json
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_tiers import aligned_room
from kvpool.cli.bench_ucx import Child, Reader, Scale, peer
from kvpool.cli.bench_ucx_peer import layout
from kvpool.completion import Completion
from kvpool.errors import UnavailableError
from kvpool.memory import BlockView
from kvpool.transfer.base import Endpoint, RemoteSlots
from kvpool.transfer.ucx import UcxTransport

_TIMEOUT_S: Final = 30.0
_LAYERS: Final = 16
# The other one's blocks, of 1 MiB, and reads of all of them that are under way when it happens.
_BLOCKS: Final = 16
_READS: Final = 8
# Reads of a peer that is stopped wait for this: longer than a sample takes.
_STOPPED_S: Final = 2.0
_ROUNDS: Final = 8


def cases(quick: bool) -> list[Case]:
    """Return the rows."""
    return [
        Case(
            name=f"transfer.tcp.beside.{fate}",
            unit="GB/s",
            reference="the same reads with the other peer at rest",
            open=partial(_open, fate == "killed", 1 if quick else _ROUNDS, Scale.of(quick)),
            one_process=False,
        )
        for fate in ("killed", "stopped")
    ]


@contextmanager
def _open(kills: bool, rounds: int, scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    with ExitStack() as stack:
        transport = stack.enter_context(UcxTransport("bench-beside"))
        said = peer(stack, "blocks", scale.memory_bytes, _LAYERS).ask()
        lively = Reader(transport, said, _LAYERS, scale, timer)
        beside = _Beside(transport, lively, kills, rounds)
        stack.callback(beside.close)
        yield beside


class _Other:
    """A peer to which something happens, its process and our endpoint to it."""

    def __init__(self, transport: UcxTransport) -> None:
        self._stack = ExitStack()
        self._shape = layout(_LAYERS)
        size = _BLOCKS * self._shape.block_bytes
        self.process: Child = peer(self._stack, "blocks", size, _LAYERS)
        self._told = json.loads(self.process.ask())
        self._transport = transport
        self._rooms = [BlockView.of_buffer(self._shape, aligned_room(size)) for _ in range(_READS)]
        self.endpoint: Endpoint = self._connect()

    def _connect(self) -> Endpoint:
        endpoint = self._transport.connect(self._told["address"], _TIMEOUT_S)
        endpoint.wait_region(0, _TIMEOUT_S)
        return endpoint

    def read(self) -> list[Completion[int]]:
        """Begin to read it; return when it is in the middle of that."""
        if not self.endpoint.alive():
            self.endpoint = self._connect()
        slots, generations = tuple(self._told["slots"]), tuple(self._told["generations"])
        reads = [
            self.endpoint.read_blocks(
                room,
                RemoteSlots(0, slots, generations),
                source_layout=self._shape,
                dest_layer=None,
                deadline_s=_STOPPED_S,
            )
            for room in self._rooms
        ]
        reads[0].wait(_TIMEOUT_S)
        return reads

    def close(self) -> None:
        self.endpoint.close()
        self._stack.close()


class _Beside:
    ceiling: float | None = None

    def __init__(self, transport: UcxTransport, lively: Reader, kills: bool, rounds: int) -> None:
        self._transport = transport
        self._lively = lively
        self._kills = kills
        self._rounds = rounds
        self._other = _Other(transport)

    def value(self) -> float:
        """Read the lively one from the moment on at which it happens to the other one."""
        reads = self._other.read()
        if self._kills:
            self._other.process.kill()
        else:
            self._other.process.halt()
        try:
            return self._rate()
        finally:
            self._other.process.go_on()
            for read in reads:
                with contextlib.suppress(UnavailableError):
                    read.wait(_TIMEOUT_S)
            if self._kills:
                self._other.close()
                self._other = _Other(self._transport)

    def reference(self) -> float:
        """Read the lively one while nothing happens to the other one."""
        return self._rate()

    def _rate(self) -> float:
        # Of equal amounts: the harmonic mean is all bytes over all time.
        rates = [self._lively.rate() for _ in range(self._rounds)]
        return len(rates) / sum(1 / rate for rate in rates)

    def close(self) -> None:
        self._other.close()
