"""Local longest-prefix match: which blocks are here, and under what number.

Owns one C table from 32-byte hash to a number (a slot, for a tier). Linear, never a binary search: a
block may be gone while its descendants are there. Who calls it: a tier, under its own lock.
"""

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.block import HASH_BYTES, BlockHash
from kvpool.errors import CapacityError, UsageError


class PrefixIndex:
    """Hash to number, for at most ``capacity`` hashes. Not thread-safe: its owner's lock guards it.

    Args:
        capacity: Most entries it can hold, above 0. Memory is taken at once.
    """

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise UsageError(f"an index of {capacity} entries: it needs at least one")
        table = lib.kvp_table_open(capacity)
        if table == ffi.NULL:
            raise CapacityError(f"no memory for an index of {capacity} entries: ask for fewer")
        self._table = ffi.gc(table, lib.kvp_table_close)

    def __len__(self) -> int:
        return lib.kvp_table_count(self._table)

    def put(self, key: BlockHash, number: int) -> None:
        """Insert or overwrite. Raises CapacityError at capacity."""
        if lib.kvp_table_put(self._table, _whole(key), number) == lib.KVP_FULL:
            raise CapacityError("the index is full: it was made for fewer entries")

    def add(self, keys: bytes, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Insert the keys (32 bytes each, concatenated) that are absent, with a number each.

        Returns:
            For each key whether it was absent. Raises CapacityError, and inserts nothing, unless
            there is room for all of them.
        """
        count = _count(keys)
        if len(numbers) != count:
            raise UsageError(f"{len(numbers)} numbers for {count} keys")
        added = np.empty(count, dtype=np.bool_)
        values = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(numbers, dtype=np.uint64))
        said = ffi.from_buffer("bool[]", added, require_writable=True)
        if lib.kvp_table_add(self._table, keys, values, count, said) == lib.KVP_FULL:
            raise CapacityError("the index is full: it was made for fewer entries")
        return added

    def get(self, key: BlockHash) -> int | None:
        """Return the number of ``key``, or None."""
        number = ffi.new("uint64_t *")
        if lib.kvp_table_get(self._table, _whole(key), number) == lib.KVP_MISS:
            return None
        return number[0]

    def remove(self, key: BlockHash) -> bool:
        """Forget ``key``. Returns False if it was not there."""
        return lib.kvp_table_remove(self._table, _whole(key), 1, ffi.NULL) == 1

    def drop(self, keys: bytes) -> bytes:
        """Forget those of the keys (32 bytes each, concatenated) that are there; return them."""
        start, count, at = ffi.from_buffer("uint8_t[]", keys), _count(keys), 0
        dropped = bytearray()
        while at < count:
            gone = lib.kvp_table_remove(self._table, start + at * HASH_BYTES, count - at, ffi.NULL)
            dropped += keys[at * HASH_BYTES : (at + gone) * HASH_BYTES]
            at += gone + 1  # and past the one that is not there
        return bytes(dropped)

    def take(self, keys: bytes) -> NDArray[np.uint64]:
        """Forget the leading keys that are there; return their numbers."""
        found = np.empty(_count(keys), dtype=np.uint64)
        values = ffi.from_buffer("uint64_t[]", found, require_writable=True)
        count = lib.kvp_table_remove(self._table, keys, len(found), values)
        return found[:count]

    def match(self, keys: bytes) -> int:
        """Count the leading keys (32 bytes each, concatenated) that are there."""
        return lib.kvp_table_match(self._table, keys, _count(keys), ffi.NULL)

    def numbers(self, keys: bytes) -> NDArray[np.uint64]:
        """Return the numbers of the leading keys that are there."""
        found = np.empty(_count(keys), dtype=np.uint64)
        values = ffi.from_buffer("uint64_t[]", found, require_writable=True)
        count = lib.kvp_table_match(self._table, keys, len(found), values)
        return found[:count]

    def find(self, keys: bytes) -> list[int | None]:
        """Return of each key its number, or None if it is not there."""
        start, count = ffi.from_buffer("uint8_t[]", keys), _count(keys)
        values = np.empty(count, dtype=np.uint64)
        numbers = ffi.from_buffer("uint64_t[]", values, require_writable=True)
        found: list[int | None] = []
        while (at := len(found)) < count:
            here = lib.kvp_table_match(
                self._table, start + at * HASH_BYTES, count - at, numbers + at
            )
            found += values[at : at + here].tolist()
            if at + here < count:
                found.append(None)
        return found

    def sweep(self, dead: NDArray[np.bool_]) -> int:
        """Forget every key whose number n is ``dead[n]``. Returns how many. Linear in capacity."""
        said = ffi.from_buffer("bool[]", np.ascontiguousarray(dead))
        return lib.kvp_table_sweep(self._table, said, len(dead))

    def keys(self) -> bytes:
        """Return all keys, concatenated, in no order. Linear in capacity."""
        found = np.empty(len(self) * HASH_BYTES, dtype=np.uint8)
        hashes = ffi.from_buffer("uint8_t[]", found, require_writable=True)
        lib.kvp_table_list(self._table, hashes, len(self))
        return found.tobytes()


def _whole(key: bytes) -> bytes:
    if len(key) != HASH_BYTES:
        raise UsageError(f"a key of {len(key)} bytes: it has {HASH_BYTES}")
    return key


def _count(keys: bytes) -> int:
    count, rest = divmod(len(keys), HASH_BYTES)
    if rest:
        raise UsageError(f"{len(keys)} bytes are not whole keys of {HASH_BYTES}")
    return count
