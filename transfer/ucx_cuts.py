"""What is read over UCX, cut into asks that each fit one window of the reader's inbox.

Owns the geometry of a read, and the copy out of the inbox: verified on the way, because the bytes
crossed a wire. Pure but for that copy. Who calls it: ``transfer/ucx_reads.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from kvpool._native import ffi, lib
from kvpool.block import BlockLayout
from kvpool.errors import CapacityError, CorruptionError, LeaseExpiredError, UsageError
from kvpool.memory import BlockView, Crcs, Span, copy_blocks
from kvpool.transfer.base import RegionDescriptor, RemoteSlots
from kvpool.transfer.pull import layers_view, require_dest, require_slots, require_spans
from kvpool.transfer.ucx_wire import ASK_SLOTS_MAX

_CRC_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class PeerRegion:
    """A region as its owner told of it."""

    descriptor: RegionDescriptor
    crc_count: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a read: the same bytes of consecutive items, a slot each.

    Attributes:
        region: Number of the region at its owner.
        first: The first item.
        slots, generations: Of the items.
        offset, size: Which bytes of each slot.
        first_crc, crc_count: Which checksums of each slot; a count of 0 asks for one of the bytes.
    """

    region: int
    first: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    offset: int
    size: int
    first_crc: int
    crc_count: int

    def crcs(self, window: Span) -> Crcs:
        """Return the checksums that came with the bytes, uint32 [items, checksums]."""
        count, each = len(self.slots), max(1, self.crc_count)
        at = window.part(count * self.size, count * each * _CRC_BYTES)
        return np.frombuffer(bytes(at.view()), dtype=np.uint32).reshape(count, each)


class Job(Protocol):
    """One read: its cuts, and what becomes of their bytes."""

    cuts: list[Cut]
    count: int  # of items

    def copy(self, cut: Cut, good: int, window: Span) -> int:
        """Copy the ``good`` leading items of a cut to their place; return how many are whole."""
        ...

    def result(self, good: int) -> int:
        """Turn the number of leading good items into the completion's result, or raise."""
        ...


class BlockJob:
    """Blocks in canonical order into a view. The result is how many leading ones arrived.

    Raises:
        UsageError, LayoutMismatchError: The input does not fit.
        CapacityError: One layer of a block is larger than a window.
    """

    def __init__(
        self,
        region: PeerRegion,
        window_bytes: int,
        dest: BlockView,
        source: RemoteSlots,
        source_layout: BlockLayout,
        dest_layer: int | None,
        crcs: Crcs | None,
    ) -> None:
        slot_bytes = region.descriptor.slot_bytes
        require_slots(source, region.descriptor.slot_count)
        if (slot_bytes, region.crc_count) != (source_layout.block_bytes, source_layout.crc_count):
            raise UsageError(
                f"slots of {slot_bytes} bytes and {region.crc_count} checksums do not hold"
                f" {source_layout.block_bytes} bytes and {source_layout.crc_count} checksums"
            )
        self._dest = require_dest(dest, source, source_layout, dest_layer, crcs)
        self._layout = source_layout
        self._crcs = crcs
        self.count = len(source.slots)
        layer_bytes = source_layout.layer_bytes + source_layout.kv_heads * _CRC_BYTES
        layers = min(source_layout.num_layers, window_bytes // layer_bytes)
        if layers == 0:
            raise CapacityError(
                f"a layer of {layer_bytes} bytes is larger than a window of {window_bytes}: give"
                " the transport a larger inbox",
                size_bytes=layer_bytes,
            )
        items = 1 if layers < source_layout.num_layers else window_bytes // (layers * layer_bytes)
        step = min(items, ASK_SLOTS_MAX)
        self.cuts = [
            self._cut(source, first, first + step, range(layer, layer + layers))
            for first in range(0, self.count, step)
            for layer in range(0, source_layout.num_layers, layers)
        ]

    def _cut(self, source: RemoteSlots, first: int, end: int, layers: range) -> Cut:
        layout = self._layout
        layers = range(layers.start, min(layers.stop, layout.num_layers))
        return Cut(
            source.region,
            first,
            source.slots[first:end],
            source.generations[first:end],
            layers.start * layout.layer_bytes,
            len(layers) * layout.layer_bytes,
            layers.start * layout.kv_heads,
            len(layers) * layout.kv_heads,
        )

    def copy(self, cut: Cut, good: int, window: Span) -> int:
        """Copy blocks, or some layers of one, checked against their owner's checksums."""
        layout = self._layout
        begin = cut.offset // layout.layer_bytes
        layers = range(begin, begin + cut.size // layout.layer_bytes)
        expected = cut.crcs(window).reshape(len(cut.slots), len(layers), layout.kv_heads)
        if self._crcs is not None:
            rows = self._crcs[cut.first : cut.first + len(cut.slots)]
            expected = np.ascontiguousarray(rows[:, layers.start : layers.stop])
        arrived = BlockView.canonical(
            replace(layout, num_layers=len(layers)),
            window.address,
            cut.size,
            np.arange(good, dtype=np.uint64),
            owner=window.owner,
            writable=False,
        )
        dest = layers_view(self._dest.take(cut.first, cut.first + good), layers)
        try:
            copy_blocks(dest, arrived, crcs=expected[:good])
        except CorruptionError as error:
            return int(str(error.block))
        return good

    def result(self, good: int) -> int:
        """Return the leading blocks that arrived."""
        return good


class SpanJob:
    """Flat bytes, all or an error. The result is the bytes copied. Items are pieces of spans."""

    def __init__(
        self,
        pairs: Sequence[tuple[Span, RemoteSlots, int]],
        regions: Sequence[PeerRegion],
        window_bytes: int,
    ) -> None:
        descriptors = [region.descriptor for region in regions]
        require_spans(pairs, [(each.slot_count, each.slot_bytes) for each in descriptors])
        self._bytes = sum(span.size for span, _, _ in pairs)
        room = window_bytes - _CRC_BYTES
        # (destination, slots, offset in the slot), none larger than a window
        self._pieces = [
            (span.part(begin, min(room, span.size - begin)), slots, offset + begin)
            for span, slots, offset in pairs
            for begin in range(0, span.size, room)
        ]
        self.count = len(self._pieces)
        self.cuts: list[Cut] = []
        first = 0
        while first < self.count:
            end = self._run_end(first, window_bytes)
            self.cuts.append(self._cut(first, end))
            first = end

    def _run_end(self, first: int, window_bytes: int) -> int:
        """Return how far the pieces from ``first`` on are alike and fit one window."""
        span, slots, offset = self._pieces[first]
        most = min(ASK_SLOTS_MAX, window_bytes // (span.size + _CRC_BYTES))
        end = first + 1
        while end < min(first + most, self.count):
            other, other_slots, other_offset = self._pieces[end]
            alike = (other.size, other_slots.region, other_offset)
            if alike != (span.size, slots.region, offset):
                break
            end += 1
        return end

    def _cut(self, first: int, end: int) -> Cut:
        span, slots, offset = self._pieces[first]
        return Cut(
            slots.region,
            first,
            tuple(slots.slots[0] for _, slots, _ in self._pieces[first:end]),
            tuple(slots.generations[0] for _, slots, _ in self._pieces[first:end]),
            offset,
            span.size,
            0,
            0,
        )

    def copy(self, cut: Cut, good: int, window: Span) -> int:
        """Copy pieces, each checked against the checksum that its owner computed.

        Raises:
            CorruptionError: One differed: it was changed on its way.
        """
        expected = cut.crcs(window)
        for index in range(good):
            arrived = window.part(index * cut.size, cut.size)
            dest = self._pieces[cut.first + index][0]
            source = ffi.cast("uint8_t *", arrived.address)
            if lib.kvp_crc32c(0, source, cut.size) != expected[index, 0]:
                raise CorruptionError("bytes were changed on their way: read them again")
            ffi.memmove(ffi.cast("uint8_t *", dest.address), source, cut.size)
        return good

    def result(self, good: int) -> int:
        """Return all bytes. Raises LeaseExpiredError: a slot is in another life than was named."""
        if good < self.count:
            slot = self._pieces[good][1].slots[0]
            raise LeaseExpiredError(f"slot {slot} is in another life: match and lease again")
        return self._bytes
