"""What a read does: blocks or flat spans, out of a peer's arena that is mapped read-only here.

Owns the checks of a read's input, all before anything moves, and the order of a copy: checksums and
generations first, the copy, generations again. Who calls it: ``PullEndpoint`` and its engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from kvpool._native import ffi, lib
from kvpool.arena import Window
from kvpool.block import BlockLayout
from kvpool.errors import InternalError, LeaseExpiredError, UsageError
from kvpool.memory import BlockView, Crcs, Crew, Span, in_runs
from kvpool.transfer.base import SPANS_MAX, RemoteSlots
from kvpool.transfer.bounds import Numbers, numbers, require_apart, require_room

if TYPE_CHECKING:
    from kvpool._native import CData

# Bytes between two looks at deadline and cancel: 2 to 4 ms of copying. A batch costs 0.05 ms of Python
# and more to wake its thread, so it is large, and a crew in C shares it instead.
BATCH_BYTES: Final = 32 << 20


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


def require_slots(slots: RemoteSlots, slot_count: int) -> tuple[Numbers, Numbers]:
    """Return slots and generations; raise UsageError unless a region of ``slot_count`` has them."""
    if not 0 < len(slots.slots) <= SPANS_MAX:
        raise UsageError(f"a read of {len(slots.slots)} slots: 1 to {SPANS_MAX}")
    if len(slots.slots) != len(slots.generations):
        raise UsageError(f"{len(slots.generations)} generations for {len(slots.slots)} slots")
    indices = numbers(slots.slots, "slots")
    if int(indices.max()) >= slot_count:
        raise UsageError(f"slot {indices.max()} is not within 0..{slot_count - 1}")
    return indices, numbers(slots.generations, "generations")


def require_dest(
    dest: BlockView,
    source: RemoteSlots,
    source_layout: BlockLayout,
    dest_layer: int | None,
    crcs: Crcs | None,
    sums: Crcs | None = None,
) -> BlockView:
    """Return where blocks go, narrowed to ``dest_layer``; raise UsageError if they do not fit."""
    if not dest.writable:
        raise UsageError("the destination is read-only: bytes are pulled, not pushed")
    if len(dest) != len(source.slots):
        raise UsageError(f"{len(source.slots)} slots do not fit a view of {len(dest)} blocks")
    if dest_layer is not None:
        dest = layer_view(dest, dest_layer)
    dest.layout.require_equal(source_layout)
    require_room(dest)
    expected = (len(dest), source_layout.num_layers, source_layout.kv_heads)
    for each in (crcs, sums):
        if each is not None and each.shape != expected:
            raise UsageError(f"checksums of shape {each.shape} where {expected} is expected")
    if sums is not None and (sums.dtype != np.uint32 or not sums.flags.carray):
        raise UsageError(f"room for sums of {sums.dtype}: uint32, writable and contiguous")
    return dest


# Of every read of a model the same: cffi takes longer to make it than to pass it.
@lru_cache(maxsize=64)
def _shape(layout: BlockLayout) -> "CData":
    return ffi.new(
        "kvp_shape *",
        (layout.kv_heads, layout.block_tokens, layout.k_row_bytes, layout.v_row_bytes),
    )


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Flat bytes to read, checked.

    Attributes:
        rows: uint64 [n, 3]: destination's address, size, offset in the slot.
        slots, generations: uint64 [n].
    """

    rows: Numbers
    slots: Numbers
    generations: Numbers


def require_spans(
    pairs: Sequence[tuple[Span, RemoteSlots, int]], geometries: Sequence[tuple[int, int]]
) -> SpanTable:
    """Return flat bytes to read as a table; raise UsageError unless they can be read so.

    Args:
        pairs: As for ``Endpoint.read_spans``.
        geometries: Slot count and slot bytes of the region that each is read from.
    """
    if not 0 < len(pairs) <= SPANS_MAX:
        raise UsageError(f"a batch of {len(pairs)} spans: 1 to {SPANS_MAX}")
    flat: list[int] = []
    for (span, slots, offset), geometry in zip(pairs, geometries, strict=True):
        if len(slots.slots) != 1 or len(slots.generations) != 1:
            raise UsageError("a span is read from one slot")
        flat += (span.address, span.size, offset, *slots.slots, *slots.generations, *geometry)
    what = "addresses, sizes, offsets, slots and generations of spans"
    table = numbers(flat, what).reshape(-1, 7)
    address, size, begin, slot, generation, slot_count, slot_bytes = table.T
    if not (size.all() and address.all()):
        raise UsageError("a span of zero bytes, or at address 0")
    wrong = (slot >= slot_count) | (size > slot_bytes) | (begin > slot_bytes - size)
    if wrong.any():
        at = int(wrong.argmax())
        raise UsageError(
            f"span {at}, {size[at]} bytes at {begin[at]} of slot {slot[at]}, leaves the slot's"
            f" {slot_bytes[at]} bytes or the region's {slot_count[at]} slots"
        )
    require_apart(address, size, "destinations of the batch")
    return SpanTable(np.ascontiguousarray(table[:, :3]), slot, generation)


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
        sums: Crcs | None = None,
    ) -> None:
        slots, generations = require_slots(source, window.slot_count)
        window.require_layout(source_layout)
        dest = require_dest(dest, source, source_layout, dest_layer, crcs, sums)
        count = len(dest)
        step = max(1, BATCH_BYTES // source_layout.block_bytes)
        self.batches = [(begin, min(begin + step, count)) for begin in range(0, count, step)]
        self._layers = source_layout.num_layers
        self._crc_count = window.crc_count
        self._crcs = None if crcs is None else in_runs(crcs)
        self._sums = sums
        # What C is pointed at, kept alive.
        self._kept = (window, dest, slots, generations, crew)
        self._where = (window.native(), ffi.NULL if crew is None else crew.native())
        self._shape = _shape(source_layout)
        self._view = dest.native()
        self._arrays = (
            ffi.from_buffer("uint64_t[]", dest.block_ids),
            ffi.from_buffer("uint64_t[]", slots),
            ffi.from_buffer("uint64_t[]", generations),
        )

    def copy(self, begin: int, end: int) -> int:
        """Copy blocks ``begin`` to ``end``: stale before, corrupt, or stale after ends it.

        In one call of C: each return from C waits for the interpreter's lock.
        """
        count = end - begin
        room, expected, stride = ffi.NULL, ffi.NULL, 0
        if self._crcs is None and self._sums is not None:
            room = ffi.from_buffer("uint32_t[]", self._sums[begin:end])
        elif self._crcs is None:
            room = ffi.from_buffer("uint32_t[]", np.empty(count * self._crc_count, np.uint32))
        else:
            crcs = self._crcs
            stride = crcs.strides[0] // crcs.itemsize
            expected = ffi.cast("uint32_t *", crcs[begin:].__array_interface__["data"][0])
        ids, slots, generations = self._arrays
        good = ffi.new("size_t *")
        status = lib.kvp_window_pull(
            *self._where,
            self._shape,
            self._layers,
            self._view,
            ids + begin,
            slots + begin,
            generations + begin,
            count,
            expected,
            stride,
            room,
            good,
        )
        if status not in (lib.KVP_OK, lib.KVP_CORRUPT):
            raise InternalError(f"kvp_window_pull answered {status}")
        if self._crcs is not None and self._sums is not None:
            self._sums[begin:end] = self._crcs[begin:end]
        return int(good[0])

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
