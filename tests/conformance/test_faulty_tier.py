"""A faulty tier without faults passes the suite of tiers."""

from kvpool.arena import Arena
from kvpool.block import BlockLayout, new_incarnation
from kvpool.testing.faults import FaultyTier
from kvpool.testing.tier_suite import TierSuite
from kvpool.tiers.base import Tier
from kvpool.tiers.dram import DramTier


class TestFaultyTier(TierSuite):
    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        arena = Arena(layout, slot_count, new_incarnation())
        return FaultyTier(DramTier(arena), seed=1)
