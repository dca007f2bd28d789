"""Tiers that fail or tarry on purpose, by a seed. With that off they pass the suite of tiers."""

import random
import threading
import time
from collections.abc import Sequence

from kvpool.arena import Slot
from kvpool.block import BlockHash
from kvpool.errors import CapacityError
from kvpool.memory import BlockView, Crcs, Span
from kvpool.tiers.base import BlockTokens, Tier, TierStats


class WrappedTier(Tier):
    """Passes every call on to another tier, which it closes. For wrappers that change some."""

    def __init__(self, inner: Tier) -> None:
        self.name = inner.name
        self.layout = inner.layout
        self._inner = inner

    def reserve(self) -> Slot:
        """Pass on."""
        return self._inner.reserve()

    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Pass on."""
        return self._inner.commit(slot, key, parent, crcs)

    def view(self, slots: Sequence[Slot], *, writable: bool) -> BlockView:
        """Pass on."""
        return self._inner.view(slots, writable=writable)

    def note_tokens(self, slots: Sequence[Slot], tokens: BlockTokens) -> None:
        """Pass on."""
        self._inner.note_tokens(slots, tokens)

    def same_tokens(self, slots: Sequence[Slot], tokens: BlockTokens) -> int:
        """Pass on."""
        return self._inner.same_tokens(slots, tokens)

    def abort(self, slot: Slot) -> None:
        """Pass on."""
        self._inner.abort(slot)

    def match(self, keys: bytes) -> int:
        """Pass on."""
        return self._inner.match(keys)

    def pin(self, keys: bytes) -> Sequence[Slot]:
        """Pass on."""
        return self._inner.pin(keys)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Pass on."""
        self._inner.unpin(slots)

    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        """Pass on."""
        return self._inner.crcs(slots)

    def grant(self, slot: Slot) -> None:
        """Pass on."""
        self._inner.grant(slot)

    def settle(self, slot: Slot) -> None:
        """Pass on."""
        self._inner.settle(slot)

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Pass on."""
        return self._inner.drop(key, reason)

    def evict(self, count: int) -> int:
        """Pass on."""
        return self._inner.evict(count)

    def stats(self) -> TierStats:
        """Pass on."""
        return self._inner.stats()

    def close(self) -> None:
        """Close the inner tier."""
        self._inner.close()


class FaultyTier(WrappedTier):
    """Wraps a tier in canonical order. Safe from any thread; a run of one thread is repeatable.

    Args:
        inner: The tier that does the work. This one closes it.
        seed: Which calls fail, and which byte flips.
        refuse: Probability that ``reserve`` raises CapacityError though there is room.
        flip: Probability that ``commit`` publishes a block of which one byte has flipped since its
            checksums were taken.

    Attributes:
        refused, flipped: Faults so far.
    """

    def __init__(self, inner: Tier, *, seed: int, refuse: float = 0.0, flip: float = 0.0) -> None:
        super().__init__(inner)
        self.refused = self.flipped = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # guards the random numbers and the counts
        self._refuse = refuse
        self._flip = flip

    def reserve(self) -> Slot:
        """Take a slot, or refuse."""
        with self._lock:
            if self._random.random() < self._refuse:
                self.refused += 1
                raise CapacityError("a fault was asked for: no room", tier=self.name)
        return self._inner.reserve()

    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Publish a block, perhaps after a byte of it has flipped."""
        with self._lock:
            if self._random.random() < self._flip:
                view = self._inner.view([slot], writable=True)
                at = view.base + int(view.block_ids[0]) * view.block_stride
                payload = Span(at, self.layout.block_bytes, view.owner).view()
                payload[self._random.randrange(self.layout.block_bytes)] ^= 1 << 3
                self.flipped += 1
        return self._inner.commit(slot, key, parent, crcs)


class SlowTier(WrappedTier):
    """Waits before some of the calls, as a tier does whose thread has lost its turn.

    Args:
        inner: The tier that does the work. This one closes it.
        seed: Which calls wait, and for how long.
        wait: Probability that a call waits.
        wait_s_max: Longest wait.

    Attributes:
        waits: Waits so far.
    """

    def __init__(
        self, inner: Tier, *, seed: int, wait: float = 0.0, wait_s_max: float = 0.002
    ) -> None:
        super().__init__(inner)
        self.waits = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # guards the random numbers and the count
        self._wait = wait
        self._wait_s_max = wait_s_max

    def reserve(self) -> Slot:
        """Pass on, perhaps later."""
        self._tarry()
        return super().reserve()

    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Pass on, perhaps later."""
        self._tarry()
        return super().commit(slot, key, parent, crcs)

    def view(self, slots: Sequence[Slot], *, writable: bool) -> BlockView:
        """Pass on, perhaps later."""
        self._tarry()
        return super().view(slots, writable=writable)

    def abort(self, slot: Slot) -> None:
        """Pass on, perhaps later."""
        self._tarry()
        super().abort(slot)

    def pin(self, keys: bytes) -> Sequence[Slot]:
        """Pass on, perhaps later."""
        self._tarry()
        return super().pin(keys)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Pass on, perhaps later."""
        self._tarry()
        super().unpin(slots)

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Pass on, perhaps later."""
        self._tarry()
        return super().drop(key, reason)

    def _tarry(self) -> None:
        with self._lock:
            if self._random.random() >= self._wait:
                return
            self.waits += 1
            seconds = self._random.uniform(0, self._wait_s_max)
        time.sleep(seconds)
