"""Pools of several models over one memory."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import BlockLayout
from kvpool.config import PoolConfig, SsdConfig
from kvpool.errors import CapacityError, ConfigError, LayoutMismatchError, UsageError
from kvpool.pool import Pool
from kvpool.pools import open_pools
from kvpool.testing.blocks import SMALL_LAYOUT, namespace, payload, view_of
from tests.conftest import Count

PAGE = 4096
CHUNK_BYTES = 8 * PAGE
CHUNKS = 12
WAIT_S = 60.0
# One, three and two pages a block, of different shapes.
LARGE = BlockLayout(num_layers=3, kv_heads=4, block_tokens=16, k_dim=8, v_dim=8)
LATENT = BlockLayout(num_layers=5, kv_heads=1, block_tokens=32, k_dim=24, v_dim=0, dtype="bfloat16")
LAYOUTS = [SMALL_LAYOUT, LARGE, LATENT]
CONFIG = PoolConfig(dram_bytes=CHUNKS * CHUNK_BYTES)


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    pools = open_pools(LAYOUTS, CONFIG, chunk_bytes=CHUNK_BYTES)
    yield pools
    for pool in pools:
        pool.close()


def visit(pool: Pool, number: int, blocks: int = 2) -> int:
    """Load a prompt and store what was not there; every byte is looked at. How much was there."""
    chain = pool.chain(
        namespace(pool.layout, f"{number}"), range(blocks * pool.layout.block_tokens)
    )
    want = payload(pool.layout, blocks, number)
    with pool.lease(pool.match(chain), WAIT_S) as lease:
        out = np.zeros_like(want[: lease.blocks])
        good = pool.load(lease, view_of(pool.layout, out), deadline_s=WAIT_S).wait(WAIT_S)
    np.testing.assert_array_equal(out[:good], want[:good])
    if good < blocks:
        source = view_of(pool.layout, want[good:])
        pool.store(chain, source, first=good, deadline_s=WAIT_S).wait(WAIT_S)
    return good


def chunks(pool: Pool) -> int:
    per_chunk = CHUNK_BYTES // (-(-pool.layout.block_bytes // PAGE) * PAGE)
    assert pool.stats().slots % per_chunk == 0
    return pool.stats().slots // per_chunk


def assert_at_rest(pools: list[Pool]) -> None:
    for pool in pools:
        stats = pool.stats()
        assert (stats.reserved, stats.quarantined, stats.extra["pins"]) == (0, 0, 0)
        assert stats.free + stats.ready == stats.slots
    assert sum(map(chunks, pools)) <= CHUNKS


def test_models_change_their_share(pools: list[Pool]) -> None:
    """Each in turn is the only one in use; then it has all chunks but one of each other's."""
    for turn, pool in enumerate(pools * 2):
        for number in range(100):
            visit(pool, 1000 * turn + number)
        assert chunks(pool) == CHUNKS - 2
        assert [chunks(other) for other in pools if other is not pool] == [1, 1]
        assert_at_rest(pools)
    for pool in pools:
        pool.tier.evict(1000)
        assert pool.stats().free == pool.stats().slots


def test_models_in_use_at_the_same_time_share(pools: list[Pool]) -> None:
    """Both want more than there is: what each has holds its blocks for as long as the other's."""
    for number in range(200):
        for pool in pools[:2]:
            visit(pool, number)
    # One page a block against three: 11 chunks are shared about as 3 to 8.
    assert [2 <= chunks(pools[0]) <= 4, 7 <= chunks(pools[1]) <= 9] == [True, True]
    assert_at_rest(pools)


def test_threads_of_several_models_find_no_wrong_byte(pools: list[Pool], count: Count) -> None:
    start = threading.Barrier(6)

    def work(thread: int) -> None:
        generator = np.random.default_rng(thread)
        start.wait(WAIT_S)
        for turn in range(count(60, 3000)):
            # Each model has its times.
            pool = pools[(turn // 10 + thread // 3) % 3]
            visit(pool, int(generator.integers(40)), int(generator.integers(1, 4)))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert_at_rest(pools)
    for pool in pools:
        pool.tier.evict(1000)
        assert pool.stats().free == pool.stats().slots


def test_a_pool_is_of_its_layout_alone(pools: list[Pool]) -> None:
    chain = pools[0].chain(namespace(SMALL_LAYOUT), range(16))
    wrong = view_of(LARGE, payload(LARGE, 1, seed=1))
    with pytest.raises(LayoutMismatchError):
        pools[0].store(chain, wrong, deadline_s=WAIT_S)


def test_the_memory_goes_with_the_last_pool() -> None:
    pools = open_pools(LAYOUTS, CONFIG, chunk_bytes=CHUNK_BYTES)
    for pool in pools:
        visit(pool, 1)
    pools[0].close()
    assert visit(pools[1], 1) == visit(pools[2], 1) == 2
    for pool in pools:
        pool.close()


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layout"):
        open_pools([], CONFIG)
    with pytest.raises(UsageError, match="whole pages"):
        open_pools(LAYOUTS, CONFIG, chunk_bytes=PAGE - 1)
    with pytest.raises(ConfigError, match="a chunk of"):
        open_pools(LAYOUTS, PoolConfig(dram_bytes=2 * CHUNK_BYTES), chunk_bytes=CHUNK_BYTES)
    with pytest.raises(ConfigError, match="do not hold a block"):
        open_pools(LAYOUTS, CONFIG, chunk_bytes=PAGE)
    with pytest.raises(CapacityError):
        open_pools(LAYOUTS, PoolConfig(dram_bytes=1 << 50))
    ssd = SsdConfig(folder=tmp_path, capacity_bytes=1 << 20)
    with pytest.raises(ConfigError, match="SSD"):
        open_pools(LAYOUTS, PoolConfig(ssd=ssd))
