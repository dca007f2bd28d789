from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvpool.arena import Arena, Slot, Slots, Window
from kvpool.block import BlockHash, SlotIndex, new_incarnation
from kvpool.clock import ManualClock
from kvpool.errors import CapacityError, UsageError
from kvpool.events import BlocksEvicted, ListSink
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, write
from kvpool.tiers.dram import DramTier

SLOTS = 4
NO_CRCS = np.zeros((SMALL_LAYOUT.num_layers, SMALL_LAYOUT.kv_heads), dtype=np.uint32)


@pytest.fixture
def events() -> ListSink:
    return ListSink()


@pytest.fixture
def tier(events: ListSink) -> Iterator[DramTier]:
    arena = Arena(SMALL_LAYOUT, SLOTS, new_incarnation())
    with DramTier(arena, clock=ManualClock(), events=events) as tier:
        yield tier


def put(tier: DramTier, number: int) -> None:
    assert write(tier, key(number), payload(SMALL_LAYOUT, 1, seed=number))


def test_events_tell_why_blocks_left(tier: DramTier, events: ListSink) -> None:
    for number in range(SLOTS + 1):
        put(tier, number)
    tier.evict(1)
    tier.drop(key(2), "corrupt")
    tier.drop(key(3), "invalid")
    tier.drop(key(3), "invalid")
    told = [event for event in events.events if isinstance(event, BlocksEvicted)]
    assert [event.reason for event in told] == ["capacity", "capacity", "corrupt", "invalid"]
    assert {(event.tier, event.blocks, event.size_bytes) for event in told} == {
        ("dram", 1, SMALL_LAYOUT.block_bytes)
    }


def test_blocks_that_leave_together_are_one_event(tier: DramTier, events: ListSink) -> None:
    for number in range(SLOTS):
        put(tier, number)
    slots = tier.reserve_run(2)
    tier.settle_run(slots)
    tier.abort_run(slots)
    assert tier.evict(SLOTS) == SLOTS - 2
    told = [event for event in events.events if isinstance(event, BlocksEvicted)]
    block_bytes = SMALL_LAYOUT.block_bytes
    assert [(event.blocks, event.size_bytes) for event in told] == [
        (2, 2 * block_bytes),
        (SLOTS - 2, (SLOTS - 2) * block_bytes),
    ]


def test_a_refused_reserve_tells_of_what_it_evicted_in_vain(
    tier: DramTier, events: ListSink
) -> None:
    for number in range(SLOTS):
        put(tier, number)
        pinned = tier.pin(key(number))
        tier.grant(pinned[0])
        tier.unpin(pinned)
    with pytest.raises(CapacityError, match="quarantined"):
        tier.reserve()
    told = [event for event in events.events if isinstance(event, BlocksEvicted)]
    assert sum(event.blocks for event in told) == tier.stats().quarantined == SLOTS


def test_an_unknown_reason_is_refused(tier: DramTier) -> None:
    put(tier, 0)
    with pytest.raises(UsageError, match="reason"):
        tier.drop(key(0), "bored")
    assert tier.match(key(0)) == 1


def test_views_are_writable_only_of_reserved_and_readable_only_of_pinned_slots(
    tier: DramTier,
) -> None:
    reserved = tier.reserve()
    assert tier.view([reserved], writable=True).writable
    with pytest.raises(UsageError, match="not pinned"):
        tier.view([reserved], writable=False)
    tier.commit(reserved, key(0), None, NO_CRCS)
    with pytest.raises(UsageError, match="not reserved"):
        tier.view([reserved], writable=True)
    with pytest.raises(UsageError, match="not pinned"):
        tier.view([reserved], writable=False)
    pinned = tier.pin(key(0))
    assert not tier.view(pinned, writable=False).writable
    tier.unpin(pinned)
    with pytest.raises(UsageError, match="not pinned"):
        tier.crcs(pinned)


def test_one_unpin_too_many_is_refused(tier: DramTier) -> None:
    put(tier, 0)
    slots = tier.pin(key(0))
    tier.unpin(slots)
    with pytest.raises(UsageError, match="not pinned"):
        tier.unpin(slots)
    assert tier.stats().pins == 0


def test_settling_what_was_not_granted_is_refused(tier: DramTier) -> None:
    slot = tier.reserve()
    with pytest.raises(UsageError):
        tier.settle(slot)
    with pytest.raises(UsageError):
        tier.grant(Slot(SlotIndex(SLOTS), 1))


def test_a_wrong_commit_changes_nothing(tier: DramTier) -> None:
    slot = tier.reserve()
    with pytest.raises(UsageError):
        tier.commit(slot, BlockHash(b"short"), None, NO_CRCS)
    with pytest.raises(UsageError):
        tier.commit(slot, key(0), key(0), NO_CRCS)
    with pytest.raises(UsageError):
        tier.commit(slot, key(0), None, NO_CRCS[:1])
    assert tier.stats().reserved == 1
    assert tier.commit(slot, key(0), None, NO_CRCS)


def test_keys_that_are_not_whole_are_refused(tier: DramTier) -> None:
    with pytest.raises(UsageError):
        tier.match(b"short")
    with pytest.raises(UsageError):
        tier.pin(b"short")


def test_the_clock_decides_what_is_old() -> None:
    clock = ManualClock()
    arena = Arena(SMALL_LAYOUT, SLOTS, new_incarnation())
    with DramTier(arena, clock=clock) as tier:
        for number in range(SLOTS):
            put(tier, number)
            clock.advance(1)
        tier.unpin(tier.pin(key(0)))
        put(tier, 9)
        assert [tier.match(key(number)) for number in range(SLOTS)] == [1, 0, 1, 1]


def test_peers_see_what_can_be_read_and_nothing_else(tier: DramTier) -> None:
    window = Window(tier.arena.fd, tier.arena.incarnation)

    def seen(slots: Sequence[Slot]) -> int:
        run = Slots.of(slots)
        return window.leading(run.indices, run.generations)

    put(tier, 0)
    pinned = tier.pin(key(0))
    assert seen(pinned) == 1
    second = tier.reserve()
    assert not tier.commit(second, key(0), None, NO_CRCS)
    assert (seen(pinned), seen([second])) == (1, 0)
    assert tier.drop(key(0), "corrupt")
    assert seen(pinned) == 0
    tier.unpin(pinned)
    put(tier, 1)
    pinned = tier.pin(key(1))
    tier.unpin(pinned)
    assert seen(pinned) == 1
    assert tier.evict(1) == 1
    assert seen(pinned) == 0


def test_peers_may_map_the_arena(tier: DramTier) -> None:
    assert tier.arena.fd >= 0
    assert tier.arena.slot_count == SLOTS
