"""The suite of pools over a ring of servers that each test finds empty."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

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
from kvpool.block import BlockHash, BlockLayout, Namespace, NodeId
from kvpool.completion import Completion
from kvpool.index.ring import Ring
from kvpool.memory import BlockView
from kvpool.testing.pool_suite import SLOTS, PoolSuite
from tests.ring import PATIENT, RingOfServers

_COUNTS = ("hits", "misses", "evictions", "corruptions")


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


@pytest.fixture(scope="class")
def ring(request: pytest.FixtureRequest) -> Iterator[RingOfServers]:
    suite: type[RingSuite] = request.cls
    dram_bytes = SLOTS * -(-suite.layout.block_bytes // 4096) * 4096
    with RingOfServers(suite.servers, dram_bytes, *suite.flags, apart=suite.apart) as servers:
        yield servers


class RingSuite(PoolSuite):
    """The suite over ``servers`` servers, on hosts of their own if ``apart``."""

    flags: ClassVar[tuple[str, ...]] = ()
    ways: ClassVar[tuple[str, ...]] = ("host", "ucx")
    apart: ClassVar[bool] = False
    ring: RingOfServers

    @pytest.fixture(autouse=True)
    def _ring(self, ring: RingOfServers) -> None:
        self.ring = ring

    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        assert slot_count == SLOTS
        pool = self.ring.connect(layout, replace(PATIENT, ways=self.ways))
        self.ring.empty()
        return Fresh(pool)

    def beside(self, pool: BlockPool, chain: Chain, blocks: int, salt: str) -> Chain:
        """Try salts until one has its chain at the same server, where no server is nearer than others."""
        names = Ring(NodeId(node.name) for node in self.ring.nodes)

        def home(one: Chain) -> NodeId:
            return names.owners(BlockHash(one[len(one) - 1]), 1)[0]

        tried = (super(RingSuite, self).beside(pool, chain, blocks, f"{salt}{number}")
                 for number in itertools.count())  # fmt: skip
        return next(one for one in tried if home(one) == home(chain))


@pytest.mark.ucx
class OverUcx(RingSuite):
    """The suite over UCX alone."""

    flags: ClassVar[tuple[str, ...]] = ("--transport", "ucx")
    ways: ClassVar[tuple[str, ...]] = ("ucx",)
