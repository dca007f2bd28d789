"""Which nodes hold which block: an inverted index, from block hash to a set of nodes.

Owns the sets, which lie in C, and how they grow; never asks a node. It believes what it is told
(`add`, `remove`), so a match is a hint, as everywhere in kvpool. Who calls it: `cluster.py` writes,
the planner matches.
"""

from typing import TYPE_CHECKING, Final

import numpy as np

from kvpool._native import ffi, lib
from kvpool.block import HASH_BYTES
from kvpool.errors import CapacityError, UsageError
from kvpool.integration.conductor.snapshot import Ints

if TYPE_CHECKING:
    from kvpool._native import CData

# Room at first, in hashes and in sets; each doubles when it is full, and so does that for nodes.
_ROOM: Final = 64
_NODES_ROOM: Final = 64


class BlockIndex:
    """An inverted index: for each block hash, who holds it.

    A chain is matched in one pass over the part of it that anybody holds, whatever the number of
    nodes; the work a block is some words of bits, one bit a node.

    Memory: about 100 bytes a hash, and a bit a node for those that several nodes hold.
    Not thread-safe: one owner.

    Args:
        node_count: Number of nodes. `grow` adds some.
        hash_bytes: Length of a hash, 8 to 32.
    """

    def __init__(self, node_count: int, hash_bytes: int = HASH_BYTES) -> None:
        self._node_count = 0
        self._hash_bytes = hash_bytes
        self._rooms = _ROOM, _ROOM, _NODES_ROOM  # for hashes, sets, nodes
        self._index = _opened(hash_bytes, self._rooms)
        self.grow(node_count)

    def __len__(self) -> int:
        """Count the blocks that some node holds."""
        return lib.kvp_block_index_count(self._index)

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return self._node_count

    def grow(self, node_count: int) -> None:
        """Have at least ``node_count`` nodes. New ones hold nothing."""
        hash_room, set_room, node_room = self._rooms
        while node_count > node_room:
            node_room *= 2
        self._move((hash_room, set_room, node_room))
        self._node_count = max(self._node_count, node_count)

    def add(self, node: int, hashes: bytes) -> None:
        """Note that ``node`` holds these blocks now: hashes, concatenated.

        Now and then all is moved to twice the room.
        """
        self._check_node(node)
        self._check_hashes(hashes)
        while size := len(hashes):
            hashes = hashes[lib.kvp_block_index_add(self._index, node, hashes, size) :]
            if hashes:
                self._make_room()

    def remove(self, node: int, hashes: bytes) -> None:
        """Note that ``node`` no longer holds these blocks. Those it did not hold are ignored."""
        self._check_node(node)
        self._check_hashes(hashes)
        lib.kvp_block_index_remove(self._index, node, hashes, len(hashes))

    def clear(self, node: int) -> None:
        """Note that ``node`` holds nothing any more. Looks at every hash."""
        self._check_node(node)
        lib.kvp_block_index_clear(self._index, node)

    def holds(self, node: int, name: bytes) -> bool:
        """Tell whether ``node`` holds one block."""
        self._check_node(node)
        return len(name) == self._hash_bytes and lib.kvp_block_index_holds(self._index, node, name)

    def match(self, chain: bytes) -> Ints:
        """Count, for each node, the leading blocks of ``chain`` that it holds."""
        self._check_hashes(chain)
        matched = np.zeros(self._rooms[2], dtype=np.int64)
        written = ffi.from_buffer("int64_t[]", matched, require_writable=True)
        lib.kvp_block_index_match(self._index, chain, len(chain), written)
        return matched[: self._node_count]

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self._node_count:
            raise UsageError(f"there is no node {node}: `grow` the index first")

    def _check_hashes(self, hashes: bytes) -> None:
        if len(hashes) % self._hash_bytes:
            raise UsageError(
                f"{len(hashes)} bytes are no hashes of {self._hash_bytes} bytes each: concatenate "
                "whole hashes"
            )

    def _make_room(self) -> None:
        """Double what is full."""
        hash_room, set_room, node_room = self._rooms
        if len(self) == hash_room:
            self._move((2 * hash_room, set_room, node_room))
        else:
            self._move((hash_room, 2 * set_room, node_room))

    def _move(self, rooms: tuple[int, int, int]) -> None:
        """Go on with an index that has such rooms, unless this one has."""
        if rooms != self._rooms:
            larger = _opened(self._hash_bytes, rooms)
            lib.kvp_block_index_copy(self._index, larger)
            self._index, self._rooms = larger, rooms


def _opened(hash_bytes: int, rooms: tuple[int, int, int]) -> "CData":
    index = lib.kvp_block_index_open(hash_bytes, *rooms)
    if index == ffi.NULL:
        raise CapacityError(
            f"no memory for an index of {rooms[0]} blocks, {rooms[1]} of them at several of "
            f"{rooms[2]} nodes: have nodes announce fewer"
        )
    return ffi.gc(index, lib.kvp_block_index_close)
