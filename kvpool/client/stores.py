"""Stores of a remote pool: batch after batch through the staging, on threads of their own.

Owns the threads, the queue of stores and the course of each. Blocks that one batch stored are leased until the
last batch has ended, so that a long store does not push out its own beginning. Who calls it: the
remote pool.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvpool.base import Chain, StoreResult
from kvpool.block import HASH_BYTES
from kvpool.client import protocol
from kvpool.client.keeper import LinkKeeper
from kvpool.client.link import Link
from kvpool.client.staging import Batch
from kvpool.client.streams import BATCH_BYTES, send_stream
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.config import TransferConfig
from kvpool.errors import (
    CancelledTransferError,
    ClosedError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.memory import BlockView

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Store:
    """One store under way; its blocks ``stored`` on are still to be sent."""

    link: Link
    chain: Chain
    source: BlockView
    first: int
    deadline: Deadline
    durable: bool
    stored: int = 0
    new: int = 0
    refused: str = ""
    holds: list[int] = field(default_factory=list)


class Stores:
    """Safe from any thread. ``_lock`` guards the count; nothing is called under it.

    Args:
        keeper: Gives the link; it is given up when the server falls silent.
        config: ``completion_threads`` threads run stores; ``stores_max`` may be under way or queued.
    """

    def __init__(self, keeper: LinkKeeper, config: TransferConfig) -> None:
        self._keeper = keeper
        self._threads = ThreadPoolExecutor(config.completion_threads, "kvpool-store")
        self._stores_max = config.stores_max
        self._timeout_s = config.match_timeout_s
        self._silent_s = config.request_timeout_s
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False

    def submit(
        self,
        chain: Chain,
        source: BlockView,
        first: int,
        deadline: Deadline,
        *,
        durable: bool = False,
    ) -> Completion[StoreResult]:
        """Queue a store whose input was checked. Never waits.

        Raises:
            ClosedError: The pool was closed.
        """
        ended: CompletionSource[StoreResult] = CompletionSource()
        if not len(source):
            ended.finish(StoreResult(0, 0))
            return ended.completion
        with self._lock:
            if self._count >= self._stores_max:
                why = f"{self._stores_max} stores are under way: wait for one to end"
                ended.finish(StoreResult(0, 0, why))
                return ended.completion
            self._count += 1
        try:
            self._threads.submit(self._run, ended, chain, source, first, deadline, durable)
        except RuntimeError as error:  # the threads were shut down
            raise ClosedError("the pool was closed: connect again") from error
        return ended.completion

    def close(self) -> None:
        """Have the stores under way end with ClosedError, as soon as their link is closed."""
        self._closed = True
        self._threads.shutdown(wait=False)

    def join(self) -> None:
        """Wait until all have ended: at most one copy of a batch, once the link is closed."""
        self._threads.shutdown(wait=True)

    def _run(
        self,
        ended: CompletionSource[StoreResult],
        chain: Chain,
        source: BlockView,
        first: int,
        deadline: Deadline,
        durable: bool,
    ) -> None:
        error: KVPoolError | None = None
        result = StoreResult(0, 0)
        try:
            result = self.run(
                chain, source, first, deadline, lambda: ended.cancel_requested, durable=durable
            )
        except KVPoolError as caught:
            error = caught
        except Exception as caught:
            logger.exception("a store failed")
            error = InternalError(f"a store failed: {caught!r}")
        with self._lock:
            self._count -= 1
        if error is not None:
            ended.fail(error)
        else:
            ended.finish(result)

    def run(
        self,
        chain: Chain,
        source: BlockView,
        first: int,
        deadline: Deadline,
        is_cancelled: Callable[[], bool],
        *,
        durable: bool,
    ) -> StoreResult:
        """Store in the caller's thread what was checked; return when nothing reads it any more.

        Raises:
            KVPoolError: What the store ends with.
        """
        try:
            store = _Store(self._keeper.link(), chain, source, first, deadline, durable)
            try:
                while store.stored < len(source) and not store.refused:
                    self._require_going(is_cancelled, deadline)
                    self._send_batch(store)
            finally:
                for lease in store.holds:
                    self._let_go(store.link, lease)
        except KVPoolError as error:
            meant = self._meaning(error)
            if meant is error:
                raise
            raise meant from error
        return StoreResult(store.stored, store.new, store.refused)

    def _let_go(self, link: Link, lease: int) -> None:
        request = protocol.ReleaseRequest(client=link.client, lease=lease)
        if link.caller.tell(protocol.RELEASE, request):
            return
        try:
            self._keeper.ask(protocol.RELEASE, request, self._timeout_s, link)
        except KVPoolError as error:
            logger.debug("blocks of a store stay held until their lease runs out: %s", error)

    def _require_going(self, is_cancelled: Callable[[], bool], deadline: Deadline) -> None:
        if self._closed:
            raise ClosedError("the pool was closed")
        if is_cancelled():
            raise CancelledTransferError("cancelled by the caller")
        if deadline.passed():
            raise TransferTimeoutError("the deadline of the store passed")

    def _send_batch(self, store: _Store) -> None:
        begin, link = store.stored, store.link
        most = max(1, BATCH_BYTES // store.source.layout.block_bytes)
        if link.staging is not None:
            most = link.staging.slot_count
        end = min(begin + most, len(store.source))
        at = store.first + begin
        batch = Batch(
            hashes=store.chain.hashes[at * HASH_BYTES : (store.first + end) * HASH_BYTES],
            ancestors=store.chain.hashes[: at * HASH_BYTES],
            source=store.source.take(begin, end),
            hold_s=store.deadline.remaining_s() if end < len(store.source) else 0.0,
            durable=store.durable,
        )
        try:
            if link.staging is not None:
                reply = link.staging.send(link, batch, store.deadline, self._silent_s)
            else:
                reply = send_stream(link, batch, store.deadline, self._silent_s)
        except (PeerUnreachableError, ClosedError) as error:
            self._keeper.lose(store.link)
            if isinstance(error, PeerUnreachableError) and store.deadline.passed():
                raise TransferTimeoutError(f"the deadline of the store passed: {error}") from error
            raise
        if reply.lease:
            store.holds.append(reply.lease)
        store.stored += reply.stored
        store.new += reply.new
        store.refused = reply.refused
        if reply.stored < end - begin and not reply.refused:
            store.refused = "the server stopped short"

    def _meaning(self, error: KVPoolError) -> KVPoolError:
        """Say what an error of the way to the server means to the one who stores."""
        if self._closed:
            meant: KVPoolError = ClosedError("the pool was closed")
        elif isinstance(error, ClosedError | PeerUnreachableError):
            meant = PeerUnreachableError(
                f"the server was lost, nothing is sure to be kept: {error}"
            )
        else:
            return error
        return meant
