"""The stack passes the suite of tiers: DRAM keeps the contract over a disk that takes nothing.

An evicted block is a miss in that suite, so nothing gets to the disk here. The flusher is at rest: it
pins what it is about to write, and which block goes next must not hang on that. Blocks that are
below, and the flusher, are the business of tests/unit/tiers/test_stack.py.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvpool.arena import Arena, Slot
from kvpool.block import BlockLayout, new_incarnation
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.planted import failing_tests
from kvpool.testing.slow_store import FaultyStore
from kvpool.testing.tier_suite import SLOTS, TierSuite
from kvpool.tiers.base import Tier
from kvpool.tiers.dram import DramTier
from kvpool.tiers.flusher import FlushLimits
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.stack import StackTier


def stack(
    folder: Path, layout: BlockLayout, slot_count: int, kind: type[StackTier] = StackTier
) -> StackTier:
    """Return a stack whose disk fails and whose flusher is at rest."""
    fast = DramTier(Arena(layout, slot_count, new_incarnation()))
    slow = FaultyStore(SsdTier(folder, layout, 4 * slot_count, threads=2, timeout_s=30))
    slow.failing.set()
    limits = FlushLimits(
        bytes_s=0,
        batch_bytes=2 * layout.block_bytes,
        timeout_s=30.0,
        backlog_bytes_max=64 * layout.block_bytes,
        high_bytes=slot_count * layout.block_bytes,
        low_bytes=slot_count * layout.block_bytes,
    )
    made = kind(fast, slow, limits, durable_bytes_max=64 * layout.block_bytes)
    assert made.flusher.close(30.0)
    return made


class TestStackTierOverAFailingDisk(TierSuite):
    folder: Path

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        return stack(self.folder, layout, slot_count)


class _ForgetsGrants(StackTier):
    def grant(self, slot: Slot) -> None:
        """A planted bug: the slot is not quarantined."""

    def settle(self, slot: Slot) -> None:
        """Match ``grant``."""


def test_the_suite_fails_on_a_stack_that_forgets_grants() -> None:
    @contextmanager
    def fresh() -> Generator[Tier, None, None]:
        with (
            TemporaryDirectory() as folder,
            stack(Path(folder), SMALL_LAYOUT, SLOTS, _ForgetsGrants) as tier,
        ):
            yield tier

    assert failing_tests(TestStackTierOverAFailingDisk(), fresh) == [
        "test_an_aborted_slot_with_a_grant_is_quarantined",
        "test_an_evicted_or_dropped_block_with_a_grant_is_quarantined",
    ]
