"""The DRAM tier against a dictionary."""

from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool.arena import Arena, Slot
from kvpool.block import new_incarnation
from kvpool.errors import UsageError
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.tier_machine import SLOTS, TierMachine
from kvpool.tiers.base import Tier
from kvpool.tiers.dram import DramTier

# No time limit on an example: the machine may be busy.
CALM = settings(deadline=None, max_examples=60, stateful_step_count=40)


class DramTierMachine(TierMachine):
    def open_tier(self) -> Tier:
        return DramTier(Arena(SMALL_LAYOUT, SLOTS, new_incarnation()))


TestDramTierMachine = DramTierMachine.TestCase
TestDramTierMachine.settings = CALM


class _UnpinsTooMuch(DramTier):
    """A planted bug: one unpin gives all pins of a slot back."""

    def unpin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            super().unpin([slot])
            with suppress(UsageError):
                while True:
                    super().unpin([slot])


class _BrokenMachine(TierMachine):
    def open_tier(self) -> Tier:
        return _UnpinsTooMuch(Arena(SMALL_LAYOUT, SLOTS, new_incarnation()))


def test_the_machine_finds_a_planted_bug() -> None:
    calm = settings(CALM, database=None, phases=[Phase.generate])  # finding it is enough
    with pytest.raises(AssertionError):
        run_state_machine_as_test(_BrokenMachine, settings=calm)
