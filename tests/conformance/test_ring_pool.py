"""The pool over a ring passes the suite of pools. Five servers and other ways: ``test_ring_pool_soak.py``."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvpool.base import BlockPool
from kvpool.block import BlockLayout
from kvpool.testing.pool_suite import PoolSuite
from tests.ring import PATIENT, RingOfServers


class RingSuite(PoolSuite):
    flags: tuple[str, ...] = ()
    ways: tuple[str, ...] = ("host", "ucx")

    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield

    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        slot_bytes = -(-layout.block_bytes // 4096) * 4096
        ring = RingOfServers(self.servers, slot_count * slot_bytes, *self.flags)
        self.stack.enter_context(ring)
        config = replace(PATIENT, ways=self.ways)
        return self.stack.enter_context(ring.connect(layout, config))


class TestOneServerThroughStreams(RingSuite):
    ways: tuple[str, ...] = ()
