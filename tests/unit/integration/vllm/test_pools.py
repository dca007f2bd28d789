"""The pool behind an engine: shared by its two sides, closed by the last; what is said without one."""

from pathlib import Path

import pytest

from kvpool.config import PoolConfig
from kvpool.errors import ClosedError, PeerUnreachableError
from kvpool.integration.vllm.options import read_options
from kvpool.integration.vllm.pools import SharedPools, named_by, open_pool
from kvpool.pool import Pool
from tests.unit.integration.vllm.scene import LAYOUT, NAMESPACE


def make() -> Pool:
    return Pool.open(LAYOUT, PoolConfig(dram_bytes=64 * 4096))


def test_an_engine_is_told_to_start_its_server_first(tmp_path: Path) -> None:
    options = read_options({"server": str(tmp_path / "nowhere")})
    with pytest.raises(PeerUnreachableError, match=r"nowhere: start it before the engine"):
        open_pool(options, LAYOUT)


def test_the_last_side_closes_the_pool() -> None:
    shared = SharedPools()
    pool = shared.attach("engine", make)
    assert shared.attach("engine", make) is pool
    other = shared.attach("another", make)
    assert other is not pool
    shared.detach("engine")
    pool.stats()
    shared.detach("engine")
    with pytest.raises(ClosedError):
        pool.stats()
    shared.detach("engine")  # no side is left
    shared.detach("another")
    fresh = shared.attach("engine", make)
    assert fresh is not pool
    shared.detach("engine")


def test_a_pool_without_tenants_leaves_names_as_they_are() -> None:
    with make() as pool:
        assert named_by(pool, NAMESPACE) == NAMESPACE
