"""A size class passes the suite of tiers: alone, and beside another one that is idle."""

from kvpool.block import BlockLayout, new_incarnation
from kvpool.testing.tier_suite import TierSuite
from kvpool.tiers.base import Tier
from kvpool.tiers.classes import ChunkMemory, ClassTier

PAGE = 4096


def memory_of(layout: BlockLayout, slot_count: int, chunks: int) -> ChunkMemory:
    pages = -(-layout.block_bytes // PAGE)
    return ChunkMemory(slot_count * pages * PAGE, chunks, new_incarnation())


class TestClassTier(TierSuite):
    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        return ClassTier(memory_of(layout, slot_count, 1), layout)


class TestClassTierBesideAnother(TierSuite):
    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        memory = memory_of(layout, slot_count, 2)
        self.other = ClassTier(memory, layout)  # which is never without its chunk
        return ClassTier(memory, layout)
