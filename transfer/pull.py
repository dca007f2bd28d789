"""What a read does: blocks or flat spans, out of a peer's arena that is mapped read-only here.

Owns the checks of a read's input, all before anything moves, and the order of a copy: checksums and
generations first, the copy, generations again. Who calls it: ``PullEndpoint`` and its engine.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from kvpool._native import ffi, lib
from kvpool.arena import Window
from kvpool.block import BlockLayout
from kvpool.errors import CorruptionError, LeaseExpiredError, UsageError
from kvpool.memory import BlockIds, BlockView, Crcs, Crew, Span, copy_blocks
from kvpool.transfer.base import SPANS_MAX, RemoteSlots

# Bytes between two looks at deadline and cancel: 2 to 4 ms of copying. A batch costs 0.05 ms of Python
# and more to wake its thread, so it is large, and a crew in C shares it instead.
BATCH_BYTES: Final = 32 << 20
_GENERATION_MAX: Final = 2**64 - 1


def layer_view(view: BlockView, layer: int) -> BlockView:
    """Describe one layer of ``view`` as blocks of a one-layer layout, in the same memory."""
    if not 0 <= layer < view.layout.num_layers:
        raise UsageError(f"layer {layer} is not within 0..{view.layout.num_layers - 1}")
    return layers_view(view, range(layer, layer + 1))


def layers_view(view: BlockView, layers: range) -> BlockView:
    """Describe a run of layers of ``view`` as blocks of fewer layers, in the same memory."""
    return replace(
        view,
        base=view.base + layers.start * view.layer_stride,
        layout=replace(view.layout, num_layers=len(layers)),
    )


def require_slots(slots: RemoteSlots, slot_count: int) -> None:
    """Raise UsageError unless these are slots of a region of ``slot_count``, one life each."""
    if not 0 < len(slots.slots) <= SPANS_MAX:
        raise UsageError(f"a read of {len(slots.slots)} slots: 1 to {SPANS_MAX}")
    if len(slots.slots) != len(slots.generations):
        raise UsageError(f"{len(slots.generations)} generations for {len(slots.slots)} slots")
    if not 0 <= min(slots.slots) <= max(slots.slots) < slot_count:
        raise UsageError(f"a slot of {slots.slots} is not within 0..{slot_count - 1}")
    if not 0 <= min(slots.generations) <= max(slots.generations) <= _GENERATION_MAX:
        raise UsageError(f"a generation of {slots.generations} is not a uint64")


def require_dest(
    dest: BlockView,
    source: RemoteSlots,
    source_layout: BlockLayout,
    dest_layer: int | None,
    crcs: Crcs | None,
) -> BlockView:
    """Return where blocks go, narrowed to ``dest_layer``; raise UsageError if they do not fit."""
    if not dest.writable:
        raise UsageError("the destination is read-only: bytes are pulled, not pushed")
    if len(dest) != len(source.slots):
        raise UsageError(f"{len(source.slots)} slots do not fit a view of {len(dest)} blocks")
    if _named_twice(dest.block_ids):
        raise UsageError("a block of the destination is named twice")
    if dest_layer is not None:
        dest = layer_view(dest, dest_layer)
    dest.layout.require_equal(source_layout)
    if crcs is not None:
        expected = (len(dest), source_layout.num_layers, source_layout.kv_heads)
        if crcs.shape != expected:
            raise UsageError(f"checksums of shape {crcs.shape} where {expected} is expected")
    return dest


def _named_twice(block_ids: BlockIds) -> bool:
    """Say whether a number comes twice. Ascending ones, the usual case, are looked at once."""
    if bool((block_ids[1:] > block_ids[:-1]).all()):
        return False
    ordered = np.sort(block_ids)
    return bool((ordered[1:] == ordered[:-1]).any())


def require_spans(
    pairs: Sequence[tuple[Span, RemoteSlots, int]], geometries: Sequence[tuple[int, int]]
) -> None:
    """Raise UsageError unless flat bytes can be read so.

    Args:
        pairs: As for ``Endpoint.read_spans``.
        geometries: Slot count and slot bytes of the region that each is read from.
    """
    if not 0 < len(pairs) <= SPANS_MAX:
        raise UsageError(f"a batch of {len(pairs)} spans: 1 to {SPANS_MAX}")
    for (span, slots, offset), (slot_count, slot_bytes) in zip(pairs, geometries, strict=True):
        require_slots(slots, slot_count)
        if len(slots.slots) != 1:
            raise UsageError("a span is read from one slot")
        if span.size <= 0:
            raise UsageError("a span of zero bytes")
        if not 0 <= offset <= offset + span.size <= slot_bytes:
            raise UsageError(f"{span.size} bytes at {offset} pass the slot's end at {slot_bytes}")
    ends = 0
    for span in sorted((pair[0] for pair in pairs), key=lambda span: span.address):
        if span.address < ends:
            raise UsageError("two destinations of the batch overlap")
        ends = span.address + span.size


class BlockPull:
    """Blocks in canonical order into a view, verified. The result is how many leading ones arrived."""

    def __init__(
        self,
        window: Window,
        dest: BlockView,
        source: RemoteSlots,
        source_layout: BlockLayout,
        dest_layer: int | None,
        crcs: Crcs | None = None,
        crew: Crew | None = None,
    ) -> None:
        require_slots(source, window.slot_count)
        window.require_layout(source_layout)
        dest = require_dest(dest, source, source_layout, dest_layer, crcs)
        self._crcs = crcs
        self._crew = crew
        self._window = window
        self._dest = dest
        self._slots = np.array(source.slots, dtype=np.uint32)
        self._generations = np.array(source.generations, dtype=np.uint64)
        self._layout = source_layout
        count = len(dest)
        step = max(1, BATCH_BYTES // source_layout.block_bytes)
        self.batches = [(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def copy(self, begin: int, end: int) -> int:
        """Copy blocks ``begin`` to ``end``: stale before, corrupt, or stale after ends it."""
        slots, generations = self._slots[begin:end], self._generations[begin:end]
        if self._crcs is None:
            crcs, good = self._window.crcs(self._layout, slots, generations)
        else:
            crcs, good = self._crcs[begin:end], self._window.leading(slots, generations)
        if good == 0:
            return 0
        slots, generations = slots[:good], generations[:good]
        try:
            copy_blocks(
                self._dest.take(begin, begin + good),
                self._window.view(self._layout, slots),
                crcs=crcs[:good],
                crew=self._crew,
            )
        except CorruptionError as error:
            good = int(str(error.block))
        return min(good, self._window.leading(slots, generations))

    def result(self, good: int) -> int:
        """Return the leading blocks that arrived."""
        return good


class SpanPull:
    """Flat bytes, all or an error. The result is the bytes copied."""

    def __init__(
        self, pairs: Sequence[tuple[Span, RemoteSlots, int]], windows: list[Window]
    ) -> None:
        require_spans(pairs, [(window.slot_count, window.slot_bytes) for window in windows])
        self._pairs = list(pairs)
        self._windows = windows
        self.batches = self._cut()

    def _cut(self) -> list[tuple[int, int]]:
        batches: list[tuple[int, int]] = []
        begin = size = 0
        for index, (span, _, _) in enumerate(self._pairs):
            size += span.size
            if size >= BATCH_BYTES or index + 1 == len(self._pairs):
                batches.append((begin, index + 1))
                begin, size = index + 1, 0
        return batches

    def copy(self, begin: int, end: int) -> int:
        """Copy spans ``begin`` to ``end``, up to the first one whose slot is in another life."""
        for index in range(begin, end):
            if not self._in_life(index):
                return index - begin
        count = end - begin
        to, source = ffi.new("uintptr_t[]", count), ffi.new("uintptr_t[]", count)
        sizes, done = ffi.new("size_t[]", count), ffi.new("size_t *")
        for at, index in enumerate(range(begin, end)):
            span, slots, offset = self._pairs[index]
            window = self._windows[index]
            to[at], sizes[at] = span.address, span.size
            source[at] = window.base + slots.slots[0] * window.slot_stride + offset
        lib.kvp_copy_spans(to, source, sizes, count, ffi.NULL, done)
        for index in range(begin, end):
            if not self._in_life(index):
                return index - begin
        return count

    def _in_life(self, index: int) -> bool:
        slots = self._pairs[index][1]
        return self._windows[index].leading(slots.slots, slots.generations) == 1

    def result(self, good: int) -> int:
        """Return all bytes. Raises LeaseExpiredError: a slot is in another life than was named."""
        if good < len(self._pairs):
            raise LeaseExpiredError(
                f"slot {self._pairs[good][1].slots[0]} is in another life: match and lease again"
            )
        return sum(span.size for span, _, _ in self._pairs)
