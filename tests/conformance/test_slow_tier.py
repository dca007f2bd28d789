"""A slow tier passes the suite of tiers, at its usual speed and when it tarries."""

from kvpool.arena import Arena
from kvpool.block import BlockLayout, new_incarnation
from kvpool.testing.faults import SlowTier
from kvpool.testing.tier_suite import TierSuite
from kvpool.tiers.base import Tier
from kvpool.tiers.dram import DramTier


class TestSlowTierAtItsUsualSpeed(TierSuite):
    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        return SlowTier(DramTier(Arena(layout, slot_count, new_incarnation())), seed=1)


class TestSlowTier(TierSuite):
    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        inner = DramTier(Arena(layout, slot_count, new_incarnation()))
        return SlowTier(inner, seed=2, wait=0.3)
