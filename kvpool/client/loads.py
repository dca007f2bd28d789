"""Leases and loads of a remote pool: bytes pulled out of the server's arena, mapped read-only here.

Owns the state of this client's leases, and what has to be told to the server when a load ends: a
block that did not verify, and a lease that waited for its last load. Who calls it: the remote pool.
"""

import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

from kvpool.base import Chain, Lease
from kvpool.block import BlockLayout
from kvpool.client import protocol
from kvpool.client.keeper import LinkKeeper
from kvpool.client.link import Link
from kvpool.client.streams import join
from kvpool.clock import Clock
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.errors import (
    CancelledTransferError,
    ClosedError,
    InternalError,
    KVPoolError,
    LeaseExpiredError,
    PeerUnreachableError,
    TransferTimeoutError,
    UnavailableError,
)
from kvpool.memory import BlockView
from kvpool.transfer.base import RemoteSlots
from kvpool.transfer.host_endpoint import HostEndpoint

logger = logging.getLogger(__name__)

# Loads at once through streams; more wait their turn.
_READERS: Final = 4


class RemoteLease(Lease):
    """A lease of a server's blocks. The lock of ``loads`` guards its state.

    Attributes:
        loads: Whose it is.
        link: The connection it was granted on; it ends with that.
        number: Its number at the server.
        source: The slots that hold the blocks.
        ends_at: When it runs out, by the pool's clock.
        running: Loads under way; it is released after the last one.
        closed: Closed by its owner.
    """

    def __init__(
        self,
        loads: "Loads",
        chain: Chain,
        link: Link,
        reply: protocol.LeaseReply,
        seconds: float,
        ends_at: float,
    ) -> None:
        self.loads = loads
        self.chain = chain
        self.blocks = len(reply.slots)
        self.seconds = seconds
        self.link = link
        self.number = reply.lease
        self.source = RemoteSlots(link.region, tuple(reply.slots), tuple(reply.generations))
        self.ends_at = ends_at
        self.running = 0
        self.closed = False

    def close(self) -> None:
        """Give the right back, in one bounded request. See ``Lease``."""
        self.loads.close_lease(self)

    def give_back(self, wait_s: float) -> None:
        """Close it for who waits for the server no longer than ``wait_s``; 0: not at all."""
        self.loads.close_lease(self, wait_s)

    def is_mapped(self) -> bool:
        """Say whether its bytes are copied here, out of the server's memory, whatever becomes of it."""
        return isinstance(self.link.endpoint, HostEndpoint)


class _Loading(Completion[int]):
    """The completion of a load; its bytes are moved by ``pull``."""

    pull: Completion[int] | None = None

    def wait(self, timeout_s: float) -> int:
        """Wait as any completion does; copies here where its pull can be helped."""
        deadline = Deadline(timeout_s)
        if self.pull is not None and not self.done():
            with suppress(KVPoolError):  # this completion says what it means
                self.pull.wait(timeout_s)
        return super().wait(deadline.remaining_s())

    def cancel(self) -> None:
        super().cancel()
        if self.pull is not None:
            self.pull.cancel()


class _Reading(Completion[int]):
    """The completion of a read through a stream: ``cancel`` ends the call, which may stand still."""

    _give_up: Callable[[], object] | None = None

    def began(self, give_up: Callable[[], object]) -> None:
        """Take what ends the call."""
        self._give_up = give_up
        if self._cancel_requested:
            give_up()

    def cancel(self) -> None:
        super().cancel()
        if self._give_up is not None:
            self._give_up()


@dataclass(slots=True, eq=False)
class _Load:
    lease: RemoteLease
    first: int
    count: int
    pull: Completion[int]
    source: CompletionSource[int]


class Loads:
    """Safe from any thread. ``_changed`` guards leases and ``_running``; nothing is called under it.

    What the server has to be told is told from one thread of its own, ``kvpool-tell``, because a
    load ends on a thread of the transport, which must not be kept.

    Args:
        layout: Of the blocks.
        keeper: Asks the server.
        clock: Of the leases.
        timeout_s: Longest wait for the server to take a report or a release.
    """

    def __init__(
        self, layout: BlockLayout, keeper: LinkKeeper, clock: Clock, timeout_s: float
    ) -> None:
        self._layout = layout
        self._keeper = keeper
        self._clock = clock
        self._timeout_s = timeout_s
        self._teller = ThreadPoolExecutor(1, "kvpool-tell")
        self._readers = ThreadPoolExecutor(_READERS, "kvpool-read")
        self._changed = threading.Condition()
        self._running: set[_Load] = set()
        self._closed = False

    def start(
        self, lease: RemoteLease, dest: BlockView, first: int, deadline_s: float
    ) -> Completion[int]:
        """Start a load whose blocks are within the lease.

        Raises:
            UsageError: ``dest`` does not fit.
            LeaseExpiredError: The lease is closed or over.
        """
        source: CompletionSource[int] = CompletionSource()
        loading = source.completion = _Loading()
        with self._changed:
            if self._closed:
                raise ClosedError("the pool is closed: connect again")
            if lease.closed or self._clock.now() >= lease.ends_at:
                raise LeaseExpiredError("the lease is closed or has run out: match and lease again")
            lease.running += 1
        try:
            pull = self._pull(lease, dest, first, deadline_s)
        except BaseException as error:
            self._end_use(lease)
            if not isinstance(error, UnavailableError):
                raise
            source.fail(error)
            return loading
        loading.pull = pull
        load = _Load(lease, first, len(dest), pull, source)
        with self._changed:
            self._running.add(load)
        pull.add_done_callback(lambda: self._ended(load))
        return loading

    def close_lease(self, lease: RemoteLease, wait_s: float | None = None) -> None:
        """Release a lease now, or after its last load. Idempotent, never raises.

        ``wait_s`` is the longest wait for the server to take it. 0: a thread here waits.
        """
        with self._changed:
            already, lease.closed = lease.closed, True
            over = not already and not lease.running
        if over and wait_s == 0.0:
            self._tell(lambda: self._release(lease))
        elif over:
            self._release(lease, wait_s)

    def close(self) -> None:
        """Have the loads under way end with ClosedError, as soon as their link is closed.

        What this client had leased ends with the connection of its transport. A client of streams
        has none, and says goodbye.
        """
        with self._changed:
            self._closed = True
        try:
            link = self._keeper.link()
            if link.endpoint is None:
                request = protocol.ReleaseRequest(client=link.client, lease=protocol.EVERY_LEASE)
                # Whether or not it answered lately: nobody asks again.
                link.caller.call(protocol.RELEASE, request, self._timeout_s)
        except KVPoolError as error:
            logger.debug("what was leased stays so until it runs out: %s", error)

    def join(self, timeout_s: float) -> None:
        """Wait until all have ended: at most one copy, once the link is closed."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, timeout_s):
                logger.error("%d loads have not ended in %s s", len(self._running), timeout_s)
        self._readers.shutdown(wait=True)
        self._teller.shutdown(wait=True)

    def _pull(
        self, lease: RemoteLease, dest: BlockView, first: int, deadline_s: float
    ) -> Completion[int]:
        span = slice(first, first + len(dest))
        source = lease.source
        if lease.link.endpoint is None:
            return self._pull_stream(lease, dest, first, deadline_s)
        try:
            return lease.link.endpoint.read_blocks(
                dest,
                RemoteSlots(source.region, source.slots[span], source.generations[span]),
                source_layout=self._layout,
                dest_layer=None,
                deadline_s=deadline_s,
            )
        except ClosedError as error:
            raise PeerUnreachableError(f"the server was lost, recompute: {error}") from error

    def _pull_stream(
        self, lease: RemoteLease, dest: BlockView, first: int, deadline_s: float
    ) -> Completion[int]:
        """Read through a stream, on a thread of the readers."""
        ended: CompletionSource[int] = CompletionSource()
        reading = ended.completion = _Reading()
        deadline = Deadline(deadline_s)
        request = protocol.ReadRequest(
            client=lease.link.client, lease=lease.number, first=first, count=len(dest)
        )

        def messages() -> Generator[protocol.Payload, None, None]:
            timeout_s = deadline.remaining_s()
            if not timeout_s:
                raise TransferTimeoutError("the deadline of the load passed before it began")
            stream = lease.link.caller.stream(
                protocol.READ, request, timeout_s, began=reading.began
            )
            with closing(stream):
                for message in stream:
                    if ended.cancel_requested:
                        raise CancelledTransferError("cancelled by the caller")
                    yield message

        def work() -> None:
            try:
                with closing(messages()) as coming:
                    ended.finish(join(coming, dest))
            except KVPoolError as error:
                if ended.cancel_requested:
                    ended.cancelled()
                ended.fail(error)
            except Exception as error:
                logger.exception("a read failed")
                ended.fail(InternalError(f"a read failed: {error!r}"))

        try:
            self._readers.submit(work)
        except RuntimeError as error:
            raise ClosedError("the pool is closed: connect again") from error
        return ended.completion

    def _ended(self, load: _Load) -> None:
        """End a load. On a thread of the transport, which must not be kept."""
        try:
            good = load.pull.result()
        except KVPoolError as error:
            self._finish(load, self._meaning(error))
            return
        if good < load.count and self._tell(lambda: self._report(load, good)):
            return
        self._finish(load, good)

    def _finish(self, load: _Load, end: int | KVPoolError) -> None:
        over = self._end_use(load.lease)
        if over:
            self._tell(lambda: self._release(load.lease))
        if isinstance(end, KVPoolError):
            load.source.fail(end)
        else:
            if end:
                load.source.advance(self._layout.num_layers)
            load.source.finish(end)
        with self._changed:
            self._running.discard(load)
            self._changed.notify_all()

    def _report(self, load: _Load, good: int) -> None:
        """Tell of a block that did not verify, before the load ends: no later match counts it."""
        lease = load.lease
        request = protocol.ReportRequest(
            client=lease.link.client, lease=lease.number, block=load.first + good
        )
        try:
            self._keeper.ask(protocol.REPORT, request, self._timeout_s, lease.link)
        except KVPoolError as error:
            logger.debug("a block that did not verify was not reported: %s", error)
        self._finish(load, good)

    def _end_use(self, lease: RemoteLease) -> bool:
        """End one use of a lease; say whether it is to be released now."""
        with self._changed:
            lease.running -= 1
            return lease.closed and not lease.running

    def _release(self, lease: RemoteLease, wait_s: float | None = None) -> None:
        if not lease.link.alive():
            return  # the server gave it back when the connection ended
        request = protocol.ReleaseRequest(client=lease.link.client, lease=lease.number)
        if lease.link.caller.tell(protocol.RELEASE, request):
            return
        timeout_s = self._timeout_s if wait_s is None else min(wait_s, self._timeout_s)
        try:
            self._keeper.ask(protocol.RELEASE, request, timeout_s, lease.link)
        except KVPoolError as error:
            logger.debug("a lease was not released, it will run out: %s", error)

    def _tell(self, call: Callable[[], None]) -> bool:
        """Run ``call`` on the teller's thread. False if that was shut down by ``close``."""
        try:
            self._teller.submit(call)
        except RuntimeError:
            return False
        return True

    def _meaning(self, error: KVPoolError) -> KVPoolError:
        """Say what the end of a pull means to the one who loads."""
        if not isinstance(error, ClosedError):
            return error
        if self._closed:
            return ClosedError("the pool was closed")
        return PeerUnreachableError(f"the server was lost, recompute: {error}")
