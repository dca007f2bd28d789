"""A policy that learns how soon blocks of each kind are used again, and evicts what earns least.

Owns the statistics and the order that follows from them; decision 0010 has the reasoning and the
figures. Pure, like all of ``tiers/eviction.py``, whose contract it meets. Who calls it: a tier whose
owner chose it, under the tier's lock; ``tiers/replay.py``.
"""

import bisect
import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.block import BlockHash
from kvpool.errors import UsageError
from kvpool.tiers.eviction import NO_FACTS, Facts

# Ages at which the chance of a use is told apart: steps of 15 s to 5 minutes, then of a tenth, to an
# hour. People take half a minute to ten minutes for their next turn.
_EDGES: Final = np.array(
    [*range(0, 300, 15), *(300 * 1.1**step for step in range(27))], dtype=np.float64
)
_EDGE_LIST: Final[list[float]] = _EDGES.tolist()
_AGES: Final = len(_EDGES)
_WIDTHS: Final = np.diff(_EDGES, append=_EDGES[-1] * 1.1)
# How often what was learned is put to use: scores are older than an age step for none.
_LEARN_EVERY_S: Final = 15.0
# What was seen this long ago counts half.
_HALF_LIFE_S: Final = 1200.0
# A kind of which fewer blocks than this were seen leans on the average of all.
_PRIOR_BLOCKS: Final = 20.0
# Uses remembered for each block of room: a block that left may be used again, and that is learned.
_USES_PER_BLOCK: Final = 8
# A run joins the request that used its parent last if that was at most this long ago.
_REQUEST_S: Final = 60.0

# A kind is: uses before (0, 1, more), new blocks of its request (powers of 2), shorter than others.
_HITS: Final = 3
_FRESH: Final = 9
_KINDS: Final = _HITS * _FRESH * 2

_Table = NDArray[np.float64]  # [kinds, ages]


class _Request:
    """One request: how many blocks it brought that nobody remembers, and its blocks so far."""

    __slots__ = ("began", "blocks", "fresh", "name")

    def __init__(self, name: str, began: float) -> None:
        self.name = name
        self.began = began
        self.fresh = 0
        self.blocks: list[int] = []


class ReusePolicy:
    """Evicts the block with the fewest expected uses for the time it would still take up room.

    Blocks are of kinds, by how often they were used and by how much their request added. For each
    kind and age it knows, from blocks here and from blocks that left, how many were used again. The
    worth of a block is the best ratio of expected uses to expected stay, over all ends of the stay;
    a block that is not used in its first seconds, as none is, keeps its worth. Weighted by the cost
    to compute the block again and by its size, if those are told.

    Memory: some 200 bytes for each block here or remembered.

    Args:
        capacity: Blocks that the tier can hold, above 0.
        uses_max: Uses that are remembered, at most; fewer than 8 for each block of room learn less.
    """

    def __init__(self, capacity: int, uses_max: int = 1 << 20) -> None:
        if capacity <= 0:
            raise UsageError(f"a policy for {capacity} blocks: there must be at least one")
        self._uses_max = min(uses_max, _USES_PER_BLOCK * capacity)
        # Blocks here and blocks that left, by number.
        self._numbers: dict[BlockHash, int] = {}
        self._keys: list[BlockHash | None] = []
        self._parents: list[BlockHash | None] = []
        self._requests: list[_Request | None] = []
        self._here = array("b")
        self._pins = array("q")
        self._used = array("d")
        self._stamps = array("q")
        self._hits = array("q")
        self._short = array("b")
        self._kinds = array("q")
        self._weights = array("d")
        self._children: dict[BlockHash, int] = {}  # of parents here or elsewhere; only those here
        self._unused: list[int] = []
        self._uses: deque[tuple[int, int]] = deque()
        self._by_name: dict[str, _Request] = {}
        self._count = 0
        self._stamp = 0
        self._now = 0.0
        self._size_max = 0
        self._heap: list[tuple[float, int, int]] = []
        # Blocks whose stay at an age ended with a use, or in being forgotten.
        self._ended_used: _Table = np.zeros((_KINDS, _AGES))
        self._ended: _Table = np.zeros((_KINDS, _AGES))
        self._worth: list[list[float]] = [[1.0] * _AGES for _ in range(_KINDS)]
        self._learned = 0.0

    def __len__(self) -> int:
        return self._count

    def admit(
        self, key: BlockHash, parent: BlockHash | None, now: float, facts: Facts = NO_FACTS
    ) -> None:
        """Take note of a new block, used now."""
        self.admit_run([key], parent, now, facts)

    def admit_run(
        self,
        keys: Sequence[BlockHash],
        parent: BlockHash | None,
        now: float,
        facts: Facts = NO_FACTS,
    ) -> None:
        """Take note of new blocks, each the parent of the next, used now."""
        self._require_new(keys, parent)
        self._tell_time(now)
        request = self._request(parent, facts.request, now)
        self._size_max = max(self._size_max, facts.size_bytes)
        short = facts.size_bytes < self._size_max
        weight = (facts.cost_s or 1.0) / (facts.size_bytes or 1)
        for key in keys:
            number = self._numbers.get(key)
            if number is None:
                request.fresh += 1
                number = self._enter(key)
            if key in self._children and self._descends(parent, key):
                parent = None  # a circle, which no hashing makes: none of it could ever go
            self._here[number] = 1
            self._parents[number] = parent
            self._short[number] = short
            self._weights[number] = weight
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
            self._count += 1
            self._touch(number, request)
            parent = key
        self._sort_out(request)

    def use(self, key: BlockHash, now: float) -> None:
        """Count a use."""
        if (number := self._numbers.get(key)) is not None and self._here[number]:
            self._use_run([number], now, "")

    def pin(self, key: BlockHash) -> None:
        """Keep a block from being a victim."""
        self._pins[self._numbers[key]] += 1

    def unpin(self, key: BlockHash) -> None:
        """Take one pin back."""
        self.unpin_run([key])

    def pin_run(self, keys: Sequence[BlockHash], now: float, facts: Facts = NO_FACTS) -> None:
        """Keep blocks from being victims; count a use of each."""
        numbers = [self._numbers[key] for key in keys]
        for number in numbers:
            self._pins[number] += 1
        if numbers:
            self._use_run(numbers, now, facts.request)

    def unpin_run(self, keys: Sequence[BlockHash]) -> None:
        """Take one pin of each back."""
        for key in keys:
            number = self._numbers.get(key)
            if number is not None and self._pins[number]:
                self._pins[number] -= 1
                self._queue(number)

    def remove(self, key: BlockHash) -> None:
        """Forget a block; nothing is learned from how it left."""
        number = self._numbers.get(key)
        if number is not None and self._here[number]:
            self._leave(number)
            self._forget(number)

    def victim(self) -> BlockHash | None:
        """Forget and return the block with the least worth; its use later is still learned."""
        while self._heap:
            _, stamp, number = heapq.heappop(self._heap)
            key = self._keys[number]
            if key is not None and self._stamps[number] == stamp and self._may_go(number):
                self._leave(number)
                if self._stamps[number] <= self._stamp - self._uses_max:
                    self._end(number)
                return key
        return None

    def _require_new(self, keys: Sequence[BlockHash], parent: BlockHash | None) -> None:
        for key in keys:
            number = self._numbers.get(key)
            if number is not None and self._here[number]:
                raise UsageError(f"block {key.hex()} is here already")
            if parent == key:
                raise UsageError(f"block {key.hex()} is its own parent")
            parent = key

    def _enter(self, key: BlockHash) -> int:
        """Give a block that nobody remembers a number."""
        if self._unused:
            number = self._unused.pop()
            self._keys[number] = key
            self._pins[number] = 0
            self._hits[number] = -1
        else:
            number = len(self._keys)
            self._keys.append(key)
            self._parents.append(None)
            self._requests.append(None)
            for numbers in (self._here, self._pins, self._stamps, self._short, self._kinds):
                numbers.append(0)
            self._hits.append(-1)
            self._used.append(0.0)
            self._weights.append(1.0)
        self._stamps[number] = 0
        self._numbers[key] = number
        return number

    def _descends(self, key: BlockHash | None, ancestor: BlockHash) -> bool:
        """Say whether ``ancestor`` is among the parents of ``key``, as far as they are here."""
        while key is not None and key != ancestor:
            number = self._numbers.get(key)
            key = self._parents[number] if number is not None and self._here[number] else None
        return key is not None

    def _may_go(self, number: int) -> bool:
        key = self._keys[number]
        return bool(self._here[number]) and not self._pins[number] and key not in self._children

    def _leave(self, number: int) -> None:
        """Take a block off those that are here; it is remembered until its use is."""
        self._here[number] = 0
        self._pins[number] = 0
        self._count -= 1
        parent = self._parents[number]
        self._parents[number] = None
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        above = self._numbers.get(parent)
        if above is not None:
            self._queue(above)

    def _forget(self, number: int) -> None:
        key = self._keys[number]
        assert key is not None and not self._here[number]
        del self._numbers[key]
        self._keys[number] = None
        self._requests[number] = None
        self._stamps[number] = 0  # heap entries and remembered uses of this life are void
        self._unused.append(number)

    def _queue(self, number: int) -> None:
        """Enter a candidate into the heap; anything else enters when it becomes one."""
        if self._may_go(number):
            worth = self._worth[self._kinds[number]][_age(self._now - self._used[number])]
            entry = (worth * self._weights[number], self._stamps[number], number)
            heapq.heappush(self._heap, entry)
            if len(self._heap) > 8 * self._count + 64:  # mostly entries of older uses
                self._rank()

    def _request(self, parent: BlockHash | None, name: str, now: float) -> _Request:
        """Return the request that a run is of: by its name, or the one that used its parent."""
        if name:
            known = self._by_name.get(name)
        else:
            number = None if parent is None else self._numbers.get(parent)
            known = None if number is None else self._requests[number]
        if known is not None and known.name == name and now - known.began <= _REQUEST_S:
            return known
        request = _Request(name, now)
        if name:
            if len(self._by_name) >= 1024:  # those that began first are over
                del self._by_name[next(iter(self._by_name))]
            self._by_name[name] = request
        return request

    def _use_run(self, numbers: list[int], now: float, name: str) -> None:
        self._tell_time(now)
        request = self._request(None, name, now)
        for number in numbers:
            self._touch(number, request)
        self._sort_out(request)

    def _touch(self, number: int, request: _Request) -> None:
        """Count a use now, and remember it; uses that are too long ago are forgotten."""
        if self._stamps[number]:
            age = _age(self._now - self._used[number])
            self._ended_used[self._kinds[number], age] += 1
            self._ended[self._kinds[number], age] += 1
        self._stamp += 1
        self._stamps[number] = self._stamp
        self._used[number] = self._now
        self._hits[number] += 1
        self._requests[number] = request
        request.blocks.append(number)
        self._uses.append((number, self._stamp))
        if len(self._uses) > self._uses_max:
            oldest, stamp = self._uses.popleft()
            if self._stamps[oldest] == stamp and not self._here[oldest]:
                self._end(oldest)

    def _end(self, number: int) -> None:
        """Learn that a block that left was not used again for as long as it is remembered."""
        self._ended[self._kinds[number], _age(self._now - self._used[number])] += 1
        self._forget(number)

    def _sort_out(self, request: _Request) -> None:
        """Give the blocks of a request the kind that they are now known to be of."""
        fresh = min(max(request.fresh, 1).bit_length() - 1, _FRESH - 1)
        mine: list[int] = []
        for number in request.blocks:
            if self._requests[number] is request:
                hits = min(self._hits[number], _HITS - 1)
                self._kinds[number] = (hits * _FRESH + fresh) * 2 + self._short[number]
                self._queue(number)
                mine.append(number)
        request.blocks = mine

    def _tell_time(self, now: float) -> None:
        self._now = max(self._now, now)
        if self._now - self._learned >= _LEARN_EVERY_S:
            self._learn()
            self._rank()

    def _learn(self) -> None:
        """Work out the worth of every kind at every age from what was seen."""
        decay = 0.5 ** ((self._now - self._learned) / _HALF_LIFE_S)
        self._learned = self._now
        self._ended_used *= decay
        self._ended *= decay
        known = np.frombuffer(self._stamps, dtype=np.int64) > 0
        ages = _ages(self._now - np.frombuffer(self._used)[known])
        places = np.frombuffer(self._kinds, dtype=np.int64)[known] * _AGES + ages
        staying = np.bincount(places, minlength=_KINDS * _AGES).reshape(_KINDS, _AGES)
        ended = self._ended + staying
        # Of the blocks that reached an age, those that went on to the next count whole.
        reached = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - 0.5 * ended
        average = self._ended_used.sum(axis=0) / (reached.sum(axis=0) + 5 * _PRIOR_BLOCKS)
        chance = (self._ended_used + _PRIOR_BLOCKS * average) / (reached + _PRIOR_BLOCKS)
        self._worth = _worth(np.minimum(chance, 0.99)).tolist()

    def _rank(self) -> None:
        """Build the heap anew from the blocks that may go."""
        here = np.flatnonzero(
            (np.frombuffer(self._here, dtype=np.int8) != 0)
            & (np.frombuffer(self._pins, dtype=np.int64) == 0)
        )
        if not len(here):
            self._heap = []
            return
        ages = _ages(self._now - np.frombuffer(self._used)[here])
        worth = np.array(self._worth)[np.frombuffer(self._kinds, dtype=np.int64)[here], ages]
        worth = worth * np.frombuffer(self._weights)[here]
        entries = zip(
            worth.tolist(),
            np.frombuffer(self._stamps, dtype=np.int64)[here].tolist(),
            here.tolist(),
            strict=True,
        )
        self._heap = sorted(entry for entry in entries if self._may_go(entry[2]))


def _age(seconds: float) -> int:
    """Return the step that an age falls into."""
    return bisect.bisect_right(_EDGE_LIST, seconds) - 1


def _ages(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    steps = np.searchsorted(_EDGES, seconds, side="right") - 1
    return np.maximum(steps, 0).astype(np.int64)


def _worth(chance: _Table) -> _Table:
    """Return the best ratio of uses to stay, from each age on, given the chance of a use at each.

    A block of age a that is kept until age b is used with probability (H[b] - H[a]) / S[a] and stays
    (C[b] - C[a]) / S[a] seconds on average, where S is the share that reaches an age, H that which
    was used before it, and C the stay up to it. S cancels: it is the steepest line from a to the
    right in the plane of C and H.
    """
    reach = np.cumprod(1 - chance, axis=1)
    reach = np.concatenate([np.ones((len(chance), 1)), reach], axis=1)
    uses = 1 - reach
    stay = np.cumsum(reach[:, :-1] * _WIDTHS * (1 - chance / 2), axis=1)
    stay = np.concatenate([np.zeros((len(chance), 1)), stay], axis=1)
    more = uses[:, None, 1:] - uses[:, :-1, None]
    longer = stay[:, None, 1:] - stay[:, :-1, None]
    later = longer > 0
    best: _Table = np.max(np.where(later, more / np.where(later, longer, 1.0), 0.0), axis=2)
    return best
