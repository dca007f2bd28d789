"""The pool over many servers: the Pool interface, whatever holds a block.

Composes what is here and owns the order of its end: ``nodes`` has the servers and asks the directory,
``parts`` leases, ``gathering`` loads, ``placing`` stores. Who calls it: ``connect``.
"""

import logging
import math
import os
import threading

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
from kvpool.client.gathering import Gathering
from kvpool.client.nodes import Nodes
from kvpool.client.parts import ClusterLease, ClusterMatch, Leaser
from kvpool.client.patience import Patience, Step
from kvpool.client.placing import Placed, Placing
from kvpool.client.remote import salted
from kvpool.client.ways import Ways
from kvpool.clock import Clock
from kvpool.completion import Completion, Deadline
from kvpool.config import TransferConfig
from kvpool.errors import (
    CapacityError,
    ClosedError,
    LeaseExpiredError,
    PeerUnreachableError,
    UnavailableError,
    UsageError,
)
from kvpool.index.directory import Store
from kvpool.index.lookup import Piece
from kvpool.memory import BlockView
from kvpool.pool import hash_tokens

logger = logging.getLogger(__name__)


class ClusterPool(BlockPool):
    """A pool over the servers of a ring. Safe from any thread.

    ``_lock`` guards the count of short leases.

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
        self._short_leases = 0
        self._leaser = Leaser(nodes)
        self._gathering = Gathering(nodes, self._leaser, layout, config)
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
        patience = self._patience()
        pieces = tuple(self._nodes.lookup(chain.hashes, patience)) if len(chain) else ()
        return ClusterMatch(chain, pieces[-1].end if pieces else 0, pieces, self, patience)

    def lease(self, match: Match, seconds: float) -> ClusterLease:
        """Ask the holders, and others if one has less than was said. See ``BlockPool``.

        A match that is not this pool's own says what the caller wants: the directory is asked first
        who holds it, unless there is one server alone, which is asked for it at once.
        """
        self._require_open()
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"a lease of {seconds} s: above 0, and not for ever")
        sole: Store | None = None
        if isinstance(match, ClusterMatch):
            patience = match.patience if match.pool is self else self._patience()
            pieces, patience = match.pieces, patience.begin(Step.LEASE)
        else:
            patience, sole = self._patience(), self._nodes.sole()
            hashes = match.chain.hashes[: match.blocks * HASH_BYTES]
            if sole is not None and match.blocks:
                pieces = (Piece(0, match.blocks, (sole,)),)
            else:
                pieces = tuple(self._nodes.lookup(hashes, patience))
        lease = ClusterLease(self, match, pieces, seconds, patience, guessed=sole is not None)
        try:
            while lease.blocks < match.blocks:
                part = self._leaser.lease(lease, lease.blocks, match.blocks, set())
                if part is None and sole is None:
                    with self._lock:
                        self._short_leases += 1
                if part is None:
                    break
                lease.parts.append(part)
                lease.blocks = part.end
                if sole is not None:
                    break  # nobody else has more
        except BaseException:
            lease.close()
            raise
        return lease

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        """Copy leased blocks out, from another replica where one fails. See ``BlockPool``."""
        self._require_open()
        own = lease if isinstance(lease, ClusterLease) and lease.pool is self else None
        leased = require_loadable(self.layout, own, dest, first, deadline_s)
        now = self._clock.now()
        if leased.closed or any(part.lease.ends_at <= now for part in leased.parts):
            raise LeaseExpiredError("the lease is closed or has run out: match and lease again")
        leased.patience = leased.patience.begin(Step.LOAD)
        return self._gathering.start(leased, dest, first, deadline_s)

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
        require_storable(self.layout, chain, source, first, durability, deadline_s)
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
            extra["short_leases"] = self._short_leases
        extra["replica_retries"] = self._gathering.retries
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
        self._leaser.close()
        self._gathering.close()
        self._ways.stop()
        self._placing.close()
        self._nodes.close()
        self._gathering.join()
        self._placing.join()
        self._ways.close()

    def _patience(self) -> Patience:
        return Patience(self._config.read_timeout_s)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool is closed: connect again")
        if os.getpid() != self._process:
            raise UsageError("this pool is its parent process's: connect after the fork")
