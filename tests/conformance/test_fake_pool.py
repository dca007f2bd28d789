"""The fake pool passes the suite of pools, and a fake that breaks the contract does not."""

from contextlib import AbstractContextManager

from kvpool.base import BlockPool, Chain, Match
from kvpool.block import BlockHash, BlockLayout
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.fake_pool import FakePool
from kvpool.testing.planted import failing_tests
from kvpool.testing.pool_suite import SLOTS, PoolSuite


class TestFakePool(PoolSuite):
    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        return FakePool(layout, slot_count)


class _CountsHoles(FakePool):
    """A planted bug: match counts blocks behind a hole, as a binary search would."""

    def match(self, chain: Chain) -> Match:
        there = [index for index in range(len(chain)) if chain[index] in self._blocks]
        return Match(chain, there[-1] + 1 if there else 0)


class _EvictsLeased(FakePool):
    """A planted bug: a lease holds nothing."""

    def _evict(self, wanted: set[BlockHash]) -> bool:
        self._leases.clear()
        return super()._evict(wanted)


def _failing(kind: type[FakePool]) -> list[str]:
    def fresh() -> AbstractContextManager[BlockPool]:
        return kind(SMALL_LAYOUT, SLOTS)

    return failing_tests(TestFakePool(), fresh)


def test_the_suite_fails_on_a_pool_that_matches_behind_a_hole() -> None:
    assert "test_a_fragment_is_no_prefix" in _failing(_CountsHoles)


def test_the_suite_fails_on_a_pool_that_evicts_leased_blocks() -> None:
    assert "test_a_full_pool_of_leases_refuses_and_says_why" in _failing(_EvictsLeased)
