"""Where blocks go and where they are read: the choice among the servers of a ring.

Owns the order in which servers are chosen, the threads of stores (``kvpool-place``; one that is alone
runs in the thread that waits for it), and how a store goes on when one of its servers fails. Who calls it: the pool over many servers.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.base import Chain, Durability, StoreResult
from kvpool.block import NodeId
from kvpool.client.nodes import Node, Nodes
from kvpool.client.patience import Patience
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.config import TransferConfig
from kvpool.errors import (
    CapacityError,
    ClosedError,
    KVPoolError,
    PeerUnreachableError,
    UnavailableError,
)
from kvpool.index.lookup import Piece
from kvpool.memory import BlockView
from kvpool.operations import Operations

logger = logging.getLogger(__name__)

# How often a store looks whether it was cancelled.
_CANCEL_LOOK_S: Final = 0.05
# A store goes where at least this share of its chain is already.
_HOME_SHARE: Final = 0.5
# Longest that ``join`` waits for stores whose servers are closed: one copy of a batch each.
_END_TIMEOUT_S: Final = 10.0


def cheapest(
    nodes: Nodes, pieces: tuple[Piece, ...], begin: int, end: int, tried: set[NodeId]
) -> tuple[Node, int] | None:
    """Return who is to be asked for blocks from ``begin`` on, and how far it is said to have them.

    On this host if there is one; else who has most of them.
    """
    reach: dict[NodeId, int] = {}
    for piece in pieces:
        if piece.end <= begin:
            continue
        for store in piece.stores:
            if reach.get(store.node, begin) >= piece.begin:
                reach[store.node] = min(piece.end, end)
    asked = [
        (node, stop)
        for name, stop in reach.items()
        if stop > begin and name not in tried and (node := nodes.get(name)) is not None
    ]
    if not asked:
        return None
    return max(asked, key=lambda each: (each[0].pool.is_near(), each[1], str(each[0].node)))


def ends_of(
    sent: Sequence[Completion[StoreResult] | KVPoolError], ended: CompletionSource[StoreResult]
) -> list[StoreResult | KVPoolError]:
    """Wait until none of the stores reads its source any more; return what came of each.

    Args:
        sent: Each has a deadline of its own; or why it did not begin.
        ended: Of their caller: if it is cancelled, they are.
    """
    under_way = [one for one in sent if not isinstance(one, KVPoolError)]
    return [one if isinstance(one, KVPoolError) else _end_of(one, under_way, ended) for one in sent]


def _end_of(
    sent: Completion[StoreResult],
    all_of_them: Sequence[Completion[StoreResult]],
    ended: CompletionSource[StoreResult],
) -> StoreResult | KVPoolError:
    while True:
        if ended.cancel_requested:
            for one in all_of_them:
                one.cancel()
        try:
            return sent.wait(_CANCEL_LOOK_S)
        except KVPoolError as error:
            if sent.done():
                return error


@dataclass(frozen=True, slots=True)
class Placed:
    """One store: what goes where, until when, and how often."""

    chain: Chain
    source: BlockView
    first: int
    durability: Durability
    deadline: Deadline
    replicas: int


class Placing:
    """Stores on servers of a ring. Safe from any thread.

    Args:
        nodes: The servers.
        config: ``completion_threads`` threads; ``stores_max`` stores may be under way or queued.
    """

    def __init__(self, nodes: Nodes, config: TransferConfig) -> None:
        self._nodes = nodes
        self._config = config
        self._operations = Operations(
            config.completion_threads, config.stores_max, name="kvpool-place"
        )
        self._closed = False

    def submit(self, store: Placed) -> Completion[StoreResult]:
        """Queue a store whose input was checked. Never waits. Raises ClosedError."""
        ended: CompletionSource[StoreResult] = CompletionSource()
        if not len(store.source):
            ended.finish(StoreResult(0, 0))
            return ended.completion
        if self._closed:
            raise ClosedError("the pool is closed: connect again")
        try:
            self._operations.enter()
        except CapacityError:
            why = f"{self._config.stores_max} stores are under way: wait for one to end"
            ended.finish(StoreResult(0, 0, why))
            return ended.completion
        ended.bound(store.deadline.remaining_s())
        return self._operations.run(ended, lambda: self._place(store, ended))

    def close(self) -> None:
        """Have the stores under way end, as soon as their links are closed."""
        self._closed = True

    def join(self) -> None:
        """Wait until all have ended."""
        self._operations.close(_END_TIMEOUT_S)

    def durable(self) -> bool:
        """Say whether some server can keep blocks for sure."""
        return any(self._is_durable(node) for node in self._nodes.usable())

    def _is_durable(self, node: Node) -> bool:
        try:
            return node.pool.durable()
        except UnavailableError:
            return False

    def _homes(self, store: Placed) -> list[Node]:
        """Return where a store goes, best first."""
        usable = [
            node
            for node in self._nodes.usable()
            if store.durability != "ssd" or self._is_durable(node)
        ]
        if len(usable) < 2:
            return usable  # nobody need be asked who holds the chain
        near = [node for node in usable if node.pool.is_near()][:1]
        ringed = self._nodes.owners(store.chain[len(store.chain) - 1])
        held = [] if near else self._holders(store.chain)
        order = {node.node: node for node in [*near, *held, *ringed, *usable] if node in usable}
        return list(order.values())

    def _holders(self, chain: Chain) -> list[Node]:
        patience = Patience(self._config.read_timeout_s)
        pieces = tuple(self._nodes.lookup(chain.hashes, patience))
        found = cheapest(self._nodes, pieces, 0, len(chain), set())
        return [found[0]] if found is not None and found[1] >= _HOME_SHARE * len(chain) else []

    def _place(self, store: Placed, ended: CompletionSource[StoreResult]) -> StoreResult:
        """Store on as many servers as replicas are wanted, on others where one fails."""
        homes, results = self._homes(store), list[StoreResult]()
        failed: KVPoolError | None = None
        while homes and len(results) < store.replicas:
            batch = [homes.pop(0) for _ in range(min(len(homes), store.replicas - len(results)))]
            if len(batch) == 1:
                ends = [self._send_here(store, batch[0], ended)]
            else:
                ends = ends_of([self._send(store, node) for node in batch], ended)
            for end in ends:
                if isinstance(end, StoreResult):
                    results.append(end)
                elif isinstance(end, UnavailableError | ClosedError):
                    failed = end
                else:
                    raise end
            if failed and (self._closed or ended.cancel_requested or store.deadline.passed()):
                homes = []
        if not results:
            if self._closed:
                raise ClosedError("the pool was closed") from failed
            raise failed or PeerUnreachableError("no server of the ring answers: recompute")
        best = max(results, key=lambda result: result.stored)
        refused = best.refused
        if len(results) < store.replicas:
            refused = f"{len(results)} of {store.replicas} replicas: no other server answers"
        elif not refused:
            refused = min(results, key=lambda result: result.stored).refused
        return StoreResult(best.stored, best.new, refused)

    def _send_here(
        self, store: Placed, node: Node, ended: CompletionSource[StoreResult]
    ) -> StoreResult | KVPoolError:
        """Store on one server in this thread; return what came of it."""
        try:
            return node.pool.store_here(
                store.chain,
                store.source,
                first=store.first,
                durability=store.durability,
                deadline=store.deadline,
                is_cancelled=lambda: ended.cancel_requested,
            )
        except KVPoolError as error:
            return error

    def _send(self, store: Placed, node: Node) -> Completion[StoreResult] | KVPoolError:
        try:
            return node.pool.store(
                store.chain,
                store.source,
                first=store.first,
                durability=store.durability,
                deadline_s=store.deadline.remaining_s(),
            )
        except KVPoolError as error:
            return error
