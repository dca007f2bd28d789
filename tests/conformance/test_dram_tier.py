"""The DRAM tier passes the suite of tiers."""

from contextlib import AbstractContextManager

from kvpool.arena import Arena, Slot
from kvpool.block import BlockLayout, new_incarnation
from kvpool.index.prefix import PrefixIndex
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.planted import failing_tests
from kvpool.testing.tier_suite import SLOTS, TierSuite
from kvpool.tiers.base import Tier
from kvpool.tiers.dram import DramTier


class TestDramTier(TierSuite):
    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        arena = Arena(layout, slot_count, new_incarnation())
        return DramTier(arena, PrefixIndex(slot_count))


class _ForgetsGrants(DramTier):
    def grant(self, slot: Slot) -> None:
        """A planted bug: the slot is not quarantined."""

    def settle(self, slot: Slot) -> None:
        """Match ``grant``."""


def test_the_suite_fails_on_a_tier_that_forgets_grants() -> None:
    def fresh() -> AbstractContextManager[Tier]:
        return _ForgetsGrants(Arena(SMALL_LAYOUT, SLOTS, new_incarnation()), PrefixIndex(SLOTS))

    assert failing_tests(TestDramTier(), fresh) == [
        "test_an_aborted_slot_with_a_grant_is_quarantined",
        "test_an_evicted_or_dropped_block_with_a_grant_is_quarantined",
    ]
