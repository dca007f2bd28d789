"""Connections to the HTTP server: too many, silent, slow with a head, idle: each ends, others work."""

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI

from kvpool.integration.conductor.edge import HttpLimits
from kvpool.integration.http_server import HttpServer

T = TypeVar("T")
WAIT_S = 30.0
CONNECTIONS = 4
# Certainly used up by who does nothing, and long enough for who asks at once.
LIMITS = HttpLimits(connections=CONNECTIONS, head_timeout_s=1.5)
GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    app = FastAPI()

    @app.get("/")
    async def root() -> str:
        return "here"

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(app, listener, LIMITS)
        await server.start(WAIT_S)
        try:
            yield listener.getsockname()[1]
        finally:
            await server.stop()


def run(story: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(WAIT_S):
            return await story

    return asyncio.run(bounded())


async def answer(port: int, *parts: bytes) -> bytes:
    """Send parts and return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_who_asks_nothing_or_half_is_closed_and_who_asks_is_answered() -> None:
    async def story() -> None:
        async with served() as port:
            slow = [
                asyncio.create_task(answer(port, *parts))
                for parts in ((), (b"GET / HT",), (GET[:-2],))
            ]
            asked = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
            assert b"200 OK" in await answer(port, asked)
            assert await asyncio.gather(*slow) == [b""] * 3

    run(story())


def test_the_head_of_a_second_request_has_its_time_too() -> None:
    async def story() -> None:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b'"here"')
            writer.write(GET[:9])
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                pass
            writer.close()

    run(story())


def test_who_asks_at_once_is_answered_whatever_others_keep_open() -> None:
    async def story() -> None:
        async with served() as port:
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS)]
            for _, writer in idle[1:]:
                writer.write(b"GET / HT")
            asked = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
            assert b"200 OK" in await answer(port, asked)
            assert await idle[0][0].read() == b"", "the oldest went"
            for _, writer in idle:
                writer.close()

    run(story())


def test_one_connection_too_many_is_closed_at_once() -> None:
    async def story() -> None:
        async with served() as port:
            idle = [asyncio.create_task(answer(port, b"GET / HT")) for _ in range(2 * CONNECTIONS)]
            done, waiting = await asyncio.wait(idle, timeout=LIMITS.head_timeout_s / 2)
            assert len(done) >= CONNECTIONS or not waiting
            assert await asyncio.gather(*idle) == [b""] * (2 * CONNECTIONS)
            asked = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
            assert b"200 OK" in await answer(port, asked), "there is room again"

    run(story())
