"""The DRAM tier: blocks in the slots of one arena in shared memory.

Owns the arena, the index from key to slot, and which slots are reserved, pinned or dropped. Never
copies a byte and never waits. Who calls it: the pool, and a server that lets peers map ``arena``.
"""

import threading
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.arena import Arena, Slot
from kvpool.block import HASH_BYTES, BlockHash, SlotIndex
from kvpool.clock import Clock, SystemClock
from kvpool.errors import CapacityError, ClosedError, UsageError
from kvpool.events import BlockEvicted, EventSink, NullSink
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.base import Tier, TierStats
from kvpool.tiers.eviction import EvictionPolicy, LRUPolicy

# Why a block may be dropped; ``capacity`` is eviction's own.
DROP_REASONS: Final = ("corrupt", "invalid")


class SlotTable(Protocol):
    """Key to slot number, as ``kvpool.index.prefix.PrefixIndex`` has it. Guarded by its tier."""

    def put(self, key: BlockHash, number: int) -> None:
        """Insert or overwrite."""
        ...

    def get(self, key: BlockHash) -> int | None:
        """Return the number of ``key``, or None."""
        ...

    def remove(self, key: BlockHash) -> bool:
        """Forget ``key``."""
        ...

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are there."""
        ...

    def numbers(self, keys: bytes) -> NDArray[np.uint64]:
        """Return the numbers of the leading keys that are there."""
        ...


@dataclass(slots=True)
class _Block:
    slot: Slot
    key: BlockHash
    pins: int = 0
    dropped: bool = False  # a miss already; goes at its last unpin


class DramTier(Tier):
    """One arena of slots. Safe from any thread.

    One lock, ``_lock``, guards everything here; calls into the arena are made under it, and events
    are emitted after it was left. It is a leaf: nothing else is locked under it but the arena's own.

    Args:
        arena: Where blocks lie. This tier's from now on: ``close`` closes it.
        slots: An empty table with room for ``arena.slot_count`` keys.
        policy: Who goes first when room is needed; None means least recently used.
        clock, events: Components; None means the machine's clock, and no events.
    """

    name = "dram"

    def __init__(
        self,
        arena: Arena,
        slots: SlotTable,
        *,
        policy: EvictionPolicy | None = None,
        clock: Clock | None = None,
        events: EventSink | None = None,
    ) -> None:
        self.layout = arena.layout
        self.arena = arena
        self._index = slots
        self._policy: EvictionPolicy = policy or LRUPolicy()
        self._clock: Clock = clock or SystemClock()
        self._events: EventSink = events or NullSink()
        self._lock = threading.Lock()
        self._closed = False
        self._reserved: dict[SlotIndex, Slot] = {}
        self._blocks: dict[SlotIndex, _Block] = {}
        self._hits = self._misses = self._evictions = self._corruptions = 0

    def reserve(self) -> Slot:
        """Take a slot, evicting at need. See ``Tier``."""
        evicted = 0
        try:
            with self._lock:
                self._require_open()
                while (slot := self._take_free()) is None:
                    # A victim with grants out is quarantined and frees nothing: go on.
                    if not self._evict_one():
                        raise CapacityError(
                            "every slot is reserved, pinned or quarantined: close leases first",
                            tier=self.name,
                            size_bytes=self.layout.block_bytes,
                        )
                    evicted += 1
                self._reserved[slot.index] = slot
                return slot
        finally:
            self._tell("capacity", evicted)

    def view(self, slots: list[Slot], *, writable: bool) -> BlockView:
        """Describe reserved slots (writable) or pinned ones. See ``Tier``."""
        with self._lock:
            self._require_open()
            for slot in slots:
                if writable:
                    self._require_reserved(slot)
                else:
                    self._require_pinned(slot)
            return replace(self.arena.view(slots), writable=writable)

    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Make a written slot readable under ``key``. See ``Tier``."""
        if len(key) != HASH_BYTES or key == parent:
            raise UsageError(f"key {key.hex()} with parent {parent!r} is not the key of a block")
        with self._lock:
            self._require_open()
            self._require_reserved(slot)
            if self._index.get(key) is not None:
                del self._reserved[slot.index]
                self.arena.release(slot)
                self._policy.use(key, self._clock.now())
                return False
            self.arena.commit(slot, crcs, key)
            del self._reserved[slot.index]
            self._blocks[slot.index] = _Block(slot, key)
            self._index.put(key, slot.index)
            self._policy.admit(key, parent, self._clock.now())
            return True

    def abort(self, slot: Slot) -> None:
        """Give a reserved slot back unwritten. See ``Tier``."""
        with self._lock:
            if not self._closed and self._reserved.get(slot.index) == slot:
                del self._reserved[slot.index]
                self.arena.release(slot)

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are here. See ``Tier``."""
        with self._lock:
            self._require_open()
            return self._index.match(keys)

    def pin(self, keys: bytes) -> list[Slot]:
        """Pin the leading blocks that are here. See ``Tier``."""
        with self._lock:
            self._require_open()
            slots: list[Slot] = []
            now = self._clock.now()
            for index in self._index.numbers(keys):
                block = self._blocks[SlotIndex(int(index))]
                self.arena.pin(block.slot)
                block.pins += 1
                self._policy.pin(block.key)
                self._policy.use(block.key, now)
                slots.append(block.slot)
            self._hits += len(slots)
            self._misses += len(keys) // HASH_BYTES - len(slots)
            return slots

    def unpin(self, slots: list[Slot]) -> None:
        """Give pins back. See ``Tier``."""
        with self._lock:
            if self._closed:
                return
            for slot in slots:
                block = self._require_pinned(slot)
                self.arena.unpin(slot)
                block.pins -= 1
                if not block.dropped:
                    self._policy.unpin(block.key)
                elif block.pins == 0:
                    self._free(block)

    def crcs(self, slots: list[Slot]) -> Crcs:
        """Return the checksums of pinned slots. See ``Tier``."""
        with self._lock:
            self._require_open()
            for slot in slots:
                self._require_pinned(slot)
            return self.arena.crcs(slots)

    def grant(self, slot: Slot) -> None:
        """Count one more party that may touch the slot. See ``Tier``."""
        with self._lock:
            self._require_open()
            self.arena.grant(slot)

    def settle(self, slot: Slot) -> None:
        """Give one grant back. See ``Tier``."""
        with self._lock:
            if not self._closed:
                self.arena.settle(slot)

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Remove a block; ``reason`` is one of ``DROP_REASONS``. See ``Tier``."""
        if reason not in DROP_REASONS:
            raise UsageError(f"reason {reason!r} is not one of {DROP_REASONS}")
        with self._lock:
            self._require_open()
            index = self._index.get(key)
            if index is None:
                return False
            block = self._blocks[SlotIndex(index)]
            self._index.remove(key)
            self._policy.remove(key)
            self._corruptions += reason == "corrupt"
            block.dropped = True
            if block.pins == 0:
                self._free(block)
        self._tell(reason, 1)
        return True

    def evict(self, count: int) -> int:
        """Evict up to ``count`` unpinned blocks. See ``Tier``."""
        evicted = 0
        with self._lock:
            self._require_open()
            while evicted < count and self._evict_one():
                evicted += 1
        self._tell("capacity", evicted)
        return evicted

    def stats(self) -> TierStats:
        """Return a consistent snapshot. See ``Tier``."""
        with self._lock:
            self._require_open()
            counts = self.arena.counts()
            return TierStats(
                slots=self.arena.slot_count,
                free=counts.free,
                reserved=counts.reserved,
                ready=counts.ready,
                quarantined=counts.quarantined,
                pins=counts.pins,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                corruptions=self._corruptions,
            )

    def close(self) -> None:
        """Close the arena. See ``Tier``."""
        with self._lock:
            self._closed = True
            self.arena.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the tier is closed", tier=self.name)

    def _require_reserved(self, slot: Slot) -> None:
        if self._reserved.get(slot.index) != slot:
            raise UsageError(f"{slot} is not reserved in this life", tier=self.name)

    def _require_pinned(self, slot: Slot) -> _Block:
        block = self._blocks.get(slot.index)
        if block is None or block.slot != slot or block.pins == 0:
            raise UsageError(f"{slot} is not pinned in this life", tier=self.name)
        return block

    def _take_free(self) -> Slot | None:
        try:
            return self.arena.reserve()
        except CapacityError:
            return None

    def _evict_one(self) -> bool:
        """Evict the policy's next victim. Under the lock. False if there is none."""
        key = self._policy.victim()
        if key is None:
            return False
        index = self._index.get(key)
        assert index is not None, "the policy knows a block that the index does not"
        self._index.remove(key)
        self._free(self._blocks[SlotIndex(index)])
        self._evictions += 1
        return True

    def _free(self, block: _Block) -> None:
        del self._blocks[block.slot.index]
        self.arena.release(block.slot)

    def _tell(self, reason: str, count: int) -> None:
        for _ in range(count):
            self._events.emit(
                BlockEvicted(tier=self.name, reason=reason, size_bytes=self.layout.block_bytes)
            )
