"""The pool's methods as a server offers them: one embedded pool, many clients.

Owns who is connected and what each method is called with; ``served_pool`` opens the pool, ``leasing``
has what clients read, ``storing`` what they store. Bytes of a store are pulled from the client; bytes
of a load are pulled by the client out of the arena, or asked for; both go through streams for a client
without a transport. Everything here runs in the server's event loop unless it says otherwise. Who
calls it: clients, through ``kvpool.client.protocol``.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any, Final

import msgspec
from google.protobuf.message import Message

from kvpool.block import HASH_BYTES
from kvpool.client import protocol
from kvpool.client.call_wire import CALL_BYTES_MAX
from kvpool.client.rpc import Method
from kvpool.client.rpc_service import Methods
from kvpool.clock import Clock
from kvpool.config import ServerConfig
from kvpool.errors import CapacityError, UnavailableError, UsageError
from kvpool.events import EventSink, PeerLost
from kvpool.metrics import Metrics
from kvpool.server.answering import Answering
from kvpool.server.holdings import Holdings
from kvpool.server.leasing import Leasing
from kvpool.server.served_pool import ServedPool
from kvpool.server.sessions import Session, Sessions
from kvpool.server.storing import Storing
from kvpool.server.tenancy import Tenancy
from kvpool.server.tenant import calling_tenant
from kvpool.server.tier_report import TierReport, tier_counts
from kvpool.server.upkeep import Tasks
from kvpool.tiers.dram import DramTier
from kvpool.tiers.stack import StackTier
from kvpool.tiers.verify import verify_blocks, verify_device
from kvpool.transfer.base import Transport
from kvpool.transfer.choice import TransportKind

logger = logging.getLogger(__name__)

# A client without a transport that asked nothing for so long is forgotten.
_IDLE_S: Final = 600.0


class PoolService:
    """One pool and its clients.

    Args:
        config: Limits.
        transports: By kind, all of one incarnation; the pool's arena is registered with each.
        executor: For what blocks: opening the arena, and checking a block that was reported.
        metrics, events, clock: Components.
        holdings: Told what is stored and removed; None: nobody is.
        tenancy: What tenants may; None: there are none.

    Attributes:
        addresses: Where each transport listens, by kind. To be set before the first client comes.
        calls: Answers what clients ask over their connections.
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
        holdings: Holdings | None = None,
        tenancy: Tenancy | None = None,
    ) -> None:
        self._served = ServedPool(
            config,
            transports,
            executor,
            metrics=metrics,
            events=events,
            clock=clock,
            holdings=holdings,
            tenancy=tenancy,
        )
        self._metrics = metrics
        self.calls = Answering()
        self.sessions = Sessions(config.clients_max, self._on_lost, self.calls.take)
        self._leasing = Leasing(self._served, self.sessions)
        self._storing = Storing(self._served, self.sessions, self._leasing)
        self.addresses: dict[TransportKind, str] = {}
        self._clients_lost = 0
        self._sweeping: asyncio.Task[None] | None = None
        self._report_tiers = TierReport(metrics)
        self.serve(self.calls)
        self._add_prompt(protocol.MATCH, self._match_now)
        self._add_prompt(protocol.LEASE, self._leasing.lease_now)
        self._add_prompt(protocol.RELEASE, self._leasing.release_now)

    def serve(self, service: Methods) -> None:
        """Add every method to what serves them."""
        self._add(service, protocol.CONFIGURE, self._configure)
        self._add(service, protocol.HELLO, self._hello)
        service.add(protocol.STAY, self._stay)
        self._add(service, protocol.MATCH, self._match)
        self._add(service, protocol.LEASE, self._leasing.lease)
        self._add(service, protocol.REPORT, self._leasing.report)
        self._add(service, protocol.RELEASE, self._leasing.release)
        self._add(service, protocol.STORE, self._storing.store)
        self._add(service, protocol.WRITE, self._storing.write)
        service.add(protocol.READ, self._leasing.read)
        self._add(service, protocol.STATS, self._stats)
        self._add(service, protocol.TIERS, self._tiers)
        self._add(service, protocol.EVICT, self._evict)
        self._add(service, protocol.VERIFY, self._verify)

    def upkeep(self) -> Tasks:
        """Return what is to be done now and then, by name."""
        return {
            "leases": self._expire_leases,
            "clients": self._expire_clients,
            "tenants": self._begin_sweep,
            "gauges": self._set_gauges,
        }

    def _expire_leases(self) -> None:
        pool = self._served.opened()
        if pool is not None:
            pool.leases.expire()

    def _expire_clients(self) -> None:
        self.sessions.expire(_IDLE_S)

    def _begin_sweep(self) -> bool:
        """Look for blocks of tenants that left; raises what it met before. False: it is under way."""
        before = self._sweeping
        if before is not None and not before.done():
            return False
        sweep = self._served.tenancy.sweep(self._served.executor)
        self._sweeping = asyncio.get_running_loop().create_task(sweep)
        if before is not None:
            before.result()
        return True

    def _set_gauges(self) -> None:
        self._metrics.set("kvpool_server_client_count", len(self.sessions))
        pool = self._served.opened()
        if pool is not None:
            self._metrics.set("kvpool_server_lease_count", pool.stats().leases)
            self._report_tiers.tell(pool.tier)

    def backlog(self) -> int:
        """Return how many blocks wait to be written to the SSD."""
        pool = self._served.opened()
        return 0 if pool is None else tier_counts(pool.tier).get("stack", {}).get("backlog", 0)

    def hurry(self) -> None:
        """Have what waits for the SSD written as fast as that takes it, whatever the budget."""
        pool = self._served.opened()
        if pool is not None and isinstance(pool.tier, StackTier):
            pool.tier.flusher.hurry()

    def close(self) -> None:
        """Close the pool. After the transport was closed: nobody reads or writes it any more."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        pool = self._served.opened()
        if pool is not None:
            pool.close()

    def _add(
        self,
        service: Methods,
        method: Method[Any, Any],
        handler: Callable[[Any], Awaitable[Message]],
    ) -> None:
        name = method.name.lower()

        async def timed(request: object) -> Message:
            began = time.perf_counter()
            outcome = "failed"
            try:
                reply = await handler(request)
                outcome = "ok"
                return reply
            except (UsageError, UnavailableError):
                outcome = "refused"
                raise
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            finally:
                took_s = time.perf_counter() - began
                self._metrics.observe(
                    "kvpool_server_request_seconds", took_s, method=name, outcome=outcome
                )

        service.add(method, timed)

    def _add_prompt(
        self, method: Method[Any, Any], prompt: Callable[[Any], Message | None]
    ) -> None:
        name = method.name.lower()

        def timed(request: object) -> Message | None:
            began, outcome, reply = time.perf_counter(), "failed", None
            try:
                reply = prompt(request)
                outcome = "ok"
            except (UsageError, UnavailableError):
                outcome = "refused"
                raise
            finally:
                # Without a reply and an error the loop makes the call, and counts it.
                if reply is not None or outcome != "ok":
                    took_s = time.perf_counter() - began
                    self._metrics.observe(
                        "kvpool_server_request_seconds", took_s, method=name, outcome=outcome
                    )
            return reply

        self.calls.add_prompt(method, timed)

    # ---- methods ---------------------------------------------------------------------------------

    async def _configure(self, request: protocol.ConfigureRequest) -> protocol.Welcome:
        version = protocol.spoken_version(request.version)
        await self._served.open(protocol.decode_layout(request.layout))
        config = self._served.config
        return protocol.Welcome(
            version=version,
            server=self._served.incarnation,
            node=config.node,
            ways=[
                protocol.Way(kind=kind, address=address, region=self._served.regions[kind])
                for kind, address in self.addresses.items()
            ],
            salt=calling_tenant.get().salt,
            durable=config.pool.ssd is not None,
            call_bytes_max=CALL_BYTES_MAX,
        )

    async def _hello(self, request: protocol.HelloRequest) -> protocol.Done:
        protocol.spoken_version(request.version)
        try:
            if request.streams:
                self.sessions.greet_stream(request.client)
            else:
                await self.sessions.greet(request.client)
        except CapacityError:
            self._served.tenancy.count_refused("clients")
            raise
        return protocol.Done()

    async def _stay(self, request: protocol.StayRequest) -> AsyncGenerator[protocol.Done]:
        async with aclosing(self.sessions.stay(request.client)) as kept:
            async for _ in kept:
                yield protocol.Done()

    async def _match(self, request: protocol.MatchRequest) -> protocol.MatchReply:
        here = self._served.get().match_hashes(request.hashes)
        visible = self._served.tenancy.visible(request.hashes[: here * HASH_BYTES])
        return protocol.MatchReply(blocks=len(visible) // HASH_BYTES)

    def _match_now(self, request: protocol.MatchRequest) -> protocol.MatchReply | None:
        """Match on any thread, for a caller that is anybody. An empty one shows that the loop turns."""
        if not request.hashes:
            return None
        return protocol.MatchReply(blocks=self._served.get().match_hashes(request.hashes))

    async def _stats(self, request: protocol.Done) -> protocol.StatsReply:
        pool = self._served.opened()
        extra = {
            "clients": len(self.sessions),
            "clients_by_streams": self.sessions.by_streams(),
            "clients_lost": self._clients_lost,
            "stores": self._storing.under_way,
            "stores_aborted": self._storing.aborted,
        }
        if pool is None:
            names = ("slots", "free", "ready", "reserved", "quarantined", "leases")
            counts = ("hits", "misses", "evictions", "corruptions")
            return protocol.StatsReply(stats=dict.fromkeys((*names, *counts), 0), extra=extra)
        stats = msgspec.to_builtins(pool.stats())
        return protocol.StatsReply(extra={**stats.pop("extra"), **extra}, stats=stats)

    async def _tiers(self, request: protocol.Done) -> protocol.TiersReply:
        pool = self._served.opened()
        counts = {} if pool is None else tier_counts(pool.tier)
        return protocol.TiersReply(
            tiers=[protocol.Tier(name=name, counts=each) for name, each in counts.items()]
        )

    async def _evict(self, request: protocol.EvictRequest) -> protocol.EvictReply:
        self._served.tenancy.require_operator()
        evict, loop = self._served.get().tier.evict, asyncio.get_running_loop()
        count = await loop.run_in_executor(self._served.executor, evict, request.blocks)
        return protocol.EvictReply(blocks=count)

    async def _verify(self, request: protocol.Done) -> protocol.VerifyReply:
        self._served.tenancy.require_operator()
        tier = self._served.get().tier
        dram = tier.fast if isinstance(tier, StackTier) else tier
        assert isinstance(dram, DramTier)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._served.executor, verify_blocks, dram)
        reply = protocol.VerifyReply(checked=found.checked, bad=found.bad)
        if isinstance(tier, StackTier):
            below = await loop.run_in_executor(self._served.executor, verify_device, tier.slow)
            reply.ssd.checked, reply.ssd.bad = below.checked, below.bad
            reply.ssd.unread = below.unread
            reply.ssd.SetInParent()  # though there be no block
        return reply

    def _on_lost(self, session: Session) -> None:
        """Give back what a client held. Its reads ended with its connection."""
        self._clients_lost += 1
        self.calls.lose(session)
        self._served.events.emit(PeerLost(peer="client", reason="its connection ended"))
        pool = self._served.opened()
        if pool is not None:
            pool.leases.drop_client(session.client)
        logger.info("a client's connection ended; what it held was given back")
