"""Eviction policies: which block leaves a tier next. Pure: no clock, thread, file or lock.

Owns the order of blocks and the rule that a block leaves before its ancestors in this tier. Never
touches a slot. Who calls it: a tier, under its own lock, which tells it of every block and pin.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.block import BlockHash, Part
from kvpool.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What else a policy may know of blocks that enter or are used together, and of their request.

    Attributes:
        part: Which part of a block it is; None means the whole.
        size_bytes: Of each of the blocks; 0 means unknown.
        cost_s: Seconds to compute one of them again; 0 means unknown.
        request: Name of the request that they are of; "" means unknown.
    """

    part: Part | None = None
    size_bytes: int = 0
    cost_s: float = 0.0
    request: str = ""


NO_FACTS: Final = Facts()


class EvictionPolicy(Protocol):
    """Orders the blocks of one tier. Times are seconds of one monotonic clock.

    A block with a child in this tier, or with a pin, is never a victim; so a pin covers the local
    ancestors. A block whose parent is not here (a fragment) is legal. A policy is told of every use,
    so it may count hits itself.
    """

    def admit(
        self, key: BlockHash, parent: BlockHash | None, now: float, facts: Facts = NO_FACTS
    ) -> None:
        """Take note of a new block. Raises UsageError if it is known already."""
        ...

    def admit_run(
        self,
        keys: Sequence[BlockHash],
        parent: BlockHash | None,
        now: float,
        facts: Facts = NO_FACTS,
    ) -> None:
        """Take note of new blocks, each the parent of the next."""
        ...

    def use(self, key: BlockHash, now: float) -> None:
        """Take note of a use. Unknown keys are ignored."""
        ...

    def pin(self, key: BlockHash) -> None:
        """Keep a known block from being a victim until as many calls of ``unpin``."""
        ...

    def unpin(self, key: BlockHash) -> None:
        """Take one pin back. Unknown keys are ignored: a block may be removed while pinned."""
        ...

    def pin_run(self, keys: Sequence[BlockHash], now: float, facts: Facts = NO_FACTS) -> None:
        """Pin known blocks that are used now, in order, by one request."""
        ...

    def unpin_run(self, keys: Sequence[BlockHash]) -> None:
        """Take one pin of each back; see ``unpin``."""
        ...

    def remove(self, key: BlockHash) -> None:
        """Forget a block that left for another reason. Unknown keys are ignored."""
        ...

    def victim(self) -> BlockHash | None:
        """Forget and return the block that goes next; None if none may go."""
        ...

    def __len__(self) -> int:
        """Return how many blocks are known."""
        ...


@dataclass(slots=True, eq=False)
class _Node:
    key: BlockHash
    parent: BlockHash | None
    used: tuple[float, int]
    pins: int = 0
    queued: bool = False  # there is an entry of this node in the heap


# When it was used, and the node: no two uses are equal, so nodes are never compared.
_Entry = tuple[tuple[float, int], _Node]


class LRUPolicy:
    """Least recently used first, among the blocks without a child or pin here.

    A heap of candidates with at most one entry a block. An entry may be older than its block's last
    use: it is put back when it comes up. So a use costs O(1), and a victim O(log n) amortised over
    the uses since; pinned blocks are not looked through.
    """

    def __init__(self) -> None:
        self._nodes: dict[BlockHash, _Node] = {}
        self._children: dict[BlockHash, int] = {}  # of parents here or elsewhere
        self._heap: list[_Entry] = []
        self._sequence = 0  # orders uses at the same time

    def __len__(self) -> int:
        return len(self._nodes)

    def admit(
        self, key: BlockHash, parent: BlockHash | None, now: float, facts: Facts = NO_FACTS
    ) -> None:
        """Take note of a new block, used now."""
        self._queue(self._enter(key, parent, now))

    def admit_run(
        self,
        keys: Sequence[BlockHash],
        parent: BlockHash | None,
        now: float,
        facts: Facts = NO_FACTS,
    ) -> None:
        """Take note of new blocks, each the parent of the next, used now."""
        nodes: list[_Node] = []
        for key in keys:
            nodes.append(self._enter(key, parent, now))
            parent = key
        for node in nodes:  # all but the last have a child, unless parents go in a circle
            if node.key not in self._children:
                self._queue(node)

    def use(self, key: BlockHash, now: float) -> None:
        """Move a block to the young end."""
        if (node := self._nodes.get(key)) is not None:
            node.used = self._stamp(now)

    def pin(self, key: BlockHash) -> None:
        """Keep a block from being a victim."""
        self._nodes[key].pins += 1

    def unpin(self, key: BlockHash) -> None:
        """Take one pin back."""
        self.unpin_run([key])

    def pin_run(self, keys: Sequence[BlockHash], now: float, facts: Facts = NO_FACTS) -> None:
        """Keep blocks from being victims; move them to the young end, in order."""
        nodes, sequence = self._nodes, self._sequence
        for key in keys:
            node = nodes[key]
            node.pins += 1
            sequence += 1
            node.used = (now, sequence)
        self._sequence = sequence

    def unpin_run(self, keys: Sequence[BlockHash]) -> None:
        """Take one pin of each back."""
        nodes, children = self._nodes, self._children
        for key in keys:
            node = nodes.get(key)
            if node is None or node.pins == 0:
                continue
            node.pins -= 1
            if not (node.pins or node.queued or key in children):
                self._queue(node)

    def remove(self, key: BlockHash) -> None:
        """Forget a block."""
        node = self._nodes.pop(key, None)
        if node is None or node.parent is None:
            return
        left = self._children[node.parent] - 1
        if left:
            self._children[node.parent] = left
            return
        del self._children[node.parent]
        if (parent := self._nodes.get(node.parent)) is not None:
            self._queue(parent)

    def victim(self) -> BlockHash | None:
        """Forget and return the least recently used candidate."""
        while self._heap:
            used, node = self._heap[0]
            if not self._may_go(node):
                heapq.heappop(self._heap)
                node.queued = False
            elif node.used != used:
                heapq.heapreplace(self._heap, (node.used, node))
            else:
                heapq.heappop(self._heap)
                self.remove(node.key)
                return node.key
        return None

    def _enter(self, key: BlockHash, parent: BlockHash | None, now: float) -> _Node:
        if key in self._nodes:
            raise UsageError(f"block {key.hex()} is here already")
        if parent == key:
            raise UsageError(f"block {key.hex()} is its own parent")
        if key in self._children and self._descends(parent, key):
            parent = None  # a circle, which no hashing makes: none of it could ever go
        node = self._nodes[key] = _Node(key, parent, self._stamp(now))
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        return node

    def _descends(self, key: BlockHash | None, ancestor: BlockHash) -> bool:
        """Say whether ``ancestor`` is among the parents of ``key``, as far as they are here."""
        while key is not None and key != ancestor:
            node = self._nodes.get(key)
            key = None if node is None else node.parent
        return key is not None

    def _stamp(self, now: float) -> tuple[float, int]:
        self._sequence += 1
        return now, self._sequence

    def _may_go(self, node: _Node) -> bool:
        here = self._nodes.get(node.key) is node
        return here and node.pins == 0 and node.key not in self._children

    def _queue(self, node: _Node) -> None:
        """Enter a candidate into the heap; anything else enters when it becomes one."""
        if node.queued or not self._may_go(node):
            return
        if len(self._heap) > 2 * len(self._nodes) + 64:  # mostly entries of removed blocks
            for _, entered in self._heap:
                entered.queued = self._may_go(entered)
            self._heap = [entry for entry in self._heap if entry[1].queued]
            heapq.heapify(self._heap)
        node.queued = True
        heapq.heappush(self._heap, (node.used, node))
