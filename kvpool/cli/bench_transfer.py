"""Rows of the transports. Here: verified pulls out of a peer's arena against a C copy of the same spans.

Both ends live in this process, connected through the socket, with the arena mapped a second time,
read-only, as a peer maps it. One operation moves 32 MiB; a sample goes several times round sources and
destinations, which are at least four times the L3 cache.
"""

import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from kvpool.arena import Arena, Window
from kvpool.block import BlockLayout
from kvpool.cli import bench_beside, bench_stream, bench_ucx, bench_writes
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_reference import CopyReference, Spans, rotate_bytes
from kvpool.cli.bench_tiers import aligned_room
from kvpool.errors import InternalError
from kvpool.memory import BlockView, copy_blocks
from kvpool.transfer.base import Endpoint, RemoteSlots
from kvpool.transfer.host import HostTransport

_OPERATION_BYTES: Final = 32 << 20
_THREADS: Final = 2
_TIMEOUT_S: Final = 30.0
# Times round in a sample. Once is 10 ms, and one turn of another program's half of it.
_ROUNDS: Final = 16
# 16 tokens of 8 KV heads of 128 bfloat16 numbers: 64 KiB a layer.
_LAYERS: Final = {"64KiB": 1, "1MiB": 16}


def cases(quick: bool) -> list[Case]:
    """Return the rows of this subject."""
    rows = [
        Case(
            name=f"transfer.host.pull.{name}",
            unit="GB/s",
            reference=f"C copy from the same mapping, {_THREADS} threads",
            open=partial(pulls, layers, 1 if quick else _ROUNDS),
        )
        for name, layers in _LAYERS.items()
    ]
    more = (bench_ucx, bench_writes, bench_beside, bench_stream)
    return [*rows, *(case for module in more for case in module.cases(quick))]


@contextmanager
def pulls(layers: int, rounds: int, timer: Timer) -> Generator[Sides, None, None]:
    """Set up a row of pulls of blocks of so many layers of 64 KiB, so many times round a sample."""
    layout = BlockLayout(
        num_layers=layers, kv_heads=8, block_tokens=16, k_dim=128, v_dim=128, dtype="bfloat16"
    )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-"))
        owner = stack.enter_context(HostTransport("bench-owner"))
        reader = stack.enter_context(HostTransport("bench-reader", copy_threads=_THREADS))
        arena = Arena(layout, rotate_bytes() // layout.block_bytes, owner.incarnation)
        stack.callback(arena.close)
        region = owner.register(arena).region
        address = owner.listen(str(Path(folder) / "bench.sock"), lambda endpoint: None)
        endpoint = reader.connect(address, _TIMEOUT_S)
        endpoint.wait_region(region, _TIMEOUT_S)
        yield _Pulls(arena, endpoint, region, rounds, timer)


class _Pulls:
    def __init__(
        self, arena: Arena, endpoint: Endpoint, region: int, rounds: int, timer: Timer
    ) -> None:
        self._layout = arena.layout
        self._endpoint = endpoint
        self._region = region
        self._rounds = rounds
        self._timer = timer
        self._blocks = _OPERATION_BYTES // self._layout.block_bytes
        self._slots = arena.reserve_some(arena.slot_count)
        room = aligned_room(arena.slot_count * self._layout.block_bytes)
        self._dest = BlockView.of_buffer(self._layout, room)
        names = bytes(32 * arena.slot_count)
        arena.commit_all(self._slots, copy_blocks(arena.view(self._slots), self._dest), names)
        self._window = Window(arena.fd, arena.incarnation)
        self._spans = [self._spans_of(turn) for turn in self._turns()]
        self._reference = CopyReference(_THREADS, timer)
        self._reference.choose(self._spans * rounds)
        self.ceiling: float | None = self._reference.ceiling

    def _turns(self) -> list[range]:
        count = len(self._slots) // self._blocks
        return [range(turn * self._blocks, (turn + 1) * self._blocks) for turn in range(count)]

    def _spans_of(self, turn: range) -> Spans:
        slots = self._slots.indices.tolist()
        size = self._layout.block_bytes
        return Spans(
            [self._dest.base + index * size for index in turn],
            [self._window.base + slots[index] * self._window.slot_stride for index in turn],
            size,
        )

    def value(self) -> float:
        took_s = 0.0
        for turn in self._turns() * self._rounds:
            run = self._slots[turn.start : turn.stop]
            source = RemoteSlots(
                self._region, tuple(run.indices.tolist()), tuple(run.generations.tolist())
            )
            dest = self._dest.take(turn.start, turn.stop)
            began = self._timer()
            read = self._endpoint.read_blocks(
                dest,
                source,
                source_layout=self._layout,
                dest_layer=None,
                deadline_s=_TIMEOUT_S,
            )
            good = read.wait(_TIMEOUT_S)
            took_s += self._timer() - began
            if good != len(turn):
                raise InternalError(f"{good} of {len(turn)} blocks arrived")
        return self._rounds * len(self._dest) * self._layout.block_bytes / took_s / 1e9

    def reference(self) -> float:
        return self._reference.rate(self._spans * self._rounds)
