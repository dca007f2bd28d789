"""The pool's methods as a server offers them: one embedded pool, many clients.

Owns the embedded pool (opened with the first client's layout), its registration with the transports,
and what each client holds. Bytes of a store are pulled from the client; bytes of a load are pulled by
the client out of the arena, or asked for; both go through streams for a client without a transport.
Everything here runs in the server's event loop unless it says otherwise. Who calls it: clients,
through ``kvpool.client.protocol``.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any, Final

import msgspec
import numpy as np
from google.protobuf.message import Message

from kvpool.arena import Slots
from kvpool.base import StoreResult
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout
from kvpool.client import protocol
from kvpool.client.rpc import Method, Service
from kvpool.client.streams import Joined, cut
from kvpool.clock import Clock
from kvpool.completion import Completion
from kvpool.config import ServerConfig
from kvpool.errors import (
    CapacityError,
    CorruptionError,
    LayoutMismatchError,
    UnavailableError,
    UsageError,
)
from kvpool.events import EventSink, PeerLost
from kvpool.memory import BlockView, Crcs
from kvpool.metrics import Metrics
from kvpool.pool import Pool
from kvpool.reservation import Reservation
from kvpool.server.holdings import Holdings
from kvpool.server.sessions import Session, Sessions
from kvpool.server.tenancy import Tenancy
from kvpool.server.tenant import calling_tenant
from kvpool.server.tier_report import TierReport, tier_counts
from kvpool.tiers.dram import DramTier
from kvpool.tiers.lease import LeaseId
from kvpool.tiers.stack import StackTier
from kvpool.tiers.verify import verify_blocks
from kvpool.transfer.base import RemoteSlots, Transport
from kvpool.transfer.choice import TransportKind

logger = logging.getLogger(__name__)

# Longest that a client may ask the server to work on one chunk of a store.
_STORE_TIMEOUT_MAX_S: Final = 600.0
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
        self._config = config
        self._transports = dict(transports)
        self._incarnation = next(iter(transports.values())).incarnation
        self._holdings = holdings
        self._tenancy = tenancy or Tenancy(metrics)
        self._executor = executor
        self._metrics = metrics
        self._events = events
        self._clock = clock
        self.sessions = Sessions(config.clients_max, self._on_lost)
        self._layout: BlockLayout | None = None
        self._opening: asyncio.Task[Pool] | None = None
        self._regions: dict[TransportKind, int] = {}
        self.addresses: dict[TransportKind, str] = {}
        self._stores = 0
        self._counts = {"clients_lost": 0, "stores_aborted": 0}
        self._report_tiers = TierReport(metrics)

    def serve(self, service: Service) -> None:
        """Add every method to a gRPC service."""
        self._add(service, protocol.CONFIGURE, self._configure)
        self._add(service, protocol.HELLO, self._hello)
        self._add(service, protocol.MATCH, self._match)
        self._add(service, protocol.LEASE, self._lease)
        self._add(service, protocol.REPORT, self._report)
        self._add(service, protocol.RELEASE, self._release)
        self._add(service, protocol.STORE, self._store)
        self._add(service, protocol.WRITE, self._write)
        service.add(protocol.READ, self._read)
        self._add(service, protocol.STATS, self._stats)
        self._add(service, protocol.TIERS, self._tiers)
        self._add(service, protocol.EVICT, self._evict)
        self._add(service, protocol.VERIFY, self._verify)

    def tick(self) -> None:
        """End leases that have run out, and set the gauges. To be called now and then."""
        self._metrics.set("kvpool_server_client_count", len(self.sessions))
        pool = self._opened()
        if pool is None:
            return
        pool.leases.expire()
        self._tenancy.tick()
        self.sessions.expire(_IDLE_S)
        stats = pool.stats()
        self._metrics.set("kvpool_server_lease_count", stats.leases)
        self._report_tiers.tell(pool.tier)

    def backlog(self) -> int:
        """Return how many blocks wait to be written to the SSD."""
        pool = self._opened()
        return 0 if pool is None else tier_counts(pool.tier).get("stack", {}).get("backlog", 0)

    def close(self) -> None:
        """Close the pool. After the transport was closed: nobody reads or writes it any more."""
        pool = self._opened()
        if pool is not None:
            pool.close()

    def _add(
        self,
        service: Service,
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

    def _opened(self) -> Pool | None:
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception():
            return None
        return opening.result()

    def _pool(self) -> Pool:
        pool = self._opened()
        if pool is None:
            raise UsageError("the pool has no layout yet: configure it first")
        return pool

    # ---- methods ---------------------------------------------------------------------------------

    async def _configure(self, request: protocol.ConfigureRequest) -> protocol.Welcome:
        version = protocol.spoken_version(request.version)
        layout = protocol.decode_layout(request.layout)
        if self._opening is None or (self._opening.done() and self._opened() is None):
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
        await asyncio.shield(self._opening)  # a client that gives up must not stop it
        return protocol.Welcome(
            version=version,
            server=self._incarnation,
            node=self._config.node,
            ways=[
                protocol.Way(kind=kind, address=address, region=self._regions[kind])
                for kind, address in self.addresses.items()
            ],
            salt=calling_tenant.get().salt,
            durable=self._config.pool.ssd is not None,
        )

    async def _open(self, layout: BlockLayout) -> Pool:
        def opened() -> Pool:
            return Pool.open(
                layout,
                self._config.pool,
                incarnation=self._incarnation,
                clock=self._clock,
                events=self._events,
            )

        pool = await asyncio.get_running_loop().run_in_executor(self._executor, opened)
        assert isinstance(pool.tier, DramTier | StackTier)
        for kind, transport in self._transports.items():
            self._regions[kind] = transport.register(pool.tier.arena).region
        slots = sum(counts.get("slots", 0) for counts in tier_counts(pool.tier).values())
        self._tenancy.opened(slots, layout.block_bytes, pool.tier.match)
        if self._holdings is not None:
            await self._holdings.opened(pool.tier)
        logger.info("opened %d slots of %s", pool.tier.arena.slot_count, layout)
        return pool

    async def _hello(self, request: protocol.HelloRequest) -> protocol.Done:
        protocol.spoken_version(request.version)
        if request.streams:
            self.sessions.greet_stream(request.client)
        else:
            await self.sessions.greet(request.client)
        return protocol.Done()

    async def _match(self, request: protocol.MatchRequest) -> protocol.MatchReply:
        return protocol.MatchReply(
            blocks=self._pool().match_hashes(self._tenancy.visible(request.hashes))
        )

    async def _lease(self, request: protocol.LeaseRequest) -> protocol.LeaseReply:
        session, pool = self.sessions.get(request.client), self._pool()
        self._tenancy.require_own(request.hashes)
        await self._promote(pool, request.hashes)
        lease, slots = self._grant(pool, session, request.hashes, request.seconds)
        pool.leases.count_missing(request.missing)
        if session.endpoint is None:
            session.leases.add(lease)
        if self._holdings is not None and len(slots) * HASH_BYTES < len(request.hashes):
            self._holdings.missed(request.hashes[len(slots) * HASH_BYTES :][:HASH_BYTES])
        return protocol.LeaseReply(
            lease=lease,
            slots=slots.indices.tolist(),
            generations=slots.generations.tolist(),
        )

    async def _report(self, request: protocol.ReportRequest) -> protocol.Done:
        session, pool = self.sessions.get(request.client), self._pool()
        await asyncio.get_running_loop().run_in_executor(
            self._executor,
            pool.leases.report_bad,
            session.client,
            LeaseId(request.lease),
            [request.block],
        )
        return protocol.Done()

    async def _release(self, request: protocol.ReleaseRequest) -> protocol.Done:
        session = self.sessions.get(request.client)
        session.leases.discard(LeaseId(request.lease))
        self._pool().leases.release(session.client, LeaseId(request.lease))
        return protocol.Done()

    async def _store(self, request: protocol.StoreRequest) -> protocol.StoreReply:
        session, pool = self.sessions.get(request.client), self._pool()
        crcs = _checked(request, pool.layout)

        async def fill(reservation: Reservation) -> Crcs:
            good = await self._pull(session, reservation, request, crcs)
            return crcs[reservation.begin : reservation.begin + good]

        return await self._keep(session, pool, request, fill)

    async def _write(self, steps: AsyncIterator[protocol.WriteRequest]) -> protocol.StoreReply:
        """Store blocks that come as a stream."""
        async for step in steps:
            request = step.header
            break
        else:
            raise UsageError("a Write without a header: send one first")
        pool = self._pool()
        session = self.sessions.get(request.client)
        _check_names(request)

        async def fill(reservation: Reservation) -> Crcs:
            return await self._join(pool.layout, reservation, steps)

        return await self._keep(session, pool, request, fill)

    async def _join(
        self,
        layout: BlockLayout,
        reservation: Reservation,
        steps: AsyncIterator[protocol.WriteRequest],
    ) -> Crcs:
        """Put a stream's blocks together in a reservation; return the sums of those that are whole."""
        joined, view, crcs = Joined(layout), reservation.view, [_no_crcs(layout)]
        begin, copy = reservation.begin, None
        try:
            async for step in steps:
                if joined.block >= begin + len(view):
                    break
                if not joined.take(step.payload):
                    continue
                at = joined.block - begin
                if at < 0:
                    joined.skip()  # it is here already
                    continue
                copy = self._executor.submit(joined.copy_to, view.take(at, at + 1))
                crcs.append(await asyncio.wrap_future(copy))
        except CorruptionError as error:
            logger.debug("a store is cut short: %s", error)
        except BaseException:  # the client is gone, cancelled, or sends what does not fit
            self._count_aborted()
            reservation.abandon()
            if copy is None:
                reservation.settle()
            else:  # at once, unless it runs still
                copy.add_done_callback(lambda _: reservation.settle())
            raise
        return np.concatenate(crcs)

    def _count_aborted(self) -> None:
        self._counts["stores_aborted"] += 1
        self._metrics.count("kvpool_server_aborted_stores_total")

    async def _keep(
        self,
        session: Session,
        pool: Pool,
        request: protocol.StoreRequest,
        fill: Callable[[Reservation], Awaitable[Crcs]],
    ) -> protocol.StoreReply:
        """Store blocks that ``fill`` writes; it returns the sums of the leading ones that are whole.

        If ``fill`` fails, it has abandoned the reservation, and settles it when nobody writes any more.
        """
        if self._stores >= self._config.stores_max:
            why = f"{self._config.stores_max} stores are under way: try later"
            return protocol.StoreReply(stored=0, new=0, refused=why)
        self._tenancy.require_own(request.ancestors + request.hashes)
        self._tenancy.require_room(request.hashes)
        began = self._clock.now()
        pool.leases.expire()
        parent = BlockHash(request.ancestors[-HASH_BYTES:]) if request.ancestors else None
        with ExitStack() as room:
            if request.durable:
                room.enter_context(pool.tier.durable_room(_bytes_of(request, pool.layout)))
            reservation = Reservation(pool.tier, request.hashes, parent)
            self._stores += 1
            try:
                result = reservation.finish(await fill(reservation))
            finally:
                self._stores -= 1
            if request.durable:
                left_s = max(0.0, request.timeout_s - (self._clock.now() - began))
                result = await self._make_durable(pool, request, result, left_s)
        if self._holdings is not None:
            first = len(request.ancestors) // HASH_BYTES
            await self._holdings.stored(request.ancestors + request.hashes, first, result.stored)
        held = request.hashes[: result.stored * HASH_BYTES]
        self._tenancy.stored(held)
        lease = self._hold(pool, session, held, request.hold_s)
        return protocol.StoreReply(
            stored=result.stored, new=result.new, refused=result.refused, lease=lease
        )

    async def _make_durable(
        self, pool: Pool, request: protocol.StoreRequest, result: StoreResult, left_s: float
    ) -> StoreResult:
        """Write what was stored to the device, with its ancestors; say how much of it is there."""
        first = len(request.ancestors) // HASH_BYTES
        names = request.ancestors + request.hashes[: result.stored * HASH_BYTES]
        refused = result.refused

        def write() -> int:
            return pool.tier.make_durable(names, deadline_s=left_s)

        try:
            durable = await asyncio.get_running_loop().run_in_executor(self._executor, write)
        except UnavailableError as error:
            durable, refused = 0, str(error)
        stored = max(0, durable - first)
        if stored < result.stored and not refused:
            refused = "a block, or one above it, is in no tier any more: store the whole chain"
        return StoreResult(stored, min(result.new, stored), refused)

    async def _read(self, request: protocol.ReadRequest) -> AsyncGenerator[protocol.Payload]:
        """Send leased blocks, verified; what does not verify ends the stream and leaves the pool."""
        session, pool = self.sessions.get(request.client), self._pool()
        with pool.leases.reading(LeaseId(request.lease)) as held:
            if request.lease not in session.leases or not (
                0 < request.count <= len(held.slots) - request.first
            ):
                raise UsageError(
                    f"blocks {request.first} to {request.first + request.count} are not of a lease "
                    f"of this client on {len(held.slots)} blocks"
                )
            loop = asyncio.get_running_loop()
            for index in range(request.first, request.first + request.count):
                if index in held.bad:
                    return
                slots = held.slots[index : index + 1]
                view, crcs = pool.tier.view(slots, writable=False), pool.tier.crcs(slots)
                try:
                    pieces = await loop.run_in_executor(self._executor, _pieces, view, index, crcs)
                except CorruptionError:
                    pool.leases.drop_bad(held, index)
                    return
                for piece in pieces:
                    piece.block -= request.first
                    yield piece

    async def _stats(self, request: protocol.Done) -> protocol.StatsReply:
        pool = self._opened()
        extra = {**self._counts, "clients": len(self.sessions), "stores": self._stores}
        if pool is None:
            names = ("slots", "free", "ready", "reserved", "quarantined", "leases")
            counts = ("hits", "misses", "evictions", "corruptions")
            return protocol.StatsReply(stats=dict.fromkeys((*names, *counts), 0), extra=extra)
        stats = msgspec.to_builtins(pool.stats())
        return protocol.StatsReply(extra={**stats.pop("extra"), **extra}, stats=stats)

    async def _tiers(self, request: protocol.Done) -> protocol.TiersReply:
        pool = self._opened()
        counts = {} if pool is None else tier_counts(pool.tier)
        return protocol.TiersReply(
            tiers=[protocol.Tier(name=name, counts=each) for name, each in counts.items()]
        )

    async def _evict(self, request: protocol.EvictRequest) -> protocol.EvictReply:
        self._tenancy.require_operator()
        _require_operator("evict")
        return protocol.EvictReply(blocks=self._pool().tier.evict(request.blocks))

    async def _verify(self, request: protocol.Done) -> protocol.VerifyReply:
        self._tenancy.require_operator()
        _require_operator("verify")
        tier = self._pool().tier
        dram = tier.fast if isinstance(tier, StackTier) else tier
        assert isinstance(dram, DramTier)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, verify_blocks, dram)
        return protocol.VerifyReply(checked=found.checked, bad=found.bad)

    async def _promote(self, pool: Pool, hashes: bytes) -> None:
        """Bring blocks up for a lease, beside this loop, which may not wait for a disk."""
        tier = pool.tier
        if not isinstance(tier, StackTier) or tier.fast.match(hashes) * HASH_BYTES == len(hashes):
            return
        began = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(self._executor, pool.promote, hashes)
        self._metrics.observe("kvpool_tiers_promotion_seconds", time.perf_counter() - began)

    # ---- stores ----------------------------------------------------------------------------------

    async def _pull(
        self,
        session: Session,
        reservation: Reservation,
        request: protocol.StoreRequest,
        crcs: Crcs,
    ) -> int:
        """Copy the blocks that are not here out of the client's slots; return how many are whole.

        Whatever ends it early, the slots stay in quarantine until the copy has returned.
        """
        begin, end = reservation.begin, reservation.begin + len(reservation.view)
        if begin == end:
            return 0
        if session.endpoint is None:
            reservation.settle()
            raise UsageError("this client has no transport: use Write")
        copy: Completion[int] | None = None
        try:
            copy = session.endpoint.read_blocks(
                reservation.view,
                RemoteSlots(
                    request.region,
                    tuple(request.slots[begin:end]),
                    tuple(request.generations[begin:end]),
                ),
                source_layout=reservation.view.layout,
                dest_layer=None,
                deadline_s=request.timeout_s,
                crcs=crcs[begin:end],
            )
            return await copy
        except BaseException:  # the client is gone, cancelled, or late; or a bug
            self._count_aborted()
            reservation.abandon()
            if copy is None:
                reservation.settle()
            else:
                copy.cancel()
                copy.add_done_callback(reservation.settle)
            raise

    def _grant(
        self, pool: Pool, session: Session, hashes: bytes, seconds: float
    ) -> tuple[LeaseId, Slots]:
        """Lease blocks to a client, within its own and its tenant's quota."""
        lease, slots = pool.leases.grant(session.client, hashes, seconds)
        clients = self.sessions.of_tenant(session.tenant)
        try:
            self._tenancy.require_leasable(sum(pool.leases.bytes_of(one.client) for one in clients))
        except CapacityError:
            pool.leases.release(session.client, lease)
            raise
        return lease, slots

    def _hold(self, pool: Pool, session: Session, hashes: bytes, seconds: float) -> int:
        """Lease blocks of an unfinished store to its client; 0 if that is not possible."""
        if not hashes or seconds <= 0:
            return 0
        try:
            limit = self._config.pool.lease_seconds_max
            return self._grant(pool, session, hashes, min(seconds, limit))[0]
        except CapacityError as error:
            logger.debug("blocks of a store are not held: %s", error)
            return 0

    def _on_lost(self, session: Session) -> None:
        """Give back what a client held. Its reads ended with its connection."""
        self._counts["clients_lost"] += 1
        self._events.emit(PeerLost(peer="client", reason="its connection ended"))
        pool = self._opened()
        if pool is not None:
            pool.leases.drop_client(session.client)
        logger.info("a client's connection ended; what it held was given back")


def _checked(request: protocol.StoreRequest, layout: BlockLayout) -> Crcs:
    """Return the checksums of a store, uint32 [blocks, layers, kv_heads], all input checked."""
    count = _check_names(request)
    crcs = np.frombuffer(request.crcs, dtype="<u4") if len(request.crcs) % 4 == 0 else np.empty(0)
    if (
        not count == len(request.slots) == len(request.generations)
        or crcs.size != count * layout.crc_count
    ):
        raise UsageError(
            f"a store of {len(request.hashes)} bytes of hashes with {len(request.slots)} slots, "
            f"{len(request.generations)} generations and {crcs.size} checksums does not fit"
        )
    shape = (count, layout.num_layers, layout.kv_heads)
    return np.ascontiguousarray(crcs.astype(np.uint32).reshape(shape))


def _check_names(request: protocol.StoreRequest) -> int:
    """Return how many blocks a store is of, its names and times checked."""
    count, rest = divmod(len(request.hashes), HASH_BYTES)
    if rest or not count or len(request.ancestors) % HASH_BYTES:
        raise UsageError(
            f"a store of {len(request.hashes)} bytes of hashes behind {len(request.ancestors)}: "
            f"whole hashes of {HASH_BYTES}, one or more"
        )
    if not (math.isfinite(request.timeout_s) and 0 < request.timeout_s <= _STORE_TIMEOUT_MAX_S):
        raise UsageError(f"a store within {request.timeout_s} s: above 0, at most 600")
    return count


def _pieces(view: BlockView, index: int, crcs: Crcs) -> list[protocol.Payload]:
    return list(cut(view, index, crcs))


def _no_crcs(layout: BlockLayout) -> Crcs:
    return np.empty((0, layout.num_layers, layout.kv_heads), dtype=np.uint32)


def _bytes_of(request: protocol.StoreRequest, layout: BlockLayout) -> int:
    return len(request.hashes) // HASH_BYTES * layout.block_bytes


def _require_operator(what: str) -> None:
    if not calling_tenant.get().operator:
        raise UsageError(f"only an operator may {what}: use an operator's token")
