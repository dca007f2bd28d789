"""Leases: who may read which blocks until when. Pure: no clock, thread or lock.

Owns the table of leases and the byte quota of each client. Never pins: its caller pins blocks before
a grant and unpins the ones that a call here returns as freed. Who calls it: the pool, under its own
lock.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Generic, NewType, TypeVar

from kvpool.errors import CapacityError, LeaseExpiredError, UsageError

LeaseId = NewType("LeaseId", int)
ClientId = bytes
Held = TypeVar("Held")


@dataclass(slots=True)
class _Lease(Generic[Held]):
    client: ClientId
    held: Held
    size_bytes: int
    ends_at: float
    users: int = 0  # reads under way: what is held is freed after the last one
    over: bool = False


class LeaseTable(Generic[Held]):
    """Leases of many clients on anything that is pinned. Not thread-safe.

    A lease that is released, or runs out, while a read is under way (``begin`` without ``end``)
    can no longer be begun, and is freed by that read's ``end``. What a call frees is returned
    exactly once, so that every pin is given back exactly once.

    Args:
        client_bytes_max: Bytes that one client may hold leased at once.
        seconds_max: Longest lease that is granted.
        lease_count_max: Leases over all clients.
    """

    def __init__(
        self, *, client_bytes_max: int, seconds_max: float, lease_count_max: int = 1 << 16
    ) -> None:
        self._client_bytes_max = client_bytes_max
        self._seconds_max = seconds_max
        self._lease_count_max = lease_count_max
        self._leases: dict[LeaseId, _Lease[Held]] = {}
        self._by_client: dict[ClientId, set[LeaseId]] = {}
        self._client_bytes: dict[ClientId, int] = {}
        self._ends: list[tuple[float, LeaseId]] = []
        self._last_id = 0

    def __len__(self) -> int:
        """Return how many leases hold something, those included that are over but still read."""
        return len(self._leases)

    @property
    def size_bytes(self) -> int:
        """Bytes held by all clients."""
        return sum(self._client_bytes.values())

    def bytes_of(self, client: ClientId) -> int:
        """Return the bytes that one client holds."""
        return self._client_bytes.get(client, 0)

    def grant(
        self, client: ClientId, held: Held, size_bytes: int, seconds: float, now: float
    ) -> LeaseId:
        """Enter a lease on what the caller has pinned. The caller unpins it if this raises.

        Raises:
            UsageError: ``seconds`` is not within 0 (exclusive) and ``seconds_max``.
            CapacityError: Over the client's byte quota, or too many leases. No state changed.
        """
        if not (math.isfinite(seconds) and 0 < seconds <= self._seconds_max):
            raise UsageError(
                f"a lease of {seconds} s: ask for more than 0 and at most {self._seconds_max} s"
            )
        used = self._client_bytes.get(client, 0)
        if used + size_bytes > self._client_bytes_max:
            raise CapacityError(
                f"the client holds {used} of {self._client_bytes_max} leased bytes, {size_bytes} "
                "more do not fit: close leases first",
                size_bytes=size_bytes,
            )
        if len(self._leases) >= self._lease_count_max:
            raise CapacityError(f"{self._lease_count_max} leases are out: close some first")
        self._last_id += 1
        lease = LeaseId(self._last_id)
        self._leases[lease] = _Lease(client, held, size_bytes, now + seconds)
        self._by_client.setdefault(client, set()).add(lease)
        self._client_bytes[client] = used + size_bytes
        heapq.heappush(self._ends, (now + seconds, lease))
        return lease

    def begin(self, lease: LeaseId, now: float) -> Held:
        """Start a read: what is held stays held until ``end``, even if the lease ends before.

        Raises:
            LeaseExpiredError: It was released, ran out, or never was.
        """
        entry = self._leases.get(lease)
        if entry is None or entry.over or entry.ends_at <= now:
            raise LeaseExpiredError("the lease is closed or has run out: match and lease again")
        entry.users += 1
        return entry.held

    def end(self, lease: LeaseId) -> list[Held]:
        """End a read. Returns what that frees: the lease's, if it was over meanwhile."""
        entry = self._leases[lease]
        entry.users -= 1
        return self._free(lease) if entry.over and entry.users == 0 else []

    def client(self, lease: LeaseId) -> ClientId:
        """Return whose lease it is. For a lease that a read has begun on."""
        return self._leases[lease].client

    def release(self, lease: LeaseId, client: ClientId) -> list[Held]:
        """End a lease early. Returns what that frees. Idempotent; another client's is left alone."""
        entry = self._leases.get(lease)
        return self._finish(lease) if entry is not None and entry.client == client else []

    def expire(self, now: float) -> list[Held]:
        """End every lease that has run out. Returns what that frees."""
        freed: list[Held] = []
        while self._ends and self._ends[0][0] <= now:
            freed += self._finish(heapq.heappop(self._ends)[1])
        return freed

    def drop_client(self, client: ClientId) -> list[Held]:
        """End every lease of a client. Returns what that frees."""
        freed: list[Held] = []
        for lease in sorted(self._by_client.get(client, ())):
            freed += self._finish(lease)
        return freed

    def clear(self) -> list[Held]:
        """End every lease. Returns what that frees."""
        freed: list[Held] = []
        for client in list(self._by_client):
            freed += self.drop_client(client)
        return freed

    def _finish(self, lease: LeaseId) -> list[Held]:
        entry = self._leases.get(lease)
        if entry is None:
            return []
        entry.over = True
        return self._free(lease) if entry.users == 0 else []

    def _free(self, lease: LeaseId) -> list[Held]:
        entry = self._leases.pop(lease)
        mine = self._by_client[entry.client]
        mine.remove(lease)
        if mine:
            self._client_bytes[entry.client] -= entry.size_bytes
        else:
            del self._by_client[entry.client], self._client_bytes[entry.client]
        if len(self._ends) > 2 * len(self._leases) + 64:  # mostly ends of leases that are gone
            self._ends = [end for end in self._ends if end[1] in self._leases]
            heapq.heapify(self._ends)
        return [entry.held]
