"""Calls that come over a client's connection, beside those of gRPC: the same methods, the same errors.

Owns the calls of each client that are under way, and their answers' way back. A client may call once
it was greeted, as the tenant that it was then. A short call that waits for nothing is answered on the
thread that brought it; the others, and those behind them, are made in the server's event loop. Who
calls it: ``sessions``, of what a connection says.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import msgspec
from google.protobuf.message import Message

from kvpool.client.call_wire import (
    ANSWER_BYTES_MAX,
    CALLS_MAX,
    UNANSWERED,
    Answer,
    Call,
    Cancel,
    cut,
)
from kvpool.client.rpc import Method, Reply, Request, decoder, encode
from kvpool.client.rpc_service import Streaming, Unary
from kvpool.errors import (
    CapacityError,
    CorruptionError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    UsageError,
)
from kvpool.server.sessions import Session
from kvpool.server.tenant import calling_tenant

logger = logging.getLogger(__name__)

# How often a connection that took part of an answer is tried again.
_RETRY_S: Final = 0.001
# Calls of one client under way and refusals on their way to it; beyond them it is told nothing.
_TASKS_MAX: Final = 2 * CALLS_MAX
# Messages of one connection that wait for the loop; a client has fewer calls under way.
_HANDED_MAX: Final = 4096

# Makes a call at once, or returns None: it has to wait for something. Safe from any thread.
Prompt = Callable[[Any], Any]


class Answering:
    """Answers unary methods over connections.

    Calls of one client are begun in their order. So one is answered on the connection's thread only
    while none of that client is with the loop: two thread wake-ups and a task less, half of the time
    that the server takes for it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._methods: dict[str, tuple[Callable[[bytes], Any], Any]] = {}
        self._prompts: dict[str, tuple[Callable[[bytes], Any], Prompt]] = {}
        # Of the loop: calls under way by number; unanswered ones by their task.
        self._tasks: dict[Session, dict[object, asyncio.Task[None]]] = {}
        self._stopping = False

    def add(self, method: Method[Request, Reply], handler: Unary | Streaming) -> None:
        """Answer a method. One that streams is left to gRPC."""
        if not method.streams and not method.takes:
            self._methods[method.path] = decoder(method.request), handler

    def add_prompt(self, method: Method[Request, Reply], prompt: Prompt) -> None:
        """Answer calls of a method, which was added, at once where ``prompt`` can."""
        self._prompts[method.path] = decoder(method.request), prompt

    def take(self, session: Session, notification: bytes) -> None:
        """Take what a client's connection said, on its thread. What is no call is left alone."""
        if not session.greeted or session.endpoint is None:
            logger.debug("a client that was not greeted may not call")
            return
        try:
            message = session.parts.take(notification)
        except CorruptionError as error:
            logger.debug("a client says what is no call: %s", error)
            return
        if not isinstance(message, Call | Cancel):
            return
        free = session.handed == session.ended
        if free and isinstance(message, Call) and self._answer_now(session, message):
            return
        if session.handed - session.ended < _HANDED_MAX:  # one that says more ends late
            self._hand(session, self._hear, message)

    def lose(self, session: Session) -> None:
        """End the calls of a client whose connection ended."""
        for task in list(self._tasks.pop(session, {}).values()):
            task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s``, then cancel them."""
        self._stopping = True
        tasks = [task for tasks in self._tasks.values() for task in tasks.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()

    # ---- on the connection's thread --------------------------------------------------------------

    def _hand(self, session: Session, call: Callable[..., object], *arguments: object) -> None:
        session.handed += 1
        with suppress(RuntimeError):  # the loop is closed: the server is at its end
            self._loop.call_soon_threadsafe(call, session, *arguments)

    def _answer_now(self, session: Session, call: Call) -> bool:
        """Make a call here and answer it. False: it is for the loop."""
        known = self._prompts.get(call.method)
        if known is None or self._stopping or not session.caller.is_anybody():
            return False
        decode, prompt = known
        try:
            reply = prompt(decode(call.request))
            if reply is None:
                return False
            answer = _answered(call, reply)
        except KVPoolError as error:
            answer = _failed(call, error)
        except Exception as error:
            logger.exception("handler failed")
            answer = _failed(call, InternalError(f"{type(error).__name__}: {error}"))
        if call.number == UNANSWERED:
            return True
        parts = cut(call.number, answer)
        try:
            while parts and session.endpoint is not None and session.endpoint.notify(parts[0]):
                del parts[0]
        except KVPoolError as error:
            logger.debug("an answer has nobody to go to: %s", error)
            return True
        if parts:  # no room for it now
            self._hand(session, self._send_later, parts, call.timeout_s)
        return True

    # ---- in the loop -----------------------------------------------------------------------------

    def _hear(self, session: Session, message: Call | Cancel) -> None:
        tasks = self._tasks.setdefault(session, {}) if session.greeted else {}
        if not session.greeted:  # its connection has ended meanwhile
            session.ended += 1
        elif isinstance(message, Call):
            self._begin(session, tasks, message)
        else:
            session.ended += 1
            if (task := tasks.get(message.number)) is not None:
                task.cancel()

    def _begin(self, session: Session, tasks: dict[object, asyncio.Task[None]], call: Call) -> None:
        refusal: KVPoolError | None = None
        if self._stopping:
            refusal = PeerUnreachableError("the server is shutting down")
        elif call.method not in self._methods:
            refusal = UsageError(f"no method {call.method}: use one version on both sides")
        elif len(tasks) >= CALLS_MAX or call.number in tasks:
            refusal = CapacityError(f"{len(tasks)} calls of this client are under way")
        if refusal is not None and (call.number == UNANSWERED or len(tasks) >= _TASKS_MAX):
            logger.debug("a call is not made: %s", refusal)
            session.ended += 1
            return
        key = call.number if call.number != UNANSWERED else object()
        if refusal is None:
            work = self._answer(session, call)
        else:
            parts = cut(call.number, _failed(call, refusal))
            key, work = object(), _send(session, parts, call.timeout_s)
        self._run(session, tasks, key, work)

    def _send_later(self, session: Session, parts: list[bytes], timeout_s: float) -> None:
        if not session.greeted:
            session.ended += 1
            return
        tasks = self._tasks.setdefault(session, {})
        self._run(session, tasks, object(), _send(session, parts, timeout_s))

    def _run(
        self,
        session: Session,
        tasks: dict[object, asyncio.Task[None]],
        key: object,
        work: Coroutine[Any, Any, None],
    ) -> None:
        task = tasks[key] = self._loop.create_task(work)

        def ended(_: "asyncio.Task[None]") -> None:
            tasks.pop(key, None)
            session.ended += 1

        task.add_done_callback(ended)

    async def _answer(self, session: Session, call: Call) -> None:
        """Make one call, as its client, and send its end back."""
        calling_tenant.set(session.caller)
        decode, handler = self._methods[call.method]
        give_up = self._loop.time() + call.timeout_s
        try:
            async with asyncio.timeout_at(give_up):
                answer = _answered(call, await handler(decode(call.request)))
        except TimeoutError:
            return  # nobody waits any more
        except KVPoolError as error:
            answer = _failed(call, error)
        except Exception as error:
            logger.exception("handler failed")
            answer = _failed(call, InternalError(f"{type(error).__name__}: {error}"))
        if call.number != UNANSWERED:
            await _send(session, cut(answer.number, answer), give_up - self._loop.time())


def _answered(call: Call, reply: msgspec.Struct | Message) -> Answer:
    """Return an answer. Raises CapacityError: it is more than a connection carries."""
    encoded = encode(reply)
    if len(encoded) > ANSWER_BYTES_MAX:
        raise CapacityError(
            f"an answer of {len(encoded)} bytes, and a connection carries {ANSWER_BYTES_MAX}: ask for "
            "less at once",
            size_bytes=len(encoded),
        )
    return Answer(call.number, "", encoded)


def _failed(call: Call, error: KVPoolError) -> Answer:
    return Answer(call.number, type(error).__name__, str(error).encode())


async def _send(session: Session, parts: list[bytes], timeout_s: float) -> None:
    """Send the parts of an answer, as far as its client takes them in time."""
    assert session.endpoint is not None
    give_up = asyncio.get_running_loop().time() + timeout_s
    try:
        for part in parts:
            while not session.endpoint.notify(part):
                if asyncio.get_running_loop().time() > give_up:
                    return
                await asyncio.sleep(_RETRY_S)
    except KVPoolError as error:
        logger.debug("an answer has nobody to go to: %s", error)
