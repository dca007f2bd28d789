"""Calls that come over a client's connection, beside those of gRPC: the same methods, the same errors.

Owns the calls of each client that are under way, and their answers' way back. A client may call once
it was greeted, as the tenant that it was then. Everything here runs in the server's event loop. Who
calls it: ``sessions``, of what a connection says.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvpool.client.call_wire import (
    CALLS_MAX,
    UNANSWERED,
    Answer,
    Call,
    Cancel,
    Parts,
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


@dataclass(slots=True, eq=False)
class _Calls:
    """What one client has said, and its calls under way, by number; unanswered ones by their task."""

    parts: Parts = field(default_factory=Parts)
    tasks: dict[object, asyncio.Task[None]] = field(default_factory=dict)


class Answering:
    """Answers unary methods over connections."""

    def __init__(self) -> None:
        self._methods: dict[str, tuple[Callable[[bytes], Any], Any]] = {}
        self._calls: dict[Session, _Calls] = {}
        self._stopping = False

    def add(self, method: Method[Request, Reply], handler: Unary | Streaming) -> None:
        """Answer a method. One that streams is left to gRPC."""
        if not method.streams and not method.takes:
            self._methods[method.path] = decoder(method.request), handler

    def take(self, session: Session, notification: bytes) -> None:
        """Take what a client's connection said. What is no call is left alone, as is a stranger."""
        if not session.greeted or session.endpoint is None:
            logger.debug("a client that was not greeted may not call")
            return
        calls = self._calls.setdefault(session, _Calls())
        try:
            message = calls.parts.take(notification)
        except CorruptionError as error:
            logger.debug("a client says what is no call: %s", error)
            return
        if isinstance(message, Call):
            self._begin(session, calls, message)
        elif isinstance(message, Cancel) and (task := calls.tasks.get(message.number)) is not None:
            task.cancel()

    def lose(self, session: Session) -> None:
        """End the calls of a client whose connection ended."""
        calls = self._calls.pop(session, None)
        for task in list(calls.tasks.values()) if calls is not None else ():
            task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s``, then cancel them."""
        self._stopping = True
        tasks = [task for calls in self._calls.values() for task in calls.tasks.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()

    def _begin(self, session: Session, calls: _Calls, call: Call) -> None:
        refusal: KVPoolError | None = None
        if self._stopping:
            refusal = PeerUnreachableError("the server is shutting down")
        elif call.method not in self._methods:
            refusal = UsageError(f"no method {call.method}: use one version on both sides")
        elif len(calls.tasks) >= CALLS_MAX or call.number in calls.tasks:
            refusal = CapacityError(f"{len(calls.tasks)} calls of this client are under way")
        if refusal is not None and (call.number == UNANSWERED or len(calls.tasks) >= _TASKS_MAX):
            logger.debug("a call is not made: %s", refusal)
            return
        key = call.number if call.number != UNANSWERED else object()
        if refusal is None:
            work = self._answer(session, call)
        else:
            key, work = object(), _send(session, _failed(call, refusal), call.timeout_s)
        task = asyncio.get_running_loop().create_task(work)
        calls.tasks[key] = task
        task.add_done_callback(lambda _: calls.tasks.pop(key, None))

    async def _answer(self, session: Session, call: Call) -> None:
        """Make one call, as its client, and send its end back."""
        calling_tenant.set(session.caller)
        decode, handler = self._methods[call.method]
        loop = asyncio.get_running_loop()
        give_up = loop.time() + call.timeout_s
        try:
            async with asyncio.timeout_at(give_up):
                answer = Answer(call.number, "", encode(await handler(decode(call.request))))
        except TimeoutError:
            return  # nobody waits any more
        except KVPoolError as error:
            answer = _failed(call, error)
        except Exception as error:
            logger.exception("handler failed")
            answer = _failed(call, InternalError(f"{type(error).__name__}: {error}"))
        if call.number != UNANSWERED:
            await _send(session, answer, give_up - loop.time())


def _failed(call: Call, error: KVPoolError) -> Answer:
    return Answer(call.number, type(error).__name__, str(error).encode())


async def _send(session: Session, answer: Answer, timeout_s: float) -> None:
    """Send an answer, as far as its client takes it in time."""
    assert session.endpoint is not None
    give_up = asyncio.get_running_loop().time() + timeout_s
    try:
        for part in cut(answer.number, answer):
            while not session.endpoint.notify(part):
                if asyncio.get_running_loop().time() > give_up:
                    return
                await asyncio.sleep(_RETRY_S)
    except KVPoolError as error:
        logger.debug("an answer has nobody to go to: %s", error)
