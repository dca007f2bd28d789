"""Whose a block is, and how much of the pool each tenant has.

Pure: no clock, socket or thread. Owns one table from block hash to tenant, for the blocks that were
stored in this run of the server; what an SSD tier kept from before belongs to nobody until a tenant
who can name it stores it again, and its name is salted. Blocks that left the tiers are found out by
sweeping, a bounded piece at a time: until then they count. Who calls it: ``tenancy``, in the server's
loop; ``absent`` alone runs on a thread.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from kvpool.block import HASH_BYTES, BlockHash
from kvpool.errors import CapacityError, UsageError
from kvpool.index.prefix import PrefixIndex
from kvpool.server.tenant import Tenant

# Names looked at in one piece of a sweep: some 20 ms of a thread.
SWEEP_NAMES: Final = 8192
# Names looked at in the server's loop at once: some 2 ms.
LOOP_NAMES: Final = 1024
# Names of one call: some 0.2 s of the loop if none of them is known. A prompt of a million tokens.
CALL_NAMES_MAX: Final = 1 << 16
# Names that are copied to look at the leading ones: what is unknown costs one copy each.
_LOOK_NAMES: Final = 64


class TenantLedger:
    """Blocks by tenant. Not thread-safe: used in the server's loop alone.

    Args:
        capacity: Names that it has room for: at least the slots of all tiers.
        block_bytes: Of one block.
        present: Says whether a block is in a tier, as a count of leading hashes. From any thread.

    Attributes:
        capacity: As given.
    """

    def __init__(self, capacity: int, block_bytes: int, present: Callable[[bytes], int]) -> None:
        self._names = PrefixIndex(capacity)
        self.capacity = capacity
        self._block_bytes = block_bytes
        self._present = present
        self._numbers: dict[str, int] = {}
        self._counts: Counter[int] = Counter()
        self._coming: Counter[int] = Counter()  # blocks of stores under way
        self._sweeping = b""

    def used_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's blocks, those included that left since the last sweep."""
        return self._counts[self._number(tenant)] * self._block_bytes

    def visible(self, tenant: Tenant, hashes: bytes) -> int:
        """Count the leading hashes that are no other tenant's.

        Raises UsageError: there are more than ``CALL_NAMES_MAX``.
        """
        own, at, count = self._number(tenant.name), 0, len(hashes) // HASH_BYTES
        if count > CALL_NAMES_MAX:
            raise UsageError(f"{count} blocks in one call: name {CALL_NAMES_MAX} at most")
        while at < count:
            numbers = self._names.numbers(hashes[at * HASH_BYTES : (at + _LOOK_NAMES) * HASH_BYTES])
            others = np.flatnonzero(numbers != own)
            if len(others):
                return at + int(others[0])
            at += len(numbers)
            if len(numbers) < _LOOK_NAMES:
                at += 1  # the one behind them is nobody's
        return min(at, count)

    def take_room(self, tenant: Tenant, hashes: bytes) -> int:
        """Count these blocks as coming; return how many are new, for ``give_room``.

        Raises:
            CapacityError: The tenant may not have them besides those that it has, or that come.
        """
        limit = tenant.store_bytes_max
        if limit is None:
            return 0
        used, new = self._after(tenant, hashes)
        if used + new > limit:
            self.sweep(LOOP_NAMES)
            used, new = self._after(tenant, hashes)
        if used + new <= limit:
            blocks = new // self._block_bytes
            self._coming[self._number(tenant.name)] += blocks
            return blocks
        raise CapacityError(
            f"tenant {tenant.name} has {used} of {limit} bytes in this server, {new} more were to "
            "be stored: store less, or have store_bytes_max raised",
            size_bytes=new,
        )

    def give_room(self, tenant: Tenant, blocks: int) -> None:
        """Count so many blocks as coming no longer: they are here by now, or will not be."""
        self._coming[self._number(tenant.name)] -= blocks

    def _after(self, tenant: Tenant, hashes: bytes) -> tuple[int, int]:
        """Return what a tenant has or has coming, and what these blocks would add, in bytes."""
        coming = self._coming[self._number(tenant.name)] * self._block_bytes
        return self.used_bytes(tenant.name) + coming, len(self._new(hashes)) * self._block_bytes

    def is_full(self, hashes: bytes) -> bool:
        """Say whether there is no room for these names: a sweep of all of them makes some."""
        return len(self._names) + len(self._new(hashes)) > self.capacity

    def stored(self, tenant: Tenant, hashes: bytes) -> None:
        """Take note that blocks are here now, and whose they are if they were nobody's."""
        new = self._new(hashes)
        if len(self._names) + len(new) > self.capacity:
            return  # those beyond the room stay nobody's: their names are salted still
        own = self._number(tenant.name)
        added = self._names.add(b"".join(new), np.full(len(new), own, dtype=np.uint64))
        self._counts[own] += int(added.sum())

    def sweep(self, limit: int) -> int:
        """Forget blocks that left the tiers, among the next ``limit`` names; return how many."""
        return self.forget(self.absent(self.piece(limit)))

    def piece(self, limit: int) -> bytes:
        """Return the names to look at next, ``limit`` at most; all of them for ``capacity``."""
        if not self._sweeping or limit >= self.capacity:
            self._sweeping = self._names.keys()
        piece = self._sweeping[: limit * HASH_BYTES]
        self._sweeping = self._sweeping[limit * HASH_BYTES :]
        return piece

    def absent(self, names: bytes) -> list[BlockHash]:
        """Return those of the names whose blocks are in no tier. From any thread."""
        return [name for name in _each(names) if not self._present(name)]

    def forget(self, names: list[BlockHash]) -> int:
        """Forget those of the names whose blocks are in no tier now; return how many."""
        gone = 0
        for name in names:
            number = self._names.get(name)
            if number is not None and not self._present(name) and self._names.remove(name):
                self._counts[number] -= 1
                gone += 1
        return gone

    def _new(self, hashes: bytes) -> list[BlockHash]:
        return [name for name in _each(hashes) if self._names.get(name) is None]

    def _number(self, tenant: str) -> int:
        return self._numbers.setdefault(tenant, len(self._numbers))


def _each(hashes: bytes) -> list[BlockHash]:
    return [BlockHash(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]
