"""The edge of the HTTP surface: bodies with limits, clients that go away, request ids.

Owns what protects the Conductor from a client that is slow, huge or gone. Knows nothing of models.
Who calls it: the Conductor's app.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpool.integration.conductor.http_error import CLIENT_GONE, HttpError

T = TypeVar("T")

# Where the request's id is kept in an ASGI scope.
_REQUEST_ID: Final = "kvpool.request_id"
_VALID_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one client may ask of the Conductor.

    Attributes:
        body_bytes: Of one request. A prompt of 128k tokens is about half a megabyte of text.
        discard_bytes: Read and thrown away of a larger body, so that the client, which sends first
            and listens then, gets to see why it is refused.
        body_timeout_s: Longest wait for a whole body.
        send_timeout_s: Longest wait for a client to take what is sent.
        requests: HTTP requests at work at a time; more are refused at once.
        bodies: Bodies that are read at a time; more are refused at once.
        further_choices: Choices at work at a time that are not the first of their request; others
            wait. With ``requests`` they fit into the queues of the workers.
        connections: Open ones; if one more comes, the one that has asked nothing for longest is
            closed, or else the one that came.
        head_timeout_s: Longest wait for the whole head of a request.
    """

    body_bytes: int = 8 << 20
    discard_bytes: int = 64 << 20
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    requests: int = 192
    bodies: int = 64
    further_choices: int = 64
    connections: int = 512
    head_timeout_s: float = 20.0


def sse(payload: dict[str, object]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


async def read_body(request: Request, limits: HttpLimits) -> bytes:
    """Return the body, holding at most ``limits.body_bytes`` of it.

    Raises:
        HttpError: 413: it is too large. 408: it did not come in time. 499: the client went away.
    """
    too_large = HttpError(
        413,
        f"the body is larger than {limits.body_bytes} bytes: send less",
        code="body_too_large",
    )
    most = limits.body_bytes + limits.discard_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                if size <= limits.body_bytes:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError as late:
        raise HttpError(
            408,
            f"the body did not arrive within {limits.body_timeout_s:g} s: send it faster",
            code="body_timeout",
            headers={"connection": "close"},
        ) from late
    except ClientDisconnect as gone:
        raise HttpError(CLIENT_GONE, "the client went away") from gone
    if size > limits.body_bytes:
        raise too_large
    return b"".join(parts)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``, but cancel it when the client goes away.

    Raises:
        HttpError: 499: the client went away.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HttpError(CLIENT_GONE, "the client went away")
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def request_id(scope: Scope) -> str:
    """Return the request's id."""
    found: str = scope[_REQUEST_ID]
    return found


class RequestIds:
    """Gives each request an id, the client's own ``X-Request-Id`` if it is one, and answers with it.

    Args:
        app: What answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        scope[_REQUEST_ID] = wanted if _VALID_ID.fullmatch(wanted) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = scope[_REQUEST_ID]
            await send(message)

        await self._app(scope, receive, send_with_id)
