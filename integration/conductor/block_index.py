"""Which nodes hold which block: an inverted index, from block hash to a set of nodes.

Owns the sets; never asks a node. It believes what it is told (`add`, `remove`), so a match is a
hint, as everywhere in kvpool. Who calls it: `cluster.py` writes, the planner matches.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, islice, repeat
from operator import and_
from typing import Final

import numpy as np

from kvpool.integration.conductor.snapshot import Ints

# Hashes looked at before asking whether any node still matches, and how that grows. The loop inside
# runs in C, so that looking at some too many costs less than asking after each.
_RUN: Final = 64
_RUN_GROWTH: Final = 4
# Setting that many positions one by one costs as much as spreading all bits with numpy.
_FEW: Final = 8


class BlockIndex:
    """An inverted index whose sets are bit masks: bit ``n`` is node ``n``.

    Masks are plain integers. That a node matches ``k`` blocks means that its bit is in the
    conjunction of the first ``k`` masks; those conjunctions only lose bits, so a chain is one
    pass in C, and a bisection for each place where bits are lost. Nothing is done per node.

    Memory: a dict item a hash; a mask of its own only where several nodes hold it.
    Not thread-safe: one owner.

    Args:
        node_count: Number of nodes. `grow` adds some.
    """

    def __init__(self, node_count: int) -> None:
        self._node_count = 0
        self._bits: list[int] = []
        self._masks: dict[Hashable, int] = {}
        self.grow(node_count)

    def __len__(self) -> int:
        """Count the blocks that some node holds."""
        return len(self._masks)

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return self._node_count

    def grow(self, node_count: int) -> None:
        """Have at least ``node_count`` nodes. New ones hold nothing."""
        self._bits.extend(1 << node for node in range(self._node_count, node_count))
        self._node_count = max(self._node_count, node_count)

    def add(self, node: int, hashes: Iterable[Hashable]) -> None:
        """Note that ``node`` holds these blocks now."""
        bit, masks = self._bits[node], self._masks
        for name in hashes:
            mask = masks.get(name)
            if mask is None:
                masks[name] = bit  # shared with all other blocks that only this node holds
            elif not mask & bit:
                masks[name] = mask | bit

    def remove(self, node: int, hashes: Iterable[Hashable]) -> None:
        """Note that ``node`` no longer holds these blocks. Those it did not hold are ignored."""
        bit, masks = self._bits[node], self._masks
        for name in hashes:
            mask = masks.get(name)
            if mask is None or not mask & bit:
                continue
            if mask == bit:
                del masks[name]
            else:
                masks[name] = mask ^ bit

    def clear(self, node: int) -> None:
        """Note that ``node`` holds nothing any more. Looks at every hash."""
        self.remove(node, list(self._masks))

    def holds(self, node: int, name: Hashable) -> bool:
        """Tell whether ``node`` holds one block."""
        return bool(self._masks.get(name, 0) & self._bits[node])

    def match(self, chain: Sequence[Hashable]) -> Ints:
        """Count, for each node, the leading blocks of ``chain`` that it holds.

        One pass over the part of the chain that anybody holds, whatever the number of nodes.
        """
        matched = np.zeros(self._node_count, dtype=np.int64)
        masks = map(self._masks.get, chain, repeat(0))
        held, size = next(masks, 0), _RUN
        done = 1  # blocks that every node in `held` has
        while held:
            run = list(accumulate(islice(masks, size), and_, initial=held))
            # `run` only loses bits, so as numbers it never grows: find each loss by bisection.
            at, last = 0, len(run) - 1
            while run[last] != held:
                at = _next_loss(run, held, at, last)
                self._write(matched, held & ~run[at], done + at - 1)
                held = run[at]
            done += last
            if last < size:  # the chain ends here
                self._write(matched, held, done)
                break
            size *= _RUN_GROWTH
        return matched

    def _write(self, matched: Ints, mask: int, count: int) -> None:
        if mask.bit_count() <= _FEW:
            while mask:
                last = mask.bit_length() - 1
                matched[last] = count
                mask ^= self._bits[last]
            return
        octets = mask.to_bytes((self._node_count + 7) // 8, "little")
        bits = np.unpackbits(np.frombuffer(octets, np.uint8), bitorder="little")
        matched[bits[: self._node_count].view(np.bool_)] = count


def _next_loss(run: list[int], held: int, low: int, high: int) -> int:
    """Find the first item that differs from ``held``: ``run[low]`` is it, ``run[high]`` is not."""
    while high - low > 1:
        middle = (low + high) // 2
        if run[middle] == held:
            low = middle
        else:
            high = middle
    return high
