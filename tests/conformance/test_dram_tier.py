"""The DRAM tier passes the suite of tiers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest

from kvpool.arena import Arena, Slot, Slots
from kvpool.block import BlockLayout, new_incarnation
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.planted import failing_tests
from kvpool.testing.tier_suite import SLOTS, TierSuite
from kvpool.tiers.base import BlockTokens, Tier
from kvpool.tiers.dram import DramTier


class TestDramTier(TierSuite):
    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        arena = Arena(layout, slot_count, new_incarnation())
        return DramTier(arena)


class _ForgetsGrants(DramTier):
    def grant(self, slot: Slot) -> None:
        """A planted bug: the slot is not quarantined."""

    def settle(self, slot: Slot) -> None:
        """Match ``grant``."""


class _TrustsHashes(DramTier):
    def same_tokens(self, slots: Sequence[Slot], tokens: BlockTokens) -> int:
        """A planted bug: a block of other tokens is given away under its hash."""
        return len(slots)


class _KeepsOldTokens(DramTier):
    def _reserve(self, count: int, *, granted: bool, tokens: BlockTokens | None = None) -> Slots:
        """A planted bug: a slot's tokens are taken for its next block's."""
        before = self._has_tokens.copy()
        slots = super()._reserve(count, granted=granted, tokens=tokens)
        if tokens is None:
            self._has_tokens[slots.indices] = before[slots.indices]
        return slots


@pytest.mark.parametrize(
    ("kind", "failing"),
    [
        (
            _TrustsHashes,
            [
                "test_a_block_of_other_tokens_is_not_the_same",
                "test_a_run_keeps_its_tokens_and_gives_its_grants_back",
            ],
        ),
        (_KeepsOldTokens, ["test_a_block_stored_by_its_hash_alone_has_any_tokens"]),
    ],
)
def test_the_suite_fails_on_a_tier_that_is_careless_with_tokens(
    kind: type[DramTier], failing: list[str]
) -> None:
    def fresh() -> AbstractContextManager[Tier]:
        return kind(Arena(SMALL_LAYOUT, SLOTS, new_incarnation()))

    assert failing_tests(TestDramTier(), fresh) == failing


def test_the_suite_fails_on_a_tier_that_forgets_grants() -> None:
    def fresh() -> AbstractContextManager[Tier]:
        return _ForgetsGrants(Arena(SMALL_LAYOUT, SLOTS, new_incarnation()))

    assert failing_tests(TestDramTier(), fresh) == [
        "test_an_aborted_slot_with_a_grant_is_quarantined",
        "test_an_evicted_or_dropped_block_with_a_grant_is_quarantined",
    ]
