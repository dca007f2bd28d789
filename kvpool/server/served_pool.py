"""The embedded pool that a server serves: opened with the first client's layout, and by nobody before.

Owns the pool and its registration with the transports, and carries what all methods need beside it.
Everything here is used in the server's event loop alone, but for ``get`` and ``opened``, which any thread
may call; only the opening itself runs beside it. Who calls it: the service and its parts.
"""

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Executor

from kvpool.block import BlockLayout
from kvpool.clock import Clock
from kvpool.config import ServerConfig
from kvpool.errors import KVPoolError, LayoutMismatchError, UsageError
from kvpool.events import EventSink
from kvpool.metrics import Metrics
from kvpool.pool import Pool
from kvpool.server.holdings import Holdings
from kvpool.server.tenancy import Tenancy
from kvpool.server.tier_report import tier_counts
from kvpool.tiers.dram import DramTier
from kvpool.tiers.stack import StackTier
from kvpool.transfer.base import Transport
from kvpool.transfer.choice import TransportKind

logger = logging.getLogger(__name__)


class ServedPool:
    """One pool, once it is open.

    Args:
        config: Limits.
        transports: By kind, all of one incarnation; the pool's arena is registered with each.
        executor: For what blocks.
        metrics, events, clock: Components.
        holdings: Told what is stored and removed; None: nobody is.
        tenancy: What tenants may; None: there are none.

    Attributes:
        incarnation: Of this process.
        regions: Of the arena, by kind of transport, once the pool is open.
    """

    def __init__(
        self,
        config: ServerConfig,
        transports: Mapping[TransportKind, Transport],
        executor: Executor,
        *,
        metrics: Metrics,
        events: EventSink,
        clock: Clock,
        holdings: Holdings | None,
        tenancy: Tenancy | None,
    ) -> None:
        self.config = config
        self.executor = executor
        self.metrics = metrics
        self.events = events
        self.clock = clock
        self.holdings = holdings
        self.tenancy = tenancy or Tenancy(metrics)
        self.incarnation = next(iter(transports.values())).incarnation
        self.regions: dict[TransportKind, int] = {}
        self._transports = dict(transports)
        self._layout: BlockLayout | None = None
        self._opening: asyncio.Task[Pool] | None = None

    def opened(self) -> Pool | None:
        """Return the pool, or None: nobody has opened it yet, or it could not be."""
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception():
            return None
        return opening.result()

    def get(self) -> Pool:
        """Return the pool. Raises UsageError: it is not open."""
        pool = self.opened()
        if pool is None:
            raise UsageError("the pool has no layout yet: configure it first")
        return pool

    async def open(self, layout: BlockLayout) -> Pool:
        """Open the pool, or wait for it; one that could not be opened is tried anew.

        Raises:
            LayoutMismatchError: It has another layout.
            KVPoolError: It cannot be opened.
        """
        if self._opening is None or (self._opening.done() and self.opened() is None):
            self._layout = layout
            self._opening = asyncio.create_task(self._open(layout))
        assert self._layout is not None
        try:
            self._layout.require_equal(layout)
        except LayoutMismatchError as error:
            raise LayoutMismatchError(
                f"this server keeps another layout ({error}): start a kvpool-server of its own for "
                "each layout, or restart this one"
            ) from error
        return await asyncio.shield(self._opening)  # a client that gives up must not stop it

    async def _open(self, layout: BlockLayout) -> Pool:
        def opened() -> Pool:
            return Pool.open(
                layout,
                self.config.pool,
                incarnation=self.incarnation,
                clock=self.clock,
                events=self.events,
            )

        loop = asyncio.get_running_loop()
        try:
            pool = await loop.run_in_executor(self.executor, opened)
        except KVPoolError as error:  # its client is told, too
            logger.error("the pool cannot be opened: %s", error)
            raise
        try:
            await self._use(pool)
        except BaseException:
            await loop.run_in_executor(self.executor, pool.close)
            raise
        return pool

    async def _use(self, pool: Pool) -> None:
        """Have everybody know of the pool who needs to."""
        assert isinstance(pool.tier, DramTier | StackTier)
        for kind, transport in self._transports.items():
            self.regions[kind] = transport.register(pool.tier.arena).region
        slots = sum(counts.get("slots", 0) for counts in tier_counts(pool.tier).values())
        self.tenancy.opened(slots, pool.layout.block_bytes, pool.tier.match)
        if self.holdings is not None:
            await self.holdings.opened(pool.tier)
        logger.info("opened %d slots of %s", pool.tier.arena.slot_count, pool.layout)
