"""What a tenant may see and use, as the service asks it in each call.

Owns the ledger of blocks by tenant and what is said when something is refused. Whom a call is for is
in ``calling_tenant``; a caller without a name (this user's own processes) is held to nothing. Used in
the server's loop alone. Who calls it: the service, and the RPC edge for its gates.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Final

from kvpool.block import HASH_BYTES
from kvpool.client.rpc_service import Gate
from kvpool.errors import CapacityError, UsageError
from kvpool.metrics import Metrics
from kvpool.server.quotas import LOOP_NAMES, SWEEP_NAMES, TenantLedger
from kvpool.server.tenant import Authenticator, Tenant, calling_tenant

logger = logging.getLogger(__name__)

_REFUSED: Final = "kvpool_server_refused_calls_total"


class Tenancy:
    """Checks the calls of tenants, and counts what it refuses."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._ledger: TenantLedger | None = None
        self._calls: Counter[str] = Counter()  # by tenant, under way
        self._stores: Counter[str] = Counter()
        self._noting: set[asyncio.Task[None]] = set()

    def gate(self, authenticator: Authenticator, *, local: bool) -> Gate:
        """Return what looks at each call first.

        Args:
            authenticator: Who may call.
            local: The address is a socket that only this user can reach: a call that shows nothing
                is his own.
        """

        @contextmanager
        def enter(metadata: Mapping[str, str], peer_names: tuple[str, ...]) -> Generator[None]:
            if local and "authorization" not in metadata:
                tenant = authenticator.own()
            else:
                try:
                    tenant = authenticator.authenticate(metadata, peer_names)
                except UsageError:
                    self.count_refused("unknown")
                    raise
            calling_tenant.set(tenant)
            with self._place(self._calls, tenant.calls_max, "calls"):
                yield

        return enter

    @contextmanager
    def store(self) -> Generator[None]:
        """Count a store of the caller, for the length of a ``with``.

        Raises CapacityError if it has as many under way as it may.
        """
        with self._place(self._stores, calling_tenant.get().stores_max, "stores"):
            yield

    @contextmanager
    def _place(self, places: Counter[str], limit: int | None, what: str) -> Generator[None]:
        name = calling_tenant.get().name
        if limit is not None and places[name] >= limit:
            self.count_refused(what)
            raise CapacityError(
                f"tenant {name} has {places[name]} {what} under way, all that it may: try later, or "
                f"have tenants.{what}_max raised"
            )
        places[name] += 1
        try:
            yield
        finally:
            places[name] -= 1

    def opened(self, slots: int, block_bytes: int, present: Callable[[bytes], int]) -> None:
        """Make room for as many blocks as the tiers have slots."""
        self._ledger = TenantLedger(2 * slots, block_bytes, present)

    async def sweep(self, executor: Executor, limit: int = SWEEP_NAMES) -> None:
        """Look for blocks that left, among so many names, on a thread. To be called now and then."""
        ledger = self._ledger
        if ledger is None or not (piece := ledger.piece(limit)):
            return
        loop = asyncio.get_running_loop()
        gone = await loop.run_in_executor(executor, ledger.absent, piece)
        for at in range(0, len(gone), LOOP_NAMES):
            ledger.forget(gone[at : at + LOOP_NAMES])
            await asyncio.sleep(0)

    def visible(self, hashes: bytes) -> bytes:
        """Return the leading hashes that the caller may know of."""
        tenant = calling_tenant.get()
        if self._ledger is None or not tenant.name:
            return hashes
        count = self._ledger.visible(tenant, hashes)
        if count * HASH_BYTES < len(hashes):
            self.count_refused("tenant")
        return hashes[: count * HASH_BYTES]

    def require_own(self, hashes: bytes) -> None:
        """Raise UsageError if one of the hashes is another tenant's block."""
        if len(self.visible(hashes)) < len(hashes):
            raise UsageError(
                "one of these blocks is another tenant's: name blocks in namespaces with the salt of "
                "the server's welcome (kvpool.connect does)"
            )

    def require_operator(self) -> None:
        """Raise UsageError unless the caller may do what concerns everybody."""
        tenant = calling_tenant.get()
        if not tenant.operator:
            self.count_refused("operator")
            raise UsageError(
                f"tenant {tenant.name} is no operator: call this with the token of one "
                "(tenants.operator = true)"
            )

    @contextmanager
    def room(self, hashes: bytes) -> Generator[None]:
        """Count blocks of the caller as coming, for the length of a ``with``.

        Raises CapacityError if it may not store them besides what it has, and what else comes.
        """
        tenant, ledger = calling_tenant.get(), self._ledger
        if ledger is None or not tenant.name:
            yield
            return
        try:
            blocks = ledger.take_room(tenant, hashes)
        except CapacityError:
            self.count_refused("store_bytes")
            raise
        try:
            yield
        finally:
            ledger.give_room(tenant, blocks)

    async def stored(self, hashes: bytes, executor: Executor) -> None:
        """Take note that blocks of the caller are here, though he leave meanwhile."""
        tenant = calling_tenant.get()
        if self._ledger is None or not tenant.name or not hashes:
            return
        if not self._ledger.is_full(hashes):
            self._ledger.stored(tenant, hashes)
            return
        noting = asyncio.create_task(self._make_room(self._ledger, tenant, hashes, executor))
        self._noting.add(noting)
        noting.add_done_callback(self._noting.discard)
        await asyncio.shield(noting)

    async def _make_room(
        self, ledger: TenantLedger, tenant: Tenant, hashes: bytes, executor: Executor
    ) -> None:
        # Blocks leave the tiers before names outnumber their slots.
        await self.sweep(executor, ledger.capacity)
        ledger.stored(tenant, hashes)

    def require_leasable(self, leased_bytes: int) -> None:
        """Raise CapacityError if all clients of the caller together hold too much."""
        tenant = calling_tenant.get()
        limit = tenant.lease_bytes_max
        if limit is not None and leased_bytes > limit:
            self.count_refused("lease_bytes")
            raise CapacityError(
                f"the clients of tenant {tenant.name} would hold {leased_bytes} of {limit} leased "
                "bytes: release leases first",
                size_bytes=leased_bytes,
            )

    def count_refused(self, reason: str) -> None:
        """Count a call that was refused."""
        self._metrics.count(_REFUSED, reason=reason)
