"""Arenas: slots in one sealed memfd that this process writes and its peers map read-only.

Owns the Python face of ``native/src/arena.c``, where the rules are enforced: the life of a slot
(free, reserved, ready), pins, grants and quarantine. It never decides what to keep. Who calls it:
the DRAM tier, and the outbox that a stream stages layer slices in. It lies on floor 0 because two
wings need it (docs/decisions/0001).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from kvpool._native import ffi, lib
from kvpool.block import BlockHash, BlockLayout, Incarnation, SlotIndex
from kvpool.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    InternalError,
    StaleIncarnationError,
    UsageError,
)
from kvpool.memory import BlockIds, BlockView, Crcs

if TYPE_CHECKING:
    from kvpool._native import CData

# What a slot that is published without a name carries: outbox slices are known by their slot.
NO_HASH = BlockHash(bytes(32))


# Every page of an arena is touched when it is made. Asking the kernel for more than it has does not
# end in an error: the machine slows down for a minute, then the kernel kills some process.
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def _available_bytes() -> int | None:
    """Return the memory that can be taken now without swapping, or None where nothing says so."""
    known: list[int] = []
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                known.append(int(line.split()[1]) << 10)
        known.append(int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError, IndexError):
        pass  # no cgroup, or its limit is "max"
    return min(known, default=None)


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one payload, in one life.

    Attributes:
        index: Number of the slot in its arena or tier.
        generation: Names this life of the slot; another life has another, larger number.
    """

    index: SlotIndex
    generation: int


@dataclass(frozen=True, slots=True)
class ArenaCounts:
    """Slots by state, and the pins and grants that are out."""

    free: int
    reserved: int
    ready: int
    quarantined: int
    pins: int
    grants: int


def _indices(slots: Sequence[Slot]) -> BlockIds:
    return np.fromiter((slot.index for slot in slots), dtype=np.uint64, count=len(slots))


class Arena:
    """Slots of one layout. Safe from any thread; every call is short.

    Args:
        layout: What one slot holds, in canonical order.
        slot_count: How many slots; memory is taken and touched at once.
        incarnation: This run of this process.

    Raises:
        UsageError: No slots are asked for.
        CapacityError: The machine does not have that much memory. None was touched.
    """

    def __init__(self, layout: BlockLayout, slot_count: int, incarnation: Incarnation) -> None:
        if slot_count <= 0:
            raise UsageError(f"an arena of {slot_count} slots: it needs at least one")
        wanted, available = slot_count * layout.block_bytes, _available_bytes()
        if available is not None and wanted > available:
            raise CapacityError(
                f"an arena of {wanted >> 20} MiB where {available >> 20} MiB of memory are "
                "available: ask for less",
                size_bytes=wanted,
            )
        self.layout = layout
        self.slot_count = slot_count
        self.incarnation = incarnation
        out = ffi.new("kvp_arena **")
        status = lib.kvp_arena_open(
            slot_count, layout.block_bytes, layout.crc_count, incarnation, out
        )
        if status != lib.KVP_OK:
            size = slot_count * layout.block_bytes
            raise CapacityError(
                f"no shared memory for {slot_count} slots of {layout.block_bytes} bytes "
                f"(errno {ffi.errno}): ask for less, or raise the memory limit",
                size_bytes=size,
            )
        # Unmapped when its last holder is gone: this object until close(), a view, a call.
        self._arena: CData | None = ffi.gc(out[0], lib.kvp_arena_close)

    @property
    def fd(self) -> int:
        """The memfd, to be sent to peers. Stays this arena's."""
        arena = self._open()
        return lib.kvp_arena_fd(arena)

    def reserve(self) -> Slot:
        """Take a free slot. Raises CapacityError if there is none."""
        arena = self._open()
        index, generation = ffi.new("uint32_t *"), ffi.new("uint64_t *")
        status = lib.kvp_arena_reserve(arena, index, generation)
        if status == lib.KVP_FULL:
            raise CapacityError("no free slot", size_bytes=self.layout.block_bytes)
        self._check(status, None)
        return Slot(SlotIndex(index[0]), generation[0])

    def commit(self, slot: Slot, crcs: Crcs, name: BlockHash = NO_HASH) -> None:
        """Publish a reserved slot with its checksums, uint32 with ``layout.crc_count`` values."""
        arena = self._open()
        flat = np.ascontiguousarray(crcs, dtype=np.uint32).reshape(-1)
        if flat.size != self.layout.crc_count or len(name) != len(NO_HASH):
            raise UsageError(f"{flat.size} checksums where {self.layout.crc_count} are expected")
        buffer = ffi.from_buffer("uint32_t[]", flat)
        status = lib.kvp_arena_commit(arena, slot.index, slot.generation, name, buffer)
        self._check(status, slot)

    def pin(self, slot: Slot) -> None:
        """Keep a ready slot from being released. Raises UsageError if it is another life."""
        arena = self._open()
        self._check(lib.kvp_arena_pin(arena, slot.index, slot.generation), slot)

    def unpin(self, slot: Slot) -> None:
        """Give one pin back."""
        if (arena := self._arena) is not None:
            self._check(lib.kvp_arena_unpin(arena, slot.index, slot.generation), slot)

    def grant(self, slot: Slot) -> None:
        """Count one more party that may still touch the slot's bytes."""
        arena = self._open()
        self._check(lib.kvp_arena_grant(arena, slot.index, slot.generation), slot)

    def settle(self, slot: Slot) -> None:
        """Give one grant back."""
        if (arena := self._arena) is not None:
            self._check(lib.kvp_arena_settle(arena, slot.index, slot.generation), slot)

    def release(self, slot: Slot) -> None:
        """Give the slot up: free now, or quarantined while grants are out. Not while pinned."""
        if (arena := self._arena) is not None:
            self._check(lib.kvp_arena_release(arena, slot.index, slot.generation), slot)

    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        """Return the checksums of ready slots, uint32 [slots, layers, kv_heads]."""
        arena = self._open()
        shape = (len(slots), self.layout.num_layers, self.layout.kv_heads)
        out = np.zeros(shape, dtype=np.uint32)
        for row, slot in zip(out, slots, strict=True):
            buffer = ffi.from_buffer("uint32_t[]", row, require_writable=True)
            status = lib.kvp_arena_crcs(arena, slot.index, slot.generation, buffer)
            self._check(status, slot)
        return out

    def view(self, slots: Sequence[Slot]) -> BlockView:
        """Describe slots for a copy. The caller holds them reserved or pinned meanwhile."""
        arena = self._open()
        base = lib.kvp_arena_base(arena)
        stride = lib.kvp_arena_slot_stride(arena)
        return BlockView.canonical(self.layout, base, stride, _indices(slots), owner=arena)

    def counts(self) -> ArenaCounts:
        """Return a consistent snapshot."""
        arena = self._open()
        out = ffi.new("kvp_arena_counts *")
        lib.kvp_arena_count(arena, out)
        names = ArenaCounts.__slots__
        return ArenaCounts(*(int(getattr(out, name)) for name in names))

    def close(self) -> None:
        """Give the memory up. Idempotent. It stays mapped until the last view and call are gone."""
        self._arena = None

    def _open(self) -> "CData":
        if (arena := self._arena) is None:
            raise ClosedError("the arena is closed")
        return arena

    def _check(self, status: int, slot: Slot | None) -> None:
        if status == lib.KVP_OK:
            return
        if status in (lib.KVP_STALE, lib.KVP_BUSY, lib.KVP_INVALID):
            raise UsageError(f"{slot} is in another life or state than this call needs")
        raise InternalError(f"the arena answered {status} for {slot}")


class Window:
    """A peer's arena, mapped read-only. Safe from any thread.

    Args:
        fd: The peer's memfd. Duplicated: the caller closes its own.
        incarnation: The peer's; another one is refused.

    Raises:
        CorruptionError: It is no kvpool arena, or not sealed.
        StaleIncarnationError: It belongs to another run.
    """

    def __init__(self, fd: int, incarnation: Incarnation) -> None:
        out = ffi.new("kvp_window **")
        status = lib.kvp_window_map(fd, incarnation, out)
        if status == lib.KVP_STALE:
            raise StaleIncarnationError("the arena belongs to another run of the peer")
        if status != lib.KVP_OK:
            raise CorruptionError(f"the peer sent no valid arena (status {status})")
        self._window = ffi.gc(out[0], lib.kvp_window_close)
        self.slot_count = int(lib.kvp_window_slot_count(self._window))
        self.slot_bytes = int(lib.kvp_window_slot_bytes(self._window))
        self.slot_stride = int(lib.kvp_window_slot_stride(self._window))
        self.crc_count = int(lib.kvp_window_crc_count(self._window))

    @property
    def base(self) -> int:
        """Address of slot 0."""
        return int(lib.kvp_window_base(self._window))

    def require_layout(self, layout: BlockLayout) -> None:
        """Raise UsageError unless slots of this window can hold ``layout``."""
        if layout.block_bytes != self.slot_bytes or layout.crc_count != self.crc_count:
            raise UsageError(
                f"slots of {self.slot_bytes} bytes and {self.crc_count} checksums do not hold "
                f"{layout.block_bytes} bytes and {layout.crc_count} checksums"
            )

    def view(self, layout: BlockLayout, slots: Sequence[int]) -> BlockView:
        """Describe slots as a read-only source. Valid while ``leading`` says so, before and after."""
        self.require_layout(layout)
        ids = np.asarray(slots, dtype=np.uint64)
        return BlockView.canonical(
            layout, self.base, self.slot_stride, ids, owner=self, writable=False
        )

    def leading(self, slots: Sequence[int], generations: Sequence[int]) -> int:
        """Count the leading slots that are ready in just these lives now."""
        bad = ffi.new("size_t *")
        status = lib.kvp_window_check(self._window, *self._arrays(slots, generations), bad)
        if status == lib.KVP_OK:
            return len(slots)
        return self._bad(status, int(bad[0]))

    def crcs(
        self, layout: BlockLayout, slots: Sequence[int], generations: Sequence[int]
    ) -> tuple[Crcs, int]:
        """Return checksums, uint32 [slots, layers, kv_heads], and how many leading ones are valid."""
        self.require_layout(layout)
        out = np.zeros((len(slots), layout.num_layers, layout.kv_heads), dtype=np.uint32)
        bad = ffi.new("size_t *")
        buffer = ffi.from_buffer("uint32_t[]", out, require_writable=True)
        good = self.leading(slots, generations)
        while good:  # the C core reads all or nothing; each turn that goes on asks for fewer
            arrays = self._arrays(slots[:good], generations[:good])
            status = lib.kvp_window_crcs(self._window, *arrays, buffer, bad)
            if status == lib.KVP_OK:
                break
            good = self._bad(status, int(bad[0]))
        return out, good

    def _bad(self, status: int, index: int) -> int:
        if status == lib.KVP_STALE:
            return index
        raise UsageError(f"slot {index} of the request is past the end of the peer's region")

    def _arrays(
        self, slots: Sequence[int], generations: Sequence[int]
    ) -> "tuple[CData, CData, int]":
        if len(slots) != len(generations):
            raise UsageError("as many generations as slots are needed")
        numbers = np.asarray(slots, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.slot_count:
            raise UsageError(f"a slot is not within 0..{self.slot_count - 1}")
        return (
            ffi.from_buffer("uint32_t[]", numbers.astype(np.uint32)),
            ffi.from_buffer("uint64_t[]", np.asarray(generations, dtype=np.uint64)),
            len(slots),
        )
