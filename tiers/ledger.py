"""The ledger: which block lies in which slot of a tier that keeps no object a block.

Owns the Python face of ``native/src/ledger.c``: keys, parents, lives, pins, grants and exact LRU in
arrays of some 120 bytes a slot. Never touches a slot's bytes. Who calls it: every tier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.arena import Generations, Slot, SlotNumbers, Slots
from kvpool.block import HASH_BYTES, BlockHash, SlotIndex
from kvpool.errors import CapacityError, InternalError, UsageError

if TYPE_CHECKING:
    from kvpool._native import CData

# The parent of a block that begins a chain, as it is kept.
NO_PARENT: Final = bytes(HASH_BYTES)

_NEEDED: Final = {
    lib.KVP_ARENA_UNPIN: "pinned",
    lib.KVP_ARENA_GRANT: "reserved or ready",
    lib.KVP_ARENA_SETTLE: "granted",
    lib.KVP_ARENA_RELEASE: "reserved",
    lib.KVP_ARENA_REQUIRE_RESERVED: "reserved",
    lib.KVP_ARENA_REQUIRE_PINNED: "pinned",
}


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Slots by state, what is out, and slots whose header on the device is another block's."""

    free: int
    reserved: int
    ready: int
    quarantined: int
    pins: int
    grants: int
    stale: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Blocks as arrays, one row each.

    Attributes:
        slots: Where they lie.
        keys, parents: Of the blocks, 32 bytes each, concatenated; ``NO_PARENT`` is none.
    """

    slots: Slots
    keys: bytes
    parents: bytes

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> "Listing":
        """Return the rows that are marked, or numbered."""
        if rows.dtype == np.bool_ and rows.all():
            return self
        return Listing(
            Slots(self.slots.indices[rows], self.slots.generations[rows]),
            _rows(self.keys)[rows].tobytes(),
            _rows(self.parents)[rows].tobytes(),
        )


class Ledger:
    """What a tier knows of its slots. Safe from any thread; every call is short.

    Args:
        slot_count: How many slots, above 0.
        first_generation: Number of the first life, above 0; higher than in any earlier run.
    """

    def __init__(self, slot_count: int, first_generation: int = 1) -> None:
        out = ffi.new("kvp_ledger **")
        status = lib.kvp_ledger_open(slot_count, first_generation, out)
        if status == lib.KVP_SYSTEM:
            raise CapacityError(f"no memory for the ledger of {slot_count} slots: ask for fewer")
        if status != lib.KVP_OK:
            raise UsageError(f"a ledger of {slot_count} slots from life {first_generation}")
        self.slot_count = slot_count
        self._ledger = ffi.gc(out[0], lib.kvp_ledger_close)

    def native(self) -> "CData":
        """Return the ``kvp_ledger``, for an arena whose slots it keeps."""
        return self._ledger

    def reserve(self, count: int, *, granted: bool = False) -> Slots:
        """Take up to ``count`` free slots, with one grant each if ``granted``."""
        slots = _room(count)
        taken = lib.kvp_ledger_reserve(self._ledger, count, granted, *slots.native())
        return slots[:taken]

    def take(self, count: int, *, granted: bool = False) -> tuple[Slots, SlotNumbers]:
        """Take slots as ``reserve`` does, and evict as many blocks as free slots are wanting.

        Returns:
            The slots, and the slots of the blocks that went. Fewer than ``count``: none is free, and
            those that went had grants out, or nothing more may go.
        """
        slots = _room(count)
        evicted = np.empty(count, dtype=np.uint32)
        gone = ffi.new("size_t *")
        taken = lib.kvp_ledger_take(
            self._ledger, count, granted, *slots.native(), _numbers(evicted), gone
        )
        return slots[:taken], evicted[: gone[0]]

    def ahead(self, count: int) -> SlotNumbers:
        """List up to ``count`` slots that ``take`` would take next if nothing changed."""
        slots = np.empty(count, dtype=np.uint32)
        listed = lib.kvp_ledger_ahead(self._ledger, count, _numbers(slots))
        return slots[:listed]

    def evict(self, count: int) -> int:
        """Evict up to ``count`` blocks, least recently used first; how many went."""
        return lib.kvp_ledger_evict(self._ledger, count, ffi.NULL)

    def evict_slots(self, count: int) -> SlotNumbers:
        """Evict as ``evict`` does; the slots that the blocks lay in."""
        slots = np.empty(count, dtype=np.uint32)
        gone = lib.kvp_ledger_evict(self._ledger, count, _numbers(slots))
        return slots[:gone]

    def vacate(self, first: int, count: int) -> tuple[Slots, int] | None:
        """Evict what is in a run of slots, and what descends from it, and reserve those slots.

        Returns:
            The slots from number ``first`` on, and how many blocks went. None, and nothing
            happened, if a slot is in use or a block, or one that descends from it, is pinned.
        """
        generations: Generations = np.empty(count, dtype=np.uint64)
        gone = ffi.new("size_t *")
        buffer = ffi.from_buffer("uint64_t[]", generations, require_writable=True)
        status = lib.kvp_ledger_vacate(self._ledger, first, count, buffer, gone)
        if status == lib.KVP_BUSY:
            return None
        if status != lib.KVP_OK:
            raise UsageError(f"slots {first} to {first + count} of {self.slot_count}")
        return Slots(np.arange(first, first + count, dtype=np.uint32), generations), int(gone[0])

    def commit(self, slots: Slots, keys: bytes, parents: bytes) -> NDArray[np.bool_]:
        """Make reserved slots ready, all or none; for each whether its key is new.

        Raises UsageError at a slot that is not reserved in this life.
        """
        self._fit(slots, keys, parents)
        added = np.zeros(len(slots), dtype=np.bool_)
        bad = ffi.new("size_t *")
        status = lib.kvp_ledger_commit(
            self._ledger, *slots.native(), keys, parents, len(slots), _flags(added), bad
        )
        self._check(status, slots, bad[0], "reserved")
        return added

    def commit_run(
        self, slots: Slots, keys: bytes, parent: BlockHash | None, *, granted: bool = False
    ) -> NDArray[np.bool_] | None:
        """Make the reserved slots of a chain ready, each block the parent of the next, all or none.

        Args:
            slots: Where the blocks lie.
            keys: 32 bytes each, concatenated.
            parent: Of the first block, or None.
            granted: Whether one grant of each slot is given back with it.

        Returns:
            None if all keys are new, or for each whether it is.

        Raises UsageError at a slot that is not reserved in this life, or has no grant, and at a block
        that is its own parent.
        """
        count = len(slots)
        if count_of(keys) != count:
            raise UsageError(f"{count_of(keys)} keys for {count} slots")
        _require_parent(parent)  # C reads all of it
        added = ffi.new("bool[]", count)
        at = ffi.new("size_t *")
        status = lib.kvp_ledger_commit_run(
            self._ledger, *slots.native(), keys, parent or NO_PARENT, count, granted, added, at
        )
        needed = "reserved, and granted, for a block that is not its own parent"
        self._check(status, slots, at[0], needed if status == lib.KVP_INVALID else "reserved")
        if at[0] == count:
            return None
        return np.frombuffer(bytes(ffi.buffer(added)), dtype=np.bool_)

    def restore(self, blocks: Listing) -> NDArray[np.bool_]:
        """Take in blocks of earlier runs, oldest use first; for each whether it was kept."""
        self._fit(blocks.slots, blocks.keys, blocks.parents)
        kept = np.zeros(len(blocks.slots), dtype=np.bool_)
        lib.kvp_ledger_restore(
            self._ledger,
            *blocks.slots.native(),
            blocks.keys,
            blocks.parents,
            len(blocks.slots),
            _flags(kept),
        )
        return kept

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are here. Not a use."""
        return lib.kvp_ledger_match(self._ledger, keys, count_of(keys))

    def rooted(self, keys: bytes) -> int:
        """Count the leading keys that are here, from one whose every ancestor is here on."""
        return lib.kvp_ledger_rooted(self._ledger, keys, count_of(keys))

    def touch(self, keys: bytes) -> NDArray[np.bool_]:
        """Count as used those of the keys that are here; say which are."""
        here = np.zeros(count_of(keys), dtype=np.bool_)
        lib.kvp_ledger_touch(self._ledger, keys, len(here), _flags(here))
        return here

    def pin(self, keys: bytes, *, use: bool = True) -> Slots:
        """Pin the leading blocks that are here, and count them as used if ``use``."""
        slots = _room(count_of(keys))
        count = lib.kvp_ledger_pin(self._ledger, keys, len(slots), use, *slots.native())
        return slots[:count]

    def drop(self, key: BlockHash) -> bool:
        """Forget a block, whose slot goes at its last unpin. False if it is not here."""
        return self.drop_slot(key) is not None

    def drop_slot(self, key: BlockHash) -> SlotIndex | None:
        """Forget a block as ``drop`` does; the slot that it lies in, or None."""
        if count_of(key) != 1:
            raise UsageError(f"a key of {len(key)} bytes: it has {HASH_BYTES}")
        slot = np.empty(1, dtype=np.uint32)
        if lib.kvp_ledger_drop(self._ledger, key, _numbers(slot)) != lib.KVP_OK:
            return None
        return SlotIndex(int(slot[0]))

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Give one pin of each slot back."""
        self._change(lib.KVP_ARENA_UNPIN, slots)

    def grant(self, slots: Slot | Sequence[Slot]) -> None:
        """Count one more party that may still touch the slots' bytes."""
        self._change(lib.KVP_ARENA_GRANT, slots)

    def settle(self, slots: Slot | Sequence[Slot]) -> None:
        """Give one grant of each slot back."""
        self._change(lib.KVP_ARENA_SETTLE, slots)

    def release(self, slots: Slot | Sequence[Slot]) -> None:
        """Give reserved slots up: free now, or quarantined while grants are out."""
        self._change(lib.KVP_ARENA_RELEASE, slots)

    def require_reserved(self, slots: Sequence[Slot]) -> None:
        """Raise UsageError unless all slots are reserved, in just these lives."""
        self._change(lib.KVP_ARENA_REQUIRE_RESERVED, slots)

    def require_pinned(self, slots: Sequence[Slot]) -> None:
        """Raise UsageError unless all slots are pinned, in just these lives."""
        self._change(lib.KVP_ARENA_REQUIRE_PINNED, slots)

    def names(self, slots: Slots) -> tuple[bytes, bytes, NDArray[np.bool_]]:
        """Return keys and parents of slots that hold a block, and which of them are not dropped."""
        keys, parents = _names(len(slots)), _names(len(slots))
        ready = np.zeros(len(slots), dtype=np.bool_)
        lib.kvp_ledger_names(
            self._ledger, *slots.native(), len(slots), _bytes(keys), _bytes(parents), _flags(ready)
        )
        return keys.tobytes(), parents.tobytes(), ready

    def blocks(self, begin: int, count: int) -> tuple[Listing, int]:
        """List up to ``count`` ready blocks from slot ``begin`` on, and where to go on."""
        slots, keys, parents = _room(count), _names(count), _names(count)
        following = ffi.new("size_t *", begin)
        listed = lib.kvp_ledger_list(
            self._ledger, following, count, *slots.native(), _bytes(keys), _bytes(parents)
        )
        listing = Listing(slots[:listed], keys[:listed].tobytes(), parents[:listed].tobytes())
        return listing, int(following[0])

    def stale(self, count: int) -> SlotNumbers:
        """List up to ``count`` slots with a stale header that nobody may write."""
        slots = np.empty(count, dtype=np.uint32)
        listed = lib.kvp_ledger_stale(self._ledger, count, _numbers(slots))
        return slots[:listed]

    def mark(self, slots: SlotNumbers, *, stale: bool) -> None:
        """Say that the headers of slots on the device are stale, or are no more."""
        run = np.ascontiguousarray(slots, dtype=np.uint32)
        lib.kvp_ledger_mark(self._ledger, ffi.from_buffer("uint32_t[]", run), len(run), stale)

    def counts(self) -> LedgerCounts:
        """Return a consistent snapshot."""
        out = ffi.new("kvp_ledger_counts *")
        lib.kvp_ledger_count(self._ledger, out)
        return LedgerCounts(*(int(getattr(out, name)) for name in LedgerCounts.__slots__))

    def _change(self, step: int, slots: Slot | Sequence[Slot]) -> None:
        run, done = Slots.of(slots), ffi.new("size_t *")
        status = lib.kvp_ledger_change(self._ledger, step, *run.native(), len(run), done)
        self._check(status, run, done[0], _NEEDED[step])

    def _check(self, status: int, slots: Slots, at: int, needed: str) -> None:
        if status == lib.KVP_OK:
            return
        slot = slots[at] if at < len(slots) else None
        if status in (lib.KVP_STALE, lib.KVP_BUSY, lib.KVP_INVALID):
            raise UsageError(f"{slot} is not {needed} in this life")
        raise InternalError(f"the ledger answered {status} for {slot}")

    def _fit(self, slots: Slots, keys: bytes, parents: bytes) -> None:
        if count_of(keys) != len(slots) or count_of(parents) != len(slots):
            raise UsageError(f"{count_of(keys)} keys for {len(slots)} slots")


def count_of(keys: bytes) -> int:
    """Count concatenated keys. Raises UsageError unless they are whole."""
    count, rest = divmod(len(keys), HASH_BYTES)
    if rest:
        raise UsageError(f"{len(keys)} bytes are not whole keys of {HASH_BYTES}")
    return count


def chained(keys: bytes, parent: BlockHash | None) -> bytes:
    """Return the parents of a run of blocks, each the parent of the next. Raises UsageError."""
    _require_parent(parent)
    return ((parent or NO_PARENT) + keys)[: len(keys)]


def own_parent(keys: bytes, parents: bytes) -> bool:
    """Say whether a block of a run is its own parent."""
    words = HASH_BYTES // 8
    alike = np.frombuffer(keys, np.uint64)[::words] == np.frombuffer(parents, np.uint64)[::words]
    # One word of four is enough to say that hardly any block can be.
    return bool(alike.any()) and bool((_rows(keys) == _rows(parents)).all(axis=1).any())


def select(keys: bytes, rows: NDArray[np.bool_]) -> bytes:
    """Return the keys that are marked."""
    return _rows(keys)[rows].tobytes()


def _require_parent(parent: BlockHash | None) -> None:
    if parent is not None and len(parent) != HASH_BYTES:
        raise UsageError(f"a parent of {len(parent)} bytes: a key has {HASH_BYTES}")


def _rows(keys: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(keys, dtype=np.uint8).reshape(-1, HASH_BYTES)


def _names(count: int) -> NDArray[np.uint8]:
    return np.zeros((count, HASH_BYTES), dtype=np.uint8)


def _room(count: int) -> Slots:
    """Return slots that the C core is to fill, through ``native``."""
    indices: SlotNumbers = np.empty(count, dtype=np.uint32)
    generations: Generations = np.empty(count, dtype=np.uint64)
    return Slots(indices, generations)


def _numbers(slots: SlotNumbers) -> "CData":
    return ffi.from_buffer("uint32_t[]", slots, require_writable=True)


def _flags(array: NDArray[np.bool_]) -> "CData":
    return ffi.from_buffer("bool[]", array, require_writable=True)


def _bytes(array: NDArray[np.uint8]) -> "CData":
    return ffi.from_buffer("uint8_t[]", array, require_writable=True)
