"""What a client stores: pulled out of its slots, or sent by it as a stream.

Owns the order of a store: what may come in, room, the bytes, the device, who is told, the hold. Runs
in the server's event loop; copies and writes run beside it. Who calls it: clients, through the
service.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Final

import numpy as np

from kvpool.base import StoreResult
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout
from kvpool.client import protocol
from kvpool.client.streams import Joined
from kvpool.completion import Completion
from kvpool.errors import CorruptionError, TransferTimeoutError, UnavailableError, UsageError
from kvpool.memory import Crcs
from kvpool.pool import Pool
from kvpool.reservation import Reservation
from kvpool.server.leasing import Leasing
from kvpool.server.served_pool import ServedPool
from kvpool.server.sessions import Session, Sessions
from kvpool.transfer.base import RemoteSlots

logger = logging.getLogger(__name__)

# Longest wait for the header of a stream.
_HEADER_TIMEOUT_S: Final = 10.0


class Storing:
    """The methods ``Store`` and ``Write``.

    Attributes:
        under_way: Stores at this moment.
        aborted: Stores whose bytes did not come.
    """

    def __init__(self, served: ServedPool, sessions: Sessions, leasing: Leasing) -> None:
        self._served = served
        self._sessions = sessions
        self._leasing = leasing
        self.under_way = 0
        self.aborted = 0

    async def store(self, request: protocol.StoreRequest) -> protocol.StoreReply:
        """Store blocks that are pulled out of the client's slots."""
        session, pool = self._sessions.get(request.client), self._served.get()
        crcs = _checked(request, pool.layout)

        async def fill(reservation: Reservation) -> Crcs:
            return await self._pull(session, reservation, request, crcs)

        return await self._keep(session, pool, request, fill)

    async def write(self, steps: AsyncIterator[protocol.WriteRequest]) -> protocol.StoreReply:
        """Store blocks that come as a stream."""
        request = await _header_of(steps)
        pool = self._served.get()
        session = self._sessions.get(request.client)
        _check_names(request)

        async def fill(reservation: Reservation) -> Crcs:
            try:
                async with asyncio.timeout(request.timeout_s):
                    return await self._join(pool.layout, reservation, steps)
            except TimeoutError as error:
                raise TransferTimeoutError(
                    f"the blocks did not come within {request.timeout_s} s: send fewer at once"
                ) from error

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
                copy = self._served.executor.submit(joined.copy_to, view.take(at, at + 1))
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
        self.aborted += 1
        self._served.metrics.count("kvpool_server_aborted_stores_total")

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
        stores_max = self._served.config.stores_max
        if self.under_way >= stores_max:
            why = f"{stores_max} stores are under way: try later"
            return protocol.StoreReply(stored=0, new=0, refused=why)
        tenancy = self._served.tenancy
        tenancy.require_own(request.ancestors + request.hashes)
        with tenancy.store(), tenancy.room(request.hashes):
            return await self._keep_in(session, pool, request, fill)

    async def _keep_in(
        self,
        session: Session,
        pool: Pool,
        request: protocol.StoreRequest,
        fill: Callable[[Reservation], Awaitable[Crcs]],
    ) -> protocol.StoreReply:
        """Store blocks that may come in; ``fill`` as in ``_keep``."""
        began = self._served.clock.now()
        pool.leases.expire()
        parent = BlockHash(request.ancestors[-HASH_BYTES:]) if request.ancestors else None
        with ExitStack() as room:
            if request.durable:
                room.enter_context(pool.tier.durable_room(_bytes_of(request, pool.layout)))
            reservation = Reservation(pool.tier, request.hashes, parent)
            self.under_way += 1
            try:
                result = reservation.finish(await fill(reservation))
            finally:
                self.under_way -= 1
            # First of all: they are here, though the caller leave or the device refuse them.
            here = request.hashes[: result.stored * HASH_BYTES]
            await self._served.tenancy.stored(here, self._served.executor)
            if request.durable:
                left_s = max(0.0, request.timeout_s - (self._served.clock.now() - began))
                result = await self._make_durable(pool, request, result, left_s)
        if self._served.holdings is not None:
            first = len(request.ancestors) // HASH_BYTES
            await self._served.holdings.stored(
                request.ancestors + request.hashes, first, result.stored
            )
        held = request.hashes[: result.stored * HASH_BYTES]
        lease = self._leasing.hold(pool, session, held, request.hold_s)
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
            durable = await asyncio.get_running_loop().run_in_executor(self._served.executor, write)
        except UnavailableError as error:
            durable, refused = 0, str(error)
        stored = max(0, durable - first)
        if stored < result.stored and not refused:
            refused = "a block, or one above it, is in no tier any more: store the whole chain"
        return StoreResult(stored, min(result.new, stored), refused)

    async def _pull(
        self,
        session: Session,
        reservation: Reservation,
        request: protocol.StoreRequest,
        crcs: Crcs | None,
    ) -> Crcs:
        """Copy the blocks that are not here out of the client's slots; return the sums of the whole ones.

        Whatever ends it early, the slots stay in quarantine until the copy has returned.
        """
        begin, end = reservation.begin, reservation.begin + len(reservation.view)
        sums = _no_crcs(reservation.view.layout, end - begin)
        if begin == end:
            return sums
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
                crcs=None if crcs is None else crcs[begin:end],
                sums=sums,
            )
            return sums[: await copy]
        except BaseException:  # the client is gone, cancelled, or late; or a bug
            self._count_aborted()
            reservation.abandon()
            if copy is None:
                reservation.settle()
            else:
                copy.cancel()
                copy.add_done_callback(reservation.settle)
            raise


async def _header_of(steps: AsyncIterator[protocol.WriteRequest]) -> protocol.StoreRequest:
    """Return what a stream begins with. Raises UsageError: it is something else, or does not come."""
    try:
        async with asyncio.timeout(_HEADER_TIMEOUT_S):
            async for step in steps:
                return step.header
    except TimeoutError as error:
        raise UsageError(f"no header of a Write within {_HEADER_TIMEOUT_S} s") from error
    raise UsageError("a Write without a header: send one first")


def _checked(request: protocol.StoreRequest, layout: BlockLayout) -> Crcs | None:
    """Return the checksums of a store, uint32 [blocks, layers, kv_heads], all input checked.

    None: the client's slots say them.
    """
    count = _check_names(request)
    crcs = np.frombuffer(request.crcs, dtype="<u4") if len(request.crcs) % 4 == 0 else np.empty(0)
    fits = count == len(request.slots) == len(request.generations)
    if fits and not request.crcs:
        return None
    if not fits or crcs.size != count * layout.crc_count:
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
    if not (
        math.isfinite(request.timeout_s) and 0 < request.timeout_s <= protocol.STORE_TIMEOUT_MAX_S
    ):
        raise UsageError(f"a store within {request.timeout_s} s: above 0, at most 600")
    return count


def _no_crcs(layout: BlockLayout, count: int = 0) -> Crcs:
    """Return room for the checksums of so many blocks."""
    return np.empty((count, layout.num_layers, layout.kv_heads), dtype=np.uint32)


def _bytes_of(request: protocol.StoreRequest, layout: BlockLayout) -> int:
    return len(request.hashes) // HASH_BYTES * layout.block_bytes
