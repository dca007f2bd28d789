import math

import pytest

from kvpool.errors import CapacityError, LeaseExpiredError, UsageError
from kvpool.tiers.lease import LeaseId, LeaseTable

ALICE, BOB = b"alice", b"bob"


@pytest.fixture
def table() -> LeaseTable[str]:
    return LeaseTable(client_bytes_max=100, seconds_max=60, lease_count_max=4)


def test_a_lease_holds_until_it_is_released_once(table: LeaseTable[str]) -> None:
    lease = table.grant(ALICE, "slots", 40, 10, now=0)
    assert (len(table), table.size_bytes) == (1, 40)
    assert table.release(lease, ALICE) == ["slots"]
    assert table.release(lease, ALICE) == []
    assert (len(table), table.size_bytes) == (0, 0)


def test_ids_are_never_used_again(table: LeaseTable[str]) -> None:
    first = table.grant(ALICE, "a", 0, 10, now=0)
    table.release(first, ALICE)
    assert table.grant(ALICE, "b", 0, 10, now=0) != first


def test_leases_expire_at_their_time_in_order(table: LeaseTable[str]) -> None:
    table.grant(ALICE, "long", 1, 20, now=0)
    table.grant(BOB, "short", 1, 5, now=0)
    assert table.expire(now=4.9) == []
    assert table.expire(now=5) == ["short"]
    assert table.expire(now=100) == ["long"]
    assert table.expire(now=200) == []


def test_a_released_lease_does_not_expire_again(table: LeaseTable[str]) -> None:
    lease = table.grant(ALICE, "a", 1, 5, now=0)
    assert table.release(lease, ALICE) == ["a"]
    assert table.expire(now=10) == []


def test_a_lease_that_ran_out_cannot_be_begun_even_before_it_is_collected(
    table: LeaseTable[str],
) -> None:
    lease = table.grant(ALICE, "a", 1, 5, now=0)
    with pytest.raises(LeaseExpiredError):
        table.begin(lease, now=5)
    with pytest.raises(LeaseExpiredError):
        table.begin(LeaseId(12345), now=0)


def test_a_read_keeps_what_it_reads(table: LeaseTable[str]) -> None:
    lease = table.grant(ALICE, "a", 60, 5, now=0)
    assert table.begin(lease, now=1) == "a"
    assert table.begin(lease, now=1) == "a"
    assert table.expire(now=10) == []
    assert table.release(lease, ALICE) == []
    with pytest.raises(LeaseExpiredError):
        table.begin(lease, now=1)
    with pytest.raises(CapacityError):  # what is read still counts against the quota
        table.grant(ALICE, "b", 60, 5, now=10)
    assert table.end(lease) == []
    assert table.end(lease) == ["a"]
    assert len(table) == 0


def test_a_read_that_ends_first_frees_nothing(table: LeaseTable[str]) -> None:
    lease = table.grant(ALICE, "a", 1, 5, now=0)
    table.begin(lease, now=1)
    assert table.end(lease) == []
    assert table.release(lease, ALICE) == ["a"]


def test_quota_is_per_client(table: LeaseTable[str]) -> None:
    first = table.grant(ALICE, "a", 70, 5, now=0)
    with pytest.raises(CapacityError, match="70 of 100") as refused:
        table.grant(ALICE, "b", 31, 5, now=0)
    assert refused.value.size_bytes == 31
    table.grant(ALICE, "c", 30, 5, now=0)
    table.grant(BOB, "d", 100, 5, now=0)
    table.release(first, ALICE)
    table.grant(ALICE, "e", 70, 5, now=0)
    assert len(table) == 3


def test_the_number_of_leases_is_limited(table: LeaseTable[str]) -> None:
    for number in range(4):
        table.grant(str(number).encode(), "a", 0, 5, now=0)
    with pytest.raises(CapacityError, match="4 leases"):
        table.grant(BOB, "b", 0, 5, now=0)


@pytest.mark.parametrize("seconds", [0, -1, 61, math.nan, math.inf])
def test_a_time_outside_the_limits_is_refused(table: LeaseTable[str], seconds: float) -> None:
    with pytest.raises(UsageError):
        table.grant(ALICE, "a", 1, seconds, now=0)
    assert len(table) == 0


def test_another_clients_lease_is_left_alone(table: LeaseTable[str]) -> None:
    lease = table.grant(ALICE, "a", 1, 5, now=0)
    assert table.release(lease, BOB) == []
    assert table.client(lease) == ALICE
    assert table.begin(lease, now=1) == "a"


def test_a_lost_client_loses_its_leases_only(table: LeaseTable[str]) -> None:
    read = table.grant(ALICE, "a", 1, 5, now=0)
    table.grant(ALICE, "b", 1, 5, now=0)
    table.grant(BOB, "c", 1, 5, now=0)
    table.begin(read, now=1)
    assert table.drop_client(ALICE) == ["b"]
    assert table.drop_client(ALICE) == []
    assert table.end(read) == ["a"]
    assert table.clear() == ["c"]
    assert (len(table), table.size_bytes) == (0, 0)


def test_leases_that_come_and_go_leave_nothing_behind(table: LeaseTable[str]) -> None:
    for _ in range(2000):
        table.release(table.grant(ALICE, "a", 1, 50, now=0), ALICE)
    assert len(table._ends) < 100
