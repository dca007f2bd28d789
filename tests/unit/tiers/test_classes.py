"""Size classes: chunks go where blocks are used, and a chunk in use stays where it is."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.block import BlockLayout, new_incarnation
from kvpool.errors import CapacityError, ClosedError, ConfigError, UsageError
from kvpool.events import BlocksEvicted, ListSink
from kvpool.memory import copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, read, view_of, write
from kvpool.tiers.classes import ChunkMemory, ClassTier

SMALL = SMALL_LAYOUT  # one page a slot
LARGE = BlockLayout(num_layers=3, kv_heads=4, block_tokens=16, k_dim=8, v_dim=8)  # three pages
CHUNK_BYTES = 6 * 4096
CHUNKS = 4


@pytest.fixture
def memory() -> Iterator[ChunkMemory]:
    memory = ChunkMemory(CHUNK_BYTES, CHUNKS, new_incarnation())
    yield memory
    memory.close()


def put(tier: ClassTier, *numbers: int) -> None:
    for number in numbers:
        assert write(tier, key(number), payload(tier.layout, 1, number))


def here(tier: ClassTier, *numbers: int) -> list[int]:
    return [number for number in numbers if tier.match(key(number))]


def test_a_class_grows_over_what_is_nobodys(memory: ChunkMemory) -> None:
    with ClassTier(memory, SMALL) as small, ClassTier(memory, LARGE) as large:
        assert (small.stats().slots, large.stats().slots) == (6, 2)
        put(small, *range(18))
        assert (small.stats().slots, small.stats().evictions) == (18, 0)
        put(small, 18)
        assert (small.stats().slots, small.stats().evictions) == (18, 1)
        assert (large.stats().slots, large.stats().free) == (2, 2)


def test_memory_follows_use(memory: ChunkMemory) -> None:
    events = ListSink()
    with ClassTier(memory, SMALL, events=events) as small, ClassTier(memory, LARGE) as large:
        put(small, *range(18))
        put(large, *range(6))
        assert large.stats().evictions == 0
        assert (small.stats().slots, large.stats().slots) == (6, 6)
        assert small.stats().evictions == 12
        for number in here(small, *range(18)):
            slots = small.pin(key(number))
            np.testing.assert_array_equal(read(small, slots), payload(SMALL, 1, number))
            small.unpin(slots)
        put(small, *range(100, 118))  # and back, as the large blocks get no use
        assert (small.stats().slots, large.stats().slots) == (18, 2)
        gone = [event for event in events.events if isinstance(event, BlocksEvicted)]
        assert sum(event.blocks for event in gone) == small.stats().evictions


def test_a_class_that_is_used_keeps_what_it_has(memory: ChunkMemory) -> None:
    with ClassTier(memory, SMALL) as small, ClassTier(memory, LARGE) as large:
        put(small, *range(18))
        for number in range(20):
            put(large, number)
            for other in here(small, *range(18)):
                small.unpin(small.pin(key(other)))
        assert (small.stats().slots, large.stats().slots) == (18, 2)
        assert small.stats().evictions == 0


def test_a_chunk_in_use_stays(memory: ChunkMemory) -> None:
    with ClassTier(memory, SMALL) as small, ClassTier(memory, LARGE) as large:
        put(small, *range(18))
        pinned = [small.pin(key(number)) for number in range(18)]
        put(large, *range(3))
        assert (small.stats().slots, large.stats().slots) == (18, 2)
        for slots in pinned:
            small.grant(slots[0])
            small.unpin(slots)
        put(large, *range(10, 13))
        assert large.stats().slots == 2
        for slots in pinned:
            small.settle(slots[0])
        put(large, *range(20, 26))
        assert large.stats().slots == 6


def test_blocks_that_descend_from_a_chunks_go_with_it_unless_one_is_pinned(
    memory: ChunkMemory,
) -> None:
    with ClassTier(memory, SMALL) as small, ClassTier(memory, LARGE) as large:
        for number in range(18):  # one chain over three chunks
            parent = key(number - 1) if number else None
            write(small, key(number), payload(SMALL, 1, number), parent)
        last = small.pin(key(17))
        put(large, *range(3))
        assert (small.stats().slots, large.stats().slots) == (18, 2)
        small.unpin(last)
        put(large, *range(10, 16))
        stats = small.stats()
        assert stats.slots == 6
        # A whole chain left from its end: nothing is here without what it descends from.
        assert here(small, *range(18)) == list(range(stats.ready))


def test_everything_pinned_is_refused_and_the_counts_come_back(memory: ChunkMemory) -> None:
    with ClassTier(memory, SMALL) as small, ClassTier(memory, LARGE) as large:
        put(small, *range(18))
        put(large, 0, 1)
        held = [small.pin(key(number)) for number in range(18)]
        held_large = [large.pin(key(number)) for number in range(2)]
        with pytest.raises(CapacityError):
            large.reserve()
        with pytest.raises(CapacityError):
            small.reserve()
        for slots in held:
            small.unpin(slots)
        for slots in held_large:
            large.unpin(slots)
        small.evict(100)
        large.evict(100)
        for tier in (small, large):
            stats = tier.stats()
            assert (stats.free, stats.reserved, stats.pins) == (stats.slots, 0, 0)


def test_a_closed_class_leaves_its_chunks_to_the_others(memory: ChunkMemory) -> None:
    large = ClassTier(memory, LARGE)
    with ClassTier(memory, SMALL) as small:
        put(large, *range(6))
        large.close()
        put(small, *range(24))
        assert (small.stats().slots, small.stats().evictions) == (24, 0)
    with pytest.raises(ClosedError):
        large.reserve()


def test_a_chunk_that_somebody_still_reads_is_not_used_again(memory: ChunkMemory) -> None:
    large = ClassTier(memory, LARGE)
    with ClassTier(memory, SMALL) as small:
        put(large, 0)
        slots = large.pin(key(0))
        view = large.view(slots, writable=False)
        want = read(large, slots)
        large.close()
        put(small, *range(40))
        assert small.stats().slots == 18
        out = np.zeros_like(want)
        copy_blocks(view_of(LARGE, out), view)
        np.testing.assert_array_equal(out, want)


def test_what_does_not_fit_is_refused(memory: ChunkMemory) -> None:
    huge = BlockLayout(num_layers=30, kv_heads=4, block_tokens=16, k_dim=8, v_dim=8)
    with pytest.raises(ConfigError, match="do not hold a block"):
        ClassTier(memory, huge)
    with pytest.raises(UsageError, match="whole pages"):
        ChunkMemory(5000, 2, new_incarnation())
    tiers = [ClassTier(memory, SMALL) for _ in range(CHUNKS)]
    with pytest.raises(ConfigError, match="each size"):
        ClassTier(memory, LARGE)
    for tier in tiers:
        tier.close()
