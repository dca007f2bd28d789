"""The pool over a ring passes the suite of pools: one server through streams, five over shared memory.

Each test of the first has a server of its own. The five are started once, which takes seconds, and
emptied between tests; ``test_ring_pool_soak.py`` starts five for each test, and goes other ways.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from kvpool.base import (
    BlockPool,
    Chain,
    Durability,
    Lease,
    Match,
    PoolStats,
    StoreResult,
    Tokens,
)
from kvpool.block import BlockLayout, Namespace
from kvpool.client import protocol
from kvpool.client.rpc import Caller
from kvpool.completion import Completion
from kvpool.memory import BlockView
from kvpool.testing.pool_suite import SLOTS, PoolSuite
from tests.ring import PATIENT, RingOfServers
from tests.server_process import WAIT_S, until

_COUNTS = ("hits", "misses", "evictions", "corruptions")


def dram_bytes(layout: BlockLayout, slot_count: int) -> int:
    """Return what has room for so many slots."""
    return slot_count * -(-layout.block_bytes // 4096) * 4096


class RingSuite(PoolSuite):
    flags: tuple[str, ...] = ()
    ways: tuple[str, ...] = ("host", "ucx")

    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield

    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        ring = RingOfServers(self.servers, dram_bytes(layout, slot_count), *self.flags)
        self.stack.enter_context(ring)
        config = replace(PATIENT, ways=self.ways)
        return self.stack.enter_context(ring.connect(layout, config))


class TestOneServerThroughStreams(RingSuite):
    ways: tuple[str, ...] = ()


class Fresh(BlockPool):
    """A pool of servers that others have used: its names are its own, and counts begin at 0."""

    _numbers = itertools.count()

    def __init__(self, pool: BlockPool) -> None:
        self.layout = pool.layout
        self._pool = pool
        self._salt = f"pool {next(self._numbers)}"
        self._before = pool.stats()

    def chain(self, namespace: Namespace, tokens: Tokens) -> Chain:
        salt = f"{self._salt}:{namespace.salt}"
        return Chain(namespace, self._pool.chain(replace(namespace, salt=salt), tokens).hashes)

    def match(self, chain: Chain) -> Match:
        return self._pool.match(chain)

    def lease(self, match: Match, seconds: float) -> Lease:
        return self._pool.lease(match, seconds)

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        return self._pool.load(lease, dest, first=first, deadline_s=deadline_s)

    def store(
        self,
        chain: Chain,
        source: BlockView,
        *,
        first: int = 0,
        durability: Durability = "dram",
        deadline_s: float,
    ) -> Completion[StoreResult]:
        return self._pool.store(
            chain, source, first=first, durability=durability, deadline_s=deadline_s
        )

    def stats(self) -> PoolStats:
        stats = self._pool.stats()
        grown = {name: getattr(stats, name) - getattr(self._before, name) for name in _COUNTS}
        return replace(stats, **grown)

    def close(self) -> None:
        self._pool.close()


@pytest.fixture(scope="module")
def five_servers() -> Iterator[RingOfServers]:
    with RingOfServers(5, dram_bytes(PoolSuite.layout, SLOTS)) as ring:
        yield ring


class TestFiveServers(PoolSuite):
    servers = 5

    @pytest.fixture(autouse=True)
    def _ring(self, five_servers: RingOfServers) -> None:
        self.ring = five_servers

    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        assert slot_count == SLOTS
        pool = self.ring.connect(layout)

        def emptied() -> bool:
            for node in self.ring.nodes:
                with closing(Caller(node.address)) as caller:
                    caller.call(protocol.EVICT, protocol.EvictRequest(blocks=SLOTS), WAIT_S)
            return pool.stats().free == SLOTS * self.servers

        until(emptied, "every block is evicted")
        return Fresh(pool)
