"""The client of a server: the Pool interface over one kvpool-server of this host.

Owns the client's side of leases, loads and stores. Bytes of a load are pulled out of the server's
arena, which is mapped read-only here; bytes of a store are pulled by the server out of a staging
arena of this process. Never writes into the server's memory. Who calls it: engines and workers.
"""

import logging
import os
import threading
from pathlib import Path
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
)
from kvpool.block import HASH_BYTES, BlockLayout, Namespace
from kvpool.client import protocol
from kvpool.client.link import Link, LinkKeeper, transport_kind
from kvpool.client.loads import Loads, RemoteLease
from kvpool.client.rpc import Method, Reply, Request
from kvpool.client.staging import Staging
from kvpool.client.stores import Stores
from kvpool.clock import Clock, SystemClock
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.config import TransferConfig
from kvpool.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    PeerUnreachableError,
    TransferTimeoutError,
    UnavailableError,
    UsageError,
)
from kvpool.memory import BlockView
from kvpool.pool import hash_tokens, require_within
from kvpool.transfer.base import Transport
from kvpool.transfer.choice import open_transport

logger = logging.getLogger(__name__)

# Longest that ``close`` waits for the thread of the link.
_CLOSE_TIMEOUT_S: Final = 2.0


def connect(
    run_dir: Path | str,
    layout: BlockLayout,
    timeout_s: float = 30.0,
    *,
    transport: Transport | None = None,
    config: TransferConfig | None = None,
) -> "RemotePool":
    """Connect to the server that runs in a folder, and return it as a pool.

    Args:
        run_dir: The folder given to ``kvpool-server --run-dir``.
        layout: Of the blocks. The first client's layout opens the server's arena.
        timeout_s: Longest wait for the server; opening its arena takes about a second per GiB.
        transport: The transport of this process, if it has one: it stays the caller's. Of the kind
            that the server was started with. None makes one of that kind, which is closed with the
            pool.
        config: Waits and sizes; None means the defaults.

    Raises:
        LayoutMismatchError, UsageError: The server keeps another layout, or is another version.
        ConfigError: The staging has no room for one block.
        PeerUnreachableError, TransferTimeoutError: No server there, or it did not answer.

    A server that is lost later is looked for again in the background.
    """
    settings = config or TransferConfig()
    if settings.staging_bytes < layout.block_bytes:
        raise ConfigError(
            f"transfer.staging_bytes is {settings.staging_bytes}: a block has {layout.block_bytes}",
            key="transfer.staging_bytes",
        )
    deadline = Deadline(timeout_s)
    folder = Path(run_dir)
    owned: Transport | None = None
    if transport is None:
        kind = transport_kind(folder, layout, timeout_s)
        transport = owned = open_transport(kind, "kvpool-client")
    try:
        return RemotePool(folder, layout, transport, settings, deadline.remaining_s(), owned=owned)
    except BaseException:
        if owned is not None:
            owned.close()
        raise


class RemotePool(BlockPool):
    """A pool in another process of this host. Safe from any thread.

    Its parts have their own locks; ``_lock`` here guards only ``_closed`` and ``_unreachable``.

    Args:
        run_dir, layout: Where the server is, and what it keeps.
        transport: The transport of this process.
        config: Waits and sizes.
        timeout_s: Longest wait for the first connection.
        clock: Of leases and pauses.
        owned: A transport to close with the pool.

    Raises as ``connect``.
    """

    def __init__(
        self,
        run_dir: Path,
        layout: BlockLayout,
        transport: Transport,
        config: TransferConfig,
        timeout_s: float,
        *,
        clock: Clock | None = None,
        owned: Transport | None = None,
    ) -> None:
        self.layout = layout
        self._config = config
        self._clock: Clock = clock or SystemClock()
        self._owned = owned
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._unreachable = 0
        self._staging = Staging(layout, config.staging_bytes, transport)
        self._keeper = LinkKeeper(
            run_dir,
            layout,
            transport,
            self._clock,
            attempt_s=config.request_timeout_s,
            backoff_min_s=config.backoff_min_s,
            backoff_max_s=config.backoff_max_s,
        )
        try:
            self._keeper.open(timeout_s)
        except BaseException:
            self._staging.close()
            raise
        self._loads = Loads(layout, self._keeper, self._clock, config.match_timeout_s)
        self._stores = Stores(self._staging, self._keeper, config)

    def chain(self, namespace: Namespace, tokens: Tokens) -> Chain:
        """Hash the full blocks of ``tokens``. See ``BlockPool``."""
        return hash_tokens(self.layout, namespace, tokens)

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

    def lease(self, match: Match, seconds: float) -> RemoteLease:
        """Ask the server, for at most ``request_timeout_s``. See ``BlockPool``."""
        self._require_open()
        link = self._keeper.link()
        ends_at = self._clock.now() + seconds  # before the server's clock starts: never later
        request = protocol.LeaseRequest(
            client=link.client,
            hashes=match.chain.hashes[: match.blocks * HASH_BYTES],
            seconds=seconds,
            missing=len(match.chain) - match.blocks,
        )
        reply = self._answer(protocol.LEASE, request, link)
        return RemoteLease(self._loads, match.chain, link, reply, seconds, ends_at)

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        """Pull blocks out of the server's arena. See ``BlockPool``."""
        self._require_open()
        if not isinstance(lease, RemoteLease) or lease.loads is not self._loads:
            raise UsageError("the lease is of another pool: lease from the pool that loads")
        self.layout.require_equal(dest.layout)
        require_within(first, len(dest), lease.blocks, "a lease")
        if not len(dest):
            nothing: CompletionSource[int] = CompletionSource()
            nothing.finish(0)
            return nothing.completion
        return self._loads.start(lease, dest, first, deadline_s)

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
        self._require_open()
        self.layout.require_equal(source.layout)
        require_within(first, len(source), len(chain), "a chain")
        if durability != "dram":
            raise CapacityError(
                "a client cannot ask a server for durable stores yet: store with 'dram'"
            )
        return self._stores.submit(chain, source, first, Deadline(deadline_s))

    def stats(self) -> PoolStats:
        """Ask the server, for at most ``request_timeout_s``. See ``BlockPool``."""
        self._require_open()
        reply = self._answer(protocol.STATS, protocol.Done(), self._keeper.link())
        with self._lock:
            own = {"client_losses": self._keeper.losses, "client_unreachable": self._unreachable}
        return PoolStats(**reply.stats, extra={**reply.extra, **own})

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until there is a server. Raises TransferTimeoutError after ``timeout_s``."""
        self._keeper.wait_linked(timeout_s)

    def close(self) -> None:
        """End everything under way with ClosedError; the server gives leases back. See ``BlockPool``."""
        with self._lock:
            already, self._closed = self._closed, True
        if already:
            return
        self._stores.close()
        self._loads.close()
        self._keeper.close(_CLOSE_TIMEOUT_S)
        self._loads.join(_CLOSE_TIMEOUT_S)
        self._stores.join()
        self._staging.close()
        if self._owned is not None:
            self._owned.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool is closed: connect again")
        if os.getpid() != self._process:
            raise UsageError("this pool is its parent process's: connect after the fork")

    def _answer(self, method: Method[Request, Reply], request: Request, link: Link) -> Reply:
        """Ask the server for what cannot be a miss: its silence is an error."""
        try:
            return self._keeper.ask(method, request, self._config.request_timeout_s, link)
        except TransferTimeoutError as error:
            raise PeerUnreachableError(f"the server is silent, recompute: {error}") from error
