"""The client of a server: the Pool interface over one kvpool-server.

Owns the client's side of leases, loads and stores. On one host, bytes of a load are pulled out of the
server's arena, which is mapped read-only here, and bytes of a store are pulled by the server out of a
staging arena of this process; between hosts they go through UCX, or gRPC streams. Never writes into
the server's memory. Who calls it: ``connect``, and the pool over many servers.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvpool.base import (
    BlockPool,
    Chain,
    Durability,
    Lease,
    Match,
    PoolStats,
    StoreResult,
    Tokens,
    require_loadable,
    require_storable,
)
from kvpool.block import HASH_BYTES, BlockLayout, Namespace
from kvpool.client import protocol
from kvpool.client.keeper import LinkKeeper
from kvpool.client.link import STREAMS, Link, Place
from kvpool.client.loads import Loads, RemoteLease
from kvpool.client.rpc import Caller, Method, Reply, Request
from kvpool.client.stores import Stores
from kvpool.client.ways import Ways
from kvpool.clock import Clock, SystemClock
from kvpool.completion import LONGEST_S, Completion, CompletionSource, Deadline
from kvpool.config import TransferConfig
from kvpool.errors import (
    CapacityError,
    ClosedError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UnavailableError,
    UsageError,
)
from kvpool.memory import BlockView
from kvpool.pool import hash_tokens
from kvpool.transfer.choice import TRANSPORT_KINDS
from kvpool.transfer.host_endpoint import HostEndpoint

logger = logging.getLogger(__name__)

# Longest that ``close`` waits for the thread of the link.
_CLOSE_TIMEOUT_S: Final = 2.0


class RemotePool(BlockPool):
    """A pool in another process. Safe from any thread.

    Its parts have their own locks; ``_lock`` here guards only ``_closed`` and ``_unreachable``.

    Args:
        place, layout: Where the server is, and what it keeps.
        ways: Of this process to it.
        config: Waits and sizes.
        timeout_s: Longest wait for the first connection; None: it is looked for in the background.
        clock: Of leases and pauses.
        owns_ways: Whether ``ways`` are closed with the pool. If not, they are to be stopped before.

    Raises as ``connect``.
    """

    def __init__(
        self,
        place: Place,
        layout: BlockLayout,
        ways: Ways,
        config: TransferConfig,
        timeout_s: float | None,
        *,
        clock: Clock | None = None,
        owns_ways: bool = True,
    ) -> None:
        self.layout = layout
        self._config = config
        self._clock: Clock = clock or SystemClock()
        self._ways = ways if owns_ways else None
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._unreachable = 0
        self._keeper = LinkKeeper(
            place,
            layout,
            ways,
            self._clock,
            attempt_s=config.request_timeout_s,
            backoff_min_s=config.backoff_min_s,
            backoff_max_s=config.backoff_max_s,
        )
        if timeout_s is None:
            self._keeper.start()
        else:
            self._keeper.open(timeout_s)
        self._loads = Loads(layout, self._keeper, self._clock, config.match_timeout_s)
        self._stores = Stores(self._keeper, config)

    def chain(self, namespace: Namespace, tokens: Tokens) -> Chain:
        """Hash the full blocks of ``tokens``, salted as the server says. See ``BlockPool``."""
        return hash_tokens(self.layout, salted(namespace, self.salt()), tokens)

    def salt(self) -> bytes:
        """Return what the server mixes into every namespace of this client.

        Raises:
            PeerUnreachableError: No server was reached yet.
        """
        return self._keeper.welcome().salt

    def match(self, chain: Chain) -> Match:
        """Ask the server, for at most ``match_timeout_s``. See ``BlockPool``."""
        self._require_open()
        if not len(chain):
            return Match(chain, 0)
        request = protocol.MatchRequest(hashes=chain.hashes)
        try:
            reply = self._keeper.ask(protocol.MATCH, request, self._config.match_timeout_s)
        except UnavailableError as error:
            logger.debug("a match of 0: %s", error)
            with self._lock:
                self._unreachable += 1
            return Match(chain, 0)
        return Match(chain, reply.blocks)

    def lease(
        self,
        match: Match,
        seconds: float,
        *,
        missing: int | None = None,
        silent_s: float | None = None,
    ) -> RemoteLease:
        """Ask the server, for at most ``request_timeout_s``. See ``BlockPool``.

        ``missing`` more blocks were wanted of the server; None: the rest of the chain. ``silent_s`` is
        the longest wait for any sign of life, for who has another server to ask.
        """
        self._require_open()
        link = self._keeper.link()
        ends_at = self._clock.now() + seconds  # before the server's clock starts: never later
        request = protocol.LeaseRequest(
            client=link.client,
            hashes=match.chain.hashes[: match.blocks * HASH_BYTES],
            seconds=seconds,
            missing=len(match.chain) - match.blocks if missing is None else missing,
        )
        reply = self._answer(protocol.LEASE, request, link, silent_s)
        return RemoteLease(self._loads, match.chain, link, reply, seconds, ends_at)

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        """Pull blocks out of the server's arena. See ``BlockPool``."""
        self._require_open()
        own = lease if isinstance(lease, RemoteLease) and lease.loads is self._loads else None
        leased = require_loadable(self.layout, own, dest, first, deadline_s)
        if not len(dest):
            nothing: CompletionSource[int] = CompletionSource()
            nothing.finish(0)
            return nothing.completion
        return self._loads.start(leased, dest, first, min(deadline_s, LONGEST_S))

    def store(
        self,
        chain: Chain,
        source: BlockView,
        *,
        first: int = 0,
        durability: Durability = "dram",
        deadline_s: float,
    ) -> Completion[StoreResult]:
        """Stage blocks, chunk by chunk, for the server to pull. See ``BlockPool``."""
        self._require_storable(chain, source, first, durability, deadline_s)
        durable = durability == "ssd"
        return self._stores.submit(chain, source, first, Deadline(deadline_s), durable=durable)

    def store_here(
        self,
        chain: Chain,
        source: BlockView,
        *,
        first: int,
        durability: Durability,
        deadline: Deadline,
        is_cancelled: Callable[[], bool],
    ) -> StoreResult:
        """Store in the caller's thread, until the end. Raises what ``store`` ends with or raises."""
        self._require_storable(chain, source, first, durability, deadline.remaining_s())
        durable = durability == "ssd"
        return self._stores.run(chain, source, first, deadline, is_cancelled, durable=durable)

    def stats(self) -> PoolStats:
        """Ask the server, for at most ``request_timeout_s``. See ``BlockPool``."""
        self._require_open()
        reply = self._answer(protocol.STATS, protocol.Done(), self._keeper.link())
        keeper, way = self._keeper, self._keeper.way()
        with self._lock:
            own = {"client_losses": keeper.losses, "client_unreachable": self._unreachable}
        own["client_bettered"] = keeper.bettered
        own.update({f"client_by_{kind}": int(kind == way) for kind in (*TRANSPORT_KINDS, STREAMS)})
        return PoolStats(**dict(reply.stats), extra={**dict(reply.extra), **own})

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until there is a server. Raises TransferTimeoutError after ``timeout_s``."""
        self._keeper.wait_linked(timeout_s)

    def close(self) -> None:
        """End everything under way with ClosedError; the server gives leases back. See ``BlockPool``."""
        with self._lock:
            already, self._closed = self._closed, True
        if already:
            return
        if self._ways is not None:
            self._ways.stop()
        self._stores.close()
        self._loads.close()
        self._keeper.close(_CLOSE_TIMEOUT_S)
        self._loads.join(_CLOSE_TIMEOUT_S)
        self._stores.join()
        if self._ways is not None:
            self._ways.close()

    def _require_storable(
        self,
        chain: Chain,
        source: BlockView,
        first: int,
        durability: Durability,
        deadline_s: float,
    ) -> None:
        self._require_open()
        require_storable(self.layout, chain, source, first, durability, deadline_s)
        if durability == "ssd" and not self.durable():
            raise CapacityError(
                "the server has no ssd tier: store with 'dram', or start it with --ssd"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool is closed: connect again")
        if os.getpid() != self._process:
            raise UsageError("this pool is its parent process's: connect after the fork")

    def durable(self) -> bool:
        """Say whether stores can be durable at the server. PeerUnreachableError: never reached."""
        return self._keeper.welcome().durable

    def usable(self) -> bool:
        """Say whether the server is there, as far as is known here, and answered lately."""
        return self._keeper.usable()

    def is_alive(self, timeout_s: float) -> bool:
        """Ask the server for a sign of life. If there is none, nobody asks it again until there is."""
        try:
            self._keeper.ask(protocol.MATCH, protocol.MatchRequest(), timeout_s)
        except UsageError:
            return True  # it answered
        except KVPoolError:
            return False
        return True

    def note_silence(self) -> None:
        """Take note that the server's process did not answer in time: nobody asks until it does."""
        self._keeper.note_silence()

    def silent(self) -> bool:
        """Say whether the server did not answer somebody in time, and has not answered since."""
        return self._keeper.silent()

    def caller(self) -> Caller | None:
        """Return what asks the server over the link there is; None: there is none now."""
        try:
            return self._keeper.link().caller
        except UnavailableError:
            return None

    def is_near(self) -> bool:
        """Say whether the server's memory is mapped here: it is on this host."""
        try:
            endpoint = self._keeper.link().endpoint
        except UnavailableError:
            return False
        return isinstance(endpoint, HostEndpoint)

    def _answer(
        self,
        method: Method[Request, Reply],
        request: Request,
        link: Link,
        silent_s: float | None = None,
    ) -> Reply:
        """Ask the server for what cannot be a miss: its silence is an error."""
        wait_s = self._config.request_timeout_s
        try:
            return self._keeper.ask(method, request, wait_s, link, silent_s=silent_s)
        except TransferTimeoutError as error:
            raise PeerUnreachableError(f"the server is silent, recompute: {error}") from error


def salted(namespace: Namespace, salt: bytes) -> Namespace:
    """Return a namespace with a server's salt before its own."""
    return replace(namespace, salt=f"{salt.hex()}:{namespace.salt}") if salt else namespace
