"""What every pool must do. Subclass ``PoolSuite`` once for each implementation.

Uses ``BlockPool`` alone, so a pool in another process passes it too. A subclass that needs a server
overrides ``open_pool`` with what starts one and stops it at ``close``.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from kvpool.base import BlockPool, Chain, Match
from kvpool.block import BlockLayout
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    LayoutMismatchError,
    LeaseExpiredError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import BlockView
from kvpool.testing.blocks import SMALL_LAYOUT, Payload, namespace, payload, view_of

SLOTS: Final = 8
# Ends a test that hangs; nothing here takes near as long.
WAIT_S: Final = 20.0
# Eleven days: nobody has to know the limits of a server.
FAR_S: Final = 1e6


class PoolSuite(ABC):
    """The suite. ``layout`` may be set to one that the implementation needs.

    ``servers`` is how many stores ``open_pool`` makes, each of ``slot_count`` blocks; what one thread
    stores goes to one of them.
    """

    layout: BlockLayout = SMALL_LAYOUT
    servers: int = 1

    @abstractmethod
    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        """Make an empty pool with room for ``slot_count`` blocks."""

    @pytest.fixture
    def pool(self) -> Iterator[BlockPool]:
        """Give each test a pool of ``SLOTS`` blocks."""
        with self.open_pool(self.layout, SLOTS) as pool:
            yield pool

    def beside(self, pool: BlockPool, chain: Chain, blocks: int, salt: str) -> Chain:
        """Return a chain under another salt that is stored where ``chain`` is."""
        del chain
        return _chain(pool, blocks, salt)

    # ---- chain ------------------------------------------------------------------------------------

    def test_a_chain_names_full_blocks_only(self, pool: BlockPool) -> None:
        tokens = list(range(3 * self.layout.block_tokens - 1))
        chain = pool.chain(namespace(self.layout), tokens)
        assert len(chain) == 2
        assert pool.chain(namespace(self.layout), np.array(tokens, dtype=np.uint32)) == chain
        assert len(pool.chain(namespace(self.layout), [])) == 0

    def test_a_chain_depends_on_everything_before_a_block(self, pool: BlockPool) -> None:
        size = self.layout.block_tokens
        base = _chain(pool, 3)
        assert _chain(pool, 3) == base
        assert _chain(pool, 4).hashes.startswith(base.hashes)
        other_first = pool.chain(base.namespace, [9999, *range(1, 3 * size)])
        assert all(other_first[index] != base[index] for index in range(3))
        other_last = pool.chain(base.namespace, [*range(3 * size - 1), 9999])
        assert [other_last[index] == base[index] for index in range(3)] == [True, True, False]
        salted = _chain(pool, 3, salt="other tenant")
        assert all(salted[index] != base[index] for index in range(3))

    def test_wrong_tokens_and_namespaces_are_refused(self, pool: BlockPool) -> None:
        with pytest.raises(UsageError):
            pool.chain(namespace(self.layout), [-1] * self.layout.block_tokens)
        with pytest.raises(UsageError):
            pool.chain(namespace(self.layout), [1 << 32] * self.layout.block_tokens)
        other = replace(self.layout, block_tokens=2 * self.layout.block_tokens)
        with pytest.raises(LayoutMismatchError):
            pool.chain(namespace(other), [1, 2, 3])

    # ---- store, match, lease, load ----------------------------------------------------------------

    def test_what_was_stored_is_loaded(self, pool: BlockPool) -> None:
        chain, blocks = _chain(pool, 4), payload(self.layout, 4, seed=1)
        result = pool.store(chain, view_of(self.layout, blocks), deadline_s=WAIT_S).wait(WAIT_S)
        assert (result.stored, result.new, result.refused) == (4, 4, "")
        match = pool.match(chain)
        assert match.blocks == 4
        with pool.lease(match, WAIT_S) as lease:
            assert lease.blocks == 4
            out = np.zeros_like(blocks)
            done = pool.load(lease, view_of(self.layout, out), deadline_s=WAIT_S)
            assert done.wait(WAIT_S) == 4
            assert done.layers_ready() == self.layout.num_layers
            np.testing.assert_array_equal(out, blocks)

    def test_an_empty_pool_matches_nothing(self, pool: BlockPool) -> None:
        match = pool.match(_chain(pool, 3))
        assert match.blocks == 0
        with pool.lease(match, WAIT_S) as lease:
            assert lease.blocks == 0

    def test_another_salt_finds_nothing(self, pool: BlockPool) -> None:
        _store(pool, _chain(pool, 2), seed=2)
        assert pool.match(_chain(pool, 2, salt="other tenant")).blocks == 0

    def test_a_match_is_the_leading_run(self, pool: BlockPool) -> None:
        _store(pool, _chain(pool, 2), seed=3)
        assert pool.match(_chain(pool, 5)).blocks == 2
        assert pool.match(_chain(pool, 1)).blocks == 1

    def test_a_part_of_a_chain_is_stored_and_loaded(self, pool: BlockPool) -> None:
        chain, blocks = _chain(pool, 5), payload(self.layout, 5, seed=4)
        view = view_of(self.layout, blocks)
        _wait_stored(pool, chain, view.take(0, 2), first=0)
        _wait_stored(pool, chain, view.take(2, 5), first=2)
        out = np.zeros((2, self.layout.block_bytes), dtype=np.uint8)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            assert lease.blocks == 5
            done = pool.load(lease, view_of(self.layout, out), first=3, deadline_s=WAIT_S)
            assert done.wait(WAIT_S) == 2
        np.testing.assert_array_equal(out, blocks[3:])

    def test_a_fragment_is_no_prefix(self, pool: BlockPool) -> None:
        chain, blocks = _chain(pool, 3), payload(self.layout, 3, seed=5)
        view = view_of(self.layout, blocks)
        assert _wait_stored(pool, chain, view.take(1, 3), first=1) == (2, 2)
        assert pool.match(chain).blocks == 0
        assert _wait_stored(pool, chain, view.take(0, 1), first=0) == (1, 1)
        assert pool.match(chain).blocks == 3

    def test_storing_again_stores_nothing_new(self, pool: BlockPool) -> None:
        chain, blocks = _chain(pool, 4), payload(self.layout, 4, seed=6)
        view = view_of(self.layout, blocks)
        assert _wait_stored(pool, chain, view.take(0, 3), first=0) == (3, 3)
        assert _wait_stored(pool, chain, view, first=0) == (4, 1)
        assert _wait_stored(pool, chain, view, first=0) == (4, 0)
        np.testing.assert_array_equal(_load_all(pool, chain), blocks)

    def test_nothing_to_store_or_load_is_fine(self, pool: BlockPool) -> None:
        chain = _chain(pool, 1)
        nothing = np.zeros((1, self.layout.block_bytes), dtype=np.uint8)
        view = view_of(self.layout, nothing).take(0, 0)
        assert _wait_stored(pool, chain, view, first=1) == (0, 0)
        _store(pool, chain, seed=7)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            assert pool.load(lease, view, deadline_s=WAIT_S).wait(WAIT_S) == 0

    def test_strided_sources_and_destinations(self, pool: BlockPool) -> None:
        chain, blocks = _chain(pool, 2), payload(self.layout, 4, seed=8)
        view = view_of(self.layout, blocks)
        _wait_stored(pool, chain, view.with_ids([3, 1]), first=0)
        out = np.zeros_like(blocks)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            target = view_of(self.layout, out).with_ids([0, 2])
            assert pool.load(lease, target, deadline_s=WAIT_S).wait(WAIT_S) == 2
        np.testing.assert_array_equal(out[[0, 2]], blocks[[3, 1]])
        assert not out[[1, 3]].any()

    def test_layers_are_announced_in_order(self, pool: BlockPool) -> None:
        chain = _chain(pool, 2)
        blocks = _store(pool, chain, seed=9)
        out = np.zeros_like(blocks)
        shape = (2, self.layout.num_layers, self.layout.layer_bytes)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            done = pool.load(lease, view_of(self.layout, out), deadline_s=WAIT_S)
            for layer in range(self.layout.num_layers):
                assert done.wait_layer(layer, WAIT_S)
                assert done.layers_ready() > layer
                got, want = out.reshape(shape)[:, layer], blocks.reshape(shape)[:, layer]
                np.testing.assert_array_equal(got, want)
            assert done.wait(WAIT_S) == 2
            assert not done.wait_layer(self.layout.num_layers, WAIT_S)

    # ---- leases -----------------------------------------------------------------------------------

    def test_a_full_pool_of_leases_refuses_and_says_why(self, pool: BlockPool) -> None:
        chain = _chain(pool, SLOTS)
        blocks = _store(pool, chain, seed=10)
        other = payload(self.layout, 2, seed=11)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            assert lease.blocks == SLOTS
            source = view_of(self.layout, other)
            asked = self.beside(pool, chain, 2, "b")
            result = pool.store(asked, source, deadline_s=WAIT_S).wait(WAIT_S)
            assert (result.stored, result.new) == (0, 0)
            assert result.refused
            out = np.zeros_like(blocks)
            done = pool.load(lease, view_of(self.layout, out), deadline_s=WAIT_S)
            assert done.wait(WAIT_S) == SLOTS
            np.testing.assert_array_equal(out, blocks)
        assert _wait_stored(pool, asked, view_of(self.layout, other)) == (2, 2)

    def test_more_blocks_than_room_are_stored_in_part(self, pool: BlockPool) -> None:
        chain = _chain(pool, SLOTS + 3)
        blocks = payload(self.layout, SLOTS + 3, seed=12)
        source = view_of(self.layout, blocks)
        result = pool.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S)
        assert (result.stored, result.new) == (SLOTS, SLOTS)
        assert result.refused
        np.testing.assert_array_equal(_load_all(pool, chain), blocks[:SLOTS])

    def test_what_a_store_builds_on_is_not_evicted_by_it(self, pool: BlockPool) -> None:
        chain = _chain(pool, SLOTS)
        blocks = payload(self.layout, SLOTS, seed=13)
        view = view_of(self.layout, blocks)
        _wait_stored(pool, chain, view.take(0, 2))
        _store(pool, self.beside(pool, chain, SLOTS - 2, "b"), seed=14)
        assert _wait_stored(pool, chain, view) == (SLOTS, SLOTS - 2)
        np.testing.assert_array_equal(_load_all(pool, chain), blocks)

    def test_a_lease_on_a_stale_match_is_shorter(self, pool: BlockPool) -> None:
        chain = _chain(pool, 3)
        _store(pool, chain, seed=15)
        stale = pool.match(chain)
        _store(pool, self.beside(pool, chain, SLOTS - 1, "b"), seed=16)
        with pool.lease(stale, WAIT_S) as lease:
            assert lease.blocks == 1
        with pool.lease(Match(_chain(pool, 2, salt="c"), 2), WAIT_S) as lease:
            assert lease.blocks == 0

    def test_a_closed_lease_cannot_be_loaded(self, pool: BlockPool) -> None:
        chain = _chain(pool, 1)
        blocks = _store(pool, chain, seed=17)
        lease = pool.lease(pool.match(chain), WAIT_S)
        lease.close()
        lease.close()
        with pytest.raises(LeaseExpiredError):
            pool.load(lease, view_of(self.layout, np.zeros_like(blocks)), deadline_s=WAIT_S)
        assert pool.stats().leases == 0

    def test_a_lease_runs_out(self, pool: BlockPool) -> None:
        chain = _chain(pool, SLOTS)
        blocks = _store(pool, chain, seed=18)
        lease = pool.lease(pool.match(chain), 0.05)
        _until(lambda: pool.stats().leases == 0)
        with pytest.raises(LeaseExpiredError):
            pool.load(lease, view_of(self.layout, np.zeros_like(blocks)), deadline_s=WAIT_S)
        lease.close()
        _store(pool, self.beside(pool, chain, SLOTS, "b"), seed=19)

    def test_a_lease_of_no_time_is_refused(self, pool: BlockPool) -> None:
        match = pool.match(_chain(pool, 1))
        for seconds in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(UsageError):
                pool.lease(match, seconds)
        assert pool.stats().leases == 0

    # ---- wrong calls ------------------------------------------------------------------------------

    def test_nonsense_is_refused_and_leaves_nothing(self, pool: BlockPool) -> None:
        """Wrong values of a caller that checks no types, more of them than operations may be queued."""
        nonsense = [None, "10", float("nan"), b"1"]
        chain = _chain(pool, SLOTS)
        blocks = _store(pool, chain, seed=40)
        out = view_of(self.layout, np.zeros_like(blocks))
        match = pool.match(chain)
        for seconds in nonsense:
            with pytest.raises((UsageError, TypeError)):
                pool.lease(match, seconds)  # type: ignore[arg-type]  # wrong on purpose
        with pool.lease(match, WAIT_S) as lease:
            for wrong in nonsense * 300:
                with pytest.raises(UsageError):
                    pool.load(lease, out, deadline_s=wrong)  # type: ignore[arg-type]  # as above
                with pytest.raises(UsageError):
                    pool.store(chain, out, deadline_s=wrong)  # type: ignore[arg-type]  # as above
                with pytest.raises(UsageError):
                    pool.store(chain, out, durability=wrong, deadline_s=WAIT_S)  # type: ignore[arg-type]  # as above
            assert pool.load(lease, out, deadline_s=float("inf")).wait(float("inf")) == SLOTS
        _until(lambda: _nothing_out(pool))
        # All slots, so none is pinned.
        _store(pool, self.beside(pool, chain, SLOTS, "other"), seed=41)

    def test_blocks_outside_the_lease_or_chain_are_refused(self, pool: BlockPool) -> None:
        chain = _chain(pool, 2)
        view = view_of(self.layout, _store(pool, chain, seed=20))
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            for first in (1, -1):
                with pytest.raises(UsageError):
                    pool.load(lease, view, first=first, deadline_s=WAIT_S)
        for first in (1, -1):
            with pytest.raises(UsageError):
                pool.store(chain, view, first=first, deadline_s=WAIT_S)

    def test_other_layouts_are_refused(self, pool: BlockPool) -> None:
        other = replace(self.layout, kv_heads=self.layout.kv_heads + 1)
        view = view_of(other, payload(other, 1, seed=21))
        chain = _chain(pool, 1)
        with pytest.raises(LayoutMismatchError):
            pool.store(chain, view, deadline_s=WAIT_S)
        _store(pool, chain, seed=22)
        with pool.lease(pool.match(chain), WAIT_S) as lease, pytest.raises(LayoutMismatchError):
            pool.load(lease, view, deadline_s=WAIT_S)

    def test_a_read_only_destination_is_refused(self, pool: BlockPool) -> None:
        chain = _chain(pool, 1)
        view = replace(view_of(self.layout, _store(pool, chain, seed=23)), writable=False)
        with pool.lease(pool.match(chain), WAIT_S) as lease, pytest.raises(UsageError):
            pool.load(lease, view, deadline_s=WAIT_S)

    def test_ssd_durability_is_refused_where_there_is_none(self, pool: BlockPool) -> None:
        view = view_of(self.layout, payload(self.layout, 1, seed=24))
        with pytest.raises(CapacityError):
            pool.store(_chain(pool, 1), view, durability="ssd", deadline_s=WAIT_S)

    # ---- ends -------------------------------------------------------------------------------------

    def test_a_deadline_may_be_far(self, pool: BlockPool) -> None:
        chain, blocks = _chain(pool, 2), payload(self.layout, 2, seed=16)
        stored = pool.store(chain, view_of(self.layout, blocks), deadline_s=FAR_S)
        assert stored.wait(WAIT_S).stored == 2
        out = np.zeros_like(blocks)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            loaded = pool.load(lease, view_of(self.layout, out), deadline_s=FAR_S)
            assert loaded.wait(WAIT_S) == 2
        np.testing.assert_array_equal(out, blocks)

    def test_a_deadline_that_is_over_ends_it(self, pool: BlockPool) -> None:
        chain = _chain(pool, 2)
        blocks = payload(self.layout, 2, seed=25)
        view = view_of(self.layout, blocks)
        with pytest.raises(TransferTimeoutError):
            pool.store(chain, view, deadline_s=0).wait(WAIT_S)
        _until(lambda: pool.stats().free == SLOTS * self.servers)
        _wait_stored(pool, chain, view)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            done = pool.load(lease, view, deadline_s=0)
            with pytest.raises(TransferTimeoutError):
                done.wait(WAIT_S)
        assert _nothing_out(pool)

    def test_cancel_ends_it_and_leaves_nothing_out(self, pool: BlockPool) -> None:
        chain = _chain(pool, SLOTS)
        view = view_of(self.layout, payload(self.layout, SLOTS, seed=26))
        storing = pool.store(chain, view, deadline_s=WAIT_S)
        storing.cancel()
        try:
            assert storing.wait(WAIT_S).stored == SLOTS
        except CancelledTransferError:
            _wait_stored(pool, chain, view)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            loading = pool.load(lease, view, deadline_s=WAIT_S)
            loading.cancel()
            try:
                assert loading.wait(WAIT_S) == SLOTS
            except CancelledTransferError:
                assert loading.done()
        _until(lambda: _nothing_out(pool))

    def test_a_load_outlives_the_close_of_its_lease(self, pool: BlockPool) -> None:
        chain = _chain(pool, SLOTS)
        blocks = _store(pool, chain, seed=27)
        out = np.zeros_like(blocks)
        lease = pool.lease(pool.match(chain), WAIT_S)
        done = pool.load(lease, view_of(self.layout, out), deadline_s=WAIT_S)
        lease.close()
        assert done.wait(WAIT_S) == SLOTS
        np.testing.assert_array_equal(out, blocks)
        _until(lambda: _nothing_out(pool))

    def test_a_closed_pool_says_so(self, pool: BlockPool) -> None:
        chain = _chain(pool, 1)
        view = view_of(self.layout, _store(pool, chain, seed=28))
        match = pool.match(chain)
        lease = pool.lease(match, WAIT_S)
        pool.close()
        pool.close()
        lease.close()
        with pytest.raises(ClosedError):
            pool.lease(match, WAIT_S)
        with pytest.raises(ClosedError):
            pool.load(lease, view, deadline_s=WAIT_S)
        with pytest.raises(ClosedError):
            pool.store(chain, view, deadline_s=WAIT_S)

    def test_close_ends_what_is_in_flight(self, pool: BlockPool) -> None:
        chain = _chain(pool, SLOTS)
        blocks = _store(pool, chain, seed=29)
        lease = pool.lease(pool.match(chain), WAIT_S)
        started = [
            pool.load(lease, view_of(self.layout, np.zeros_like(blocks)), deadline_s=WAIT_S)
            for _ in range(8)
        ]
        pool.close()
        for done in started:
            assert done.done()
            try:
                assert done.result() == SLOTS
            except ClosedError:
                continue

    # ---- counts and threads -----------------------------------------------------------------------

    def test_stats_count(self, pool: BlockPool) -> None:
        stats = pool.stats()
        slots = SLOTS * self.servers
        assert (stats.slots, stats.free, stats.ready, stats.leases) == (slots, slots, 0, 0)
        chain = _chain(pool, 3)
        _store(pool, chain, seed=30)
        before = pool.stats()
        assert (before.free, before.ready, before.hits, before.misses) == (slots - 3, 3, 0, 0)
        lease = pool.lease(Match(_chain(pool, 5), 5), WAIT_S)
        during = pool.stats()
        assert (during.leases, during.hits, during.misses) == (1, 3, 2)
        lease.close()
        _store(pool, self.beside(pool, chain, SLOTS, "b"), seed=31)
        after = pool.stats()
        assert (after.leases, after.evictions, after.ready) == (0, 3, SLOTS)
        assert _nothing_out(pool)

    def test_threads_see_whole_blocks_only(self, pool: BlockPool) -> None:
        chains = [_chain(pool, 3, salt=str(number)) for number in range(5)]
        blocks = [payload(self.layout, 3, seed=100 + number) for number in range(5)]

        def work(thread: int) -> int:
            loaded = 0
            for turn in range(12):
                number = (thread + turn) % 5
                source = view_of(self.layout, blocks[number])
                pool.store(chains[number], source, deadline_s=WAIT_S).wait(WAIT_S)
                with pool.lease(pool.match(chains[number]), WAIT_S) as lease:
                    out = np.zeros((lease.blocks, self.layout.block_bytes), dtype=np.uint8)
                    if lease.blocks:
                        done = pool.load(lease, view_of(self.layout, out), deadline_s=WAIT_S)
                        assert done.wait(WAIT_S) == lease.blocks
                    np.testing.assert_array_equal(out, blocks[number][: lease.blocks])
                    loaded += lease.blocks
            return loaded

        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(work, range(4))) > 0
        _until(lambda: _nothing_out(pool))


def _chain(pool: BlockPool, blocks: int, salt: str = "") -> Chain:
    tokens = range(blocks * pool.layout.block_tokens)
    return pool.chain(namespace(pool.layout, salt), list(tokens))


def _store(pool: BlockPool, chain: Chain, seed: int) -> Payload:
    """Store a whole chain and return its payloads."""
    blocks = payload(pool.layout, len(chain), seed)
    assert _wait_stored(pool, chain, view_of(pool.layout, blocks))[0] == len(chain)
    return blocks


def _wait_stored(
    pool: BlockPool, chain: Chain, source: BlockView, first: int = 0
) -> tuple[int, int]:
    result = pool.store(chain, source, first=first, deadline_s=WAIT_S).wait(WAIT_S)
    return result.stored, result.new


def _load_all(pool: BlockPool, chain: Chain) -> Payload:
    """Load as much of a chain as there is."""
    with pool.lease(pool.match(chain), WAIT_S) as lease:
        out = np.zeros((lease.blocks, pool.layout.block_bytes), dtype=np.uint8)
        done = pool.load(lease, view_of(pool.layout, out), deadline_s=WAIT_S)
        assert done.wait(WAIT_S) == lease.blocks
    return out


def _nothing_out(pool: BlockPool) -> bool:
    """Say whether no lease, reservation or quarantine is out."""
    stats = pool.stats()
    assert stats.free + stats.ready + stats.reserved + stats.quarantined == stats.slots
    return (stats.leases, stats.reserved, stats.quarantined) == (0, 0, 0)


def _until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the time only bounds a failing test."""
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true"
        time.sleep(0.005)
