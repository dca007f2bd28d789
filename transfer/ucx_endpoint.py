"""One endpoint over UCX: notifications, reads and writes, made of notes and puts.

Owns what the two sides say to each other on one connection, and its end. Reads are the engine's
(``ucx_reads``). Who calls it: ``transfer/ucx.py``, on whose engine's thread everything here runs that
is not an operation of a caller.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.completion import Completion, Deadline
from kvpool.errors import (
    ClosedError,
    CorruptionError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.transfer.calls import weakly
from kvpool.transfer.endpoint import CLOSE_TIMEOUT_S, require_notification
from kvpool.transfer.registered import Registered
from kvpool.transfer.remote_endpoint import BYE_TIMEOUT_S, RemoteEndpoint
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_engine import UcxEngine
from kvpool.transfer.ucx_reads import Job, Reads, block_job, span_job
from kvpool.transfer.ucx_wire import (
    PROTOCOL_VERSION,
    PUT_TIMEOUT_S,
    Bye,
    Message,
    Offer,
    Welcome,
    decode,
    encode,
    frame,
)

logger = logging.getLogger(__name__)

# A peer that has connected says within this time what it has.
WELCOME_TIMEOUT_S: Final = 5.0
# Messages that may wait for a peer to read: what it is told unasked, and its answers.
BACKLOG_MAX: Final = 4096
# When a message that found no room is tried again.
_RETRY_S: Final = 0.001


class UcxEndpoint(RemoteEndpoint[Job]):
    """See ``Endpoint``. Made on the engine's thread when a connection opens.

    Args:
        connection: Open. The endpoint takes its notes and its end over.
        engine: Of the connection.
        ours: What the transport has registered.
        on_welcome: Called once, when the peer has told of its regions.
        on_drained: Called once at the end, when nobody writes into the inbox part any more.
    """

    def __init__(
        self,
        connection: UcxConnection,
        engine: UcxEngine,
        ours: Registered,
        *,
        on_welcome: Callable[["UcxEndpoint"], None],
        on_drained: Callable[["UcxEndpoint"], None],
    ) -> None:
        super().__init__(connection.peer, ours, span_job, block_job)
        assert connection.inbox is not None
        self.connection = connection
        self._engine = engine
        self._on_welcome = on_welcome
        self._on_drained = on_drained
        self._welcomed = False
        self._backlog: deque[bytes] = deque()  # under the send lock
        self._reads = Reads(engine, connection.id, self.lose)

    def start(self, ours: Sequence[Offer]) -> None:
        """Tell the peer what there is, and listen to it. On the engine's thread, once."""
        self.connection.on_notification(self._take)
        self.connection.on_lost(self._gone)
        self.tell_regions(ours)
        self._say(Welcome(PROTOCOL_VERSION))
        self._engine.call_later(WELCOME_TIMEOUT_S, weakly(self._require_welcome))

    def tell_regions(self, ours: Sequence[Offer]) -> None:
        """Tell the peer of regions that it has not been told of."""
        with self._send_lock:
            for offer in ours[self._told :]:
                self._queue(encode(offer))
            self._told = max(self._told, len(ours))

    def wait_welcome(self, timeout_s: float) -> None:
        """Wait until the peer has told of its regions.

        Raises:
            TransferTimeoutError: It has not.
            KVPoolError: What ended the endpoint first.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._welcomed or self._lost is not None, timeout_s
            ):
                raise TransferTimeoutError(f"no welcome within {timeout_s} s")
            if not self._welcomed:
                self._require_alive()

    # ---- the contract ----------------------------------------------------------------------------

    def notify(self, payload: bytes) -> bool:
        """Send a notification behind what was sent before."""
        require_notification(payload)
        with self._changed:
            self._require_alive()
        with self._send_lock:
            if self._backlog or self._full():
                return False
            if not self.connection.notify(frame(payload), PUT_TIMEOUT_S):
                return False
            self._sent += 1
            return True

    def after_fork(self) -> None:
        """Be ended in a child; see ``forked``. Its locks and its reads are the parent's."""
        super().after_fork()
        self._backlog.clear()
        self._reads.after_fork()

    def post(self, call: Callable[[], None]) -> bool:
        """Run ``call`` on the engine's thread."""
        return self._engine.post(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Run ``call`` on the engine's thread, later."""
        self._engine.call_later(seconds, call)

    def close(self) -> None:
        """End the connection: last words first, then nobody writes here any more."""
        self.lose(ClosedError("the endpoint was closed"))
        if self._engine.on_thread():
            return  # it is what the end waits for
        self.wait_drained(CLOSE_TIMEOUT_S)

    def wait_drained(self, timeout_s: float) -> None:
        """Wait until an endpoint that was ended is drained. Not on the engine's thread."""
        deadline = Deadline(timeout_s)
        reads = self._reads.drain(timeout_s)
        if not (reads and self._drained.wait(deadline.remaining_s())):
            logger.error("a closed endpoint has not ended in %s s", timeout_s)

    def windows(self) -> tuple[int, int]:
        """Return the windows of the inbox that are free, and those that the peer still owes."""
        return self._reads.counts()

    # ---- sending ---------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        """Send a message now, or as soon as there is room. Lost with the peer."""
        with self._send_lock:
            self._queue(encode(message))
            waiting = len(self._backlog)
        if waiting > BACKLOG_MAX:
            self._break("it does not read what it asked for")

    def _queue(self, note: bytes) -> None:
        """Send a note behind those that wait. With the lock held."""
        waits = bool(self._backlog)
        self._backlog.append(note)
        if not waits and not self._send_backlog():
            self._engine.call_later(_RETRY_S, self._flush)

    def _send_backlog(self) -> bool:
        """Send what waits. False if something still does. With the lock held."""
        try:
            while self._backlog:
                if not self.connection.notify(self._backlog[0], PUT_TIMEOUT_S):
                    return False
                self._backlog.popleft()
        except (PeerUnreachableError, ClosedError):
            self._backlog.clear()  # on_lost tells of it
        return True

    def _flush(self) -> None:
        with self._send_lock:
            if not self._send_backlog():
                self._engine.call_later(_RETRY_S, self._flush)

    # ---- what the peer says, on the engine's thread ----------------------------------------------

    def _take(self, note: bytes) -> None:
        if self._lost is not None:
            return
        try:
            message = decode(note)
            if isinstance(message, Welcome):
                self._greeted()
            elif isinstance(message, bytes):
                if not self._welcomed:
                    raise CorruptionError("the peer sent a notification before its welcome")
                self._notified(message)
            else:
                self._told_of(message)
        except KVPoolError as error:
            self._break(str(error))

    def _greeted(self) -> None:
        with self._changed:
            if self._welcomed:
                raise CorruptionError("the peer said welcome twice")
            self._welcomed = True
            self._changed.notify_all()
        self._on_welcome(self)

    def _require_welcome(self) -> None:
        if not self._welcomed:
            self._break(f"no welcome within {WELCOME_TIMEOUT_S} s")

    # ---- the end ---------------------------------------------------------------------------------

    def _submit(self, job: Job, deadline_s: float) -> Completion[int]:
        try:
            return self._reads.submit(job, deadline_s)
        except ClosedError:
            # The engine knows of an end that this endpoint is yet to be told of.
            raise self.connection.gone() from None

    def _end_reads(self, error: KVPoolError) -> None:
        self._reads.end(error)

    def _release(self) -> None:
        if isinstance(self._lost, ClosedError) and self.connection.alive():
            self._say(Bye())
            self._engine.call_later(BYE_TIMEOUT_S, weakly(self.connection.close))
        else:
            self.connection.close()

    def _gone(self, connection: UcxConnection) -> None:
        """End with the connection, which is drained: nobody writes into the inbox any more."""
        self.lose(connection.gone())
        # Its inbox part goes to another connection when this returns.
        if not self._reads.drain(CLOSE_TIMEOUT_S):
            logger.error("copies of a lost endpoint have not ended in %s s", CLOSE_TIMEOUT_S)
        self._on_drained(self)
        self._drained.set()
