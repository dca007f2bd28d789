"""Whose a block is, and how much of the pool each tenant has.

Pure: no clock, socket or thread. Owns one table from block hash to tenant, for the blocks that were
stored in this run of the server; what an SSD tier kept from before belongs to nobody until a tenant
who can name it stores it again, and its name is salted. Blocks that left the tiers are found out by
sweeping, a bounded piece at a time: until then they count. Who calls it: the service, in its loop.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from kvpool.block import HASH_BYTES, BlockHash
from kvpool.errors import CapacityError
from kvpool.index.prefix import PrefixIndex
from kvpool.server.tenant import Tenant

# Names looked at in one piece of a sweep: some 20 ms.
SWEEP_NAMES: Final = 8192


class TenantLedger:
    """Blocks by tenant. Not thread-safe: used in the server's loop alone.

    Args:
        capacity: Names that it has room for: at least the slots of all tiers.
        block_bytes: Of one block.
        present: Says whether a block is in a tier, as a count of leading hashes.
    """

    def __init__(self, capacity: int, block_bytes: int, present: Callable[[bytes], int]) -> None:
        self._names = PrefixIndex(capacity)
        self._capacity = capacity
        self._block_bytes = block_bytes
        self._present = present
        self._numbers: dict[str, int] = {}
        self._counts: Counter[int] = Counter()
        self._sweeping = b""

    def used_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's blocks, those included that left since the last sweep."""
        return self._counts[self._number(tenant)] * self._block_bytes

    def visible(self, tenant: Tenant, hashes: bytes) -> int:
        """Count the leading hashes that are no other tenant's."""
        own, at, count = self._number(tenant.name), 0, len(hashes) // HASH_BYTES
        while at < count:
            numbers = self._names.numbers(hashes[at * HASH_BYTES :])
            others = np.flatnonzero(numbers != own)
            if len(others):
                return at + int(others[0])
            at += len(numbers) + 1  # the one behind them is nobody's
        return min(at, count)

    def require_room(self, tenant: Tenant, hashes: bytes) -> None:
        """Raise CapacityError if a tenant may not have these blocks besides those that it has."""
        limit = tenant.store_bytes_max
        if limit is None:
            return
        used, new = self._after(tenant, hashes)
        if used + new > limit:
            self.sweep(SWEEP_NAMES)
            used, new = self._after(tenant, hashes)
        if used + new <= limit:
            return
        raise CapacityError(
            f"tenant {tenant.name} has {used} of {limit} bytes in this server, {new} more were to "
            "be stored: store less, or have store_bytes_max raised",
            size_bytes=new,
        )

    def _after(self, tenant: Tenant, hashes: bytes) -> tuple[int, int]:
        """Return what a tenant has, and what these blocks would add, in bytes."""
        held = sum(self._names.get(name) is not None for name in _each(hashes))
        new = (len(hashes) // HASH_BYTES - held) * self._block_bytes
        return self.used_bytes(tenant.name), new

    def stored(self, tenant: Tenant, hashes: bytes) -> None:
        """Take note that blocks are here now, and whose they are if they were nobody's."""
        count = len(hashes) // HASH_BYTES
        if len(self._names) + count > self._capacity:
            self.sweep(self._capacity)  # blocks leave the tiers before names outnumber their slots
        room = self._capacity - len(self._names)
        if count > room:
            return  # those beyond the room stay nobody's: their names are salted still
        own = self._number(tenant.name)
        added = self._names.add(hashes, np.full(count, own, dtype=np.uint64))
        self._counts[own] += int(added.sum())

    def sweep(self, limit: int) -> int:
        """Forget blocks that left the tiers, among the next ``limit`` names; return how many."""
        if not self._sweeping:
            self._sweeping = self._names.keys()
        piece = self._sweeping[: limit * HASH_BYTES]
        self._sweeping = self._sweeping[limit * HASH_BYTES :]
        gone = 0
        for name in _each(piece):
            if self._present(name):
                continue
            number = self._names.get(name)
            if number is not None and self._names.remove(name):
                self._counts[number] -= 1
                gone += 1
        return gone

    def _number(self, tenant: str) -> int:
        return self._numbers.setdefault(tenant, len(self._numbers))


def _each(hashes: bytes) -> list[BlockHash]:
    return [BlockHash(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]
