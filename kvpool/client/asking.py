"""Calls over the connection that bytes take: a third of the time of a call of gRPC, or less.

Owns the calls of one connection that wait for an answer, and which way a call takes: long ones, streams
and those before the connection go through gRPC. The server answers both alike. Who calls it: links.
"""

import itertools
import logging
import math
import threading
import time
from typing import Final

from kvpool import errors
from kvpool.client import protocol
from kvpool.client.call_wire import (
    ANSWER_BYTES_MAX,
    CALL_BYTES_MAX,
    CALLS_MAX,
    TIMEOUT_MAX_S,
    UNANSWERED,
    Answer,
    Call,
    Cancel,
    Message,
    Parts,
    cut,
)
from kvpool.client.rpc import Asked, Caller, Method, Reply, Request, decoder, encode
from kvpool.completion import Deadline
from kvpool.errors import (
    CorruptionError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.transfer.base import Endpoint

logger = logging.getLogger(__name__)

# How often a connection that took part of a message is tried again.
_RETRY_S: Final = 0.0005
# Longest wait for a thread that has an end of a call in its hands.
_ENDING_S: Final = 10.0
# What the server may take for a call that nobody waits for.
_TELL_TIMEOUT_S: Final = 60.0
_NUMBERS: Final = 2**32


class _Waiting:
    """The end of one call, for whoever waits for it. Safe from any thread.

    ``_going`` is held until the end: who can take it need not wait any more. An Event does the same
    with three locks, which costs both threads 20 us where nothing is in their caches.
    """

    def __init__(self, number: int, deadline: Deadline) -> None:
        self.number = number
        self.deadline = deadline
        self._going = threading.Lock()
        self._going.acquire()
        self._reply = b""
        self._error: KVPoolError | None = None

    def end(self, reply: bytes, error: KVPoolError | None) -> None:
        """End it. Once: whoever took it out of the table does."""
        self._reply, self._error = reply, error
        self._going.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, at most so long and until the deadline; say whether it came."""
        wait_s = max(0.0, min(timeout_s, self.deadline.remaining_s()))
        if not self._going.acquire(timeout=wait_s):
            return False
        self._going.release()
        return True

    def reply(self) -> bytes:
        """Return what was answered, or raise. It has ended, or somebody is about to end it."""
        if not self._going.acquire(timeout=_ENDING_S):
            raise InternalError("a call that was taken out of the table does not end")
        self._going.release()
        if self._error is not None:
            raise self._error
        return self._reply


class _NearAsked(Asked[Reply]):
    """One call under way on the connection. Safe from any thread."""

    def __init__(self, near: "Near", waiting: _Waiting, kind: type[Reply]) -> None:
        super().__init__(None, decoder(kind))
        self._near = near
        self._waiting = waiting

    def reply(self) -> Reply:
        """Wait for its end, which its deadline bounds. Raises as ``Caller.call``."""
        if not self._waiting.wait(self._waiting.deadline.remaining_s()):
            self._near.give_up(
                self._waiting, TransferTimeoutError("no answer within the deadline of the call")
            )
        return self._decode(self._waiting.reply())

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most so long; say whether it ended: its deadline is an end."""
        return self._waiting.wait(timeout_s) or self._waiting.deadline.passed()

    def cancel(self) -> None:
        """Give the call up."""
        self._near.give_up(self._waiting, PeerUnreachableError("the call was given up"))


class Near:
    """The calls of one connection. Safe from any thread; ``_lock`` guards the table and ``_lost``.

    Args:
        endpoint: The connection; its notifications are taken over.
        bytes_max: Largest request that the server takes here.
    """

    def __init__(self, endpoint: Endpoint, bytes_max: int) -> None:
        self._endpoint = endpoint
        self._bytes_max = min(bytes_max, CALL_BYTES_MAX)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._lost: KVPoolError | None = None
        self._numbers = itertools.count(1)
        self._parts = Parts(ANSWER_BYTES_MAX)  # of the connection's thread
        endpoint.on_notification(self._take)
        endpoint.on_lost(
            lambda _: self.end(PeerUnreachableError("the connection ended: connect again"))
        )

    def ask(
        self,
        method: Method[Request, Reply],
        request: bytes,
        timeout_s: float,
        begin_s: float = math.inf,
    ) -> Asked[Reply] | None:
        """Begin a call; None if it does not fit, or too many are under way.

        Raises:
            PeerUnreachableError, ClosedError: The connection ended.
            TransferTimeoutError: It took no more within ``begin_s``.
        """
        if len(request) > self._bytes_max or not timeout_s > 0:
            return None
        with self._lock:
            if self._lost is not None:
                raise type(self._lost)(str(self._lost))
            if len(self._waiting) >= CALLS_MAX // 2:  # the server counts what was given up, too
                return None
            number = self._number()
            waiting = self._waiting[number] = _Waiting(number, Deadline(timeout_s))
        try:
            call = Call(number, method.path, min(timeout_s, TIMEOUT_MAX_S), request)
            sent = self._send(number, call, Deadline(min(timeout_s, begin_s)))
        except BaseException:
            self._forget(number)
            raise
        if not sent:
            self._forget(number)
            return None
        return _NearAsked(self, waiting, method.reply)

    def tell(self, method: Method[Request, Reply], request: bytes) -> bool:
        """Send a call whose end nobody waits for; False if it does not fit.

        The server begins it before every call that comes here later. Raises as ``ask``.
        """
        if len(request) > self._bytes_max:
            return False
        call = Call(UNANSWERED, method.path, _TELL_TIMEOUT_S, request)
        return self._send(self._number(), call, Deadline(_TELL_TIMEOUT_S))

    def give_up(self, waiting: _Waiting, error: KVPoolError) -> None:
        """End a call here, and tell the server that nobody waits for it."""
        if self._forget(waiting.number) is None:
            return  # it has ended, or ends now
        waiting.end(b"", error)
        try:
            self._send(self._number(), Cancel(waiting.number), Deadline(0.0))
        except KVPoolError as gone:
            logger.debug("a call ends with its connection: %s", gone)

    def end(self, error: KVPoolError) -> None:
        """End every call with an error like ``error``, and take none any more. Idempotent."""
        with self._lock:
            if self._lost is None:
                self._lost = error
            waiting, self._waiting = list(self._waiting.values()), {}
        for each in waiting:
            each.end(b"", type(error)(str(error)))

    def _number(self) -> int:
        return next(self._numbers) % (_NUMBERS - 1) + 1

    def _forget(self, number: int) -> _Waiting | None:
        with self._lock:
            return self._waiting.pop(number, None)

    def _send(self, number: int, message: Message, deadline: Deadline) -> bool:
        """Send a message; False, and nothing is sent, if there is no room for its first part."""
        for index, part in enumerate(cut(number, message)):
            while not self._endpoint.notify(part):
                if not index:
                    return False
                if deadline.passed():
                    raise TransferTimeoutError("the server takes no more of a call")
                time.sleep(_RETRY_S)
        return True

    def _take(self, notification: bytes) -> None:
        """Take what the server says. On the connection's thread."""
        try:
            message = self._parts.take(notification)
        except CorruptionError as error:
            logger.warning("the server says what is no answer: %s", error)
            return
        if not isinstance(message, Answer) or (waiting := self._forget(message.number)) is None:
            return  # the rest of one is to come, or nobody waits for it any more
        waiting.end(message.reply, _error_of(message))


def _error_of(answer: Answer) -> KVPoolError | None:
    """Return the error that the server raised."""
    if not answer.error:
        return None
    text = answer.reply.decode("utf-8", "replace")
    kind = getattr(errors, answer.error, None)
    if isinstance(kind, type) and issubclass(kind, KVPoolError):
        return kind(text)
    return InternalError(f"call failed with {answer.error}: {text}")


class LinkCaller(Caller):
    """Calls to the server of a link: over its connection, once there is one, where they fit.

    Calls that go over the connection are begun by the server in their order.
    """

    _near: Near | None = None
    _told = False  # something was told whose end nobody has seen

    def use(self, endpoint: Endpoint, bytes_max: int) -> None:
        """Have calls of up to ``bytes_max`` bytes go over a connection from now on; 0: none."""
        if bytes_max:
            self._near = Near(endpoint, bytes_max)

    def ask(
        self,
        method: Method[Request, Reply],
        request: Request,
        timeout_s: float,
        begin_s: float = math.inf,
    ) -> Asked[Reply]:
        """Begin a unary call. See ``Caller``.

        ``begin_s`` is the longest wait until the server has taken it, where it has to take something
        first. Raises TransferTimeoutError behind that.
        """
        near = self._near
        if near is None:
            return super().ask(method, request, timeout_s)
        deadline, begin_s = Deadline(timeout_s), min(timeout_s, begin_s)
        asked = near.ask(method, encode(request), timeout_s, begin_s)
        if asked is None:
            self._settle(near, begin_s)
            return super().ask(method, request, deadline.remaining_s())
        return asked

    def tell(self, method: Method[Request, Reply], request: Request) -> bool:
        """Have a call made whose end nobody waits for. False: ask it, it does not go that way.

        Every later call of this link is begun after it.
        """
        near = self._near
        try:
            told = near is not None and near.tell(method, encode(request))
        except KVPoolError as error:
            logger.debug("the server is gone, and what it held for this client: %s", error)
            return True
        self._told = self._told or told
        return told

    def close(self) -> None:
        """Close the channel: calls under way end with PeerUnreachableError. Idempotent."""
        if self._near is not None:
            self._near.end(PeerUnreachableError("the connection was closed: connect again"))
        super().close()

    def _settle(self, near: Near, wait_s: float) -> None:
        """Wait until what was told has been begun: what comes next takes another way."""
        if not self._told:
            return
        self._told = False
        deadline = Deadline(wait_s)
        asked = near.ask(protocol.MATCH, encode(protocol.MatchRequest()), wait_s, wait_s)
        if asked is not None:
            asked.wait(deadline.remaining_s())
            if deadline.passed():
                asked.cancel()
                raise TransferTimeoutError("the server takes nothing: it is silent")
