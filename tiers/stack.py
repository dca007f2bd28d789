"""The stack: one tier to its caller, DRAM over SSD inside.

Owns the order of things between the two: what is stored goes to DRAM at once and below in the
background, what is asked for and is only below is promoted within a time, and what must be durable
is written before it is acknowledged. Slots are the DRAM tier's. Who calls it: the pool, and a server
that lets peers map ``arena``.
"""

import logging
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvpool.arena import Arena, Slot, Slots
from kvpool.block import HASH_BYTES, BlockHash
from kvpool.completion import Deadline
from kvpool.errors import CapacityError, KVPoolError, UnavailableError, UsageError
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.base import BlockTokens, Tier, TierStats
from kvpool.tiers.dram import DramTier
from kvpool.tiers.flusher import FlushCounts, Flusher, FlushLimits, SlowStore
from kvpool.tiers.tokens import TokenRows

logger = logging.getLogger(__name__)

# Bytes promoted by one read. Less is known about how quick the disk is before the first one.
_PROMOTE_BYTES: Final = 32 << 20
# Share of a new measurement in the speed that is expected of the next read.
_SPEED_SHARE: Final = 0.25
# Longest wait for the flusher's write under way when the stack is closed.
_CLOSE_TIMEOUT_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCounts:
    """What a stack did since it began, in blocks.

    Attributes:
        flush: Of the flusher.
        promoted: Were brought up.
        promotions_refused: Were left below because they would have come too late.
        promotions_failed: Were asked for and did not come: by the deadline, or at all.
    """

    flush: FlushCounts
    promoted: int
    promotions_refused: int
    promotions_failed: int


class StackTier(Tier):
    """A DRAM tier over a store on a device. Safe from any thread.

    Everything of the ``Tier`` contract happens in the DRAM tier, and at its speed: nothing there
    waits for the device. ``match`` sees both; ``pin`` takes what is in DRAM, after ``promote`` has
    brought up what was not. One lock, ``_lock``, guards the counts; no tier is called under it.

    Args:
        fast: Where blocks are read and written. This stack's from now on.
        slow: Where they are kept besides. This stack's from now on.
        limits: The budget of the background writes, and the watermarks.
        durable_bytes_max: Blocks that may wait to be durable at once, over all callers.
    """

    name = "dram"

    def __init__(
        self, fast: DramTier, slow: SlowStore, limits: FlushLimits, *, durable_bytes_max: int
    ) -> None:
        fast.layout.require_equal(slow.layout)
        self.layout = fast.layout
        self.fast = fast
        self.slow = slow
        self.flusher = Flusher(fast, slow, limits)
        self._lock = threading.Lock()
        self._durable_bytes_max = durable_bytes_max
        self._durable_bytes = 0
        self._read_bytes_s = 0.0  # 0: not measured yet
        self._promoted = self._refused = self._failed = 0

    @property
    def arena(self) -> Arena:
        """The DRAM tier's."""
        return self.fast.arena

    # ---- between the tiers ------------------------------------------------------------------------

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are in either tier. See ``Tier``."""
        at = 0
        while at < len(keys):
            found = self.fast.match(keys[at:])
            at += found * HASH_BYTES
            below = self.slow.match(keys[at:])
            at += below * HASH_BYTES
            if not (found or below):
                break
        else:
            self.fast.match(b"")  # says so if it is closed
        return at // HASH_BYTES

    def promote(self, keys: bytes, *, wait_s: float) -> int:
        """Bring leading blocks up into DRAM. See ``Tier``."""
        deadline = Deadline(wait_s)
        held: list[Slots] = []
        at = 0
        try:
            while at < len(keys):
                slots = self.fast.hold(keys[at:])
                if slots:
                    held.append(slots)
                    at += len(slots) * HASH_BYTES
                elif not self._promote_run(keys, at, deadline):
                    break
        finally:
            for slots in held:
                self.fast.unpin(slots)
        return at // HASH_BYTES

    @contextmanager
    def durable_room(self, size_bytes: int) -> Generator[None, None, None]:
        """Count bytes that are about to be made durable. See ``Tier``."""
        with self._lock:
            waiting = self._durable_bytes
            if waiting + size_bytes > self._durable_bytes_max:
                raise CapacityError(
                    f"{waiting} bytes wait to be durable, and at most {self._durable_bytes_max} "
                    "may: store with 'dram', or try later",
                    tier=self.slow.name,
                    size_bytes=size_bytes,
                )
            self._durable_bytes += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self._durable_bytes -= size_bytes

    def make_durable(self, keys: bytes, *, deadline_s: float) -> int:
        """Write what is missing of a chain. See ``Tier``."""
        deadline = Deadline(deadline_s)
        done = self.slow.durable(keys)
        while done * HASH_BYTES < len(keys):
            rest = keys[done * HASH_BYTES :]
            parent = BlockHash(keys[(done - 1) * HASH_BYTES :][:HASH_BYTES]) if done else None
            slots = self.fast.hold(rest)
            try:
                if not slots:
                    break  # it was evicted from both meanwhile
                written = self.slow.write(
                    rest[: len(slots) * HASH_BYTES],
                    parent,
                    self.fast.view(slots, writable=False),
                    crcs=self.fast.crcs(slots),
                    tokens=self.fast.tokens(slots),
                    deadline_s=max(0.0, deadline.remaining_s()),
                )
            finally:
                self.fast.unpin(slots)
            now = self.slow.durable(keys)
            if not written or now <= done:
                break
            done = now
        return done

    def counts(self) -> StackCounts:
        """Return what went between the tiers."""
        flush = self.flusher.counts()
        with self._lock:
            return StackCounts(
                flush=flush,
                promoted=self._promoted,
                promotions_refused=self._refused,
                promotions_failed=self._failed,
            )

    # ---- the contract, in the DRAM tier -----------------------------------------------------------

    def reserve(self) -> Slot:
        """Take a slot, evicting at need; what goes is below by now, or is lost. See ``Tier``."""
        return self.fast.reserve()

    def reserve_run(self, count: int, tokens: BlockTokens | None = None) -> Slots:
        """Take slots with a grant each, evicting at need. See ``Tier``."""
        return self.fast.reserve_run(count, tokens)

    def view(self, slots: Sequence[Slot], *, writable: bool) -> BlockView:
        """Describe reserved slots (writable) or pinned ones. See ``Tier``."""
        return self.fast.view(slots, writable=writable)

    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Make a written slot readable, and have it written below later. See ``Tier``."""
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
        """Make the written slots of a run readable, and have them written below later."""
        new = self.fast.commit_run(slots, keys, parent, crcs, granted=granted)
        self.flusher.offer(keys, parent)
        return new

    def note_tokens(self, slots: Sequence[Slot], tokens: BlockTokens) -> None:
        """Keep tokens beside slots in DRAM; they go below with their blocks. See ``Tier``."""
        self.fast.note_tokens(slots, tokens)

    def same_tokens(self, slots: Sequence[Slot], tokens: BlockTokens) -> int:
        """Compare tokens of pinned blocks. See ``Tier``."""
        return self.fast.same_tokens(slots, tokens)

    def abort(self, slot: Slot) -> None:
        """Give a reserved slot back unwritten. See ``Tier``."""
        self.fast.abort(slot)

    def abort_run(self, slots: Sequence[Slot]) -> None:
        """Give reserved slots back unwritten. See ``Tier``."""
        self.fast.abort_run(slots)

    def pin(self, keys: bytes) -> Slots:
        """Pin the leading blocks that are in DRAM. See ``Tier``."""
        return self.fast.pin(keys)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Give pins back. See ``Tier``."""
        self.fast.unpin(slots)

    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        """Return the checksums of pinned slots. See ``Tier``."""
        return self.fast.crcs(slots)

    def grant(self, slot: Slot) -> None:
        """Count one more party that may touch the slot. See ``Tier``."""
        self.fast.grant(slot)

    def settle(self, slot: Slot) -> None:
        """Give one grant back. See ``Tier``."""
        self.fast.settle(slot)

    def settle_run(self, slots: Sequence[Slot]) -> None:
        """Give one grant of each slot back. See ``Tier``."""
        self.fast.settle_run(slots)

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Remove a block from both tiers. See ``Tier``."""
        here = self.fast.drop(key, reason)
        return self.slow.drop(key, reason) or here

    def evict(self, count: int) -> int:
        """Evict up to ``count`` unpinned blocks from DRAM; what is below stays. See ``Tier``."""
        return self.fast.evict(count)

    def stats(self) -> TierStats:
        """Return the DRAM tier's counts. See ``Tier``, and ``counts`` for what is between."""
        return self.fast.stats()

    def close(self) -> None:
        """End the flusher after its write under way, and close both tiers. See ``Tier``."""
        if not self.flusher.close(_CLOSE_TIMEOUT_S):
            logger.warning("a write to %s has not ended; closing anyway", self.slow.name)
        self.fast.close()
        self.slow.close()

    # ---- inside -----------------------------------------------------------------------------------

    def _promote_run(self, keys: bytes, at: int, deadline: Deadline) -> int:
        """Read one batch of blocks from ``at`` on; return how many are in DRAM now."""
        wanted = self.slow.match(keys[at:])
        if not wanted:
            return 0
        batch = min(wanted, max(1, _PROMOTE_BYTES // self.layout.block_bytes))
        batch = min(batch, self._blocks_within(deadline.remaining_s()))
        if batch <= 0:
            self._count(refused=wanted)
            return 0
        below = self.slow.pin(keys[at : at + batch * HASH_BYTES])
        try:
            return self._read(keys[at:], keys[:at], below, deadline) if below else 0
        except UnavailableError as error:
            logger.debug("%s gives no blocks now: %s", self.slow.name, error)
            self._count(failed=len(below))
            return 0
        finally:
            self.slow.unpin(below)

    def _read(self, keys: bytes, above: bytes, below: Slots, deadline: Deadline) -> int:
        """Copy pinned blocks up and commit those that came whole."""
        slots = self.fast.reserve_run(len(below))
        begun = time.monotonic()
        good = 0
        try:
            if not slots:
                return 0  # everything in DRAM is in use
            view = self.fast.view(slots, writable=True)
            wait_s = max(0.0, deadline.remaining_s())
            rows = TokenRows.unknown(len(slots), self.layout.block_tokens)
            good, crcs = self.slow.read(below[: len(slots)], view, tokens=rows, deadline_s=wait_s)
            self.fast.settle_run(slots)
            written, slots = slots[:good], slots[good:]
            if good:
                self._measure(good, time.monotonic() - begun)
                parent = BlockHash(above[-HASH_BYTES:]) if above else None
                known = rows.take(0, good).known
                self.fast.note_tokens(
                    Slots(written.indices[known], written.generations[known]),
                    rows.values[:good][known],
                )
                self.fast.commit_run(written, keys[: good * HASH_BYTES], parent, crcs)
            self.fast.abort_run(slots)
        except BaseException:
            for slot in slots:
                self._give_back(slot)
            raise
        self._count(promoted=good, failed=len(below) - good)
        return good

    def _give_back(self, slot: Slot) -> None:
        """End a reservation whose grant may have been settled already. Nothing writes it any more."""
        try:
            self.fast.settle(slot)
        except UsageError:
            logger.debug("%s was settled before", slot)
        self.fast.abort(slot)

    def _blocks_within(self, seconds: float) -> int:
        """Return how many blocks may be expected to come in so much time: many, if nobody knows."""
        with self._lock:
            speed = self._read_bytes_s
        if seconds <= 0:
            return 0
        if not speed:
            return max(1, _PROMOTE_BYTES // self.layout.block_bytes)
        return int(seconds * speed / self.layout.block_bytes)

    def _measure(self, blocks: int, seconds: float) -> None:
        speed = blocks * self.layout.block_bytes / max(seconds, 1e-6)
        with self._lock:
            old = self._read_bytes_s or speed
            self._read_bytes_s = old + _SPEED_SHARE * (speed - old)

    def _count(self, *, promoted: int = 0, refused: int = 0, failed: int = 0) -> None:
        with self._lock:
            self._promoted += promoted
            self._refused += refused
            self._failed += failed


def stats_of(tier: Tier) -> list[tuple[str, TierStats]]:
    """Return the counts of every tier that a pool's tier is made of, fastest first."""
    if isinstance(tier, StackTier):
        try:
            return [("dram", tier.fast.stats()), (tier.slow.name, tier.slow.stats())]
        except KVPoolError:
            return [("dram", tier.fast.stats())]
    return [(tier.name, tier.stats())]
