"""What one store tells the directory: what it holds, to the owners of each name.

Pure: no clock, socket or thread. Owns the names of a store and, for each node, what that node has
not been told yet. Who calls it: a server, under its lock, which sends what ``take`` gives.
"""

from typing import Final

import numpy as np

from kvpool.block import HASH_BYTES, BlockHash, NodeId
from kvpool.errors import UsageError
from kvpool.index.directory import Kind
from kvpool.index.prefix import PrefixIndex
from kvpool.index.ring import Ring

# Blocks of a run: a prompt is looked up by its full runs first.
RUN_BLOCKS: Final = 64
# Owners of each name: the first, and those that answer in its place.
OWNERS: Final = 2
# Names that one node may have to be told; with more it is told everything anew.
PENDING_MAX: Final = 1 << 18
_RUN_MARK: Final = np.frombuffer(b"run of blocks".ljust(HASH_BYTES, b"\0"), dtype=np.uint8)


def run_names(hashes: bytes) -> bytes:
    """Return the names of the full runs of a chain: of each its last block's hash, marked.

    A run is named by its last block because that is unique to its branch, and known to who asks.
    The mark keeps the name of a run apart from the block's, and brings it to owners of its own.
    """
    blocks = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
    return (blocks[RUN_BLOCKS - 1 :: RUN_BLOCKS] ^ _RUN_MARK).tobytes()


def run_name(block: BlockHash) -> BlockHash:
    """Return the name of the run that ends with a block, if one does."""
    return BlockHash((np.frombuffer(block, dtype=np.uint8) ^ _RUN_MARK).tobytes())


class Announcer:
    """The names of one store and who has to be told of them.

    A store evicts a block before its ancestors, so a run that was whole is whole for as long as its
    last block is there: with it goes the run's name. Not thread-safe: its owner's lock guards it.

    Args:
        capacity: Most blocks of the store.
        ring: Of the directory.
        owners: How many nodes are told of each name.
    """

    def __init__(self, capacity: int, ring: Ring, owners: int = OWNERS) -> None:
        # One name in RUN_BLOCKS is a run's; a few blocks of many branches may end runs.
        self._names = PrefixIndex(2 * capacity)
        self._ring = ring
        self._owners = owners
        self._pending: dict[NodeId, dict[BlockHash, Kind]] = {}
        self._behind: set[NodeId] = set()

    def __len__(self) -> int:
        return len(self._names)

    def stored(self, hashes: bytes, first: int, count: int) -> None:
        """Take note that blocks of a chain came, and of the runs that are whole with them.

        Args:
            hashes: Of the chain, from its root to the last of the blocks at least.
            first: The first block that came.
            count: How many came.
        """
        stop = (first + count) * HASH_BYTES
        if first < 0 or count < 0 or stop > len(hashes):
            raise UsageError(f"blocks {first} to {first + count} of {len(hashes) // HASH_BYTES}")
        self._add(hashes[first * HASH_BYTES : stop])
        held = self._names.match(hashes[:stop])
        runs = run_names(hashes[: held * HASH_BYTES])
        self._add(runs[first // RUN_BLOCKS * HASH_BYTES :])

    def removed(self, block: BlockHash) -> None:
        """Take note that a block left the store, and with it the run that it ends."""
        for name in (block, run_name(block)):
            if self._names.remove(name):
                self._queue(name, "removed")

    def change_ring(self, ring: Ring) -> int:
        """Use another ring: names are told to those who own them now and did not before.

        Returns:
            How many names each new owner has to be told, added up.
        """
        before, self._ring = self._ring, ring
        gone = set(before.nodes) - set(ring.nodes)
        self._pending = {node: told for node, told in self._pending.items() if node not in gone}
        self._behind -= gone
        names = self._names.keys()
        pairs = zip(
            before.owners_of(names, self._owners), ring.owners_of(names, self._owners), strict=True
        )
        told = 0
        for index, (old, new) in enumerate(pairs):
            name = BlockHash(names[index * HASH_BYTES : (index + 1) * HASH_BYTES])
            for node in set(new) - set(old):
                self._tell(node, name, "stored")
                told += 1
        return told

    def renew(self, node: NodeId) -> None:
        """Tell a node everything anew: it has forgotten, or was out of reach for too long."""
        self._pending.pop(node, None)
        self._behind.discard(node)
        names = self._names.keys()
        for index, owners in enumerate(self._ring.owners_of(names, self._owners)):
            if node in owners:
                name = BlockHash(names[index * HASH_BYTES : (index + 1) * HASH_BYTES])
                self._pending.setdefault(node, {})[name] = "stored"

    def waiting(self) -> list[NodeId]:
        """Return the nodes that have to be told something."""
        return sorted({*(node for node, told in self._pending.items() if told), *self._behind})

    def take(self, node: NodeId, limit: int) -> tuple[Kind, bytes]:
        """Return what to tell a node next: up to ``limit`` names of one kind, oldest first.

        What could not be sent is given back with ``renew``.
        """
        if node in self._behind:
            self.renew(node)
        waiting = self._pending.get(node, {})
        kind: Kind = "stored"
        for oldest in waiting.values():
            kind = oldest
            break
        names: list[BlockHash] = []
        for name, said in waiting.items():
            if said != kind or len(names) == limit:
                break
            names.append(name)
        for name in names:
            del waiting[name]
        return kind, b"".join(names)

    def _add(self, names: bytes) -> None:
        count = len(names) // HASH_BYTES
        added = self._names.add(names, np.zeros(count, dtype=np.uint64))
        for index in np.flatnonzero(added).tolist():
            name = BlockHash(names[index * HASH_BYTES : (index + 1) * HASH_BYTES])
            self._queue(name, "stored")

    def _queue(self, name: BlockHash, kind: Kind) -> None:
        for node in self._ring.owners(name, self._owners):
            self._tell(node, name, kind)

    def _tell(self, node: NodeId, name: BlockHash, kind: Kind) -> None:
        """Queue one name for one node. What was queued of the same name is void."""
        if node in self._behind:
            return
        told = self._pending.setdefault(node, {})
        told.pop(name, None)
        told[name] = kind
        if len(told) > PENDING_MAX:
            del self._pending[node]
            self._behind.add(node)
