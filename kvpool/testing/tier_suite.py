"""What every tier must do. Subclass ``TierSuite`` once for each implementation and wrapper.

Uses the ``Tier`` contract alone. Payloads go in and out with ``copy_blocks``, so a tier may keep them
in any order of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import pytest

from kvpool.arena import Slot
from kvpool.block import BlockHash, BlockLayout
from kvpool.errors import CapacityError, ClosedError, UsageError
from kvpool.memory import copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, read, view_of, write
from kvpool.tiers.base import BlockTokens, Tier, TierStats

SLOTS: Final = 6


class TierSuite(ABC):
    """The suite. ``layout`` may be set to one that the implementation needs."""

    layout: BlockLayout = SMALL_LAYOUT

    @abstractmethod
    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        """Make an empty tier of ``slot_count`` slots."""

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """Give each test a tier of ``SLOTS`` slots."""
        with self.open_tier(self.layout, SLOTS) as tier:
            yield tier

    # ---- a block's life ---------------------------------------------------------------------------

    def test_a_new_tier_is_empty(self, tier: Tier) -> None:
        assert _states(tier.stats()) == (SLOTS, 0, 0, 0)
        assert tier.match(key(0)) == 0
        assert tier.pin(key(0)) == []

    def test_a_block_reads_as_it_was_written(self, tier: Tier) -> None:
        blocks = payload(self.layout, 3, seed=1)
        for index in range(3):
            assert write(tier, key(index), blocks[index : index + 1])
        slots = tier.pin(_keys(0, 1, 2))
        assert len(slots) == 3
        np.testing.assert_array_equal(read(tier, slots), blocks)
        tier.unpin(slots)

    def test_a_block_is_a_miss_until_its_commit(self, tier: Tier) -> None:
        blocks = payload(self.layout, 1, seed=2)
        slot = tier.reserve()
        crcs = copy_blocks(tier.view([slot], writable=True), view_of(self.layout, blocks))
        assert tier.match(key(0)) == 0
        assert _states(tier.stats()) == (SLOTS - 1, 1, 0, 0)
        assert tier.commit(slot, key(0), None, crcs[0])
        assert tier.match(key(0)) == 1
        assert _states(tier.stats()) == (SLOTS - 1, 0, 1, 0)

    def test_checksums_are_kept(self, tier: Tier) -> None:
        blocks = payload(self.layout, 1, seed=3)
        slot = tier.reserve()
        crcs = copy_blocks(tier.view([slot], writable=True), view_of(self.layout, blocks))
        tier.commit(slot, key(0), None, crcs[0])
        slots = tier.pin(key(0))
        np.testing.assert_array_equal(tier.crcs(slots), crcs)
        tier.unpin(slots)

    def test_a_second_copy_of_a_block_is_dropped(self, tier: Tier) -> None:
        blocks = payload(self.layout, 2, seed=4)
        assert write(tier, key(0), blocks[:1])
        assert not write(tier, key(0), blocks[1:])
        assert _states(tier.stats()) == (SLOTS - 1, 0, 1, 0)
        slots = tier.pin(key(0))
        np.testing.assert_array_equal(read(tier, slots), blocks[:1])
        tier.unpin(slots)

    def test_an_aborted_slot_is_free_again(self, tier: Tier) -> None:
        slot = tier.reserve()
        tier.abort(slot)
        tier.abort(slot)
        assert _states(tier.stats()) == (SLOTS, 0, 0, 0)

    def test_abort_after_commit_keeps_the_block(self, tier: Tier) -> None:
        slot = _put(tier, 0)
        tier.abort(slot)
        assert tier.match(key(0)) == 1
        assert _states(tier.stats()) == (SLOTS - 1, 0, 1, 0)

    def test_commit_needs_a_reserved_slot_in_this_life(self, tier: Tier) -> None:
        crcs = np.zeros((self.layout.num_layers, self.layout.kv_heads), dtype=np.uint32)
        slot = tier.reserve()
        tier.abort(slot)
        with pytest.raises(UsageError):
            tier.commit(slot, key(0), None, crcs)
        committed = _put(tier, 1)
        with pytest.raises(UsageError):
            tier.commit(committed, key(0), None, crcs)
        assert tier.match(key(0)) == 0
        assert _states(tier.stats()) == (SLOTS - 1, 0, 1, 0)

    def test_a_commit_that_does_not_fit_changes_nothing(self, tier: Tier) -> None:
        slot = tier.reserve()
        crcs = np.zeros((self.layout.num_layers, self.layout.kv_heads), dtype=np.uint32)
        for name, parent, sums in (
            (key(0), None, crcs[1:]),
            (key(0), None, np.zeros((2, *crcs.shape), dtype=np.uint32)),
            (BlockHash(key(0)[1:]), None, crcs),
            (key(0), key(0), crcs),
            (key(0), BlockHash(key(1)[1:]), crcs),
        ):
            with pytest.raises(UsageError):
                tier.commit(slot, name, parent, sums)
        assert (tier.stats().reserved, tier.stats().ready, tier.match(key(0))) == (1, 0, 0)
        tier.abort(slot)
        assert tier.stats().free == tier.stats().slots

    def test_every_life_of_a_slot_has_another_generation(self, tier: Tier) -> None:
        seen: set[Slot] = set()
        for _ in range(3 * SLOTS):
            slot = tier.reserve()
            assert slot not in seen
            assert all(slot.generation > old.generation for old in seen if old.index == slot.index)
            seen.add(slot)
            tier.abort(slot)

    # ---- match and pin ----------------------------------------------------------------------------

    def test_match_and_pin_stop_at_the_first_hole(self, tier: Tier) -> None:
        for number in (0, 1, 3):
            _put(tier, number)
        assert tier.match(_keys(0, 1, 2, 3)) == 2
        slots = tier.pin(_keys(0, 1, 2, 3))
        assert len(slots) == 2
        tier.unpin(slots)
        assert tier.match(_keys(2, 0)) == 0

    def test_hits_and_misses_count_pins_and_not_matches(self, tier: Tier) -> None:
        _put(tier, 0)
        tier.match(_keys(0, 1))
        tier.unpin(tier.pin(_keys(0, 1, 2)))
        assert (tier.stats().hits, tier.stats().misses) == (1, 2)

    def test_pins_are_counted(self, tier: Tier) -> None:
        _put(tier, 0)
        first, second = tier.pin(key(0)), tier.pin(key(0))
        assert first == second
        assert tier.stats().pins == 2
        tier.unpin(first)
        assert tier.evict(1) == 0
        tier.unpin(second)
        assert tier.stats().pins == 0
        assert tier.evict(1) == 1

    # ---- tokens -----------------------------------------------------------------------------------

    def test_a_block_of_other_tokens_is_not_the_same(self, tier: Tier) -> None:
        tokens = np.arange(3 * self.layout.block_tokens, dtype=np.uint32).reshape(3, -1)
        for number in range(3):
            _put(tier, number, tokens=tokens[number : number + 1])
        slots = tier.pin(_keys(0, 1, 2))
        assert tier.same_tokens(slots, tokens) == 3
        assert tier.stats().mismatches == 0
        other = tokens.copy()
        other[1, -1] += 1
        assert tier.same_tokens(slots, other) == 1
        assert tier.same_tokens(slots[1:], other[1:]) == 0
        assert tier.stats().mismatches == 2
        tier.unpin(slots)

    def test_a_block_stored_by_its_hash_alone_has_any_tokens(self, tier: Tier) -> None:
        tokens = np.ones((SLOTS, self.layout.block_tokens), dtype=np.uint32)
        for number in range(SLOTS):
            _put(tier, number, tokens=tokens[:1])
        assert tier.evict(SLOTS) == SLOTS
        for number in range(SLOTS):  # in slots that held others
            _put(tier, number)
        slots = tier.pin(_keys(*range(SLOTS)))
        assert tier.same_tokens(slots, 2 * tokens) == SLOTS
        assert tier.stats().mismatches == 0
        tier.unpin(slots)

    def test_the_second_copy_does_not_change_the_tokens(self, tier: Tier) -> None:
        tokens = np.ones((1, self.layout.block_tokens), dtype=np.uint32)
        _put(tier, 0, tokens=tokens)
        slot = tier.reserve()
        tier.note_tokens([slot], 2 * tokens)
        crcs = np.zeros((self.layout.num_layers, self.layout.kv_heads), dtype=np.uint32)
        assert not tier.commit(slot, key(0), None, crcs)
        slots = tier.pin(key(0))
        assert tier.same_tokens(slots, tokens) == 1
        tier.unpin(slots)

    # ---- runs -------------------------------------------------------------------------------------

    def test_a_run_keeps_its_tokens_and_gives_its_grants_back(self, tier: Tier) -> None:
        blocks = payload(self.layout, 3, seed=21)
        count = 3 * self.layout.block_tokens
        tokens = np.arange(count, dtype=np.uint32).reshape(3, self.layout.block_tokens)
        slots = tier.reserve_run(3, tokens)
        crcs = copy_blocks(tier.view(slots, writable=True), view_of(self.layout, blocks))
        assert tier.commit_run(slots, _keys(0, 1, 2), None, crcs, granted=True) == 3
        pinned = tier.pin(_keys(0, 1, 2))
        np.testing.assert_array_equal(read(tier, pinned), blocks)
        assert tier.same_tokens(pinned, tokens) == 3
        assert tier.same_tokens(pinned, tokens + 1) == 0
        tier.unpin(pinned)
        assert tier.evict(1) == 1 and tier.match(_keys(0, 1, 2)) == 2  # the leaf
        assert _states(tier.stats()) == (SLOTS - 2, 0, 2, 0)  # none is quarantined

    def test_a_run_that_is_refused_stays_reserved(self, tier: Tier) -> None:
        tokens = np.zeros((2, self.layout.block_tokens), dtype=np.uint32)
        with pytest.raises(UsageError):
            tier.reserve_run(2, tokens[:, 1:])
        assert _states(tier.stats()) == (SLOTS, 0, 0, 0)
        slots = tier.reserve_run(2, tokens)
        shape = (2, self.layout.num_layers, self.layout.kv_heads)
        crcs = np.zeros(shape, dtype=np.uint32)
        with pytest.raises(UsageError):  # a block is its own parent
            tier.commit_run(slots, _keys(0, 1), key(0), crcs)
        assert _states(tier.stats()) == (SLOTS - 2, 2, 0, 0)
        tier.abort_run(slots)
        assert _states(tier.stats()) == (SLOTS - 2, 0, 0, 2)  # granted: in quarantine
        tier.settle_run(slots)
        assert _states(tier.stats()) == (SLOTS, 0, 0, 0)

    # ---- eviction ---------------------------------------------------------------------------------

    def test_a_full_tier_evicts_the_least_recently_used(self, tier: Tier) -> None:
        for number in range(SLOTS):
            _put(tier, number)
        tier.unpin(tier.pin(key(0)))
        _put(tier, 100)
        assert [tier.match(key(number)) for number in range(SLOTS)] == [1, 0] + [1] * (SLOTS - 2)
        assert tier.stats().evictions == 1

    def test_match_is_not_a_use(self, tier: Tier) -> None:
        for number in range(SLOTS):
            _put(tier, number)
        tier.match(key(0))
        _put(tier, 100)
        assert tier.match(key(0)) == 0

    def test_storing_a_block_again_is_a_use(self, tier: Tier) -> None:
        for number in range(SLOTS - 1):
            _put(tier, number)
        assert not write(tier, key(0), payload(self.layout, 1, seed=0))
        _put(tier, 100)
        _put(tier, 101)
        assert tier.match(key(0)) == 1
        assert tier.match(key(1)) == 0

    def test_a_block_goes_before_its_ancestors(self, tier: Tier) -> None:
        _put_chain(tier, SLOTS)
        for left in range(SLOTS, 0, -1):
            assert tier.match(_keys(*range(SLOTS))) == left
            assert tier.evict(1) == 1
        assert tier.match(key(0)) == 0

    def test_branches_go_before_their_common_parent(self, tier: Tier) -> None:
        _put(tier, 0)
        _put(tier, 1, parent=0)
        _put(tier, 2, parent=0)
        assert tier.evict(2) == 2
        assert tier.match(key(0)) == 1
        assert tier.evict(1) == 1

    def test_a_fragment_without_its_parent_is_legal(self, tier: Tier) -> None:
        _put(tier, 1, parent=0)
        assert tier.match(key(1)) == 1
        _put(tier, 0)
        assert tier.evict(1) == 1
        assert (tier.match(key(0)), tier.match(key(1))) == (1, 0)

    def test_a_pinned_block_and_its_ancestors_stay(self, tier: Tier) -> None:
        _put_chain(tier, 3)
        slots = tier.pin(key(2))
        assert tier.evict(SLOTS) == 0
        tier.unpin(slots)
        assert tier.evict(SLOTS) == 3

    def test_evict_says_how_many_went(self, tier: Tier) -> None:
        for number in range(3):
            _put(tier, number)
        assert tier.evict(2) == 2
        assert tier.evict(2) == 1
        assert tier.evict(2) == 0
        assert _states(tier.stats()) == (SLOTS, 0, 0, 0)

    def test_a_tier_full_of_pins_and_reservations_refuses(self, tier: Tier) -> None:
        for number in range(SLOTS - 1):
            _put(tier, number)
        slots = tier.pin(_keys(*range(SLOTS - 1)))
        reserved = tier.reserve()
        before = tier.stats()
        with pytest.raises(CapacityError):
            tier.reserve()
        assert tier.stats() == before
        np.testing.assert_array_equal(
            read(tier, slots), np.concatenate([_bytes(self.layout, n) for n in range(SLOTS - 1)])
        )
        tier.unpin(slots[:1])
        tier.abort(reserved)
        tier.reserve()
        assert tier.reserve().index == slots[0].index
        tier.unpin(slots[1:])

    # ---- grants and quarantine --------------------------------------------------------------------

    def test_an_aborted_slot_with_a_grant_is_quarantined(self, tier: Tier) -> None:
        slot = tier.reserve()
        tier.grant(slot)
        tier.grant(slot)
        tier.abort(slot)
        assert _states(tier.stats()) == (SLOTS - 1, 0, 0, 1)
        others = [tier.reserve() for _ in range(SLOTS - 1)]
        assert slot.index not in {other.index for other in others}
        with pytest.raises(CapacityError):
            tier.reserve()
        tier.settle(slot)
        with pytest.raises(CapacityError):
            tier.reserve()
        tier.settle(slot)
        assert tier.reserve().index == slot.index

    def test_an_evicted_or_dropped_block_with_a_grant_is_quarantined(self, tier: Tier) -> None:
        evicted, dropped = _put(tier, 0), _put(tier, 1)
        tier.grant(evicted)
        tier.grant(dropped)
        assert tier.drop(key(1), "invalid")
        assert tier.evict(1) == 1
        assert _states(tier.stats()) == (SLOTS - 2, 0, 0, 2)
        tier.settle(evicted)
        tier.settle(dropped)
        assert _states(tier.stats()) == (SLOTS, 0, 0, 0)

    def test_a_settled_slot_is_committed_as_any(self, tier: Tier) -> None:
        slot = tier.reserve()
        tier.grant(slot)
        blocks = payload(self.layout, 1, seed=5)
        crcs = copy_blocks(tier.view([slot], writable=True), view_of(self.layout, blocks))
        tier.settle(slot)
        assert tier.commit(slot, key(0), None, crcs[0])
        assert _states(tier.stats()) == (SLOTS - 1, 0, 1, 0)

    # ---- drop -------------------------------------------------------------------------------------

    def test_a_dropped_block_is_a_miss_and_its_slot_free(self, tier: Tier) -> None:
        _put(tier, 0)
        assert tier.drop(key(0), "corrupt")
        assert not tier.drop(key(0), "corrupt")
        assert tier.match(key(0)) == 0
        assert _states(tier.stats()) == (SLOTS, 0, 0, 0)
        assert tier.stats().corruptions == 1

    def test_a_dropped_block_is_readable_until_its_last_unpin(self, tier: Tier) -> None:
        _put(tier, 0)
        slots = tier.pin(key(0))
        tier.pin(key(0))
        assert tier.drop(key(0), "invalid")
        assert tier.match(key(0)) == 0
        assert tier.pin(key(0)) == []
        assert tier.evict(SLOTS) == 0
        np.testing.assert_array_equal(read(tier, slots), _bytes(self.layout, 0))
        tier.unpin(slots)
        assert _states(tier.stats()) == (SLOTS - 1, 0, 1, 0)
        tier.unpin(slots)
        assert _states(tier.stats()) == (SLOTS, 0, 0, 0)
        assert tier.stats().corruptions == 0

    def test_a_dropped_pinned_block_can_be_stored_anew(self, tier: Tier) -> None:
        _put(tier, 0)
        old = tier.pin(key(0))
        tier.drop(key(0), "corrupt")
        fresh = payload(self.layout, 1, seed=77)
        assert write(tier, key(0), fresh)
        slots = tier.pin(key(0))
        assert slots != old
        np.testing.assert_array_equal(read(tier, slots), fresh)
        tier.unpin(old)
        assert tier.match(key(0)) == 1
        tier.unpin(slots)
        assert tier.evict(1) == 1

    # ---- threads and close ------------------------------------------------------------------------

    def test_threads_leave_no_slot_behind(self, tier: Tier) -> None:
        def work(thread: int) -> None:
            for turn in range(40):
                number = (thread + turn) % 9
                try:
                    write(tier, key(number), _bytes(self.layout, number))
                except CapacityError:
                    continue
                slots = tier.pin(key(number))
                if slots:
                    np.testing.assert_array_equal(read(tier, slots), _bytes(self.layout, number))
                tier.unpin(slots)
                if turn % 7 == thread:
                    tier.drop(key(number), "invalid")

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        stats = tier.stats()
        assert (stats.reserved, stats.quarantined, stats.pins) == (0, 0, 0)
        tier.evict(SLOTS)
        assert _states(tier.stats()) == (SLOTS, 0, 0, 0)

    def test_a_closed_tier_says_so(self, tier: Tier) -> None:
        _put(tier, 0)
        slots, reserved, late = tier.pin(key(0)), tier.reserve(), tier.reserve()
        tier.grant(late)
        tier.close()
        tier.close()
        tier.unpin(slots)
        tier.abort(reserved)
        tier.abort(late)
        tier.settle(late)
        with pytest.raises(ClosedError):
            tier.reserve()
        with pytest.raises(ClosedError):
            tier.match(key(0))
        with pytest.raises(ClosedError):
            tier.pin(key(0))
        with pytest.raises(ClosedError):
            tier.drop(key(0), "corrupt")
        with pytest.raises(ClosedError):
            tier.evict(1)
        with pytest.raises(ClosedError):
            tier.stats()

    def test_a_view_outlives_its_tier(self, tier: Tier) -> None:
        _put(tier, 0)
        slots = tier.pin(key(0))
        view, crcs = tier.view(slots, writable=False), tier.crcs(slots)
        tier.close()
        out = np.zeros((1, self.layout.block_bytes), dtype=np.uint8)
        copy_blocks(view_of(self.layout, out), view, crcs=crcs)
        np.testing.assert_array_equal(out, _bytes(self.layout, 0))


def _keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def _bytes(layout: BlockLayout, number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return payload(layout, 1, seed=1000 + number)


def _put(
    tier: Tier, number: int, parent: int | None = None, tokens: BlockTokens | None = None
) -> Slot:
    """Store block ``number`` and return its slot."""
    name = None if parent is None else key(parent)
    blocks = _bytes(tier.layout, number)
    slot = tier.reserve()
    if tokens is not None:
        tier.note_tokens([slot], tokens)
    crcs = copy_blocks(tier.view([slot], writable=True), view_of(tier.layout, blocks))
    assert tier.commit(slot, key(number), name, crcs[0])
    return slot


def _put_chain(tier: Tier, length: int) -> None:
    for number in range(length):
        _put(tier, number, parent=number - 1 if number else None)


def _states(stats: TierStats) -> tuple[int, int, int, int]:
    states = (stats.free, stats.reserved, stats.ready, stats.quarantined)
    assert sum(states) == stats.slots
    return states
