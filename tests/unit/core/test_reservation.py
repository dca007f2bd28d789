from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.block import new_incarnation
from kvpool.errors import ClosedError, TransferTimeoutError, UsageError
from kvpool.memory import Crcs, copy_blocks
from kvpool.reservation import Reservation
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, read, view_of, write
from kvpool.tiers.dram import DramTier

SLOTS = 4
BLOCKS = payload(SMALL_LAYOUT, 8, seed=1)


@pytest.fixture
def tier() -> Iterator[DramTier]:
    with DramTier(Arena(SMALL_LAYOUT, SLOTS, new_incarnation())) as tier:
        yield tier


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def fill(reservation: Reservation) -> Crcs:
    begin = reservation.begin
    source = view_of(SMALL_LAYOUT, BLOCKS).take(begin, begin + len(reservation.view))
    return copy_blocks(reservation.view, source)


def states(tier: DramTier) -> tuple[int, int, int, int, int]:
    stats = tier.stats()
    return stats.free, stats.reserved, stats.ready, stats.quarantined, stats.pins


def test_all_blocks_are_published(tier: DramTier) -> None:
    reservation = Reservation(tier, keys(0, 1, 2), None)
    assert (reservation.begin, len(reservation.view)) == (0, 3)
    assert states(tier) == (1, 3, 0, 0, 0)
    result = reservation.finish(fill(reservation))
    assert (result.stored, result.new, result.refused) == (3, 3, "")
    slots = tier.pin(keys(0, 1, 2))
    np.testing.assert_array_equal(read(tier, slots), BLOCKS[:3])
    assert tier.stats().misses == 0


def test_what_is_there_is_held_and_not_asked_for(tier: DramTier) -> None:
    write(tier, key(0), BLOCKS[:1])
    write(tier, key(1), BLOCKS[1:2], key(0))
    reservation = Reservation(tier, keys(0, 1, 2), None)
    assert (reservation.begin, len(reservation.view)) == (2, 1)
    assert tier.stats().pins == 2
    result = reservation.finish(fill(reservation))
    assert (result.stored, result.new) == (3, 1)
    assert tier.stats().pins == 0


def test_parents_follow_the_chain(tier: DramTier) -> None:
    reservation = Reservation(tier, keys(1, 2), key(0))
    reservation.finish(fill(reservation))
    write(tier, key(0), BLOCKS[:1])
    tier.evict(2)
    assert tier.match(keys(0, 1)) == 1


def test_a_short_write_publishes_the_leading_blocks(tier: DramTier) -> None:
    reservation = Reservation(tier, keys(0, 1, 2), None)
    result = reservation.finish(fill(reservation)[:1])
    assert (result.stored, result.new) == (1, 1)
    assert result.refused == "1 of 3 blocks were written"
    assert states(tier) == (3, 0, 1, 0, 0)


def test_less_room_than_blocks_says_why(tier: DramTier) -> None:
    taken = tier.reserve()
    reservation = Reservation(tier, keys(*range(6)), None)
    assert len(reservation.view) == SLOTS - 1
    result = reservation.finish(fill(reservation))
    assert (result.stored, result.new) == (3, 3)
    assert "every slot is" in result.refused
    tier.abort(taken)


def test_a_block_behind_a_hole_is_not_new(tier: DramTier) -> None:
    write(tier, key(1), BLOCKS[1:2], key(0))
    reservation = Reservation(tier, keys(0, 1, 2), None)
    assert reservation.begin == 0
    result = reservation.finish(fill(reservation))
    assert (result.stored, result.new, result.refused) == (3, 2, "")


def test_abandon_quarantines_until_settle(tier: DramTier) -> None:
    write(tier, key(0), BLOCKS[:1])
    reservation = Reservation(tier, keys(0, 1, 2), None)
    assert reservation.abandon()
    assert not reservation.abandon()
    assert states(tier) == (1, 0, 1, 2, 0)
    with pytest.raises(TransferTimeoutError):
        reservation.finish(fill(reservation))
    assert states(tier) == (1, 0, 1, 2, 0)
    reservation.settle()
    reservation.settle()
    assert states(tier) == (3, 0, 1, 0, 0)


def test_settle_without_an_end_gives_everything_back(tier: DramTier) -> None:
    reservation = Reservation(tier, keys(0, 1), None)
    reservation.settle()
    assert states(tier) == (SLOTS, 0, 0, 0, 0)
    assert not reservation.abandon()


def test_after_its_end_nothing_can_be_taken_back(tier: DramTier) -> None:
    reservation = Reservation(tier, keys(0), None)
    reservation.finish(fill(reservation))
    assert not reservation.abandon()
    reservation.settle()
    assert states(tier) == (SLOTS - 1, 0, 1, 0, 0)


def test_checksums_that_do_not_fit_are_refused(tier: DramTier) -> None:
    reservation = Reservation(tier, keys(0), None)
    crcs = fill(reservation)
    for wrong in (np.concatenate([crcs, crcs]), crcs[:, :1], crcs.view(np.int32)):
        with pytest.raises(UsageError):
            reservation.finish(wrong)  # type: ignore[arg-type]  # the last has another dtype
    assert states(tier) == (SLOTS - 1, 1, 0, 0, 0)
    assert reservation.finish(crcs).stored == 1


def test_blocks_that_the_tier_refuses_leave_nothing_behind(tier: DramTier) -> None:
    reservation = Reservation(tier, keys(0, 0, 1), None)  # a block that is its own parent
    with pytest.raises(UsageError, match="own parent"):
        reservation.finish(fill(reservation)[:2])
    assert states(tier) == (SLOTS, 0, 0, 0, 0)
    reservation.settle()
    assert states(tier) == (SLOTS, 0, 0, 0, 0)


def test_hashes_that_are_not_whole_are_refused(tier: DramTier) -> None:
    with pytest.raises(UsageError):
        Reservation(tier, keys(0)[:-1], None)


def test_a_closed_tier_is_no_trap(tier: DramTier) -> None:
    late = Reservation(tier, keys(0), None)
    crcs = fill(late)
    tier.close()
    with pytest.raises(ClosedError):
        late.finish(crcs)
    late.settle()
    with pytest.raises(ClosedError):
        Reservation(tier, keys(1), None)
