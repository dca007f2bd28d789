"""The pool over many servers: the Pool interface, whatever holds a block.

Owns leases of several servers, and what a load tries next when one fails. Blocks themselves move
through the pools of single servers. Who calls it: ``connect``.
"""

import logging
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from kvpool.block import HASH_BYTES, BlockLayout, Namespace, NodeId
from kvpool.client.loads import RemoteLease
from kvpool.client.nodes import Node, Nodes
from kvpool.client.placing import Placed, Placing, cheapest, run_on
from kvpool.client.remote import salted
from kvpool.client.ways import Ways
from kvpool.clock import Clock
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.config import TransferConfig
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    InternalError,
    KVPoolError,
    LeaseExpiredError,
    PeerUnreachableError,
    TransferTimeoutError,
    UnavailableError,
    UsageError,
)
from kvpool.index.lookup import Piece
from kvpool.memory import BlockView
from kvpool.pool import hash_tokens, require_within

logger = logging.getLogger(__name__)


# A replica that gives less than this is slow: the next one is asked.
_SLOWEST_BYTES_S: Final = 64 << 20
# Longest that the end of a load is waited for behind its deadline: its pull has one of its own.
_END_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ClusterMatch(Match):
    """A match, and who holds what of it."""

    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Blocks ``begin`` to ``end`` of a chain, leased from one server."""

    begin: int
    end: int
    node: Node
    lease: RemoteLease


class ClusterLease(Lease):
    """A lease of blocks of several servers.

    Attributes:
        pool: Whose it is.
        pieces: Who else holds what of the chain.
        parts: What is leased from whom, in order, without a gap.
    """

    def __init__(
        self, pool: "ClusterPool", match: Match, pieces: tuple[Piece, ...], seconds: float
    ) -> None:
        self.pool = pool
        self.chain = match.chain
        self.pieces = pieces
        self.seconds = seconds
        self.parts: list[Part] = []
        self.blocks = 0
        self.closed = False

    def close(self) -> None:
        """Give every part back. See ``Lease``."""
        self.closed = True
        for part in self.parts:
            part.lease.close()


class _Running(Completion[int]):
    """A load under way; ``cancel`` reaches the parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pulls: list[Completion[int]] = []

    @property
    def cancel_requested(self) -> bool:
        """Whether the reader has asked for an early end."""
        return self._cancel_requested

    def cancel(self) -> None:
        super().cancel()
        for pull in list(self.pulls):
            pull.cancel()


class ClusterPool(BlockPool):
    """A pool over the servers of a ring. Safe from any thread.

    ``_lock`` guards the counts. Loads run on threads ``kvpool-load``.

    Args:
        nodes: The servers; closed with the pool.
        layout, ways, config, clock: As for a pool of one server; ``ways`` are closed with the pool.
    """

    def __init__(
        self,
        nodes: Nodes,
        layout: BlockLayout,
        ways: Ways,
        config: TransferConfig,
        clock: Clock,
    ) -> None:
        self.layout = layout
        self._nodes = nodes
        self._ways = ways
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._salt: bytes | None = None
        self._counts = {"replica_retries": 0, "short_leases": 0}
        self._loaders = ThreadPoolExecutor(config.completion_threads, "kvpool-load")
        self._placing = Placing(nodes, config)

    def chain(self, namespace: Namespace, tokens: Tokens) -> Chain:
        """Hash the full blocks of ``tokens``, salted as the servers say. See ``BlockPool``."""
        if self._salt is None:
            usable = self._nodes.usable()
            if not usable:
                raise PeerUnreachableError("no server of the ring answers: recompute, or wait")
            self._salt = usable[0].pool.salt()
        return hash_tokens(self.layout, salted(namespace, self._salt), tokens)

    def match(self, chain: Chain) -> ClusterMatch:
        """Ask the directory, in two rounds at most. See ``BlockPool``."""
        self._require_open()
        pieces = tuple(self._nodes.lookup(chain.hashes)) if len(chain) else ()
        return ClusterMatch(chain, pieces[-1].end if pieces else 0, pieces)

    def lease(self, match: Match, seconds: float) -> ClusterLease:
        """Ask the holders, and others if one has less than was said. See ``BlockPool``."""
        self._require_open()
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"a lease of {seconds} s: above 0, and not for ever")
        pieces = match.pieces if isinstance(match, ClusterMatch) else None
        if pieces is None:
            pieces = tuple(self._nodes.lookup(match.chain.hashes[: match.blocks * HASH_BYTES]))
        lease = ClusterLease(self, match, pieces, seconds)
        try:
            while lease.blocks < match.blocks:
                part = self._lease_from(lease, lease.blocks, match.blocks, set())
                if part is None:
                    self._count("short_leases")
                    break
                lease.parts.append(part)
                lease.blocks = part.end
        except BaseException:
            lease.close()
            raise
        return lease

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        """Copy leased blocks out, from another replica where one fails. See ``BlockPool``."""
        self._require_open()
        if not isinstance(lease, ClusterLease) or lease.pool is not self:
            raise UsageError("the lease is of another pool: lease from the pool that loads")
        self.layout.require_equal(dest.layout)
        if not dest.writable:
            raise UsageError("the destination is read-only")
        require_within(first, len(dest), lease.blocks, "a lease")
        now = self._clock.now()
        if lease.closed or any(part.lease.ends_at <= now for part in lease.parts):
            raise LeaseExpiredError("the lease is closed or has run out: match and lease again")
        source: CompletionSource[int] = CompletionSource()
        running = source.completion = _Running()
        deadline = Deadline(deadline_s)

        def work() -> int:
            return self._load(lease, dest, first, deadline, running)

        def ended(good: int) -> None:
            if good:
                source.advance(self.layout.num_layers)

        run_on(self._loaders, source, work, ended)
        return running

    def store(
        self,
        chain: Chain,
        source: BlockView,
        *,
        first: int = 0,
        durability: Durability = "dram",
        deadline_s: float,
        replicas: int | None = None,
    ) -> Completion[StoreResult]:
        """Copy blocks in, on ``replicas`` servers. See ``BlockPool``.

        A chain goes to the server of this host if there is one, else to where most of it is, else
        where the ring says; further replicas to the next servers of the ring. With fewer copies than
        asked for, the result is ``refused`` and says how many there are.
        """
        self._require_open()
        self.layout.require_equal(source.layout)
        require_within(first, len(source), len(chain), "a chain")
        wanted = self._config.replicas if replicas is None else replicas
        if wanted < 1:
            raise UsageError(f"{wanted} replicas: ask for one or more")
        if durability == "ssd" and not self._placing.durable():
            raise CapacityError("no server has an ssd tier: store with 'dram', or give one an ssd")
        deadline = Deadline(deadline_s)
        return self._placing.submit(Placed(chain, source, first, durability, deadline, wanted))

    def stats(self) -> PoolStats:
        """Add up what the servers that answer say. See ``BlockPool``."""
        self._require_open()
        total: dict[str, int] = {}
        extra: dict[str, int] = {}
        answered = 0
        for node in self._nodes.usable():
            try:
                stats = node.pool.stats()
            except UnavailableError as error:
                logger.debug("%s says nothing of itself: %s", node.node, error)
                continue
            answered += 1
            for name in PoolStats.__slots__:
                if name != "extra":
                    total[name] = total.get(name, 0) + getattr(stats, name)
            for name, count in stats.extra.items():
                extra[name] = extra.get(name, 0) + count
        if not answered:
            raise PeerUnreachableError("no server of the ring answers: recompute")
        with self._lock:
            extra.update(self._counts)
        extra.update(nodes=answered, lookups=self._nodes.lookups, lookup_rounds=self._nodes.rounds)
        return PoolStats(**total, extra=extra)

    def nodes(self) -> list[str]:
        """Return the names of the servers that can be asked now."""
        return [str(node.node) for node in self._nodes.usable()]

    def close(self) -> None:
        """End everything under way with ClosedError; servers give leases back. See ``BlockPool``."""
        with self._lock:
            already, self._closed = self._closed, True
        if already:
            return
        self._ways.stop()
        self._loaders.shutdown(wait=False)
        self._placing.close()
        self._nodes.close()
        self._loaders.shutdown(wait=True)
        self._placing.join()
        self._ways.close()

    # ---- leases ----------------------------------------------------------------------------------

    def _lease_from(
        self, lease: ClusterLease, begin: int, end: int, tried: set[NodeId]
    ) -> Part | None:
        while True:
            found = cheapest(self._nodes, lease.pieces, begin, end, tried)
            if found is None:
                return None
            node, stop = found
            # What nobody is known to hold is asked of the last holder: it may have come since.
            stop = end if stop == max(piece.end for piece in lease.pieces) else stop
            missing = 0 if begin else len(lease.chain) - end
            hashes = lease.chain.hashes[begin * HASH_BYTES : stop * HASH_BYTES]
            part = Chain(lease.chain.namespace, hashes)
            try:
                got = node.pool.lease(
                    Match(part, stop - begin),
                    lease.seconds,
                    missing=missing,
                    silent_s=self._config.read_timeout_s,
                )
            except (CapacityError, UsageError):
                raise
            except KVPoolError as error:
                logger.debug("%s gives no lease: %s", node.node, error)
                if self._closed:
                    raise ClosedError("the pool is closed: connect again") from error
                tried.add(node.node)
                continue
            if got.blocks < stop - begin:
                self._nodes.absent(node.node, lease.chain[begin + got.blocks])
            if got.blocks:
                return Part(begin, begin + got.blocks, node, got)
            got.close()
            tried.add(node.node)

    # ---- loads -----------------------------------------------------------------------------------

    def _load(
        self,
        lease: ClusterLease,
        dest: BlockView,
        first: int,
        deadline: Deadline,
        running: _Running,
    ) -> int:
        """Start all parts at once, and end them in order; return the leading blocks that came."""
        stop = first + len(dest)
        pulls: list[tuple[int, int, Part, Completion[int] | KVPoolError]] = []
        for part in lease.parts:
            begin, end = max(part.begin, first), min(part.end, stop)
            if begin < end:
                view = dest.take(begin - first, end - first)
                pulls.append((begin, end, part, self._pull(part, view, begin, deadline, running)))
        at = first
        for begin, end, part, pull in pulls:
            good = self._end(pull, part, deadline) if at == begin else self._give_up(pull)
            if at == begin:
                at += good
                if at < end and not self._over(deadline, running):
                    at = self._retry(lease, dest, first, (at, end), part, deadline, running)
        if running.cancel_requested:
            raise CancelledTransferError("cancelled by the caller")
        if self._closed:
            raise ClosedError("the pool was closed")
        if at < stop and deadline.passed():
            raise TransferTimeoutError("the deadline of the load passed")
        return at - first

    def _over(self, deadline: Deadline, running: _Running) -> bool:
        return running.cancel_requested or self._closed or deadline.passed()

    def _pull(
        self, part: Part, view: BlockView, begin: int, deadline: Deadline, running: _Running
    ) -> Completion[int] | KVPoolError:
        """Start one part. What goes wrong at once is returned."""
        wait_s = (
            self._config.read_timeout_s + len(view) * self.layout.block_bytes / _SLOWEST_BYTES_S
        )
        try:
            pull = part.node.pool.load(
                part.lease,
                view,
                first=begin - part.begin,
                deadline_s=min(deadline.remaining_s(), wait_s),
            )
        except KVPoolError as error:
            return error
        running.pulls.append(pull)
        if running.cancel_requested:
            pull.cancel()
        return pull

    def _end(self, pull: Completion[int] | KVPoolError, part: Part, deadline: Deadline) -> int:
        """Wait until nothing writes any more; return how many leading blocks came.

        A holder that gives no sign of life for ``read_timeout_s`` meanwhile is given up.
        """
        if isinstance(pull, KVPoolError):
            return 0
        look_s = self._config.read_timeout_s / 2
        while True:
            try:
                return pull.wait(min(look_s, deadline.remaining_s()))
            except KVPoolError as error:
                if pull.done():
                    logger.debug("a replica failed: %s", error)
                    return 0
            if deadline.passed() or not part.node.pool.is_alive(look_s):
                return self._give_up(pull)

    def _give_up(self, pull: Completion[int] | KVPoolError) -> int:
        """Cancel a pull and wait until nothing writes any more."""
        if isinstance(pull, KVPoolError):
            return 0
        pull.cancel()
        try:
            return pull.wait(_END_TIMEOUT_S)
        except KVPoolError as error:
            if not pull.done():
                raise InternalError("a pull did not end behind its deadline") from error
            return 0

    def _retry(
        self,
        lease: ClusterLease,
        dest: BlockView,
        first: int,
        blocks: tuple[int, int],
        failed: Part,
        deadline: Deadline,
        running: _Running,
    ) -> int:
        """Read what one replica did not give from others; return up to where blocks came."""
        at, end = blocks
        tried = {failed.node.node}
        self._nodes.absent(failed.node.node, lease.chain[at])
        while at < end and not self._over(deadline, running):
            part = self._lease_from(lease, at, end, tried)
            if part is None:
                break
            self._count("replica_retries")
            try:
                view = dest.take(at - first, part.end - first)
                pull = self._pull(part, view, at, deadline, running)
                at += self._end(pull, part, deadline)
            finally:
                part.lease.close()
            tried.add(part.node.node)
        return at

    # ---- inside ----------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool is closed: connect again")
        if os.getpid() != self._process:
            raise UsageError("this pool is its parent process's: connect after the fork")
