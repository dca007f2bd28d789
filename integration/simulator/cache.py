"""One node's store of blocks, as the simulator keeps it: names only, the real eviction policy.

Owns which blocks a node holds and what leaves when it is full. Never keeps a byte, and never decides
an order itself: that is ``kvpool.tiers.eviction``. Who calls it: the cluster's nodes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvpool.block import BlockHash
from kvpool.errors import UsageError
from kvpool.tiers.eviction import EvictionPolicy


class Listener(Protocol):
    """Hears what enters and leaves."""

    def entered(self, blocks: Sequence[BlockHash]) -> None:
        """Take note of blocks that are here now."""
        ...

    def left(self, blocks: Sequence[BlockHash]) -> None:
        """Take note of blocks that are gone."""
        ...


class NodeCache:
    """Blocks of one node, at most ``block_count_max``."""

    def __init__(
        self, block_count_max: int, policy: Callable[[], EvictionPolicy], listener: Listener | None
    ) -> None:
        if block_count_max < 1:
            raise UsageError(
                f"cache_blocks is {block_count_max}: a node holds at least one block",
                key="cache_blocks",
            )
        self._max = block_count_max
        self._policy = policy()
        self._here: set[BlockHash] = set()
        self._listener = listener
        self.pinned = 0  # pins given out and not taken back

    def __len__(self) -> int:
        return len(self._here)

    def match(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are here. Is no use of them."""
        here = self._here
        for count, block in enumerate(chain):
            if block not in here:
                return count
        return len(chain)

    def pin(self, chain: Sequence[BlockHash], now: float) -> Sequence[BlockHash]:
        """Use the leading blocks that are here and keep them until ``unpin`` of what is returned."""
        held = chain[: self.match(chain)]
        self._policy.pin_run(held, now)
        self.pinned += len(held)
        return held

    def unpin(self, held: Sequence[BlockHash]) -> None:
        """Let blocks go again that ``pin`` returned."""
        self._policy.unpin_run(held)
        self.pinned -= len(held)

    def admit(self, chain: Sequence[BlockHash], now: float) -> int:
        """Take a chain in: what is here is used, what is missing enters, in order.

        Returns:
            How many leading blocks are here afterwards. Fewer than all when pins leave no room.
        """
        count = self.match(chain)
        held = list(chain[:count])
        self._policy.pin_run(held, now)
        entered: list[BlockHash] = []
        left: list[BlockHash] = []
        for block in chain[count:]:
            if block in self._here:
                self._policy.pin_run([block], now)
            else:
                if not self._make_room(left):
                    break
                self._policy.admit(block, held[-1] if held else None, now)
                self._policy.pin(block)
                self._here.add(block)
                entered.append(block)
            held.append(block)
        self._policy.unpin_run(held)
        if self._listener is not None:
            self._listener.left(left)
            self._listener.entered(entered)
        return len(held)

    def _make_room(self, left: list[BlockHash]) -> bool:
        if len(self._here) < self._max:
            return True
        victim = self._policy.victim()
        if victim is None:
            return False
        self._here.remove(victim)
        left.append(victim)
        return True
