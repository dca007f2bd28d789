"""Loads from several servers at once: another replica is read where one fails.

Owns what a load tries next, and how long. Blocks themselves move through the pools of single servers.
A load that is alone runs in the thread that waits for it, others on threads ``kvpool-load``. Who calls
it: the pool over many servers.
"""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvpool.block import BlockLayout
from kvpool.client.nodes import Nodes
from kvpool.client.parts import ClusterLease, Leaser, Part
from kvpool.client.patience import Patience
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.config import TransferConfig
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    InternalError,
    KVPoolError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import BlockView
from kvpool.operations import Operations

logger = logging.getLogger(__name__)

# A replica that gives less than this is slow: the next one is asked.
_SLOWEST_BYTES_S: Final = 64 << 20
# Longest that the end of a load is waited for behind its deadline: its pull has one of its own.
_END_TIMEOUT_S: Final = 10.0
# Loads under way and queued; one more is refused.
_LOADS_MAX: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """Blocks ``begin`` to ``end`` of a chain under way, or why they are not."""

    begin: int
    end: int
    part: Part
    pull: Completion[int] | KVPoolError


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


def given_up(pull: Completion[int] | KVPoolError) -> int:
    """Cancel a pull and wait until it writes no more; return how many leading blocks came.

    Raises:
        InternalError: It did not end: its destination is not free.
    """
    if isinstance(pull, KVPoolError):
        return 0
    pull.cancel()
    try:
        return pull.wait(_END_TIMEOUT_S)
    except KVPoolError as error:
        if not pull.done():
            raise InternalError("a pull did not end behind its deadline") from error
        return 0


def end_all(pulls: Iterable[Completion[int]]) -> None:
    """Cancel pulls, all of them first, and wait until none writes any more.

    Raises:
        InternalError: One did not end: its destination is not free.
    """
    under_way = [pull for pull in list(pulls) if not pull.done()]
    for pull in under_way:
        pull.cancel()
    give_up = Deadline(_END_TIMEOUT_S)
    for pull in under_way:
        try:
            pull.wait(give_up.remaining_s())
        except KVPoolError as error:
            if not pull.done():
                raise InternalError("a pull did not end behind its deadline") from error


class Gathering:
    """Loads of a pool over many servers. Safe from any thread; ``_lock`` guards the count.

    Args:
        nodes: The servers.
        leaser: For what one replica did not give.
        layout: Of the blocks.
        config: Threads and waits.
    """

    def __init__(
        self, nodes: Nodes, leaser: Leaser, layout: BlockLayout, config: TransferConfig
    ) -> None:
        self._nodes = nodes
        self._leaser = leaser
        self._layout = layout
        self._config = config
        self._lock = threading.Lock()
        self._retries = 0
        self._closed = False
        self._operations = Operations(config.completion_threads, _LOADS_MAX, name="kvpool-load")

    @property
    def retries(self) -> int:
        """How often another replica was read."""
        with self._lock:
            return self._retries

    def start(
        self, lease: ClusterLease, dest: BlockView, first: int, deadline_s: float
    ) -> Completion[int]:
        """Begin a load; its completion is as ``BlockPool.load`` says.

        Raises:
            CapacityError: Too many are under way.
            ClosedError: The pool was closed.
        """
        if self._closed:
            raise ClosedError("the pool is closed: connect again")
        running = _Running()
        source = CompletionSource(running)
        deadline = Deadline(deadline_s)
        self._operations.enter()
        # Now: the lease may be closed as soon as this returns.
        try:
            pulls = self._begin(lease, dest, first, deadline, running)
        except BaseException:
            try:
                end_all(running.pulls)
            finally:
                self._operations.leave()
            raise

        def work() -> int:
            good = self._load(pulls, lease, dest, first, deadline, running)
            if good:
                source.advance(self._layout.num_layers)
            return good

        source.bound(deadline_s)
        return self._operations.run(source, work)

    def close(self) -> None:
        """Have what is under way end with ClosedError, and begin nothing any more."""
        self._closed = True

    def join(self) -> None:
        """Wait for the end of all loads. After the servers were closed, which ends them."""
        self._operations.close(_END_TIMEOUT_S)

    def _begin(
        self,
        lease: ClusterLease,
        dest: BlockView,
        first: int,
        deadline: Deadline,
        running: _Running,
    ) -> list[_Begun]:
        """Start all parts at once."""
        begun: list[_Begun] = []
        for part in lease.parts:
            begin, end = max(part.begin, first), min(part.end, first + len(dest))
            if begin < end:
                view = dest.take(begin - first, end - first)
                pull = self._pull(part, view, begin, deadline, running)
                begun.append(_Begun(begin, end, part, pull))
        return begun

    def _load(
        self,
        pulls: list[_Begun],
        lease: ClusterLease,
        dest: BlockView,
        first: int,
        deadline: Deadline,
        running: _Running,
    ) -> int:
        """Load all parts; whatever comes of it, nothing writes into ``dest`` behind the end."""
        try:
            return self._load_parts(pulls, lease, dest, first, deadline, running)
        finally:
            end_all(running.pulls)

    def _load_parts(
        self,
        pulls: list[_Begun],
        lease: ClusterLease,
        dest: BlockView,
        first: int,
        deadline: Deadline,
        running: _Running,
    ) -> int:
        """End all parts in order; return the leading blocks that came."""
        stop = first + len(dest)
        at = first
        for one in pulls:
            if at != one.begin:
                given_up(one.pull)
                continue
            at += self._end(one.pull, one.part, lease.patience, deadline)
            if at < one.end and not self._over(deadline, running):
                at = self._retry(lease, dest, first, (at, one.end), one.part, deadline, running)
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
            self._config.read_timeout_s + len(view) * self._layout.block_bytes / _SLOWEST_BYTES_S
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

    def _end(
        self,
        pull: Completion[int] | KVPoolError,
        part: Part,
        patience: Patience,
        deadline: Deadline,
    ) -> int:
        """Wait until nothing writes any more; return how many leading blocks came.

        A holder that gives no sign of life meanwhile is given up, as ``patience`` says; but for one
        whose memory is mapped here, which nobody has to be alive for.
        """
        if isinstance(pull, KVPoolError):
            return 0
        silent_s, alive = patience.share_s(), part.lease.is_mapped()
        while True:
            began = time.monotonic()
            wait_s = deadline.remaining_s() if alive else silent_s / 2
            try:
                return pull.wait(min(wait_s, deadline.remaining_s()))
            except KVPoolError as error:
                if pull.done():
                    logger.debug("a replica failed: %s", error)
                    patience.spend(time.monotonic() - began, silent_s)
                    return 0
            if deadline.passed():
                return given_up(pull)
            if not part.node.pool.is_alive(silent_s / 2):
                patience.spend(time.monotonic() - began, silent_s)
                return given_up(pull)

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
            try:
                part = self._leaser.lease(lease, at, end, tried)
            except (CapacityError, UsageError) as error:
                logger.debug("no other replica may be read: %s", error)
                break
            if part is None:
                break
            with self._lock:
                self._retries += 1
            try:
                view = dest.take(at - first, part.end - first)
                pull = self._pull(part, view, at, deadline, running)
                at += self._end(pull, part, lease.patience, deadline)
            finally:
                part.lease.give_back(0.0)
            tried.add(part.node.node)
        return at
