"""What one store tells the directory: what it holds, to the owners of each name.

Pure: no clock, socket or thread. Owns the names of a store and, for each node, what that node has
not been told yet. Who calls it: a server, under its lock, which sends what ``take`` gives.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
# Rings before this one whose owners may still have names from then.
FORMER_MAX: Final = 16
# A depth that no chain reaches 0 from.
_NO_DEPTH: Final = -(1 << 40)
_NO_PARENT: Final = BlockHash(bytes(HASH_BYTES))
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
        self._former: deque[Ring] = deque(maxlen=FORMER_MAX)
        self._owners = owners
        self._pending: dict[NodeId, dict[BlockHash, Kind]] = {}
        self._owed: dict[NodeId, bytearray] = {}
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
        if first + count < RUN_BLOCKS:
            return  # no run ends here
        held = self._names.match(hashes[:stop])
        runs = run_names(hashes[: held * HASH_BYTES])
        self._add(runs[first // RUN_BLOCKS * HASH_BYTES :])

    def removed(self, blocks: bytes) -> None:
        """Take note that blocks left the store, and with each the run that it ends."""
        for names in (blocks, (_bytes_of(blocks) ^ _RUN_MARK).tobytes()):
            self._take_back(self._names.drop(names))

    def denied(self, block: BlockHash) -> None:
        """Take note that somebody was told of a block that is not here: it is taken back, known or not."""
        for name in (block, run_name(block)):
            self._names.remove(name)
            self._take_back(name)

    def broken(self, last: BlockHash) -> None:
        """Take note that a run is not whole, if it ends with this block, which may be here."""
        name = run_name(last)
        if self._names.remove(name):
            self._take_back(name)

    def change_ring(self, ring: Ring) -> int:
        """Use another ring: names are told to those who own them now and did not before.

        Returns:
            How many names each new owner has to be told, added up.
        """
        before = self.turn(ring)
        moved = moved_names(before, ring, self.names(), self._owners)
        self.owe(moved)
        return sum(len(names) for names in moved.values()) // HASH_BYTES

    def turn(self, ring: Ring) -> Ring:
        """Use another ring for what comes from now on; return the one before.

        The first half of ``change_ring``, at no cost. What new owners have to be told of what is here
        already, ``moved_names`` finds out, on a thread if need be; ``owe`` takes note of it.
        """
        before, self._ring = self._ring, ring
        self._former.append(before)
        for node in set(before.nodes) - set(ring.nodes):
            self._pending.pop(node, None)
            self._owed.pop(node, None)
            self._behind.discard(node)
        return before

    def settle(self) -> None:
        """Take note that every node has dropped what it does not own in this ring."""
        self._former.clear()

    def owe(self, names: Mapping[NodeId, bytes]) -> None:
        """Take note of names that nodes have to be told. What has left when its turn comes is not."""
        for node, some in names.items():
            if node not in self._ring.nodes or node in self._behind or not some:
                continue
            owed = self._owed.setdefault(node, bytearray())
            owed += some
            if len(owed) > 2 * max(len(some), len(self._names) * HASH_BYTES):
                self.lose(node)  # less is to be told when it is told all

    def is_behind(self, node: NodeId) -> bool:
        """Say whether a node is to be told everything anew."""
        return node in self._behind

    def lose(self, node: NodeId, untold: tuple[Kind, bytes] = ("stored", b"")) -> None:
        """Take note that a node did not take what it was told, or forgot: it is told all anew.

        What left is told before: if the node has not forgotten, it would have it for ever.

        Args:
            node: Who it is.
            untold: What ``take`` gave last and may not have arrived.
        """
        kind, names = untold
        if node in self._behind and not names:
            return  # it is known, and only removals wait
        removed = [name for name in _cut(names) if kind == "removed"]
        queued: dict[BlockHash, Kind] = {
            name: "removed" for name in removed if self._names.get(name) is None
        }
        queued.update(self._pending.pop(node, {}))
        self._owed.pop(node, None)
        if node in self._ring.nodes:
            self._behind.add(node)
            self._keep_removals(node, queued)

    def restored(self, keys: bytes, parents: bytes) -> None:
        """Take note of blocks that a store held before this process, and of the runs among them.

        Args:
            keys: Of the blocks, in any order.
            parents: Of each, the block before it, or zeros.
        """
        self._add(keys)
        above = dict(zip(_cut(keys), _cut(parents), strict=True))
        depths: dict[BlockHash, int] = {}
        for key in above:
            chain: dict[BlockHash, None] = {}
            at = key
            while at in above and at not in depths and at not in chain:
                chain[at] = None
                at = above[at]
            # Behind a gap, or in a circle that no honest store holds, nothing ends a run.
            depth = depths.get(at, 0 if at == _NO_PARENT else _NO_DEPTH)
            for each in reversed(chain):
                depth += 1
                depths[each] = depth
        ends = [key for key, depth in depths.items() if depth > 0 and depth % RUN_BLOCKS == 0]
        self._add(b"".join(run_name(key) for key in ends))

    def names(self) -> bytes:
        """Return all names that are held here, concatenated, in no order."""
        return self._names.keys()

    def renew(self, node: NodeId) -> None:
        """Tell a node everything anew: it has forgotten, or was out of reach for too long."""
        ring, names = self.begin_renewal(node)
        self.owe({node: owned_names(ring, names, node, self._owners)})

    def begin_renewal(self, node: NodeId) -> tuple[Ring, bytes]:
        """Begin to tell a node everything anew: return what ``owned_names`` needs.

        Changes from now on are queued. What it owns is then for ``owe``; if that does not come about,
        ``lose`` begins anew.
        """
        self._keep_removals(node, self._pending.pop(node, {}))
        self._owed.pop(node, None)
        self._behind.discard(node)
        return self._ring, self._names.keys()

    def waiting(self) -> list[NodeId]:
        """Return the nodes that have to be told something."""
        told = (*self._pending.items(), *self._owed.items())
        return sorted({*(node for node, names in told if names), *self._behind})

    def take(self, node: NodeId, limit: int) -> tuple[Kind, bytes]:
        """Return what to tell a node next: up to ``limit`` names of one kind.

        What came and left goes before what other nodes were told until now. What could not be sent is
        given back with ``lose``.
        """
        if node in self._behind:
            self.renew(node)
        waiting = self._pending.get(node, {})
        if not waiting:
            return "stored", self._take_owed(node, limit)
        kind: Kind = "stored"
        for oldest in waiting.values():
            kind = oldest
            break
        names: list[BlockHash] = []
        for name, said in waiting.items():
            if said != kind or len(names) == limit:
                break
            names.append(name)
        if len(names) == len(waiting):
            waiting.clear()
        else:
            for name in names:
                del waiting[name]
        return kind, b"".join(names)

    def _take_owed(self, node: NodeId, limit: int) -> bytes:
        """Return some of what a node is owed and is here still."""
        owed = self._owed.get(node, bytearray())
        while owed:
            some = bytes(owed[-limit * HASH_BYTES :])
            del owed[-limit * HASH_BYTES :]
            here = b"".join(name for name in _cut(some) if self._names.get(name) is not None)
            if here:
                return here
        self._owed.pop(node, None)
        return b""

    def _add(self, names: bytes) -> None:
        if not names:
            return
        count = len(names) // HASH_BYTES
        added = self._names.add(names, np.zeros(count, dtype=np.uint64))
        new = names if added.all() else _bytes_of(names)[added].tobytes()
        for node, owned in self._by_owner(self._ring, new).items():
            self._tell(node, owned, "stored")

    def _by_owner(self, ring: Ring, names: bytes) -> dict[NodeId, list[BlockHash]]:
        """Return of each node the names that it owns, in their order."""
        cut = _cut(names)
        if len(ring) <= self._owners:
            return dict.fromkeys(ring.nodes, cut)  # each of them owns every name
        owned: dict[NodeId, list[BlockHash]] = {}
        for name, owners in zip(cut, ring.owners_of(names, self._owners), strict=True):
            for node in owners:
                owned.setdefault(node, []).append(name)
        return owned

    def _tell(self, node: NodeId, names: list[BlockHash], kind: Kind) -> None:
        """Queue names for one node, all at once. What was queued of the same names is void."""
        if not names or (node in self._behind and kind == "stored"):
            return  # they are among what is told anew, behind what left
        told = self._pending.setdefault(node, {})
        more: dict[BlockHash, Kind] = dict.fromkeys(names, kind)
        for name in told.keys() & more.keys() if told else ():
            del told[name]
        told.update(more)
        if len(told) > PENDING_MAX:
            del self._pending[node]
            self._behind.add(node)

    def _take_back(self, names: bytes) -> None:
        """Tell names' owners that they left; who owned one before may have it still, and own it again."""
        for ring in (self._ring, *self._former) if names else ():
            for node, owned in self._by_owner(ring, names).items():
                if node in self._ring.nodes:
                    self._tell(node, owned, "removed")

    def _keep_removals(self, node: NodeId, queued: Mapping[BlockHash, Kind]) -> None:
        kept: dict[BlockHash, Kind] = {
            name: kind for name, kind in queued.items() if kind == "removed"
        }
        if 0 < len(kept) <= PENDING_MAX:
            self._pending[node] = kept


def gone(names: bytes, keys: bytes) -> list[BlockHash]:
    """Return the names whose blocks are not among ``keys``. Linear; shares nothing.

    The name of a run that has gone is returned as well, and is no block's.
    """
    named, here = _rows(names), _rows(keys)
    runs = _rows((_bytes_of(keys) ^ _RUN_MARK).tobytes())
    lost = named[~np.isin(named, np.concatenate([here, runs]))]
    return [BlockHash(bytes(name)) for name in lost]


def moved_names(before: Ring, after: Ring, names: bytes, owners: int) -> dict[NodeId, bytes]:
    """Return, of each node, the names that it owns in one ring and not in the other.

    Linear; shares nothing: for a thread.
    """
    named = _bytes_of(names)
    moved: dict[NodeId, bytes] = {}
    for node, rows in _new_owners(before, after, names, owners):
        moved[node] = moved.get(node, b"") + named[rows].tobytes()
    return moved


def owned_names(ring: Ring, names: bytes, node: NodeId, owners: int) -> bytes:
    """Return the names that a node owns. Linear; shares nothing: for a thread."""
    return _bytes_of(names)[_owns(ring, names, node, owners)].tobytes()


def other_names(ring: Ring, names: bytes, node: NodeId, owners: int) -> bytes:
    """Return the names that a node does not own. Linear; shares nothing: for a thread."""
    return _bytes_of(names)[~_owns(ring, names, node, owners)].tobytes()


def _owns(ring: Ring, names: bytes, node: NodeId, owners: int) -> NDArray[np.bool_]:
    numbers = ring.owner_numbers(names, owners)
    if node not in ring.nodes:
        return np.zeros(len(numbers), dtype=np.bool_)
    mine: NDArray[np.bool_] = (numbers == ring.nodes.index(node)).any(axis=1)
    return mine


def _new_owners(
    before: Ring, after: Ring, names: bytes, owners: int
) -> Iterator[tuple[NodeId, NDArray[np.intp]]]:
    """Yield each node with the rows of the names that it owns in one ring, and not in the other."""
    numbers = {node: number for number, node in enumerate(after.nodes)}
    # Nodes that are gone have no number in the later ring.
    known = np.array([numbers.get(node, -1) for node in before.nodes], dtype=np.intp)
    old, new = before.owner_numbers(names, owners), after.owner_numbers(names, owners)
    old = known[old] if old.size else old
    for column in range(new.shape[1]):
        is_new = ~(old == new[:, column : column + 1]).any(axis=1)
        for number in np.unique(new[is_new, column]).tolist():
            yield after.nodes[number], np.flatnonzero(is_new & (new[:, column] == number))


def _bytes_of(names: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(names, dtype=np.uint8).reshape(-1, HASH_BYTES)


def _rows(names: bytes) -> NDArray[np.void]:
    """Return names as values that can be compared whole."""
    return np.frombuffer(names, dtype=np.dtype((np.void, HASH_BYTES)))


def _cut(names: bytes) -> list[BlockHash]:
    return [
        BlockHash(names[begin : begin + HASH_BYTES]) for begin in range(0, len(names), HASH_BYTES)
    ]
