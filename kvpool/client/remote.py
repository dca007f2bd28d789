"""The client of a server: the Pool interface over one kvpool-server of this host.

Owns the client's side of leases, loads and stores. Bytes of a load are pulled out of the server's
arena, which is mapped read-only here; bytes of a store are pulled by the server out of a staging
arena of this process. Never writes into the server's memory. Who calls it: engines and workers.
"""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

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
from kvpool.client.breaker import Breaker
from kvpool.client.link import Link, LinkKeeper
from kvpool.client.rpc import Method
from kvpool.client.staging import Chunk, Staging
from kvpool.clock import Clock, SystemClock
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.config import TransferConfig
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    ConfigError,
    InternalError,
    KVPoolError,
    LayoutMismatchError,
    LeaseExpiredError,
    PeerUnreachableError,
    TransferTimeoutError,
    UnavailableError,
    UsageError,
)
from kvpool.index.hashing import hash_chain
from kvpool.memory import BlockView
from kvpool.transfer.base import RemoteSlots, Transport
from kvpool.transfer.host import HostTransport

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=msgspec.Struct)
Reply = TypeVar("Reply", bound=msgspec.Struct)

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
        transport: The host transport of this process, if it has one: it stays the caller's. None
            makes one that is closed with the pool.
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
    owned = None if transport is not None else HostTransport()
    used = transport or owned
    assert used is not None
    try:
        return RemotePool(Path(run_dir), layout, used, settings, timeout_s, owned=owned)
    except BaseException:
        if owned is not None:
            owned.close()
        raise


class RemoteLease(Lease):
    """A lease of a server's blocks. Its state is guarded by the pool's ``_ending``.

    Attributes:
        link: The connection it was granted on; it ends with that.
        number: Its number at the server.
        source: The slots that hold the blocks.
        ends_at: When it runs out, by the pool's clock.
        loads: Loads under way; it is released after the last one.
    """

    def __init__(
        self,
        pool: "RemotePool",
        chain: Chain,
        link: Link,
        number: int,
        source: RemoteSlots,
        seconds: float,
        ends_at: float,
    ) -> None:
        self.pool = pool
        self.chain = chain
        self.blocks = len(source.slots)
        self.seconds = seconds
        self.link = link
        self.number = number
        self.source = source
        self.ends_at = ends_at
        self.loads = 0
        self.closed = False

    def close(self) -> None:
        """Give the right back, in one bounded request. See ``Lease``."""
        self.pool.close_lease(self)


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way."""

    lease: RemoteLease
    first: int
    count: int
    completion: Completion[int]


class RemotePool(BlockPool):
    """A pool in another process of this host. Safe from any thread.

    ``_ending`` guards leases and ``_loads``; requests that end a lease or report a bad block are
    made under it, each with a deadline, so that a block reported by one thread is not matched by
    another. ``_state`` guards the counts and ``_closed``, and nothing is called under it.

    Args:
        run_dir, layout: Where the server is, and what it keeps.
        transport: The host transport of this process.
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
        self._ending = threading.Lock()
        self._loads: set[_Load] = set()
        self._state = threading.Lock()
        self._closed = False
        self._stores = 0
        self._unreachable = 0
        pauses = {"min_s": config.backoff_min_s, "max_s": config.backoff_max_s}
        self._breaker = Breaker(self._clock, **pauses)
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
        self._threads = ThreadPoolExecutor(config.completion_threads, "kvpool-remote")

    def chain(self, namespace: Namespace, tokens: Tokens) -> Chain:
        """Hash the full blocks of ``tokens``. See ``BlockPool``."""
        if namespace.block_tokens != self.layout.block_tokens:
            raise LayoutMismatchError(
                f"the namespace has blocks of {namespace.block_tokens} tokens, the pool of "
                f"{self.layout.block_tokens}"
            )
        return Chain(namespace, hash_chain(namespace.digest, tokens, namespace.block_tokens))

    def match(self, chain: Chain) -> Match:
        """Ask the server, for at most ``match_timeout_s``. See ``BlockPool``."""
        if not len(chain):
            return Match(chain, 0)
        try:
            self._end_loads()
            request = protocol.MatchRequest(hashes=chain.hashes)
            reply = self._ask(protocol.MATCH, request, self._config.match_timeout_s)
        except UnavailableError as error:
            logger.debug("a match of 0: %s", error)
            with self._state:
                self._unreachable += 1
            return Match(chain, 0)
        return Match(chain, reply.blocks)

    def lease(self, match: Match, seconds: float) -> RemoteLease:
        """Ask the server, for at most ``request_timeout_s``. See ``BlockPool``."""
        self._end_loads()
        link = self._keeper.link()
        ends_at = self._clock.now() + seconds  # before the server's clock starts: never later
        request = protocol.LeaseRequest(
            client=link.client,
            hashes=match.chain.hashes[: match.blocks * HASH_BYTES],
            seconds=seconds,
            missing=len(match.chain) - match.blocks,
        )
        try:
            reply = self._ask(protocol.LEASE, request, self._config.request_timeout_s, link)
        except TransferTimeoutError as error:
            raise PeerUnreachableError(f"the server is silent, recompute: {error}") from error
        source = RemoteSlots(link.region, tuple(reply.slots), tuple(reply.generations))
        return RemoteLease(self, match.chain, link, reply.lease, source, seconds, ends_at)

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        """Pull blocks out of the server's arena. See ``BlockPool``."""
        if not isinstance(lease, RemoteLease) or lease.pool is not self:
            raise UsageError("the lease is of another pool: lease from the pool that loads")
        self.layout.require_equal(dest.layout)
        if not 0 <= first <= first + len(dest) <= lease.blocks:
            raise UsageError(
                f"blocks {first} to {first + len(dest)} are not within the lease's {lease.blocks}"
            )
        source: CompletionSource[int] = CompletionSource()
        with self._ending:
            self._require_open()
            if lease.closed or self._clock.now() >= lease.ends_at:
                raise LeaseExpiredError("the lease is closed or has run out: match and lease again")
            if not len(dest):
                source.finish(0)
                return source.completion
            try:
                completion = lease.link.endpoint.read_blocks(
                    dest,
                    RemoteSlots(
                        lease.source.region,
                        lease.source.slots[first : first + len(dest)],
                        lease.source.generations[first : first + len(dest)],
                    ),
                    source_layout=self.layout,
                    dest_layer=None,
                    deadline_s=deadline_s,
                )
            except ClosedError as error:
                source.fail(PeerUnreachableError(f"the server was lost, recompute: {error}"))
                return source.completion
            except UnavailableError as error:
                source.fail(error)
                return source.completion
            load = _Load(lease, first, len(dest), completion)
            lease.loads += 1
            self._loads.add(load)
        completion.add_done_callback(self._end_loads_soon)
        return completion

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
        if durability != "dram":
            raise CapacityError("the server has no SSD tier: store with durability 'dram'")
        self.layout.require_equal(source.layout)
        if not 0 <= first <= first + len(source) <= len(chain):
            raise UsageError(
                f"blocks {first} to {first + len(source)} are not within a chain of {len(chain)}"
            )
        ended: CompletionSource[StoreResult] = CompletionSource()
        with self._state:
            self._require_open()
            refused = self._stores >= self._config.stores_max
            self._stores += not refused
        if refused:
            why = f"{self._config.stores_max} stores are under way: wait for one to end"
            ended.finish(StoreResult(0, 0, why))
            return ended.completion
        run = partial(self._run_store, ended, chain, source, first, Deadline(deadline_s))
        try:
            self._threads.submit(run)
        except RuntimeError as error:  # the threads were shut down by close
            raise ClosedError("the pool was closed: connect again") from error
        return ended.completion

    def stats(self) -> PoolStats:
        """Ask the server, for at most ``request_timeout_s``. See ``BlockPool``."""
        link = self._keeper.link()
        try:
            reply = self._ask(protocol.STATS, protocol.Done(), self._config.request_timeout_s, link)
        except TransferTimeoutError as error:
            raise PeerUnreachableError(f"the server is silent: {error}") from error
        with self._state:
            own = {"client_losses": self._keeper.losses, "client_unreachable": self._unreachable}
        return PoolStats(**reply.stats, extra={**reply.extra, **own})

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until there is a server. Raises TransferTimeoutError after ``timeout_s``."""
        self._keeper.wait_linked(timeout_s)

    def close(self) -> None:
        """End everything under way with ClosedError; the server gives leases back. See ``BlockPool``."""
        with self._state:
            if self._closed:
                return
            self._closed = True
        self._keeper.close(_CLOSE_TIMEOUT_S)
        self._threads.shutdown(wait=True)  # short: their requests ended with the link
        self._staging.close()
        if self._owned is not None:
            self._owned.close()

    def close_lease(self, lease: RemoteLease) -> None:
        """Release a lease now, or after its last load. Idempotent, never raises."""
        try:
            self._end_loads()
            with self._ending:
                if not lease.closed:
                    lease.closed = True
                    self._release_if_over(lease)
        except KVPoolError as error:
            logger.debug("a lease was not released, it will run out: %s", error)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool is closed: connect again")

    def _ask(
        self,
        method: Method[Request, Reply],
        request: Request,
        timeout_s: float,
        link: Link | None = None,
    ) -> Reply:
        """Make one short request, unless the server is being given a pause."""
        link = link or self._keeper.link()
        if not self._breaker.allows():
            raise PeerUnreachableError("the server did not answer lately: it is asked again soon")
        try:
            reply = link.caller.call(method, request, timeout_s)
        except TransferTimeoutError:
            self._breaker.failed()
            raise
        except (PeerUnreachableError, ClosedError) as error:
            self._require_open()
            self._keeper.lose(link)
            raise PeerUnreachableError(f"the server was lost: {error}") from error
        except KVPoolError:
            self._breaker.succeeded()  # it answered
            raise
        self._breaker.succeeded()
        return reply

    def _end_loads_soon(self) -> None:
        """From the thread that ends a load, which must not be kept."""
        try:
            self._threads.submit(self._end_loads)
        except RuntimeError:
            pass  # shut down by close: the server gives the leases back by itself

    def _end_loads(self) -> None:
        """Report what loads found to be bad, and release the leases that waited for them."""
        with self._ending:
            for load in [load for load in self._loads if load.completion.done()]:
                self._loads.remove(load)
                load.lease.loads -= 1
                try:
                    self._report(load)
                    self._release_if_over(load.lease)
                except KVPoolError as error:
                    logger.debug("the end of a load was not told: %s", error)

    def _report(self, load: _Load) -> None:
        try:
            good = load.completion.result()
        except KVPoolError:
            return
        if good < load.count:
            lease = load.lease
            request = protocol.ReportRequest(
                client=lease.link.client, lease=lease.number, block=load.first + good
            )
            self._ask(protocol.REPORT, request, self._config.match_timeout_s, lease.link)

    def _release_if_over(self, lease: RemoteLease) -> None:
        """Under ``_ending``."""
        if lease.closed and not lease.loads and lease.link.endpoint.alive():
            request = protocol.ReleaseRequest(client=lease.link.client, lease=lease.number)
            self._ask(protocol.RELEASE, request, self._config.match_timeout_s, lease.link)

    def _run_store(
        self,
        ended: CompletionSource[StoreResult],
        chain: Chain,
        source: BlockView,
        first: int,
        deadline: Deadline,
    ) -> None:
        """Run one store to its end, on one of the pool's threads."""
        holds: list[protocol.ReleaseRequest] = []
        error: KVPoolError | None = None
        result = StoreResult(0, 0)
        try:
            link = self._keeper.link()
            while result.stored < len(source) and not result.refused:
                self._require_going(ended, deadline)
                result = self._store_chunk(link, chain, source, first, result, deadline, holds)
        except (ClosedError, PeerUnreachableError) as caught:
            error = ClosedError("the pool was closed") if self._closed else _lost(caught)
        except KVPoolError as caught:
            error = caught
        except Exception as caught:
            logger.exception("a store failed")
            error = InternalError(f"a store failed: {caught!r}")
        for hold in holds:
            self._let_go(link, hold)
        with self._state:
            self._stores -= 1
        if error is not None:
            ended.fail(error)
        else:
            ended.finish(result)

    def _require_going(self, ended: CompletionSource[StoreResult], deadline: Deadline) -> None:
        self._require_open()
        if ended.cancel_requested:
            raise CancelledTransferError("cancelled by the caller")
        if deadline.passed():
            raise TransferTimeoutError("the deadline of the store passed")

    def _store_chunk(
        self,
        link: Link,
        chain: Chain,
        source: BlockView,
        first: int,
        before: StoreResult,
        deadline: Deadline,
        holds: list[protocol.ReleaseRequest],
    ) -> StoreResult:
        """Send the next chunk; blocks sent before are held so that they are not pushed out by it."""
        begin = before.stored
        end = min(begin + self._staging.slot_count, len(source))
        at = first + begin
        chunk = Chunk(
            hashes=chain.hashes[at * HASH_BYTES : (first + end) * HASH_BYTES],
            parent=chain.parent(at),
            source=source.take(begin, end),
            hold_s=deadline.remaining_s() if end < len(source) else 0.0,
        )
        reply = self._staging.send(link, chunk, deadline)
        if reply.lease:
            holds.append(protocol.ReleaseRequest(client=link.client, lease=reply.lease))
        stored, new = begin + reply.stored, before.new + reply.new
        refused = reply.refused or ("" if reply.stored == end - begin else "the server stopped")
        return StoreResult(stored, new, refused)

    def _let_go(self, link: Link, hold: protocol.ReleaseRequest) -> None:
        try:
            self._ask(protocol.RELEASE, hold, self._config.match_timeout_s, link)
        except KVPoolError as error:
            logger.debug("blocks of a store stay held until their lease runs out: %s", error)


def _lost(error: KVPoolError) -> PeerUnreachableError:
    lost = PeerUnreachableError(f"the server was lost, nothing is sure to be stored: {error}")
    lost.__cause__ = error
    return lost
