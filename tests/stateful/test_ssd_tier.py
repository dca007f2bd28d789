"""The SSD tier against a dictionary."""

import tempfile
from pathlib import Path

from hypothesis import settings

from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.tier_machine import SLOTS, TierMachine
from kvpool.tiers.base import Tier
from kvpool.tiers.ssd import SsdTier


class SsdTierMachine(TierMachine):
    def open_tier(self) -> Tier:
        self.folder = tempfile.TemporaryDirectory()
        return SsdTier(
            Path(self.folder.name),
            SMALL_LAYOUT,
            SLOTS,
            threads=2,
            staging_slots=4 * SLOTS,
            timeout_s=30,
        )

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


TestSsdTierMachine = SsdTierMachine.TestCase
TestSsdTierMachine.settings = settings(deadline=None, max_examples=25, stateful_step_count=40)
