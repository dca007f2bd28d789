"""The HTTP server in front of the Conductor: uvicorn, with limits on connections.

Owns the listening socket's server and how long a connection may take to ask something. What is
asked is the app's. Who calls it: ``kvpool-serve``.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvpool.completion import Deadline
from kvpool.errors import UnavailableError
from kvpool.integration.conductor.edge import HttpLimits

# Open connections get this long at the end.
_GRACE_S: Final = 1.0
# Longest that ``stop`` takes.
HTTP_STOP_S: Final = 2 * _GRACE_S
_POLL_S: Final = 0.05


class HttpServer:
    """The HTTP server of an app, in the running loop.

    Args:
        app: What answers.
        listener: A socket that listens already. It stays the caller's.
        limits: Of connections.
    """

    def __init__(self, app: FastAPI, listener: Any, limits: HttpLimits) -> None:
        class Limited(_LimitedProtocol):
            http_limits = limits
            asking: dict[_LimitedProtocol, None] = {}  # noqa: RUF012 (of this server's connections)

        config = uvicorn.Config(
            app,
            http=Limited,
            log_level="warning",
            timeout_graceful_shutdown=math.ceil(_GRACE_S),
        )
        self._server = _Server(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> None:
        """Serve from now on. Raises UnavailableError if it does not start."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        deadline = Deadline(timeout_s)
        while not self._server.started:
            if self._task.done() or deadline.passed():
                raise UnavailableError("the HTTP server did not start: its message is above")
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Give open connections a moment, then end. Idempotent."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=HTTP_STOP_S)
            self._task.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the launcher has the order of the stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class _LimitedProtocol(H11Protocol):
    """One connection, closed if it takes too long to ask something.

    If there are too many, the one that has taken longest goes, so that whoever asks at once is
    answered. uvicorn bounds how long a connection idles between two requests, and nothing before that.
    """

    http_limits: HttpLimits
    asking: dict["_LimitedProtocol", None]  # those that have not asked yet, the oldest first
    _impatience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or close it."""
        super().connection_made(transport)
        if len(self.connections) > self.http_limits.connections:
            oldest = next(iter(self.asking), None)
            if oldest is None:
                transport.abort()
                return
            del self.asking[oldest]
            oldest.transport.abort()
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the time for a head begins anew with the first byte after an answer."""
        super().data_received(data)
        # uvicorn's annotation leaves out that there is none before the first request.
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self._wait_for_head()
        elif self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None
            self.asking.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self.asking.pop(self, None)
        if self._impatience is not None:
            self._impatience.cancel()

    def _wait_for_head(self) -> None:
        if self._impatience is None and not self.transport.is_closing():
            limit_s = self.http_limits.head_timeout_s
            self._impatience = self.loop.call_later(limit_s, self.transport.abort)
            self.asking[self] = None
