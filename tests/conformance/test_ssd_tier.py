"""The SSD tier passes the suite of tiers."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool.arena import Slot
from kvpool.block import BlockLayout
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.planted import failing_tests
from kvpool.testing.tier_suite import SLOTS, TierSuite
from kvpool.tiers.base import Tier
from kvpool.tiers.ssd import SsdTier


class TestSsdTier(TierSuite):
    folder: Path

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        return SsdTier(self.folder, layout, slot_count, threads=4, timeout_s=30)


class _ForgetsGrants(SsdTier):
    def grant(self, slot: Slot) -> None:
        """A planted bug: neither the slot nor its buffer is quarantined."""

    def settle(self, slot: Slot) -> None:
        """Match ``grant``."""


def test_the_suite_fails_on_a_tier_that_forgets_grants() -> None:
    @contextmanager
    def fresh() -> Generator[Tier, None, None]:
        with (
            tempfile.TemporaryDirectory() as folder,
            _ForgetsGrants(Path(folder), SMALL_LAYOUT, SLOTS, threads=2, timeout_s=30) as tier,
        ):
            yield tier

    assert failing_tests(TestSsdTier(), fresh) == [
        "test_a_run_that_is_refused_stays_reserved",
        "test_an_aborted_slot_with_a_grant_is_quarantined",
        "test_an_evicted_or_dropped_block_with_a_grant_is_quarantined",
    ]
