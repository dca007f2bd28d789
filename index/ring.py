"""The ring: which nodes own a name, by consistent hashing with virtual nodes, and bounded load.

Pure and immutable: a change of membership is another ring. Owns no entries and talks to nobody. Who
calls it: the directory's servers and its readers, which must all come to the same owners.

Sources: Karger et al., "Consistent Hashing and Random Trees", STOC 1997; Mirrokni, Thorup and
Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.block import HASH_BYTES, BlockHash, NodeId, sha256
from kvpool.errors import UsageError

# Points of one node. The share of a node varies by about 1 / sqrt(VIRTUAL_NODES): 6 %.
VIRTUAL_NODES: Final = 256
# How far above the mean a node's load may be before its successor is asked in its place.
LOAD_FACTOR: Final = 1.25
_POINTS_PER_DIGEST: Final = 4


class Ring:
    """Owners of names among some nodes. Equal sets of nodes make equal rings, in every process.

    Args:
        nodes: Names of the nodes, in any order, each once. May be empty: then nobody owns anything.
        virtual_nodes: Points of each node.

    Attributes:
        nodes: Sorted.
    """

    def __init__(self, nodes: Iterable[NodeId], virtual_nodes: int = VIRTUAL_NODES) -> None:
        self.nodes: tuple[NodeId, ...] = tuple(sorted(nodes))
        if len(set(self.nodes)) != len(self.nodes):
            raise UsageError("a node is named twice: every node needs a name of its own")
        if virtual_nodes <= 0:
            raise UsageError(f"{virtual_nodes} virtual nodes: use at least one")
        points = [_points(node, virtual_nodes) for node in self.nodes]
        places = np.concatenate(points) if points else np.empty(0, dtype=np.uint64)
        numbers = np.repeat(np.arange(len(self.nodes)), virtual_nodes)
        order = np.lexsort((numbers, places))  # equal points: the first node in order has it
        self._places, self._numbers = places[order], numbers[order].tolist()
        self._tables: dict[int, list[tuple[NodeId, ...]]] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def owners(self, name: BlockHash, count: int) -> tuple[NodeId, ...]:
        """Return the owner of a name and the next ``count - 1`` distinct nodes after it.

        Fewer if there are fewer nodes.
        """
        return self.owners_of(name, count)[0] if self.nodes else ()

    def owners_of(self, names: bytes, count: int) -> list[tuple[NodeId, ...]]:
        """Return ``owners`` of each of many names (32 bytes each, concatenated)."""
        if count <= 0 or len(names) % HASH_BYTES:
            raise UsageError(f"{count} owners of {len(names)} bytes of names of {HASH_BYTES}")
        places = np.frombuffer(names, dtype=">u8").reshape(-1, HASH_BYTES // 8)[:, 0]
        if not self.nodes:
            return [()] * len(places)
        begins = np.searchsorted(self._places, places.astype(np.uint64)) % len(self._places)
        table = self._table(count)
        return [table[begin] for begin in begins.tolist()]

    def owner_numbers(self, names: bytes, count: int) -> NDArray[np.intp]:
        """Return ``owners`` of many names as numbers in ``nodes``, [names, owners]."""
        wanted = min(count, len(self.nodes))
        places = np.frombuffer(names, dtype=">u8").reshape(-1, HASH_BYTES // 8)[:, 0]
        if not wanted:
            return np.empty((len(places), 0), dtype=np.intp)
        begins = np.searchsorted(self._places, places.astype(np.uint64)) % len(self._places)
        numbers = {node: number for number, node in enumerate(self.nodes)}
        table = np.array([[numbers[node] for node in owners] for owners in self._table(count)])
        return table.astype(np.intp)[begins]

    def _table(self, count: int) -> list[tuple[NodeId, ...]]:
        """Return the owners that follow each point, made once for each ``count``."""
        if count not in self._tables:
            made = [self._successors(begin, count) for begin in range(len(self._numbers))]
            self._tables[count] = made
        return self._tables[count]

    def _successors(self, begin: int, count: int) -> tuple[NodeId, ...]:
        wanted = min(count, len(self.nodes))
        found: dict[int, None] = {}
        at = begin
        while len(found) < wanted:
            found[self._numbers[at]] = None
            at = (at + 1) % len(self._numbers)
        return tuple(self.nodes[number] for number in found)


def _points(node: NodeId, count: int) -> NDArray[np.uint64]:
    digests = b"".join(
        sha256(b"kvpool-ring-1" + struct.pack("<I", number) + node.encode("utf-8", "surrogatepass"))
        for number in range(-(-count // _POINTS_PER_DIGEST))
    )
    return np.frombuffer(digests, dtype=">u8")[:count].astype(np.uint64)


class BoundedLoad:
    """Chooses among the owners of a name so that no node is asked much more than the mean.

    The first owner whose count would stay within ``factor`` times the mean is asked: a hot name
    spreads over its owners, every other one stays at its first. Counts are halved from time to
    time, so that old load is forgotten. Not thread-safe: its owner's lock guards it.

    Args:
        nodes: That can be asked.
        factor: Above 1; the smaller, the evener, and the more names are asked of a successor.
        window: Counts are halved when they add up to this.
    """

    def __init__(
        self, nodes: Sequence[NodeId], factor: float = LOAD_FACTOR, window: int = 1 << 16
    ) -> None:
        if factor <= 1.0:
            raise UsageError(f"a load factor of {factor}: use more than 1")
        self._nodes = tuple(nodes)
        self._factor = factor
        self._window = window
        self._counts: Counter[NodeId] = Counter()
        self._total = 0

    def counts(self) -> dict[NodeId, int]:
        """Return how much each node was asked lately."""
        return dict(self._counts)

    def choose(self, owners: Sequence[NodeId]) -> NodeId:
        """Return the owner to ask, and count it. ``owners`` is not empty."""
        limit = self._factor * (self._total + 1) / max(1, len(self._nodes))
        chosen = next((node for node in owners if self._counts[node] + 1 <= limit), None)
        if chosen is None:
            chosen = min(owners, key=lambda node: self._counts[node])
        self._counts[chosen] += 1
        self._total += 1
        if self._total >= self._window:
            self._counts = Counter({node: count // 2 for node, count in self._counts.items()})
            self._total = self._counts.total()
        return chosen
