"""The lease table against a list: what is pinned is given back exactly once, and no quota is passed."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.errors import CapacityError, LeaseExpiredError
from kvpool.tiers.lease import LeaseId, LeaseTable

CLIENTS = [b"a", b"b", b"c"]
BYTES_MAX = 10
COUNT_MAX = 6
picks = st.integers(0, 63)


@dataclass(eq=False)
class ModelLease:
    lease: LeaseId
    client: bytes
    name: int
    size_bytes: int
    ends_at: float
    users: int = 0
    over: bool = False
    freed: bool = False


class LeaseTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table: LeaseTable[int] = LeaseTable(
            client_bytes_max=BYTES_MAX, seconds_max=100, lease_count_max=COUNT_MAX
        )
        self.leases: list[ModelLease] = []
        self.now = 0.0

    def held(self) -> list[ModelLease]:
        return [lease for lease in self.leases if not lease.freed]

    def finish(self, leases: list[ModelLease]) -> set[int]:
        """End leases in the model; return the names that this frees."""
        names: set[int] = set()
        for lease in leases:
            lease.over = True
            if lease.users == 0 and not lease.freed:
                lease.freed = True
                names.add(lease.name)
        return names

    def check(self, freed: list[int], expected: set[int]) -> None:
        assert len(freed) == len(set(freed))
        assert set(freed) == expected

    @rule(client=st.sampled_from(CLIENTS), size=st.integers(0, 6), seconds=st.integers(1, 20))
    def grant(self, client: bytes, size: int, seconds: int) -> None:
        name = len(self.leases)
        mine = sum(lease.size_bytes for lease in self.held() if lease.client == client)
        fits = mine + size <= BYTES_MAX and len(self.held()) < COUNT_MAX
        try:
            lease = self.table.grant(client, name, size, seconds, self.now)
        except CapacityError:
            assert not fits
            return
        assert fits
        self.leases.append(ModelLease(lease, client, name, size, self.now + seconds))

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def begin(self, pick: int) -> None:
        lease = self.leases[pick % len(self.leases)]
        if lease.over or lease.ends_at <= self.now:
            with pytest.raises(LeaseExpiredError):
                self.table.begin(lease.lease, self.now)
        else:
            assert self.table.begin(lease.lease, self.now) == lease.name
            lease.users += 1

    @precondition(lambda self: any(lease.users for lease in self.leases))
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        busy = [lease for lease in self.leases if lease.users]
        lease = busy[pick % len(busy)]
        lease.users -= 1
        self.check(self.table.end(lease.lease), self.finish([lease]) if lease.over else set())

    @precondition(lambda self: self.leases)
    @rule(pick=picks, client=st.sampled_from(CLIENTS))
    def release(self, pick: int, client: bytes) -> None:
        lease = self.leases[pick % len(self.leases)]
        mine = [lease] if lease.client == client else []
        self.check(self.table.release(lease.lease, client), self.finish(mine))

    @rule(client=st.sampled_from(CLIENTS))
    def drop_client(self, client: bytes) -> None:
        mine = [lease for lease in self.held() if lease.client == client]
        self.check(self.table.drop_client(client), self.finish(mine))

    @rule(seconds=st.integers(0, 15))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        ended = [lease for lease in self.held() if lease.ends_at <= self.now]
        self.check(self.table.expire(self.now), self.finish(ended))

    @rule()
    def clear(self) -> None:
        self.check(self.table.clear(), self.finish(self.held()))

    @invariant()
    def counts_the_same(self) -> None:
        assert len(self.table) == len(self.held())
        assert self.table.size_bytes == sum(lease.size_bytes for lease in self.held())


TestLeaseTableMachine = LeaseTableMachine.TestCase
TestLeaseTableMachine.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
