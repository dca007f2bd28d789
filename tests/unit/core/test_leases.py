from collections.abc import Iterator

import pytest

from kvpool.arena import Arena, Slot
from kvpool.block import new_incarnation
from kvpool.clock import ManualClock
from kvpool.config import PoolConfig
from kvpool.errors import CapacityError, LeaseExpiredError, UsageError
from kvpool.leases import PoolLeases
from kvpool.memory import Span
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, write
from kvpool.tiers.dram import DramTier

SLOTS = 4
ALICE, BOB = b"alice", b"bob"
CONFIG = PoolConfig(lease_seconds_max=100, lease_bytes_max=3 * SMALL_LAYOUT.block_bytes)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def tier() -> Iterator[DramTier]:
    with DramTier(Arena(SMALL_LAYOUT, SLOTS, new_incarnation())) as tier:
        for number in range(SLOTS):
            write(tier, key(number), payload(SMALL_LAYOUT, 1, seed=number))
        yield tier


@pytest.fixture
def leases(tier: DramTier, clock: ManualClock) -> PoolLeases:
    return PoolLeases(tier, CONFIG, clock)


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def flip_a_byte(tier: DramTier, slot: Slot) -> None:
    view = tier.arena.view([slot])
    address = view.base + slot.index * view.block_stride
    Span(address, SMALL_LAYOUT.block_bytes, view.owner).view()[100] ^= 1


def test_a_lease_pins_what_is_there(tier: DramTier, leases: PoolLeases) -> None:
    lease, slots = leases.grant(ALICE, keys(0, 1, 9), 10)
    assert len(slots) == 2
    assert tier.stats().pins == 2
    counts = leases.counts()
    assert (counts.leases, counts.hits, counts.misses) == (1, 2, 1)
    assert counts.size_bytes == 2 * SMALL_LAYOUT.block_bytes
    leases.count_missing(3)
    leases.release(BOB, lease)
    assert tier.stats().pins == 2
    leases.release(ALICE, lease)
    leases.release(ALICE, lease)
    assert tier.stats().pins == 0
    assert leases.counts().misses == 4


def test_a_refused_lease_pins_nothing(tier: DramTier, leases: PoolLeases) -> None:
    with pytest.raises(CapacityError):
        leases.grant(ALICE, keys(0, 1, 2, 3), 10)
    with pytest.raises(UsageError):
        leases.grant(ALICE, keys(0), 101)
    assert tier.stats().pins == 0
    assert leases.counts().hits == 0


def test_leases_expire_by_the_clock(tier: DramTier, leases: PoolLeases, clock: ManualClock) -> None:
    leases.grant(ALICE, keys(0), 10)
    clock.advance(9.5)
    assert leases.expire() == 0
    clock.advance(0.5)
    assert leases.expire() == 1
    assert tier.stats().pins == 0


def test_a_grant_makes_room_of_what_has_run_out(leases: PoolLeases, clock: ManualClock) -> None:
    leases.grant(ALICE, keys(0, 1, 2), 10)
    clock.advance(10)
    leases.grant(ALICE, keys(0, 1, 2), 10)


def test_a_lost_client_holds_nothing_but_what_is_read(tier: DramTier, leases: PoolLeases) -> None:
    lease, _ = leases.grant(ALICE, keys(0), 10)
    leases.grant(ALICE, keys(1), 10)
    leases.grant(BOB, keys(2), 10)
    with leases.reading(lease) as held:
        assert held.keys == keys(0)
        leases.drop_client(ALICE)
        assert tier.stats().pins == 2
    assert tier.stats().pins == 1
    with pytest.raises(LeaseExpiredError):
        leases.begin(lease)
    leases.clear()
    assert tier.stats().pins == 0


def test_a_reported_block_is_dropped_only_if_it_is_bad_here(
    tier: DramTier, leases: PoolLeases
) -> None:
    lease, slots = leases.grant(ALICE, keys(0, 1, 2), 10)
    assert leases.report_bad(ALICE, lease, [0, 1, 2]) == 0
    flip_a_byte(tier, slots[1])
    assert leases.report_bad(ALICE, lease, [0, 1]) == 1
    assert leases.report_bad(ALICE, lease, [1]) == 0
    assert tier.match(keys(0, 1)) == 1
    assert tier.stats().corruptions == 1
    leases.release(ALICE, lease)
    assert tier.stats().free == 1


def test_a_block_stored_anew_is_not_dropped_for_its_predecessor(
    tier: DramTier, leases: PoolLeases
) -> None:
    lease, slots = leases.grant(ALICE, keys(0), 10)
    flip_a_byte(tier, slots[0])
    assert leases.report_bad(ALICE, lease, [0]) == 1
    write(tier, key(0), payload(SMALL_LAYOUT, 1, seed=0))
    assert leases.report_bad(ALICE, lease, [0]) == 0
    assert tier.match(key(0)) == 1


def test_reports_on_what_is_not_ones_own_are_refused(
    tier: DramTier, leases: PoolLeases, clock: ManualClock
) -> None:
    lease, slots = leases.grant(ALICE, keys(0), 10)
    flip_a_byte(tier, slots[0])
    with pytest.raises(UsageError):
        leases.report_bad(BOB, lease, [0])
    for index in (1, -1):
        with pytest.raises(UsageError):
            leases.report_bad(ALICE, lease, [index])
    clock.advance(10)
    with pytest.raises(LeaseExpiredError):
        leases.report_bad(ALICE, lease, [0])
    assert tier.match(key(0)) == 1
