"""The embedded pool passes the suite of pools, alone and as one of several over one memory."""

from kvpool.base import BlockPool
from kvpool.block import BlockLayout
from kvpool.config import PoolConfig
from kvpool.pool import Pool
from kvpool.pools import open_pools
from kvpool.testing.pool_suite import PoolSuite


class TestPool(PoolSuite):
    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        slot_bytes = -(-layout.block_bytes // 4096) * 4096
        return Pool.open(layout, PoolConfig(dram_bytes=slot_count * slot_bytes))


class TestPoolBesideAnother(PoolSuite):
    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        slot_bytes = -(-layout.block_bytes // 4096) * 4096
        chunk_bytes = slot_count * slot_bytes
        config = PoolConfig(dram_bytes=2 * chunk_bytes)
        self.other, pool = open_pools([layout, layout], config, chunk_bytes=chunk_bytes)
        return pool
