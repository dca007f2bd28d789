"""The embedded pool passes the suite of pools."""

from kvpool.base import BlockPool
from kvpool.block import BlockLayout
from kvpool.config import PoolConfig
from kvpool.pool import Pool
from kvpool.testing.pool_suite import PoolSuite


class TestPool(PoolSuite):
    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        slot_bytes = -(-layout.block_bytes // 4096) * 4096
        return Pool.open(layout, PoolConfig(dram_bytes=slot_count * slot_bytes))
