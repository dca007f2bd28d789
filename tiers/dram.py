"""The DRAM tier: blocks in the slots of one arena in shared memory.

Owns the arena, the index from key to slot, and which slots are reserved, pinned or dropped. Never
copies a byte and never waits. Who calls it: the pool, and a server that lets peers map ``arena``.
"""

import threading
from collections.abc import Sequence
from operator import eq
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.arena import Arena, Slot, Slots
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

    def add(self, keys: bytes, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Insert the keys that are absent, with a number each; for each, whether it was."""
        ...

    def take(self, keys: bytes) -> NDArray[np.uint64]:
        """Forget the leading keys that are there; return their numbers."""
        ...

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are there."""
        ...

    def numbers(self, keys: bytes) -> NDArray[np.uint64]:
        """Return the numbers of the leading keys that are there."""
        ...


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
        # By slot: the key of the ready block in it (None: no block, or a dropped one) and its life.
        self._keys: list[BlockHash | None] = [None] * arena.slot_count
        self._lives = np.zeros(arena.slot_count, dtype=np.uint64)
        self._dropped: set[SlotIndex] = set()  # misses already; they go at their last unpin
        self._hits = self._misses = self._evictions = self._corruptions = 0

    def reserve(self) -> Slot:
        """Take a slot, evicting at need. See ``Tier``."""
        slots = self._reserve(1, granted=False)
        if not slots:
            raise CapacityError(
                "every slot is reserved, pinned or quarantined: close leases first",
                tier=self.name,
                size_bytes=self.layout.block_bytes,
            )
        return slots[0]

    def reserve_run(self, count: int) -> Slots:
        """Take slots with a grant each, evicting at need. See ``Tier``."""
        return self._reserve(count, granted=True)

    def view(self, slots: Sequence[Slot], *, writable: bool) -> BlockView:
        """Describe reserved slots (writable) or pinned ones. See ``Tier``."""
        with self._lock:
            self._require_open()
            if writable:
                self.arena.require_reserved(slots)
            else:
                self.arena.require_pinned(slots)
            return self.arena.view(slots, writable=writable)

    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Make a written slot readable under ``key``. See ``Tier``."""
        return self.commit_run([slot], key, parent, crcs) == 1

    def commit_run(
        self, slots: Sequence[Slot], keys: bytes, parent: BlockHash | None, crcs: Crcs
    ) -> int:
        """Make the written slots of a run readable, all or none. See ``Tier``."""
        run, names = Slots.of(slots), _cut(keys)
        parents = [parent, *names[:-1]]
        if len(names) != len(run) or any(map(eq, names, parents)):
            raise UsageError(
                f"{len(names)} keys for {len(run)} slots, or a block is its own parent"
            )
        if crcs.size != len(run) * self.layout.crc_count:
            raise UsageError(f"{crcs.size} checksums for {len(run)} blocks")
        with self._lock:
            self._require_open()
            self.arena.require_reserved(run)
            now = self._clock.now()
            added = self._index.add(keys, run.indices.astype(np.uint64))
            if added.all():
                self.arena.commit_all(run, crcs, keys)
                self._policy.admit_run(names, parent, now)
            else:
                crcs = crcs.reshape(len(run), -1)
                for at, name in enumerate(names):
                    if added[at]:
                        self.arena.commit_all(run[at : at + 1], crcs[at], name)
                        self._policy.admit(name, parents[at], now)
                    else:
                        self.arena.release(run[at])
                        self._policy.use(name, now)
            for index, name, new in zip(run.indices.tolist(), names, added.tolist(), strict=True):
                if new:
                    self._keys[index] = name
            self._lives[run.indices] = run.generations
            return int(added.sum())

    def abort(self, slot: Slot) -> None:
        """Give a reserved slot back unwritten. See ``Tier``."""
        self.abort_run([slot])

    def abort_run(self, slots: Sequence[Slot]) -> None:
        """Give reserved slots back unwritten. See ``Tier``."""
        with self._lock:
            if self._closed:
                return
            run = Slots.of(slots)
            try:
                self.arena.require_reserved(run)
            except UsageError:  # some have ended already
                for slot in run:
                    if self._is_reserved(slot):
                        self.arena.release(slot)
            else:
                self.arena.release(run)

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are here. See ``Tier``."""
        with self._lock:
            self._require_open()
            return self._index.match(keys)

    def pin(self, keys: bytes) -> Slots:
        """Pin the leading blocks that are here. See ``Tier``."""
        with self._lock:
            self._require_open()
            indices = self._index.numbers(keys)
            slots = Slots(indices.astype(np.uint32), self._lives[indices])
            self.arena.pin(slots)
            self._policy.pin_run(self._names(slots), self._clock.now())
            self._hits += len(slots)
            self._misses += len(keys) // HASH_BYTES - len(slots)
            return slots

    def keys(self) -> bytes:
        """Return the keys of all blocks that are here, 32 bytes each, in no order. ClosedError."""
        with self._lock:
            self._require_open()
            return b"".join(key for key in self._keys if key is not None)

    def hold(self, keys: bytes) -> Slots:
        """Pin the leading blocks that are here, for work behind the scenes: not a use, not counted.

        ``unpin`` gives them back. Raises ClosedError.
        """
        with self._lock:
            self._require_open()
            indices = self._index.numbers(keys)
            slots = Slots(indices.astype(np.uint32), self._lives[indices])
            self.arena.pin(slots)
            for name in self._names(slots):
                self._policy.pin(name)
            return slots

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Give pins back. See ``Tier``."""
        with self._lock:
            if self._closed:
                return
            run = Slots.of(slots)
            self.arena.unpin(run)
            self._policy.unpin_run(self._names(run))
            if self._dropped:
                for slot in run:
                    if slot.index in self._dropped and not self._is_pinned(slot):
                        self._dropped.remove(slot.index)
                        self.arena.release(slot)

    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        """Return the checksums of pinned slots. See ``Tier``."""
        with self._lock:
            self._require_open()
            self.arena.require_pinned(slots)
            return self.arena.crcs(slots)

    def grant(self, slot: Slot) -> None:
        """Count one more party that may touch the slot. See ``Tier``."""
        with self._lock:
            self._require_open()
            self.arena.grant(slot)

    def settle(self, slot: Slot) -> None:
        """Give one grant back. See ``Tier``."""
        self.settle_run([slot])

    def settle_run(self, slots: Sequence[Slot]) -> None:
        """Give one grant of each slot back. See ``Tier``."""
        with self._lock:
            if not self._closed:
                self.arena.settle(slots)

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Remove a block; ``reason`` is one of ``DROP_REASONS``. See ``Tier``."""
        if reason not in DROP_REASONS:
            raise UsageError(f"reason {reason!r} is not one of {DROP_REASONS}")
        with self._lock:
            self._require_open()
            taken = self._index.take(key)
            if not len(taken):
                return False
            index = SlotIndex(int(taken[0]))
            slot = Slot(index, int(self._lives[index]))
            self._keys[index] = None
            self._policy.remove(key)
            self._corruptions += reason == "corrupt"
            if self._is_pinned(slot):
                self._dropped.add(index)
            else:
                self.arena.release(slot)
        self._tell(reason, 1)
        return True

    def evict(self, count: int) -> int:
        """Evict up to ``count`` unpinned blocks. See ``Tier``."""
        evicted = 0
        with self._lock:
            self._require_open()
            evicted = self._evict(count)
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

    def _reserve(self, count: int, *, granted: bool) -> Slots:
        """Take up to ``count`` slots, evicting what stands in the way."""
        runs: list[Slots] = []
        evicted = 0
        try:
            with self._lock:
                self._require_open()
                while True:
                    runs.append(self.arena.reserve_some(count, granted=granted))
                    count -= len(runs[-1])
                    # A victim with grants out is quarantined and frees nothing: go on.
                    gone = self._evict(count)
                    if not gone:
                        return _joined(runs)
                    evicted += gone
        finally:
            self._tell("capacity", evicted)

    def _names(self, slots: Slots) -> list[BlockHash]:
        """Return the keys of the blocks in ready slots, without those that were dropped."""
        indices: list[int] = slots.indices.tolist()
        return [key for index in indices if (key := self._keys[index]) is not None]

    def _is_reserved(self, slot: Slot) -> bool:
        try:
            self.arena.require_reserved([slot])
        except UsageError:
            return False
        return True

    def _is_pinned(self, slot: Slot) -> bool:
        try:
            self.arena.require_pinned([slot])
        except UsageError:
            return False
        return True

    def _evict(self, count: int) -> int:
        """Evict up to ``count`` of the policy's victims. Under the lock. Returns how many."""
        victims: list[BlockHash] = []
        while len(victims) < count and (key := self._policy.victim()) is not None:
            victims.append(key)
        if not victims:
            return 0
        indices = self._index.take(b"".join(victims))
        assert len(indices) == len(victims), "the policy knows a block that the index does not"
        for index in indices.tolist():
            self._keys[index] = None
        self.arena.release(Slots(indices.astype(np.uint32), self._lives[indices]))
        self._evictions += len(victims)
        return len(victims)

    def _tell(self, reason: str, count: int) -> None:
        if count:
            event = BlockEvicted(tier=self.name, reason=reason, size_bytes=self.layout.block_bytes)
            for _ in range(count):
                self._events.emit(event)


def _cut(keys: bytes) -> list[BlockHash]:
    if len(keys) % HASH_BYTES:
        raise UsageError(f"{len(keys)} bytes are not whole keys of {HASH_BYTES}")
    return [BlockHash(keys[at : at + HASH_BYTES]) for at in range(0, len(keys), HASH_BYTES)]


def _joined(runs: list[Slots]) -> Slots:
    if len(runs) == 1:
        return runs[0]
    return Slots(
        np.concatenate([run.indices for run in runs]),
        np.concatenate([run.generations for run in runs]),
    )
