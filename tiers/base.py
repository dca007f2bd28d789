"""The Tier contract: one store of blocks on one node, fast or slow.

A tier keeps payloads under 32-byte keys (``Part.key``; a whole block's key is its hash). It owns
slots, the index from key to slot, pins and eviction. It never decides what to admit and never talks
to another process. Every implementation and wrapper passes ``kvpool.testing.tier_suite``.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvpool.arena import Slot
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout
from kvpool.errors import CapacityError
from kvpool.memory import BlockView, Crcs

# The tokens of blocks, uint32 [blocks, block_tokens].
BlockTokens = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counts of one tier. ``free + reserved + ready + quarantined == slots`` always.

    ``mismatches`` are blocks that were found by their key and held other tokens.
    """

    slots: int
    free: int
    reserved: int
    ready: int
    quarantined: int
    pins: int
    hits: int
    misses: int
    evictions: int
    corruptions: int
    mismatches: int = 0


class Tier(ABC):
    """One store of blocks. All methods are safe from any thread; none waits for another's work.

    A reader can never see a half-written block: a block is found only after ``commit``. A pinned
    block is never evicted or overwritten. A slot with grants out (``grant``) is quarantined when it
    is given up, and not handed out again before the last ``settle``.
    """

    name: str
    layout: BlockLayout

    @abstractmethod
    def reserve(self) -> Slot:
        """Take a slot to write a block into, evicting unpinned blocks (LRU, leaves first) at need.

        Raises:
            CapacityError: Every slot is reserved, pinned or quarantined. No state changed.
            ClosedError: The tier is closed.
        """

    def reserve_run(self, count: int, tokens: BlockTokens | None = None) -> Sequence[Slot]:
        """Take up to ``count`` slots, each with one grant out, evicting at need.

        Args:
            count: Slots that are wanted. Fewer are no error: there is no more room now.
            tokens: Of the blocks that they are for, uint32 [count, block_tokens], if they are known;
                kept as ``note_tokens`` keeps them.

        Raises:
            UsageError: ``tokens`` are of another shape. No slot is taken.
            ClosedError: The tier is closed.
        """
        slots: list[Slot] = []
        try:
            with contextlib.suppress(CapacityError):
                while len(slots) < count:
                    slot = self.reserve()
                    self.grant(slot)
                    slots.append(slot)
            if tokens is not None:
                self.note_tokens(slots, tokens[: len(slots)])
        except BaseException:
            self.settle_run(slots)
            self.abort_run(slots)
            raise
        return slots

    @abstractmethod
    def view(self, slots: Sequence[Slot], *, writable: bool) -> BlockView:
        """Describe slots for a copy. Writable only while reserved; readable while pinned.

        The view keeps the memory mapped, not the slots: the caller keeps them reserved or pinned.
        """

    def note_tokens(self, slots: Sequence[Slot], tokens: BlockTokens) -> None:  # noqa: B027
        """Keep the tokens of the blocks that reserved slots are being written with beside them.

        A tier may keep none, and then compares none. Raises UsageError, ClosedError.
        """

    def same_tokens(self, slots: Sequence[Slot], tokens: BlockTokens) -> int:
        """Count the leading pinned slots that hold blocks of just these tokens.

        One whose tokens are not known (it was stored by its hash alone) counts as the same. What
        follows the count is a miss: a block of other tokens has that key, and is never data.

        Raises:
            UsageError: A slot is not pinned, or ``tokens`` is not [slots, block_tokens].
            ClosedError: The tier is closed.
        """
        return len(slots)

    @abstractmethod
    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Make a written slot readable under ``key``.

        Args:
            slot: A reserved slot, written whole. Consumed by this call whatever it returns.
            key: The block's (or part's) key.
            parent: Key of the block before it in its chain, or None for the first. A block is
                evicted before its ancestors in this tier.
            crcs: uint32 [layers, kv_heads], the CRC32C of the payload that was written.

        Returns:
            False if the key was there already (the new copy was dropped), True if it is new.

        Raises:
            UsageError: The slot is not reserved, or another life. No state changed.
        """

    def commit_run(
        self,
        slots: Sequence[Slot],
        keys: bytes,
        parent: BlockHash | None,
        crcs: Crcs,
        *,
        granted: bool = False,
    ) -> int:
        """Make the written slots of a run readable, each block the parent of the next.

        Args:
            slots: Reserved slots, written whole.
            keys: Of the blocks, 32 bytes each, concatenated.
            parent: Of the first block, or None.
            crcs: uint32 [slots, layers, kv_heads].
            granted: Whether the grant of ``reserve_run`` is given back first, as by ``settle_run``.

        Returns:
            How many are new; see ``commit``. Raises as it does; slots that are not committed then
            are reserved, as they were.
        """
        if granted:
            self.settle_run(slots)
        new = 0
        for index, slot in enumerate(slots):
            key = BlockHash(keys[index * HASH_BYTES : (index + 1) * HASH_BYTES])
            new += self.commit(slot, key, parent, crcs[index])
            parent = key
        return new

    @abstractmethod
    def abort(self, slot: Slot) -> None:
        """Give a reserved slot back unwritten. Quarantined while grants are out. Idempotent."""

    def abort_run(self, slots: Sequence[Slot]) -> None:
        """Give reserved slots back unwritten. Idempotent; see ``abort``."""
        for slot in slots:
            self.abort(slot)

    @abstractmethod
    def match(self, keys: bytes) -> int:
        """Count the leading keys (32 bytes each, concatenated) that are here. Not a use: a hint."""

    @abstractmethod
    def pin(self, keys: bytes) -> Sequence[Slot]:
        """Pin the leading blocks that are here and count as used; their slots, in order.

        Each pin is given back with ``unpin``. Fewer slots than keys is a miss, not an error.
        """

    def promote(self, keys: bytes, *, wait_s: float) -> int:
        """Bring leading blocks to where ``pin`` finds them; how many leading ones are there then.

        Only a tier made of several does anything, and may then wait for a device for ``wait_s``. What
        is expected to come later than that is left where it is; what came by then is kept.

        Raises:
            ClosedError: The tier is closed.
        """
        return self.match(keys)

    def durable_room(self, size_bytes: int) -> AbstractContextManager[None]:
        """Count bytes that ``make_durable`` is about to be asked for, while the context is open.

        Raises:
            CapacityError: Nothing here is durable, or too much is under way. Nothing was counted.
        """
        raise CapacityError(
            "this pool has no ssd tier: store with 'dram', or open it with one",
            tier=self.name,
            size_bytes=size_bytes,
        )

    def make_durable(self, keys: bytes, *, deadline_s: float) -> int:
        """Have blocks of a chain, from its first, on a device; how many leading ones are by then.

        Those outlive this process and machine, with all their ancestors, until they are evicted.

        Raises:
            UnavailableError: The device failed. Those it has had before stay.
            CorruptionError: A block is not what its checksums say.
            ClosedError: The tier is closed.
        """
        return 0

    @abstractmethod
    def unpin(self, slots: Sequence[Slot]) -> None:
        """Give pins back."""

    @abstractmethod
    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        """Return the CRC32C of pinned slots, uint32 [slots, layers, kv_heads]."""

    @abstractmethod
    def grant(self, slot: Slot) -> None:
        """Count one more party that may still touch the slot's bytes (a peer, the kernel)."""

    @abstractmethod
    def settle(self, slot: Slot) -> None:
        """Give one grant back: that party has ended, or is known to be dead."""

    def settle_run(self, slots: Sequence[Slot]) -> None:
        """Give one grant of each slot back; see ``settle``."""
        for slot in slots:
            self.settle(slot)

    @abstractmethod
    def drop(self, key: BlockHash, reason: str) -> bool:
        """Remove a block because it is corrupt or invalid; a pinned one goes at its last unpin.

        From this call on it is a miss. Returns False if it was not here.
        """

    @abstractmethod
    def evict(self, count: int) -> int:
        """Evict up to ``count`` unpinned blocks in policy order. Returns how many went."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return a consistent snapshot of the counts."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory, which stays mapped until the last view of it is gone. Idempotent.

        Later calls raise ClosedError; giving back (``abort``, ``unpin``, ``settle``) does nothing.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
