"""Rows of the peers that live on: what a read of one gets while another one dies, hangs or is cut off.

Two endpoints of one engine: a lively owner that is read, and another one of which reads are under way
when it is killed, stopped, cut off or slowed down. What is compared is the lively one's rate with the
other at rest. Rows of links run in a process of their own, ``benchmarks/link/job.py``. Who calls it:
``bench_transfer``.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_tiers import aligned_room
from kvpool.cli.bench_ucx import Child, Reader, Scale, peer, sampled
from kvpool.cli.bench_ucx_peer import layout
from kvpool.completion import Completion
from kvpool.errors import UnavailableError, UsageError
from kvpool.memory import BlockView
from kvpool.transfer.base import Endpoint, RemoteSlots
from kvpool.transfer.ucx import UcxTransport

TIMEOUT_S: Final = 30.0
LAYERS: Final = 16
# The other one's blocks, of 1 MiB, and reads of all of them that are under way when it happens.
_BLOCKS: Final = 16
_READS: Final = 8
# Reads of a peer that does not answer wait for this: longer than a sample takes.
_SILENT_S: Final = 2.0
_LINK_FATES: Final = ("cut", "slow")
_LINK_JOB: Final = Path(__file__).resolve().parents[2] / "benchmarks" / "link" / "job.py"


class Victim(Protocol):
    """A process to which something happens; what it said of its blocks when it started."""

    said: str

    def strike(self) -> None:
        """Let it happen."""
        ...

    def mend(self) -> None:
        """Undo it, as far as that can be."""
        ...

    def ended(self) -> bool:
        """Say whether it is gone for good."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


def cases(quick: bool) -> list[Case]:
    """Return the rows."""
    scale = Scale.of(quick)
    opened: dict[str, Callable[[Timer], contextlib.AbstractContextManager[Sides]]] = {
        "killed": partial(_open, True, scale),
        "stopped": partial(_open, False, scale),
        **{fate: partial(_open_link, fate, scale) for fate in _LINK_FATES},
    }
    return [
        Case(
            name=f"transfer.tcp.beside.{fate}",
            unit="GB/s",
            reference="the same reads with the other peer at rest",
            open=open_it,
            one_process=False,
        )
        for fate, open_it in opened.items()
    ]


@contextmanager
def _open(kills: bool, scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    with ExitStack() as stack:
        transport = stack.enter_context(UcxTransport("bench-beside"))
        said = peer(stack, "blocks", scale.memory_bytes, LAYERS).ask()
        lively = Reader(transport, said, LAYERS, scale, timer)
        beside = Beside(transport, lively, partial(_Process, kills), scale.rounds)
        stack.callback(beside.close)
        yield beside


@contextmanager
def _open_link(fate: str, scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    del timer  # the other process measures
    with ExitStack() as stack:
        yield _Linked(stack, fate, scale)


class _Linked:
    """The row of a link, in a process of its own: libucp reads the machine's routes once."""

    ceiling: float | None = None

    def __init__(self, stack: ExitStack, fate: str, scale: Scale) -> None:
        sizes = (scale.memory_bytes, scale.operation_bytes, scale.rounds)
        self._child = Child(stack, sys.executable, _LINK_JOB, fate, *sizes)
        ready = self._child.ask()
        if ready != "ready":
            raise UsageError(ready)

    def value(self) -> float:
        return float(self._child.ask("value"))

    def reference(self) -> float:
        return float(self._child.ask("reference"))


class _Process:
    """A victim on this host that is killed, for good, or stopped."""

    def __init__(self, kills: bool) -> None:
        self._stack = ExitStack()
        self._kills = kills
        self._process = peer(self._stack, "blocks", victim_bytes(), LAYERS)
        self.said = self._process.ask()

    def strike(self) -> None:
        if self._kills:
            self._process.kill()
        else:
            self._process.halt()

    def mend(self) -> None:
        self._process.go_on()

    def ended(self) -> bool:
        return self._kills

    def close(self) -> None:
        self._stack.close()


def victim_bytes() -> int:
    """Return how much memory a victim has."""
    return _BLOCKS * layout(LAYERS).block_bytes


class _Other:
    """Reads of a victim, and our endpoint to it."""

    def __init__(self, transport: UcxTransport, victim: Victim) -> None:
        self.victim = victim
        self._shape = layout(LAYERS)
        self._told = json.loads(victim.said)
        self._transport = transport
        size = victim_bytes()
        self._rooms = [BlockView.of_buffer(self._shape, aligned_room(size)) for _ in range(_READS)]
        self._endpoint: Endpoint = self._connect()

    def _connect(self) -> Endpoint:
        endpoint = self._transport.connect(self._told["address"], TIMEOUT_S)
        endpoint.wait_region(0, TIMEOUT_S)
        return endpoint

    def read(self) -> list[Completion[int]]:
        """Begin to read it; return when it is in the middle of that."""
        if not self._endpoint.alive():
            self._endpoint = self._connect()
        try:
            return self._begin()
        except UnavailableError:  # it was lost, and nobody had noticed
            self._endpoint.close()
            self._endpoint = self._connect()
            return self._begin()

    def _begin(self) -> list[Completion[int]]:
        slots, generations = tuple(self._told["slots"]), tuple(self._told["generations"])
        reads = [
            self._endpoint.read_blocks(
                room,
                RemoteSlots(0, slots, generations),
                source_layout=self._shape,
                dest_layer=None,
                deadline_s=_SILENT_S,
            )
            for room in self._rooms
        ]
        reads[0].wait(TIMEOUT_S)
        return reads

    def close(self) -> None:
        self._endpoint.close()
        self.victim.close()


class Beside:
    """Both sides of a row: a lively peer is read while something happens to a victim, or nothing.

    Args:
        transport: Both peers are connected through it.
        lively: Reads the lively one.
        victim: Starts a victim; again whenever one has ended.
        rounds: Reads of the lively one in a sample.
    """

    ceiling: float | None = None

    def __init__(
        self,
        transport: UcxTransport,
        lively: Reader,
        victim: Callable[[], Victim],
        rounds: int,
    ) -> None:
        self._transport = transport
        self._lively = lively
        self._start = victim
        self._rounds = rounds
        self._other = _Other(transport, victim())

    def value(self) -> float:
        """Read the lively one from the moment on at which it happens to the other one."""
        reads = self._other.read()
        self._other.victim.strike()
        try:
            return self._rate()
        finally:
            self._other.victim.mend()
            for read in reads:
                with contextlib.suppress(UnavailableError):
                    read.wait(TIMEOUT_S)
            if self._other.victim.ended():
                self._other.close()
                self._other = _Other(self._transport, self._start())

    def reference(self) -> float:
        """Read the lively one while nothing happens to the other one."""
        return self._rate()

    def _rate(self) -> float:
        return sampled(self._lively.rate, self._rounds)

    def close(self) -> None:
        """End the victim."""
        self._other.close()
