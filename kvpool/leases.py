"""The leases of a pool: pinned blocks, by client, until a time.

Owns the lock around the lease table and gives every pin back exactly once. Decides nothing itself:
``tiers/lease.py`` does. Who calls it: the pool for its own process, and a server for its clients.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvpool.arena import Slots
from kvpool.block import HASH_BYTES, BlockHash
from kvpool.clock import Clock
from kvpool.config import PoolConfig
from kvpool.errors import CorruptionError, UsageError
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.tiers.base import BlockTokens, Tier
from kvpool.tiers.lease import LeaseId, LeaseTable


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """What a lease holds: the leading blocks of a run, pinned.

    Attributes:
        keys: Their hashes, 32 bytes each.
        slots: Their slots in the tier, in order.
        bad: Indices of those that proved corrupt and left the tier.
    """

    keys: bytes
    slots: Slots
    bad: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCounts:
    """Leases that are out, their bytes, and the blocks asked for with the intent to read."""

    leases: int
    size_bytes: int
    hits: int
    misses: int


class PoolLeases:
    """Leases on the blocks of one tier. Safe from any thread; every call is short.

    One lock, ``_lock``, guards the table and the counts; the tier is called outside it.
    """

    def __init__(self, tier: Tier, config: PoolConfig, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._lock = threading.Lock()
        self._hits = self._misses = 0
        self._table: LeaseTable[LeasedBlocks] = LeaseTable(
            client_bytes_max=config.lease_bytes_max, seconds_max=config.lease_seconds_max
        )

    def grant(
        self, client: bytes, hashes: bytes, seconds: float, tokens: BlockTokens | None = None
    ) -> tuple[LeaseId, Slots]:
        """Pin the leading blocks (32 bytes a hash) that are here for a client.

        With ``tokens``, uint32 [hashes, block_tokens], those from one on that was stored with other
        tokens are missing.

        Returns:
            The lease, and the slots of the leading blocks: perhaps none.

        Raises:
            UsageError: ``seconds`` is not within the limits.
            CapacityError: Over the client's byte quota.
            ClosedError: The tier is closed.
        """
        self.expire()
        slots = Slots.of(self._tier.pin(hashes))
        if tokens is not None:
            try:
                same = self._tier.same_tokens(slots, tokens[: len(slots)])
            except BaseException:
                self._tier.unpin(slots)
                raise
            self._tier.unpin(slots[same:])
            slots = slots[:same]
        held = LeasedBlocks(hashes[: len(slots) * HASH_BYTES], slots)
        size_bytes = len(slots) * self._tier.layout.block_bytes
        try:
            with self._lock:
                lease = self._table.grant(client, held, size_bytes, seconds, self._clock.now())
                self._hits += len(slots)
                self._misses += len(hashes) // HASH_BYTES - len(slots)
        except BaseException:
            self._tier.unpin(slots)
            raise
        return lease, slots

    def count_missing(self, blocks: int) -> None:
        """Count blocks that were wanted, but left out of ``grant`` because a match missed them."""
        with self._lock:
            self._misses += blocks

    def begin(self, lease: LeaseId) -> LeasedBlocks:
        """Start a read; end it with ``end``. Raises LeaseExpiredError."""
        with self._lock:
            return self._table.begin(lease, self._clock.now())

    def end(self, lease: LeaseId) -> None:
        """End a read; what it held is unpinned if its lease ended meanwhile."""
        with self._lock:
            freed = self._table.end(lease)
        self._unpin(freed)

    @contextmanager
    def reading(self, lease: LeaseId) -> Generator[LeasedBlocks, None, None]:
        """Hold a lease's blocks for the length of a ``with``. Raises LeaseExpiredError."""
        held = self.begin(lease)
        try:
            yield held
        finally:
            self.end(lease)

    def release(self, client: bytes, lease: LeaseId) -> None:
        """End a client's lease. Idempotent; another client's is left alone. Never raises."""
        with self._lock:
            freed = self._table.release(lease, client)
        self._unpin(freed)

    def drop_client(self, client: bytes) -> None:
        """End every lease of a client that is gone. Idempotent, never raises."""
        with self._lock:
            freed = self._table.drop_client(client)
        self._unpin(freed)

    def expire(self) -> int:
        """End the leases that have run out; the pool does so too whenever it needs room."""
        with self._lock:
            freed = self._table.expire(self._clock.now())
        self._unpin(freed)
        return len(freed)

    def clear(self) -> None:
        """End every lease."""
        with self._lock:
            freed = self._table.clear()
        self._unpin(freed)

    def counts(self) -> LeaseCounts:
        """Return a consistent snapshot."""
        with self._lock:
            return LeaseCounts(
                leases=len(self._table),
                size_bytes=self._table.size_bytes,
                hits=self._hits,
                misses=self._misses,
            )

    def report_bad(self, client: bytes, lease: LeaseId, indices: Sequence[int]) -> int:
        """Check blocks whose checksum differed at a reader; drop those that are bad here.

        A reader's word alone drops nothing: its own copy may have failed.

        Returns:
            How many were dropped.

        Raises:
            LeaseExpiredError: The lease is over: what it named may be another block by now.
            UsageError: It is another client's lease, or an index is not within it.
        """
        with self.reading(lease) as held:
            with self._lock:
                owner = self._table.client(lease)
            if owner != client or not all(0 <= index < len(held.slots) for index in indices):
                raise UsageError(
                    f"blocks {list(indices)} are not of a lease of this client on "
                    f"{len(held.slots)} blocks"
                )
            layout = self._tier.layout
            room = np.empty(layout.block_bytes, dtype=np.uint8)
            scratch = BlockView.of_buffer(layout, Span.of(room))
            before = len(held.bad)
            for index in indices:
                slots = [held.slots[index]]
                try:
                    stored = self._tier.view(slots, writable=False)
                    copy_blocks(scratch, stored, crcs=self._tier.crcs(slots))
                except CorruptionError:
                    self.drop_bad(held, index)
            return len(held.bad) - before

    def bytes_of(self, client: bytes) -> int:
        """Return the leased bytes of one client."""
        with self._lock:
            return self._table.bytes_of(client)

    def drop_bad(self, held: LeasedBlocks, index: int) -> None:
        """Drop a block that proved corrupt, once: its name may be another copy's by now."""
        with self._lock:
            if index in held.bad:
                return
            held.bad.add(index)
        key = BlockHash(held.keys[index * HASH_BYTES : (index + 1) * HASH_BYTES])
        self._tier.drop(key, "corrupt")

    def _unpin(self, freed: list[LeasedBlocks]) -> None:
        for held in freed:
            self._tier.unpin(held.slots)
