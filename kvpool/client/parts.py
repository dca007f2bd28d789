"""Leases of blocks that lie on several servers.

Owns which part of a chain is leased from whom, and which server is asked next. Who calls it: the pool
over many servers, and its loads.
"""

import logging
import time
from dataclasses import dataclass, field

from kvpool.base import BlockPool, Chain, Lease, Match
from kvpool.block import HASH_BYTES, NodeId
from kvpool.client.loads import RemoteLease
from kvpool.client.nodes import Node, Nodes
from kvpool.client.patience import Patience
from kvpool.client.placing import cheapest
from kvpool.errors import CapacityError, ClosedError, KVPoolError, UsageError
from kvpool.index.lookup import Piece

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterMatch(Match):
    """A match, who holds what of it, whose it is, and how long its read may still wait for silence."""

    pieces: tuple[Piece, ...]
    pool: BlockPool = field(compare=False, repr=False)
    patience: Patience = field(compare=False, repr=False)


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
        patience: Of the read that it is for.
        guessed: Whether ``pieces`` is what may be there: nobody has said that it is.
    """

    def __init__(
        self,
        pool: BlockPool,
        match: Match,
        pieces: tuple[Piece, ...],
        seconds: float,
        patience: Patience,
        *,
        guessed: bool = False,
    ) -> None:
        self.pool = pool
        self.guessed = guessed
        self.patience = patience
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
            wait_s = self.patience.share_s()
            began = time.monotonic()
            part.lease.give_back(wait_s)
            if part.node.pool.silent():
                self.patience.spend(time.monotonic() - began, wait_s)


class Leaser:
    """Leases parts of chains, from one server after the other. Safe from any thread.

    Args:
        nodes: The servers.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._closed = False

    def close(self) -> None:
        """Have what goes wrong from now on be the end of the pool."""
        self._closed = True

    def lease(self, lease: ClusterLease, begin: int, end: int, tried: set[NodeId]) -> Part | None:
        """Lease blocks from ``begin`` on from the cheapest server that has not been tried.

        A server that gives no sign of life is given up, as the patience of the lease says.

        Returns:
            One part, up to ``end`` or less; None if nobody gives any. Servers that gave nothing are
            in ``tried`` then.

        Raises:
            CapacityError, UsageError: A server says that this client may not.
            ClosedError: The pool was closed.
        """
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
            silent_s, began = lease.patience.share_s(), time.monotonic()
            try:
                got = node.pool.lease(
                    Match(part, stop - begin),
                    lease.seconds,
                    missing=missing,
                    silent_s=silent_s,
                )
            except (CapacityError, UsageError):
                raise
            except KVPoolError as error:
                logger.debug("%s gives no lease: %s", node.node, error)
                lease.patience.spend(time.monotonic() - began, silent_s)
                if self._closed:
                    raise ClosedError("the pool is closed: connect again") from error
                tried.add(node.node)
                continue
            if got.blocks < stop - begin and not lease.guessed:
                self._nodes.absent(node.node, lease.chain[begin + got.blocks])
            if got.blocks:
                return Part(begin, begin + got.blocks, node, got)
            got.give_back(0.0)
            tried.add(node.node)
