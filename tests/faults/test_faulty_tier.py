"""A pool over a tier that refuses and corrupts: misses and counters, never a wrong byte."""

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.block import new_incarnation
from kvpool.errors import CapacityError, CorruptionError, TransferTimeoutError
from kvpool.pool import Pool
from kvpool.testing.blocks import SMALL_LAYOUT, key, namespace, payload, read, view_of, write
from kvpool.testing.faults import FaultyTier, SlowTier
from kvpool.tiers.dram import DramTier

WAIT_S = 20.0


def faulty(seed: int, slot_count: int = 16, refuse: float = 0.0, flip: float = 0.0) -> FaultyTier:
    arena = Arena(SMALL_LAYOUT, slot_count, new_incarnation())
    inner = DramTier(arena)
    return FaultyTier(inner, seed=seed, refuse=refuse, flip=flip)


def test_a_flipped_byte_is_found_by_its_reader() -> None:
    with faulty(seed=1, flip=1.0) as tier:
        write(tier, key(0), payload(SMALL_LAYOUT, 1, seed=1))
        assert tier.flipped == 1
        slots = tier.pin(key(0))
        with pytest.raises(CorruptionError):
            read(tier, slots)


def test_a_refusal_changes_nothing() -> None:
    with faulty(seed=1, refuse=1.0) as tier:
        before = tier.stats()
        with pytest.raises(CapacityError):
            tier.reserve()
        assert tier.stats() == before
        assert tier.refused == 1


def test_the_same_seed_fails_the_same_calls() -> None:
    def outcomes(seed: int) -> list[bool]:
        made: list[bool] = []
        with faulty(seed=seed, refuse=0.5) as tier:
            for _ in range(20):
                try:
                    tier.abort(tier.reserve())
                    made.append(True)
                except CapacityError:
                    made.append(False)
        return made

    assert outcomes(3) == outcomes(3)
    assert outcomes(3) != outcomes(4)


def test_a_corrupt_block_ends_the_load_and_leaves_the_pool() -> None:
    tier = faulty(seed=5, flip=0.3)
    with Pool(tier) as pool:
        chain = pool.chain(namespace(SMALL_LAYOUT), list(range(12 * SMALL_LAYOUT.block_tokens)))
        blocks = payload(SMALL_LAYOUT, 12, seed=2)
        pool.store(chain, view_of(SMALL_LAYOUT, blocks), deadline_s=WAIT_S).wait(WAIT_S)
        assert 0 < tier.flipped < 12
        for _ in range(tier.flipped + 1):
            match = pool.match(chain)
            with pool.lease(match, WAIT_S) as lease:
                out = np.zeros((lease.blocks, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
                load = pool.load(lease, view_of(SMALL_LAYOUT, out), deadline_s=WAIT_S)
                delivered = load.wait(WAIT_S)
                np.testing.assert_array_equal(out[:delivered], blocks[:delivered])
                again = pool.load(lease, view_of(SMALL_LAYOUT, out), deadline_s=WAIT_S)
                assert again.wait(WAIT_S) == delivered
            if delivered == match.blocks:
                break
            # Any block may be the first bad one of its own layer, so several may have gone.
            assert pool.match(chain).blocks <= delivered
        else:
            raise AssertionError("a block that proved corrupt is still matched")
        assert 0 < pool.stats().corruptions <= tier.flipped
        stats = pool.stats()
        assert (stats.reserved, stats.quarantined, stats.leases) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_under_all_faults_every_loaded_byte_is_right(seed: int) -> None:
    tier = faulty(seed=seed, slot_count=8, refuse=0.1, flip=0.2)
    with Pool(tier) as pool:
        tokens = list(range(6 * SMALL_LAYOUT.block_tokens))
        salts = ("a", "b", "c")
        chains = [pool.chain(namespace(SMALL_LAYOUT, salt), tokens) for salt in salts]
        blocks = [payload(SMALL_LAYOUT, 6, seed=10 + number) for number in range(3)]
        for turn in range(30):
            chain, want = chains[turn % 3], blocks[turn % 3]
            stored = pool.store(chain, view_of(SMALL_LAYOUT, want), deadline_s=WAIT_S).wait(WAIT_S)
            assert stored.stored == 6 or stored.refused
            with pool.lease(pool.match(chain), WAIT_S) as lease:
                out = np.zeros((lease.blocks, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
                load = pool.load(lease, view_of(SMALL_LAYOUT, out), deadline_s=WAIT_S)
                delivered = load.wait(WAIT_S)
            np.testing.assert_array_equal(out[:delivered], want[:delivered])
        stats = pool.stats()
        assert (stats.reserved, stats.quarantined, stats.leases) == (0, 0, 0)
        assert stats.corruptions > 0
        assert tier.refused > 0


def test_a_slow_tier_waits_at_the_same_calls_for_the_same_seed() -> None:
    def waits(seed: int, wait: float) -> list[int]:
        counts: list[int] = []
        inner = DramTier(Arena(SMALL_LAYOUT, 4, new_incarnation()))
        with SlowTier(inner, seed=seed, wait=wait) as tier:
            for _ in range(20):
                tier.abort(tier.reserve())
                counts.append(tier.waits)
        return counts

    assert waits(1, 0.5) == waits(1, 0.5) != waits(2, 0.5)
    assert waits(1, 0.0)[-1] == 0
    assert waits(1, 1.0)[-1] == 40


def test_a_load_from_a_slow_tier_keeps_its_deadline() -> None:
    inner = DramTier(Arena(SMALL_LAYOUT, 16, new_incarnation()))
    with Pool(SlowTier(inner, seed=1, wait=1.0, wait_s_max=0.01)) as pool:
        chain = pool.chain(namespace(SMALL_LAYOUT), list(range(4 * SMALL_LAYOUT.block_tokens)))
        blocks = payload(SMALL_LAYOUT, 4, seed=1)
        source = view_of(SMALL_LAYOUT, blocks)
        assert pool.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S).stored == 4
        out = np.zeros_like(blocks)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            late = pool.load(lease, view_of(SMALL_LAYOUT, out), deadline_s=0.0)
            with pytest.raises(TransferTimeoutError):
                late.wait(WAIT_S)
            done = pool.load(lease, view_of(SMALL_LAYOUT, out), deadline_s=WAIT_S)
            assert done.wait(WAIT_S) == 4
        np.testing.assert_array_equal(out, blocks)
        stats = pool.stats()
        assert (stats.reserved, stats.quarantined, stats.extra["pins"]) == (0, 0, 0)
