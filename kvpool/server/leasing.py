"""What a client reads: leases of blocks, and their bytes where it has no transport to pull them.

Owns the checks of a lease, and nothing else: the pool owns leases, ``sessions`` who has which. Runs in
the server's event loop; promotion and verification run beside it. ``lease_now`` and ``release_now``
run on any thread, for callers that are anybody. Who calls it: clients, through the service.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack

from kvpool.arena import Slots
from kvpool.block import HASH_BYTES
from kvpool.client import protocol
from kvpool.client.streams import cut
from kvpool.errors import CapacityError, CorruptionError, StaleIncarnationError, UsageError
from kvpool.memory import BlockView, Crcs
from kvpool.pool import Pool
from kvpool.server.served_pool import ServedPool
from kvpool.server.sessions import Session, Sessions
from kvpool.tiers.lease import LeaseId
from kvpool.tiers.stack import StackTier

logger = logging.getLogger(__name__)


class Leasing:
    """The methods ``Lease``, ``Report``, ``Release`` and ``Read``."""

    def __init__(self, served: ServedPool, sessions: Sessions) -> None:
        self._served = served
        self._sessions = sessions

    async def lease(self, request: protocol.LeaseRequest) -> protocol.LeaseReply:
        """Grant the leading blocks that are here, brought up first if they are below."""
        session, pool = self._sessions.get(request.client), self._served.get()
        self._served.tenancy.require_own(request.hashes)
        await self._promote(pool, request.hashes)
        lease, slots = self._grant(pool, session, request.hashes, request.seconds)
        pool.leases.count_missing(request.missing)
        if session.endpoint is None:
            session.leases.add(lease)
        if self._served.holdings is not None and len(slots) * HASH_BYTES < len(request.hashes):
            self._served.holdings.missed(request.hashes[len(slots) * HASH_BYTES :])
        return _granted(lease, slots)

    def lease_now(self, request: protocol.LeaseRequest) -> protocol.LeaseReply | None:
        """Grant what lies in the first tier, all of it; None: ``lease`` has to see to it.

        From any thread, for a client with a connection.
        """
        session, pool = self._sessions.get(request.client), self._served.get()
        tier = pool.tier.fast if isinstance(pool.tier, StackTier) else pool.tier
        count = len(request.hashes) // HASH_BYTES
        if session.endpoint is None or tier.match(request.hashes) < count:
            return None
        lease, slots = pool.leases.grant(session.client, request.hashes, request.seconds)
        alive = self._sessions.is_alive(
            session
        )  # behind the grant: whoever ends it drops the lease
        if not alive or len(slots) < count:
            pool.leases.release(session.client, lease)
            self._sessions.require_alive(session)
            return None
        pool.leases.count_missing(request.missing)
        return _granted(lease, slots)

    async def report(self, request: protocol.ReportRequest) -> protocol.Done:
        """Look at a block that a reader says is damaged."""
        session, pool = self._sessions.get(request.client), self._served.get()
        await asyncio.get_running_loop().run_in_executor(
            self._served.executor,
            pool.leases.report_bad,
            session.client,
            LeaseId(request.lease),
            [request.block],
        )
        return protocol.Done()

    async def release(self, request: protocol.ReleaseRequest) -> protocol.Done:
        """End a lease, or all that a client of streams has, which ends with them."""
        session = self._sessions.get(request.client)
        if request.lease == protocol.EVERY_LEASE:
            self._sessions.end(session)
            return protocol.Done()
        session.leases.discard(LeaseId(request.lease))
        self._served.get().leases.release(session.client, LeaseId(request.lease))
        return protocol.Done()

    def release_now(self, request: protocol.ReleaseRequest) -> protocol.Done | None:
        """End one lease of a client with a connection; None: ``release`` has to. From any thread."""
        session = self._sessions.get(request.client)
        if request.lease == protocol.EVERY_LEASE or session.endpoint is None:
            return None
        self._served.get().leases.release(session.client, LeaseId(request.lease))
        return protocol.Done()

    async def read(self, request: protocol.ReadRequest) -> AsyncGenerator[protocol.Payload]:
        """Send leased blocks, verified; what does not verify ends the stream and leaves the pool."""
        session, pool = self._sessions.get(request.client), self._served.get()
        with ExitStack() as ends:
            held = ends.enter_context(pool.leases.reading(LeaseId(request.lease)))
            if request.lease not in session.leases or not (
                0 < request.count <= len(held.slots) - request.first
            ):
                raise UsageError(
                    f"blocks {request.first} to {request.first + request.count} are not of a lease "
                    f"of this client on {len(held.slots)} blocks"
                )
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            # A reader that takes nothing would have the blocks pinned beyond every lease.
            limit = loop.call_later(self._served.config.pool.lease_seconds_max, task.cancel)
            ends.callback(limit.cancel)
            for index in range(request.first, request.first + request.count):
                if index in held.bad:
                    return
                slots = held.slots[index : index + 1]
                view, crcs = pool.tier.view(slots, writable=False), pool.tier.crcs(slots)
                try:
                    pieces = await loop.run_in_executor(
                        self._served.executor, _pieces, view, index, crcs
                    )
                except CorruptionError:
                    pool.leases.drop_bad(held, index)
                    return
                for piece in pieces:
                    piece.block -= request.first
                    yield piece

    def hold(self, pool: Pool, session: Session, hashes: bytes, seconds: float) -> int:
        """Lease blocks of an unfinished store to its client; 0 if that is not possible."""
        if not hashes or not seconds > 0:  # nor if it is no number
            return 0
        try:
            limit = self._served.config.pool.lease_seconds_max
            return self._grant(pool, session, hashes, min(seconds, limit))[0]
        except (CapacityError, StaleIncarnationError) as error:
            logger.debug("blocks of a store are not held: %s", error)
            return 0

    async def _promote(self, pool: Pool, hashes: bytes) -> None:
        """Bring blocks up for a lease, beside this loop, which may not wait for a disk."""
        tier = pool.tier
        if not isinstance(tier, StackTier) or tier.fast.match(hashes) * HASH_BYTES == len(hashes):
            return
        began = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(
            self._served.executor, pool.promote, hashes
        )
        self._served.metrics.observe("kvpool_tiers_promotion_seconds", time.perf_counter() - began)

    def _grant(
        self, pool: Pool, session: Session, hashes: bytes, seconds: float
    ) -> tuple[LeaseId, Slots]:
        """Lease blocks to a client, within its own and its tenant's quota.

        Raises StaleIncarnationError: its connection ended while the call was waited for, and all that
        it had was given back.
        """
        self._sessions.require_alive(session)
        lease, slots = pool.leases.grant(session.client, hashes, seconds)
        clients = self._sessions.of_tenant(session.tenant)
        try:
            self._served.tenancy.require_leasable(
                sum(pool.leases.bytes_of(one.client) for one in clients)
            )
        except CapacityError:
            pool.leases.release(session.client, lease)
            raise
        return lease, slots


def _granted(lease: LeaseId, slots: Slots) -> protocol.LeaseReply:
    return protocol.LeaseReply(
        lease=lease, slots=slots.indices.tolist(), generations=slots.generations.tolist()
    )


def _pieces(view: BlockView, index: int, crcs: Crcs) -> list[protocol.Payload]:
    return list(cut(view, index, crcs))
