"""Rows of the host transport: pulls out of a peer's arena against a C copy from the same mapping.

Both ends live in this process, connected through the socket, with the arena mapped a second time,
read-only, as a peer maps it. Every sample moves 32 MiB; sources and destinations rotate over 128 MiB.
"""

import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.arena import Arena, Window
from kvpool.block import BlockLayout
from kvpool.cli.bench import Case, Sides
from kvpool.cli.bench_reference import CopyReference, Spans, copy_reference
from kvpool.errors import InternalError
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.transfer.base import Endpoint, RemoteSlots
from kvpool.transfer.host import HostTransport

_ROTATE_BYTES: Final = 128 << 20
_SAMPLE_BYTES: Final = 32 << 20
_THREADS: Final = 2
_TIMEOUT_S: Final = 30.0
_SIZES: Final = {"64KiB": 64 << 10, "1MiB": 1 << 20}


def cases(quick: bool) -> list[Case]:
    """Return the rows of this subject."""
    return [
        Case(
            name=f"transfer.host.pull.{name}",
            unit="GB/s",
            reference=f"C copy from the same mapping, {_THREADS} threads",
            open=partial(_open, size),
        )
        for name, size in _SIZES.items()
    ]


@contextmanager
def _open(size: int) -> Generator[Sides, None, None]:
    # One head of 16 tokens, as wide as a slot must be.
    layout = BlockLayout(
        num_layers=1, kv_heads=1, block_tokens=16, k_dim=size // 32, v_dim=size // 32, dtype="uint8"
    )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-"))
        reference = stack.enter_context(copy_reference())
        owner = stack.enter_context(HostTransport("bench-owner"))
        reader = stack.enter_context(HostTransport("bench-reader", copy_threads=_THREADS))
        arena = Arena(layout, _ROTATE_BYTES // size, owner.incarnation)
        stack.callback(arena.close)
        region = owner.register(arena).region
        address = owner.listen(str(Path(folder) / "bench.sock"), lambda endpoint: None)
        endpoint = reader.connect(address, _TIMEOUT_S)
        endpoint.wait_region(region, _TIMEOUT_S)
        yield _Pulls(arena, endpoint, region, reference)


class _Pulls:
    def __init__(
        self, arena: Arena, endpoint: Endpoint, region: int, reference: CopyReference
    ) -> None:
        self._size = arena.layout.block_bytes
        self._endpoint = endpoint
        self._region = region
        self._reference = reference
        self._count = _SAMPLE_BYTES // self._size
        self._turns = arena.slot_count // self._count
        self._turn = 0
        self._slots = [arena.reserve() for _ in range(arena.slot_count)]
        source = np.random.default_rng(0).integers(0, 256, _ROTATE_BYTES, dtype=np.uint8)
        self._dest = np.ones(_ROTATE_BYTES, dtype=np.uint8)
        view = arena.view(self._slots)
        crcs = copy_blocks(view, BlockView.of_buffer(arena.layout, Span.of(source)))
        for slot, slot_crcs in zip(self._slots, crcs, strict=True):
            arena.commit(slot, slot_crcs)
        self._window = Window(arena.fd, arena.incarnation)
        self._room = Span.of(self._dest)
        reference.choose(self._spans(0), _THREADS)

    def _range(self, turn: int) -> range:
        begin = turn % self._turns * self._count
        return range(begin, begin + self._count)

    def _spans(self, turn: int) -> Spans:
        window = self._window
        dest = [self._room.address + index * self._size for index in self._range(turn)]
        source = [window.base + index * window.slot_stride for index in self._range(turn)]
        return Spans(dest, source, self._size)

    def value(self) -> float:
        self._turn += 1
        pairs = [
            (
                self._room.part(index * self._size, self._size),
                RemoteSlots(
                    self._region, (self._slots[index].index,), (self._slots[index].generation,)
                ),
                0,
            )
            for index in self._range(self._turn)
        ]
        began = time.perf_counter()
        moved = self._endpoint.read_spans(pairs, _TIMEOUT_S).wait(_TIMEOUT_S)
        took_s = time.perf_counter() - began
        if moved != _SAMPLE_BYTES:
            raise InternalError(f"{moved} bytes arrived where {_SAMPLE_BYTES} were asked for")
        return moved / took_s / 1e9

    def reference(self) -> float:
        self._turn += 1
        return self._reference.rate(self._spans(self._turn), _THREADS)
