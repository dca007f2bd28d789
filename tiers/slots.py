"""Slots of one memory: what the tiers whose blocks lie in memory have in common.

Owns the bookkeeping of the ``Tier`` contract over a ledger: which block is in which slot, pins,
grants, checksums, tokens, eviction, counts. Knows no memory: a subclass describes it for copies, and
is told when a block can be read and when no longer. Who calls it: through its subclasses, the pool.
"""

import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.arena import Slot, SlotNumbers, Slots
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout
from kvpool.clock import Clock, SystemClock
from kvpool.errors import CapacityError, ClosedError, UsageError
from kvpool.events import BlocksEvicted, EventSink, NullSink
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.base import BlockTokens, Tier, TierStats
from kvpool.tiers.eviction import EvictionPolicy, Facts
from kvpool.tiers.ledger import Ledger, count_of, select
from kvpool.tiers.tokens import TokenRows

# Why a block may be dropped; ``capacity`` is eviction's own.
DROP_REASONS: Final = ("corrupt", "invalid")


class SlotTier(Tier):
    """A tier of slots in memory. Safe from any thread; nothing waits and nothing is copied here.

    One lock, ``_lock``, guards everything here; the ledger and the memory are called under it, and
    events are emitted after it was left. No call costs Python time for each block, unless it is given
    a ``policy``.

    Args:
        layout: Of the blocks.
        slot_count: How many slots, above 0.
        policy: Who goes first when room is needed; None means least recently used, kept in C.
        clock: Tells a policy when blocks are used; None means the machine's.
        events: Told of evictions; None means nobody.
        lock: Of this tier and others that share its memory; None means its own.
    """

    def __init__(
        self,
        layout: BlockLayout,
        slot_count: int,
        *,
        policy: EvictionPolicy | None = None,
        clock: Clock | None = None,
        events: EventSink | None = None,
        lock: "threading.Lock | None" = None,
    ) -> None:
        self.layout = layout
        self._ledger = Ledger(slot_count)
        self._policy = policy
        self._facts = Facts(size_bytes=layout.block_bytes)
        self._clock: Clock = clock or SystemClock()
        self._events: EventSink = events or NullSink()
        self._lock = threading.Lock()
        if lock is not None:
            self._lock = lock
        self._closed = False
        # By slot, of what was committed to it last.
        self._crcs: NDArray[np.uint32] = np.empty((slot_count, layout.crc_count), dtype=np.uint32)
        self._tokens: NDArray[np.uint32] = np.empty(
            (slot_count, layout.block_tokens), dtype=np.uint32
        )
        self._has_tokens: NDArray[np.bool_] = np.zeros(slot_count, dtype=np.bool_)
        self._hits = self._misses = self._evictions = self._corruptions = self._mismatches = 0

    # ---- of a subclass: called under the lock -----------------------------------------------------

    @abstractmethod
    def _describe(self, slots: Slots, writable: bool) -> BlockView:
        """Return where slots lie."""

    def _require_readable(self, slots: Slots) -> None:
        """Raise UsageError at a slot that must not be read now."""
        self._ledger.require_pinned(slots)

    def _show(self, slots: Slots, keys: bytes, crcs: Crcs) -> None:
        """Take note that blocks can be read now."""

    def _hide(self, numbers: SlotNumbers) -> None:
        """Take note that blocks have left their slots, before anybody writes there."""

    def _used(self, slots: Slots) -> None:
        """Take note that slots are used now."""

    # Whether ``_make_room`` can find any.
    _has_other_room = False

    def _make_room(self) -> bool:
        """Find free slots in another way than by eviction. False if there is none."""
        return False

    @abstractmethod
    def _let_go(self) -> None:
        """Give the memory up, which stays mapped until the last view of it is gone. Once."""

    # ---- the contract -----------------------------------------------------------------------------

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

    def reserve_run(self, count: int, tokens: BlockTokens | None = None) -> Slots:
        """Take slots with a grant each, evicting at need. See ``Tier``."""
        return self._reserve(count, granted=True, tokens=tokens)

    def view(self, slots: Sequence[Slot], *, writable: bool) -> BlockView:
        """Describe reserved slots (writable) or pinned ones. See ``Tier``."""
        run = Slots.of(slots)
        with self._lock:
            self._require_open()
            if writable:
                self._ledger.require_reserved(run)
            else:
                self._require_readable(run)
            return self._describe(run, writable)

    def note_tokens(self, slots: Sequence[Slot], tokens: BlockTokens) -> None:
        """Keep the tokens of reserved slots beside them. See ``Tier``."""
        run = Slots.of(slots)
        with self._lock:
            self._require_open()
            self._ledger.require_reserved(run)
            self._tokens[run.indices] = self._fitting(len(run), tokens)
            self._has_tokens[run.indices] = True

    def same_tokens(self, slots: Sequence[Slot], tokens: BlockTokens) -> int:
        """Count the leading pinned slots that hold blocks of these tokens. See ``Tier``."""
        run = Slots.of(slots)
        with self._lock:
            self._require_open()
            self._ledger.require_pinned(run)
            other = (self._tokens[run.indices] != self._fitting(len(run), tokens)).any(axis=1)
            other &= self._has_tokens[run.indices]
            if not other.any():
                return len(run)
            self._mismatches += 1
            return int(other.argmax())

    def tokens(self, slots: Sequence[Slot]) -> TokenRows:
        """Return what is known of the tokens of pinned slots. Raises UsageError, ClosedError."""
        run = Slots.of(slots)
        with self._lock:
            self._require_open()
            self._ledger.require_pinned(run)
            return TokenRows(self._tokens[run.indices], self._has_tokens[run.indices])

    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Make a written slot readable under ``key``. See ``Tier``."""
        return self.commit_run([slot], key, parent, crcs) == 1

    def commit_run(
        self,
        slots: Sequence[Slot],
        keys: bytes,
        parent: BlockHash | None,
        crcs: Crcs,
        *,
        granted: bool = False,
    ) -> int:
        """Make the written slots of a run readable, all or none. See ``Tier``."""
        run, crc_count = Slots.of(slots), self._crcs.shape[1]
        count = new = len(run)
        if crcs.size != count * crc_count:
            raise UsageError(f"{crcs.size} checksums for {count} blocks")
        sums = np.ascontiguousarray(crcs, dtype=np.uint32).reshape(count, crc_count)
        with self._lock:
            self._require_open()
            added = self._ledger.commit_run(run, keys, parent, granted=granted)
            self._crcs[run.indices] = sums
            if added is None:
                self._show(run, keys, sums)
            else:
                new = int(added.sum())
                fresh = Slots(run.indices[added], run.generations[added])
                self._show(fresh, select(keys, added), sums[added])
            if self._policy is not None:
                self._admit(self._policy, keys, parent, added)
            return new

    def abort(self, slot: Slot) -> None:
        """Give a reserved slot back unwritten. See ``Tier``."""
        self.abort_run([slot])

    def abort_run(self, slots: Sequence[Slot]) -> None:
        """Give reserved slots back unwritten. See ``Tier``."""
        run = Slots.of(slots)
        with self._lock:
            if self._closed or not run:
                return
            try:
                self._ledger.require_reserved(run)
            except UsageError:  # some have ended already
                for slot in run:
                    if self._is_reserved(slot):
                        self._ledger.release(slot)
            else:
                self._ledger.release(run)

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are here. See ``Tier``."""
        with self._lock:
            self._require_open()
            return self._ledger.match(keys)

    def pin(self, keys: bytes) -> Slots:
        """Pin the leading blocks that are here. See ``Tier``."""
        with self._lock:
            self._require_open()
            slots = self._ledger.pin(keys)
            self._used(slots)
            if self._policy is not None:
                names = _cut(keys[: len(slots) * HASH_BYTES])
                self._policy.pin_run(names, self._clock.now(), self._facts)
            self._hits += len(slots)
            self._misses += count_of(keys) - len(slots)
            return slots

    def hold(self, keys: bytes) -> Slots:
        """Pin the leading blocks that are here, for work behind the scenes: not a use, not counted.

        ``unpin`` gives them back. Raises ClosedError.
        """
        with self._lock:
            self._require_open()
            slots = self._ledger.pin(keys, use=False)
            if self._policy is not None:
                for name in _cut(keys[: len(slots) * HASH_BYTES]):
                    self._policy.pin(name)
            return slots

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Give pins back. See ``Tier``."""
        run = Slots.of(slots)
        with self._lock:
            if self._closed:
                return
            names: list[BlockHash] = []
            if self._policy is not None:
                keys, _, ready = self._ledger.names(run)
                names = _cut(select(keys, ready))
            self._ledger.unpin(run)
            if self._policy is not None:
                self._policy.unpin_run(names)

    def keys(self) -> bytes:
        """Return the keys of all blocks that are here, 32 bytes each, in no order. ClosedError."""
        with self._lock:
            self._require_open()
            return self._ledger.blocks(0, self._ledger.slot_count)[0].keys

    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        """Return the checksums of pinned slots. See ``Tier``."""
        run = Slots.of(slots)
        with self._lock:
            self._require_open()
            self._ledger.require_pinned(run)
            shape = (len(run), self.layout.num_layers, self.layout.kv_heads)
            return self._crcs[run.indices].reshape(shape)

    def grant(self, slot: Slot) -> None:
        """Count one more party that may touch the slot. See ``Tier``."""
        with self._lock:
            self._require_open()
            self._ledger.grant(slot)

    def settle(self, slot: Slot) -> None:
        """Give one grant back. See ``Tier``."""
        self.settle_run([slot])

    def settle_run(self, slots: Sequence[Slot]) -> None:
        """Give one grant of each slot back. See ``Tier``."""
        with self._lock:
            if not self._closed:
                self._ledger.settle(slots)

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Remove a block; ``reason`` is one of ``DROP_REASONS``. See ``Tier``."""
        if reason not in DROP_REASONS:
            raise UsageError(f"reason {reason!r} is not one of {DROP_REASONS}")
        with self._lock:
            self._require_open()
            number = self._ledger.drop_slot(key)
            if number is None:
                return False
            self._hide(np.array([number], dtype=np.uint32))
            if self._policy is not None:
                self._policy.remove(key)
            self._corruptions += reason == "corrupt"
        self._tell(reason, 1)
        return True

    def evict(self, count: int) -> int:
        """Evict up to ``count`` unpinned blocks. See ``Tier``."""
        with self._lock:
            self._require_open()
            evicted = self._evict(min(count, self._ledger.slot_count))
        self._tell("capacity", evicted)
        return evicted

    def stats(self) -> TierStats:
        """Return a consistent snapshot. See ``Tier``."""
        with self._lock:
            return self._stats()

    def close(self) -> None:
        """Let go of the memory. See ``Tier``."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._let_go()

    # ---- inside: under the lock, but for ``_reserve`` and ``_tell`` -------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the tier is closed", tier=self.name)

    def _reserve(self, count: int, *, granted: bool, tokens: BlockTokens | None = None) -> Slots:
        """Take up to ``count`` slots, evicting what stands in the way."""
        evicted = 0
        try:
            with self._lock:
                self._require_open()
                rows = None if tokens is None else self._fitting(count, tokens)
                slots, evicted = self._take(count, granted)
                self._has_tokens[slots.indices] = rows is not None
                if rows is not None:
                    self._tokens[slots.indices] = rows[: len(slots)]
                return slots
        finally:
            self._tell("capacity", evicted)

    def _take(self, count: int, granted: bool) -> tuple[Slots, int]:
        """Reserve up to ``count`` slots in the ledger; those, and how many blocks had to go."""
        runs: list[Slots] = []
        evicted = 0
        in_order = self._policy is None  # the ledger's own
        evict = in_order and not self._has_other_room
        while True:
            if evict:
                run, numbers = self._ledger.take(count, granted=granted)
                gone = self._count_evicted(numbers)
            else:
                run, gone = self._ledger.reserve(count, granted=granted), 0
            if run:
                self._used(run)
                runs.append(run)
            count -= len(run)
            if count and not gone and not self._make_room():
                if not in_order:
                    gone = self._evict(count)
                if evict or not (in_order or gone):
                    count = 0  # nothing more may go
                evict = in_order
            # A victim with grants out is quarantined and frees nothing: then go on.
            evicted += gone
            if not count:
                return _joined(runs), evicted

    def _stats(self) -> TierStats:
        self._require_open()
        counts = self._ledger.counts()
        return TierStats(
            slots=self._ledger.slot_count,
            free=counts.free,
            reserved=counts.reserved,
            ready=counts.ready,
            quarantined=counts.quarantined,
            pins=counts.pins,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            corruptions=self._corruptions,
            mismatches=self._mismatches,
        )

    def _fitting(self, count: int, tokens: BlockTokens) -> BlockTokens:
        shape = (count, self.layout.block_tokens)
        if tokens.shape != shape:
            raise UsageError(f"tokens of shape {tokens.shape} where {shape} is expected")
        return tokens

    def _is_reserved(self, slot: Slot) -> bool:
        try:
            self._ledger.require_reserved([slot])
        except UsageError:
            return False
        return True

    def _admit(
        self,
        policy: EvictionPolicy,
        keys: bytes,
        parent: BlockHash | None,
        added: NDArray[np.bool_] | None,
    ) -> None:
        """Tell a policy of a run that was committed."""
        now, names = self._clock.now(), _cut(keys)
        parent = parent if parent and any(parent) else None
        if added is None:
            policy.admit_run(names, parent, now, self._facts)
            return
        for name, new in zip(names, added.tolist(), strict=True):
            if new:
                policy.admit(name, parent, now, self._facts)
            else:
                policy.use(name, now)
            parent = name

    def _evict(self, count: int) -> int:
        """Evict up to ``count`` blocks; how many."""
        if self._policy is None:
            numbers = self._ledger.evict_slots(count)
        else:
            numbers = self._victims(self._policy, count)
        return self._count_evicted(numbers)

    def _count_evicted(self, numbers: SlotNumbers) -> int:
        """Count blocks that were evicted, and hide their slots; how many."""
        if len(numbers):
            self._hide(numbers)
            self._evictions += len(numbers)
        return len(numbers)

    def _victims(self, policy: EvictionPolicy, count: int) -> SlotNumbers:
        """Evict the policy's victims; their slots."""
        numbers: list[int] = []
        while len(numbers) < count and (key := policy.victim()) is not None:
            number = self._ledger.drop_slot(key)
            assert number is not None, "the policy knows a block that the ledger does not"
            numbers.append(number)
        return np.array(numbers, dtype=np.uint32)

    def _tell(self, reason: str, count: int) -> None:
        if count and not isinstance(self._events, NullSink):
            size_bytes = count * self.layout.block_bytes
            self._events.emit(
                BlocksEvicted(tier=self.name, reason=reason, blocks=count, size_bytes=size_bytes)
            )


def _cut(keys: bytes) -> list[BlockHash]:
    return [BlockHash(keys[at : at + HASH_BYTES]) for at in range(0, len(keys), HASH_BYTES)]


def _joined(runs: list[Slots]) -> Slots:
    if len(runs) == 1:
        return runs[0]
    if not runs:
        return Slots.of([])
    return Slots(
        np.concatenate([run.indices for run in runs]),
        np.concatenate([run.generations for run in runs]),
    )
