"""A client below HTTP, for tests: speaks ASGI to an app, and goes away or stalls when told to."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp, Message, Scope

FOREVER: Final = 10**9


@dataclass
class Asked:
    """One request as a client makes it.

    Attributes:
        method, path, headers: Of the request.
        body: Its parts as they are sent.
        whole: False if the rest of the body never comes.
        gone_after: Messages of the answer after which the client goes away; -1: before its body is
            whole.
        stalled_after: Messages of the answer after which it takes no more.
        status, answer: What it got.
    """

    path: str
    body: Iterable[bytes] = ()
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    whole: bool = True
    gone_after: int = FOREVER
    stalled_after: int = FOREVER
    status: int | None = None
    answer: bytes = b""

    async def of(self, app: ASGIApp) -> "Asked":
        """Ask an app, and return when it is done with the request."""
        self._parts = iter([*self.body])
        self._sent = 0
        self._moved = asyncio.Event()
        self._ended = False
        await app(self._scope(), self._receive, self._send)
        return self

    def _scope(self) -> Scope:
        path, _, query = self.path.partition("?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("utf-8", "replace"),
            "query_string": query.encode("utf-8", "replace"),
            "root_path": "",
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
                for name, value in self.headers.items()
            ],
            "client": ("client", 1),
            "server": ("front", 80),
        }

    async def _receive(self) -> Message:
        for part in self._parts:
            return {"type": "http.request", "body": part, "more_body": True}
        if self.whole and self.gone_after >= 0:
            self.whole = False
            return {"type": "http.request", "body": b"", "more_body": False}
        while self._sent < self.gone_after and not self._ended:
            self._moved.clear()
            await self._moved.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._sent >= self.stalled_after:
            await asyncio.Event().wait()
        self._sent += 1
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.answer += message.get("body", b"")
            self._ended = not message.get("more_body", False)
        self._moved.set()
        await asyncio.sleep(0)  # let others see it
