"""The gpu tier, a size class, the stack and the wrappers against a dictionary."""

import tempfile
from pathlib import Path

from hypothesis import settings

from kvpool.arena import Arena
from kvpool.block import new_incarnation
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.faults import FaultyTier, SlowTier
from kvpool.testing.tier_machine import SLOTS, TierMachine
from kvpool.tiers.base import Tier
from kvpool.tiers.classes import ChunkMemory, ClassTier
from kvpool.tiers.dram import DramTier
from kvpool.tiers.gpu import GpuTier
from tests.conformance.test_stack_tier import stack

# No time limit on an example: the machine may be busy.
CALM = settings(deadline=None, max_examples=12, stateful_step_count=40)


def dram() -> DramTier:
    return DramTier(Arena(SMALL_LAYOUT, SLOTS, new_incarnation()))


class GpuTierMachine(TierMachine):
    def open_tier(self) -> Tier:
        return GpuTier(SMALL_LAYOUT, SLOTS)


class ClassTierMachine(TierMachine):
    def open_tier(self) -> Tier:
        return ClassTier(ChunkMemory(SLOTS * 4096, 1, new_incarnation()), SMALL_LAYOUT)


class FaultyTierMachine(TierMachine):
    def open_tier(self) -> Tier:
        return FaultyTier(dram(), seed=1)


class SlowTierMachine(TierMachine):
    def open_tier(self) -> Tier:
        return SlowTier(dram(), seed=1, wait=0.02)


class StackTierMachine(TierMachine):
    def open_tier(self) -> Tier:
        self.folder = tempfile.TemporaryDirectory()
        return stack(Path(self.folder.name), SMALL_LAYOUT, SLOTS)

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


TestGpuTierMachine = GpuTierMachine.TestCase
TestClassTierMachine = ClassTierMachine.TestCase
TestFaultyTierMachine = FaultyTierMachine.TestCase
TestSlowTierMachine = SlowTierMachine.TestCase
TestStackTierMachine = StackTierMachine.TestCase
for case in (
    TestGpuTierMachine,
    TestClassTierMachine,
    TestFaultyTierMachine,
    TestSlowTierMachine,
    TestStackTierMachine,
):
    case.settings = CALM
