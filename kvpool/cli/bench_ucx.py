"""Rows of the UCX transport over TCP: puts, reads, and what the engine costs beside them.

The other side is another process of this host. Puts go round memory of at least four times the L3
cache, in an order in which no span lies beside the one before it, so that nothing is coalesced; the
reference does the same puts in C. Who calls it: ``bench_transfer``.
"""

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_reference import program, rotate_bytes
from kvpool.cli.bench_tiers import aligned_room
from kvpool.cli.bench_ucx_peer import layout
from kvpool.errors import InternalError
from kvpool.memory import BlockView, Span
from kvpool.transfer.base import RemoteSlots, Transport
from kvpool.transfer.ucx import UcxTransport
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_engine import UcxEngine

_TIMEOUT_S: Final = 30.0
_SIZES: Final = {"64KiB": 64 << 10, "1MiB": 1 << 20}
_LAYERS: Final = {"64KiB": 1, "1MiB": 16}
# Spans of a batch, each against a quarter of it; of 64 KiB.
_BATCHES: Final = (4, 16, 64, 256, 1024)
# The n-th span is block n * _STRIDE: odd, so that all blocks of a power of two have their turn.
_STRIDE: Final = 37
_SUBMITTED: Final = 256
_MEMORY_BYTES_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Scale:
    """How much a sample does.

    Attributes:
        operation_bytes: What it moves at once.
        memory_bytes: What it goes round.
        batches: How many are submitted.
        idle_s: How long nothing is done.
        rounds: How often it moves that, one after another: once is 30 ms, and one turn of another
            program's half of it.
    """

    operation_bytes: int
    memory_bytes: int
    batches: int
    idle_s: float
    rounds: int = 1

    @classmethod
    def of(cls, quick: bool) -> "Scale":
        """Return what evidence needs, or what a look does."""
        if quick:
            return cls(16 << 20, 64 << 20, 10, 0.2)
        # A power of two, which the stride does not divide.
        memory_bytes = min(1 << (rotate_bytes() - 1).bit_length(), _MEMORY_BYTES_MAX)
        return cls(64 << 20, memory_bytes, 50, 2.0, rounds=8)


def cases(quick: bool) -> list[Case]:
    """Return the rows."""
    scale = Scale.of(quick)
    writes = [
        _case(f"transfer.tcp.write.{name}", "GB/s", "C loop of ucp_put_nbx and a flush",
              partial(_open_writes, size, scale))
        for name, size in _SIZES.items()
    ]  # fmt: skip
    reads = [
        _case(f"transfer.tcp.read.{name}", "GB/s", "kvpool's own write of as many bytes",
              partial(_open_reads, layers, scale))
        for name, layers in _LAYERS.items()
    ]  # fmt: skip
    batches = [
        _case(f"transfer.tcp.batch.{count}", "GB/s", f"batches of {count // 4} spans of 64 KiB",
              partial(_open_batches, count, scale))
        for count in _BATCHES
    ]  # fmt: skip
    costs = [
        _case(
            f"transfer.tcp.submit.{_SUBMITTED}",
            "us/span",
            "1 us a span",
            partial(_open_submit, scale),
            True,
        ),
        _case("transfer.tcp.idle", "% of a CPU", "1 % of a CPU", partial(_open_idle, scale), True),
    ]
    return [*writes, *reads, *batches, *costs]


def _case(
    name: str,
    unit: str,
    reference: str,
    opened: Callable[[Timer], AbstractContextManager[Sides]],
    lower_is_better: bool = False,
) -> Case:
    return Case(
        name=name,
        unit=unit,
        reference=reference,
        open=opened,
        lower_is_better=lower_is_better,
        one_process=False,
    )


# ---- other processes -----------------------------------------------------------------------------


class Child:
    """A process that speaks in lines and ends when its standard input does."""

    def __init__(
        self,
        stack: ExitStack,
        *command: str | Path | int,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        stack.callback(self._end)

    def ask(self, question: str = "") -> str:
        """Write a line, if there is one to write, and read one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if question:
            print(question, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise InternalError(f"{self._process.args!r} ended")
        return answer.strip()

    def halt(self) -> None:
        """Stop it where it is, so that it takes no CPU, until ``go_on``."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self._process.kill()

    def go_on(self) -> None:
        """Let a stopped process run. Harmless if it is gone."""
        self._process.send_signal(signal.SIGCONT)

    def _end(self) -> None:
        self.go_on()
        try:
            self._process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def peer(stack: ExitStack, role: str, size: int, layers: int) -> Child:
    """Start the other side of a row; see ``bench_ucx_peer``."""
    module = "kvpool.cli.bench_ucx_peer"
    return Child(stack, sys.executable, "-m", module, role, size, layers)


# ---- puts ----------------------------------------------------------------------------------------


class Writer:
    """Puts batches into another process's inbox, round and round."""

    def __init__(self, stack: ExitStack, size: int, scale: Scale, timer: Timer) -> None:
        self.memory_bytes = scale.memory_bytes
        self.engine = stack.enter_context(UcxEngine(endpoint_max=1))
        port = json.loads(peer(stack, "inbox", self.memory_bytes, 1).ask())["port"]
        self.connection: UcxConnection = self.engine.connect("127.0.0.1", port, _TIMEOUT_S)
        self._room = aligned_room(self.memory_bytes)
        blocks = self.memory_bytes // size
        begins = np.arange(blocks, dtype=np.uint64) * np.uint64(_STRIDE) % np.uint64(blocks)
        begins *= np.uint64(size)
        local = begins + np.uint64(self._room.address)
        self._rows = np.stack([local, np.full_like(begins, size), begins], axis=1)
        self._size = size
        self._operation_bytes = scale.operation_bytes
        self._at = 0
        self._timer = timer

    def next_rows(self, count: int) -> NDArray[np.uint64]:
        """Return the next spans of the round, as the engine takes them."""
        if self._at + count > len(self._rows):
            self._at = 0
        self._at += count
        return self._rows[self._at - count : self._at]

    def pairs(self, count: int) -> list[tuple[Span, int]]:
        """Return spans as a caller has them who keeps no table."""
        return [
            (Span(int(local), int(size)), int(offset))
            for local, size, offset in self.next_rows(count)
        ]

    def rate(self, count: int) -> float:
        """Put one operation's bytes in batches of ``count`` spans, one after another; GB/s."""
        turns = max(1, self._operation_bytes // (count * self._size))
        batches = [self.next_rows(count) for _ in range(turns)]
        began = self._timer()
        for rows in batches:
            self.connection.put(rows, _TIMEOUT_S, b"arrived").wait(_TIMEOUT_S)
        return turns * count * self._size / (self._timer() - began) / 1e9


class _Loop:
    """The reference: a C program that puts, and another that is put into."""

    def __init__(self, stack: ExitStack, library: str, size: int, scale: Scale) -> None:
        built = program("ucx_put", ("ucx_load", "ucx_sockets"))
        size_of = scale.memory_bytes
        server = Child(stack, built, library, "serve", size_of)
        self._sender = Child(stack, built, library, "send", server.ask(), size_of)
        self._size = size
        self._count = scale.operation_bytes // size

    def rate(self) -> float:
        took_s = float(self._sender.ask(f"{self._size} {self._count} {_STRIDE}"))
        return self._count * self._size / took_s / 1e9


def sampled(rate: Callable[[], float], rounds: int) -> float:
    """Move as much so many times; return all bytes over all time, the harmonic mean of the rates."""
    return rounds / sum(1 / rate() for _ in range(rounds))


class _Pair:
    """Two functions as the sides of a case."""

    ceiling: float | None = None

    def __init__(self, value: Callable[[], float], reference: Callable[[], float]) -> None:
        self.value = value
        self.reference = reference


def pair_of_rates(
    value: Callable[[], float], reference: Callable[[], float], scale: Scale
) -> Sides:
    """Return two rates as the sides of a case, each sampled as often as the scale says."""
    return _Pair(partial(sampled, value, scale.rounds), partial(sampled, reference, scale.rounds))


@contextmanager
def _open_writes(size: int, scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    with ExitStack() as stack:
        writer = Writer(stack, size, scale, timer)
        loop = _Loop(stack, writer.engine.library, size, scale)
        rate = partial(writer.rate, scale.operation_bytes // size)
        yield pair_of_rates(rate, loop.rate, scale)


@contextmanager
def _open_batches(count: int, scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    with ExitStack() as stack:
        writer = Writer(stack, _SIZES["64KiB"], scale, timer)
        yield pair_of_rates(partial(writer.rate, count), partial(writer.rate, count // 4), scale)


# ---- reads ---------------------------------------------------------------------------------------


class Reader:
    """Reads blocks out of another process, round and round."""

    def __init__(
        self, transport: Transport, said: str, layers: int, scale: Scale, timer: Timer
    ) -> None:
        self._layout = layout(layers)
        memory_bytes = scale.memory_bytes
        self._count = scale.operation_bytes // self._layout.block_bytes
        told = json.loads(said)
        self._endpoint = transport.connect(told["address"], _TIMEOUT_S)
        self._endpoint.wait_region(0, _TIMEOUT_S)
        order = [turn * _STRIDE % len(told["slots"]) for turn in range(len(told["slots"]))]
        self._slots = [told["slots"][at] for at in order]
        self._generations = [told["generations"][at] for at in order]
        self._dest = BlockView.of_buffer(self._layout, aligned_room(memory_bytes)).with_ids(order)
        self._at = 0
        self._timer = timer

    @classmethod
    def over_ucx(cls, stack: ExitStack, layers: int, scale: Scale, timer: Timer) -> "Reader":
        """Read through UCX out of a process that is started for it."""
        said = peer(stack, "blocks", scale.memory_bytes, layers).ask()
        transport = stack.enter_context(UcxTransport("bench-reader"))
        return cls(transport, said, layers, scale, timer)

    def rate(self) -> float:
        """Read one operation's bytes; GB/s."""
        count = self._count
        if self._at + count > len(self._slots):
            self._at = 0
        turn = slice(self._at, self._at + count)
        self._at += count
        source = RemoteSlots(0, tuple(self._slots[turn]), tuple(self._generations[turn]))
        dest = self._dest.take(turn.start, turn.stop)
        began = self._timer()
        read = self._endpoint.read_blocks(
            dest, source, source_layout=self._layout, dest_layer=None, deadline_s=_TIMEOUT_S
        )
        good = read.wait(_TIMEOUT_S)
        took_s = self._timer() - began
        if good != count:
            raise InternalError(f"{good} of {count} blocks arrived")
        return count * self._layout.block_bytes / took_s / 1e9


@contextmanager
def _open_reads(layers: int, scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    with ExitStack() as stack:
        reader = Reader.over_ucx(stack, layers, scale, timer)
        size = layout(layers).block_bytes
        writer = Writer(stack, size, scale, timer)
        yield pair_of_rates(reader.rate, partial(writer.rate, scale.operation_bytes // size), scale)


# ---- what it costs beside --------------------------------------------------------------------------


@contextmanager
def _open_submit(scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    with ExitStack() as stack:
        writer = Writer(stack, 4096, scale, timer)

        def value() -> float:
            took_s: list[float] = []
            for _ in range(scale.batches):
                pairs = writer.pairs(_SUBMITTED)
                began = timer()
                done = writer.connection.put(pairs, _TIMEOUT_S)
                took_s.append(timer() - began)
                done.wait(_TIMEOUT_S)
            return statistics.median(took_s) / _SUBMITTED * 1e6

        yield _Pair(value, lambda: 1.0)


@contextmanager
def _open_idle(scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    with ExitStack() as stack:
        Writer(stack, _SIZES["1MiB"], scale, timer).rate(1)

        def value() -> float:
            began = time.process_time()
            time.sleep(scale.idle_s)
            # Never 0, which no ratio can be made of.
            return max(time.process_time() - began, 1e-6) / scale.idle_s * 100

        yield _Pair(value, lambda: 1.0)
