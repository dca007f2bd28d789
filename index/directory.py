"""One shard of the directory: which stores of which nodes hold a block.

Pure: no clock, socket or thread. Entries are soft state: a store announces what it holds to the
owners of each name (``index/announce.py``), and a store whose life is over takes its entries with
it. Owns no bytes of KV and never decides who is alive. Who calls it: a server, under its lock;
readers ask it through ``index/lookup.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvpool.block import HASH_BYTES, BlockHash, NodeId
from kvpool.errors import CapacityError, StaleIncarnationError, UsageError
from kvpool.index.prefix import PrefixIndex

# Stores that one name is known to be at; the oldest gives way. More replicas help nobody.
REPLICAS_MAX: Final = 16

Kind = Literal["stored", "removed"]


@dataclass(frozen=True, slots=True)
class Store:
    """One store of one node, in one life.

    Attributes:
        node: Whose it is.
        name: ``"dram"`` or ``"ssd"``, say.
        identity: What makes its contents these, 16 bytes: the incarnation of the process, or for a
            store that outlives its process the store's own id.
    """

    node: NodeId
    name: str
    identity: bytes


Stores = tuple[Store, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What a subscriber is told: names (32 bytes each, concatenated) came to a store or left it."""

    kind: Kind
    store: Store
    names: bytes


class Directory:
    """Names, and the stores that hold them, for at most ``capacity`` names.

    A name is a block hash or the name of a run. Every distinct list of stores is kept once and
    numbered, so a name costs one place in a C table. Not thread-safe: its owner's lock guards it.

    Args:
        capacity: Most names, above 0. Memory is taken at once.
    """

    def __init__(self, capacity: int) -> None:
        self._table = PrefixIndex(capacity)
        self._capacity = capacity
        self._lists: list[Stores] = []
        self._uses: list[int] = []  # names of each list
        self._numbers: dict[Stores, int] = {}
        self._free: list[int] = []
        self._live: dict[tuple[NodeId, str], Store] = {}
        self._away: dict[tuple[NodeId, str], Store] = {}
        self._subscribers: list[Callable[[Change], None]] = []

    def __len__(self) -> int:
        return len(self._table)

    def subscribe(self, tell: Callable[[Change], None]) -> Callable[[], None]:
        """Have announcements and withdrawals told, by who makes them. ``tell`` must not raise.

        Returns:
            What ends it.
        """
        self._subscribers.append(tell)
        return lambda: self._subscribers.remove(tell)

    # ---- which stores there are ------------------------------------------------------------------

    def join(self, store: Store) -> None:
        """Let a store announce, and show its entries. Those of an earlier life of it are forgotten.

        A store that was away and comes back in the same life has its entries back at once.
        """
        place = (store.node, store.name)
        for known in (self._live.get(place), self._away.get(place)):
            if known not in (None, store):
                self._end(known)
        self._away.pop(place, None)
        self._live[place] = store

    def leave(self, node: NodeId) -> None:
        """Hide the entries of a node that does not answer: it may come back. Idempotent."""
        for place in [place for place in self._live if place[0] == node]:
            self._away[place] = self._live.pop(place)

    def forget(self, node: NodeId) -> None:
        """Drop the entries of a node that will not come back. Idempotent."""
        for stores in (self._live, self._away):
            for place in [place for place in stores if place[0] == node]:
                self._end(stores.pop(place))

    # ---- what they hold --------------------------------------------------------------------------

    def announce(self, store: Store, names: bytes) -> int:
        """Take note of names that a store holds. Returns how many of them are new for it.

        Raises:
            StaleIncarnationError: The store has not joined, or in another life.
            CapacityError: There are too many names. Nothing was taken.
            UsageError: The bytes are no whole names.
        """
        self._require(store)
        count, room = _count(names), self._capacity - len(self._table)
        # All at once what nobody held, which is nearly all there is.
        if count <= room:
            new = self._put_new(names, (store,))
            if new.all():
                self._tell("stored", store, names)
                return count
            keys = _split(names)
        else:
            keys = _split(names)
            if sum(self._table.get(key) is None for key in set(keys)) > room:
                raise CapacityError(
                    f"the directory holds {self._capacity} names: give it more room"
                )
            new = np.zeros(count, dtype=np.bool_)
        for at in np.flatnonzero(~new).tolist():
            stores = self._stores(keys[at])
            if store not in stores:
                self._put(keys[at], (*stores[-(REPLICAS_MAX - 1) :], store))
                new[at] = True
        rows = np.frombuffer(names, dtype=np.uint8).reshape(-1, HASH_BYTES)
        self._tell("stored", store, rows[new].tobytes())
        return int(new.sum())

    def withdraw(self, store: Store, names: bytes) -> int:
        """Take note of names that a store no longer holds. Returns how many it had here.

        Raises StaleIncarnationError and UsageError as ``announce`` does.
        """
        self._require(store)
        keys = list(dict.fromkeys(_split(names)))
        gone, last = bytearray(), bytearray()
        numbers: list[int] = []
        for key, number in zip(keys, self._table.find(b"".join(keys)), strict=True):
            stores = () if number is None else self._lists[number]
            if number is None or store not in stores:
                continue
            gone += key
            if len(stores) == 1:
                last += key
                numbers.append(number)
            else:
                self._put(key, tuple(one for one in stores if one != store))
        self._table.drop(bytes(last))
        for number in numbers:
            self._unused(number)
        self._tell("removed", store, bytes(gone))
        return len(gone) // HASH_BYTES

    def lookup(self, names: bytes) -> list[Stores]:
        """Return the stores, of those that are here, of the leading names that are held by one."""
        found: list[Stores] = []
        live = set(self._live.values())
        shown: dict[int, Stores] = {}
        numbers: list[int] = self._table.numbers(names).tolist()
        for number in numbers:
            if number not in shown:
                shown[number] = tuple(one for one in self._lists[number] if one in live)
            if not shown[number]:
                break
            found.append(shown[number])
        return found

    def names(self) -> bytes:
        """Return all names, concatenated, in no order."""
        return self._table.keys()

    def drop(self, names: bytes) -> int:
        """Forget names whoever holds them: this shard does not own them. Returns how many."""
        before = len(self._table)
        for key in _split(names):
            self._put(key, ())
        return before - len(self._table)

    def _require(self, store: Store) -> None:
        if self._live.get((store.node, store.name)) != store:
            raise StaleIncarnationError(
                f"the store {store.name} of {store.node} has not joined in this life"
            )

    def _stores(self, key: BlockHash) -> Stores:
        number = self._table.get(key)
        return () if number is None else self._lists[number]

    def _put(self, key: BlockHash, stores: Stores) -> None:
        """Give a name another list of stores. A list that no name has is forgotten."""
        before = self._table.get(key)
        if stores:
            number = self._numbered(stores)
            self._table.put(key, number)
            self._uses[number] += 1
        else:
            self._table.remove(key)
        if before is not None:
            self._unused(before)

    def _put_new(self, names: bytes, stores: Stores) -> NDArray[np.bool_]:
        """Give those names a list that have none; say of each whether it had none. There is room."""
        number = self._numbered(stores)
        count = len(names) // HASH_BYTES
        new = self._table.add(names, np.full(count, number, dtype=np.uint64))
        self._uses[number] += int(new.sum()) + 1
        self._unused(number)  # the one too many: a list that got no name is forgotten
        return new

    def _numbered(self, stores: Stores) -> int:
        number = self._numbers.get(stores)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._lists[number] = stores
            else:
                number = len(self._lists)
                self._lists.append(stores)
                self._uses.append(0)
            self._numbers[stores] = number
        return number

    def _unused(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            stores, self._lists[number] = self._lists[number], ()
            if self._numbers.get(stores) == number:
                del self._numbers[stores]
            self._free.append(number)

    def _end(self, store: Store) -> None:
        """Take a store out of every list, and forget the names that no other store holds."""
        dead = np.zeros(len(self._lists), dtype=np.bool_)
        for number, stores in enumerate(self._lists):
            if store in stores:
                left = tuple(one for one in stores if one != store)
                self._lists[number], dead[number] = left, not left
                self._numbers.pop(stores, None)
                # Two lists may be equal now: each keeps its names, the first takes new ones.
                self._numbers.setdefault(left, number)
        self._numbers.pop((), None)
        self._table.sweep(dead)
        for number in np.flatnonzero(dead).tolist():
            self._uses[number] = 0
            self._free.append(number)

    def _tell(self, kind: Kind, store: Store, names: bytes) -> None:
        if names:
            for tell in self._subscribers:
                tell(Change(kind, store, names))


def _count(names: bytes) -> int:
    count, rest = divmod(len(names), HASH_BYTES)
    if rest:
        raise UsageError(f"{len(names)} bytes are not whole names of {HASH_BYTES}")
    return count


def _split(names: bytes) -> list[BlockHash]:
    _count(names)
    return [
        BlockHash(names[begin : begin + HASH_BYTES]) for begin in range(0, len(names), HASH_BYTES)
    ]
