"""A pool with an SSD tier: what is durable outlives it, and a lease waits no longer than it may."""

from pathlib import Path

import numpy as np
import pytest

from kvpool.config import PoolConfig, SsdConfig
from kvpool.errors import CapacityError, ConfigError, UnavailableError
from kvpool.pool import Pool
from kvpool.testing.blocks import SMALL_LAYOUT, namespace, payload, view_of
from kvpool.testing.slow_store import FaultyStore
from kvpool.tiers.stack import StackTier

PATIENCE_S = 60.0
LAYOUT = SMALL_LAYOUT
SPACE = namespace(LAYOUT)
SSD_BYTES = 16 << 20


def open_pool(folder: Path, dram_blocks: int = 16, **settings: float) -> Pool:
    ssd = SsdConfig(
        folder=folder,
        capacity_bytes=SSD_BYTES,
        promote_timeout_s=settings.pop("promote_timeout_s", PATIENCE_S),
        **{name: int(value) for name, value in settings.items()},
    )
    slot = -(-LAYOUT.block_bytes // 4096) * 4096
    return Pool.open(LAYOUT, PoolConfig(dram_bytes=dram_blocks * slot, ssd=ssd))


def tokens(blocks: int, prompt: int = 0) -> list[int]:
    return [prompt, *range(1, blocks * LAYOUT.block_tokens)]


def loaded(
    pool: Pool, blocks: int, prompt: int = 0
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Match, lease and load a prompt; return the blocks that came."""
    match = pool.match(pool.chain(SPACE, tokens(blocks, prompt)))
    with pool.lease(match, PATIENCE_S) as lease:
        out = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
        done = pool.load(lease, view_of(LAYOUT, out), deadline_s=PATIENCE_S).wait(PATIENCE_S)
        return out[:done]


def test_what_is_durable_is_served_by_the_next_pool_at_its_first_match(tmp_path: Path) -> None:
    blocks = payload(LAYOUT, 10, seed=1)
    with open_pool(tmp_path) as pool:
        chain = pool.chain(SPACE, tokens(10))
        store = pool.store(chain, view_of(LAYOUT, blocks), durability="ssd", deadline_s=PATIENCE_S)
        result = store.wait(PATIENCE_S)
        assert (result.stored, result.new, result.refused) == (10, 10, "")
    with open_pool(tmp_path) as pool:
        assert pool.match(pool.chain(SPACE, tokens(12))).blocks == 10
        np.testing.assert_array_equal(loaded(pool, 10), blocks)


def test_what_is_stored_in_dram_is_served_after_it_left_dram(tmp_path: Path) -> None:
    with open_pool(tmp_path, dram_blocks=8) as pool:
        assert isinstance(pool.tier, StackTier)
        for prompt in range(6):
            chain = pool.chain(SPACE, tokens(4, prompt))
            source = view_of(LAYOUT, payload(LAYOUT, 4, seed=prompt))
            pool.store(chain, source, deadline_s=PATIENCE_S).wait(PATIENCE_S)
            assert pool.tier.flusher.wait_idle(PATIENCE_S)
        for prompt in range(6):
            np.testing.assert_array_equal(loaded(pool, 4, prompt), payload(LAYOUT, 4, seed=prompt))
        assert pool.stats().evictions > 0


def test_a_store_of_the_end_of_a_chain_is_durable_with_its_ancestors_only(tmp_path: Path) -> None:
    blocks = payload(LAYOUT, 6, seed=2)
    with open_pool(tmp_path) as pool:
        chain = pool.chain(SPACE, tokens(6))
        end = view_of(LAYOUT, blocks[3:])
        orphan = pool.store(chain, end, first=3, durability="ssd", deadline_s=PATIENCE_S)
        result = orphan.wait(PATIENCE_S)
        assert result.stored == 0 and "no tier" in result.refused
        begin = view_of(LAYOUT, blocks[:3])
        pool.store(chain, begin, deadline_s=PATIENCE_S).wait(PATIENCE_S)
        whole = pool.store(chain, end, first=3, durability="ssd", deadline_s=PATIENCE_S)
        assert whole.wait(PATIENCE_S).stored == 3
    with open_pool(tmp_path) as pool:
        np.testing.assert_array_equal(loaded(pool, 6), blocks)


def test_a_pool_without_an_ssd_refuses_what_must_be_durable_at_once() -> None:
    with Pool.open(LAYOUT, PoolConfig(dram_bytes=1 << 20)) as pool:
        chain = pool.chain(SPACE, tokens(1))
        source = view_of(LAYOUT, payload(LAYOUT, 1, seed=3))
        with pytest.raises(CapacityError, match="no ssd tier"):
            pool.store(chain, source, durability="ssd", deadline_s=PATIENCE_S)


def test_too_much_to_make_durable_is_refused_at_once_and_leaves_no_trace(tmp_path: Path) -> None:
    limit = 2 * LAYOUT.block_bytes
    with open_pool(tmp_path, durable_bytes_max=limit) as pool:
        chain = pool.chain(SPACE, tokens(3))
        source = view_of(LAYOUT, payload(LAYOUT, 3, seed=3))
        with pytest.raises(CapacityError, match="durable"):
            pool.store(chain, source, durability="ssd", deadline_s=PATIENCE_S)
        for first in (0, 1):
            part = source.take(first, first + 2)
            done = pool.store(chain, part, first=first, durability="ssd", deadline_s=PATIENCE_S)
            assert done.wait(PATIENCE_S).stored == 2


def test_a_lease_leaves_out_what_would_take_longer_than_computing_it(tmp_path: Path) -> None:
    blocks = payload(LAYOUT, 4, seed=4)
    with open_pool(tmp_path) as pool:
        assert isinstance(pool.tier, StackTier)
        chain = pool.chain(SPACE, tokens(4))
        store = pool.store(chain, view_of(LAYOUT, blocks), durability="ssd", deadline_s=PATIENCE_S)
        store.wait(PATIENCE_S)
        gone = 0
        while gone < 4:  # the flusher may hold one for a moment
            gone += pool.tier.evict(4 - gone)
        faulty = FaultyStore(pool.tier.slow)
        faulty.open_gate.clear()
        pool.tier.slow = faulty
        match = pool.match(chain)
        assert match.blocks == 4
        with pool.lease(match, PATIENCE_S, recompute_s=0.05) as lease:
            assert lease.blocks == 0
        faulty.open_gate.set()
        with pool.lease(match, PATIENCE_S, recompute_s=PATIENCE_S) as lease:
            assert lease.blocks == 4


def test_a_disk_that_fails_refuses_a_durable_store_and_keeps_the_blocks_in_dram(
    tmp_path: Path,
) -> None:
    with open_pool(tmp_path) as pool:
        assert isinstance(pool.tier, StackTier)
        faulty = FaultyStore(pool.tier.slow)
        faulty.failing.set()
        pool.tier.slow = faulty
        chain = pool.chain(SPACE, tokens(2))
        source = view_of(LAYOUT, payload(LAYOUT, 2, seed=5))
        store = pool.store(chain, source, durability="ssd", deadline_s=PATIENCE_S)
        result = store.wait(PATIENCE_S)
        assert result.stored == 0 and "fails" in result.refused
        assert pool.match(chain).blocks == 2


def test_one_folder_serves_one_pool(tmp_path: Path) -> None:
    with open_pool(tmp_path), pytest.raises(UnavailableError):
        open_pool(tmp_path)
    open_pool(tmp_path).close()


def test_settings_that_contradict_are_named(tmp_path: Path) -> None:
    for wrong in ({"capacity_bytes": 0}, {"high_share": 0.5}, {"flush_bytes_s": -1}):
        with pytest.raises(ConfigError) as refused:
            SsdConfig(**{"folder": tmp_path, "capacity_bytes": 1 << 20, **wrong})  # type: ignore[arg-type]
        assert refused.value.key == f"pool.ssd.{next(iter(wrong))}"
    small = PoolConfig(dram_bytes=1 << 20, ssd=SsdConfig(folder=tmp_path, capacity_bytes=100))
    with pytest.raises(ConfigError, match="capacity_bytes"):
        Pool.open(LAYOUT, small)
