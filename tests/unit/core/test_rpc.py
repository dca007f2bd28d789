"""Control messages over a real unix socket, in one process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest

from kvpool.client.rpc import MESSAGE_BYTES_MAX, AsyncCaller, Caller, Method
from kvpool.client.rpc_service import Service
from kvpool.errors import (
    CapacityError,
    ClosedError,
    InternalError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)


class Ask(msgspec.Struct, frozen=True):
    number: int


class Answer(msgspec.Struct, frozen=True):
    number: int


class Text(msgspec.Struct, frozen=True):
    text: str


ASK = Method("Test", "Ask", Ask, Answer)
COUNT = Method("Test", "Count", Ask, Answer, streams=True)
MISREAD = Method("Test", "Ask", Text, Answer)
MISHEARD = Method("Test", "Ask", Ask, Text)
UNKNOWN = Method("Test", "Nobody", Ask, Answer)


class Handlers:
    """0 is refused, below 0 is a bug, above 99 takes for ever."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def ask(self, request: Ask) -> Answer:
        if request.number == 0:
            raise CapacityError("no room: ask for more than 0")
        if request.number < 0:
            raise ZeroDivisionError("a bug")
        if request.number > 99:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return Answer(request.number + 1)

    async def count(self, request: Ask) -> AsyncIterator[Answer]:
        try:
            for number in range(request.number):
                yield Answer(number)
            if request.number == 0:
                raise CapacityError("nothing to count")
            if request.number > 99:
                await asyncio.Event().wait()
        finally:
            self.cancelled.set()


Check = Callable[[str, Handlers], Coroutine[Any, Any, None]]


def serve(run_dir: Path, check: Check, calls_max: int = 100) -> None:
    async def main() -> None:
        handlers, service = Handlers(), Service(calls_max)
        service.add(ASK, handlers.ask)
        service.add(COUNT, handlers.count)
        address = f"unix:{run_dir}/test.sock"
        await service.start(address)
        try:
            await check(address, handlers)
        finally:
            await service.stop(0)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_unary(tmp_path: Path) -> None:
    async def check(address: str, handlers: Handlers) -> None:
        caller = AsyncCaller(address)
        assert (await caller.call(ASK, Ask(1), 5)).number == 2
        with pytest.raises(CapacityError, match="no room: ask for more than 0"):
            await caller.call(ASK, Ask(0), 5)
        with pytest.raises(InternalError, match="ZeroDivisionError: a bug"):
            await caller.call(ASK, Ask(-1), 5)
        with pytest.raises(TransferTimeoutError):
            await caller.call(ASK, Ask(100), 0.05)
        await asyncio.wait_for(handlers.cancelled.wait(), 5)
        await caller.close()

    serve(tmp_path, check)


def test_blocking_calls(tmp_path: Path) -> None:
    def calls(address: str) -> None:
        caller = Caller(address)
        assert caller.call(ASK, Ask(1), 5).number == 2
        with pytest.raises(CapacityError):
            caller.call(ASK, Ask(0), 5)
        with pytest.raises(TransferTimeoutError):
            caller.call(ASK, Ask(100), 0.05)
        caller.close()
        caller.close()
        with pytest.raises(ClosedError):
            caller.call(ASK, Ask(1), 5)

    async def check(address: str, handlers: Handlers) -> None:
        await asyncio.to_thread(calls, address)

    serve(tmp_path, check)


def test_messages_of_another_shape_are_refused(tmp_path: Path) -> None:
    async def check(address: str, handlers: Handlers) -> None:
        caller = AsyncCaller(address)
        with pytest.raises(UsageError, match="no Ask of this version"):
            await caller.call(MISREAD, Text("hello"), 5)
        with pytest.raises(UsageError, match="no Text of this version"):
            await caller.call(MISHEARD, Ask(1), 5)
        with pytest.raises(UsageError, match="UNIMPLEMENTED"):
            await caller.call(UNKNOWN, Ask(1), 5)
        async with grpc.aio.insecure_channel(address) as channel:
            raw: Any = channel.unary_unary(ASK.path)
            for garbage in (b"", b"\xff" * 100, b"\x81\xa6number\xa1\xff"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw(garbage, timeout=5)
                assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert (await caller.call(ASK, Ask(1), 5)).number == 2
        await caller.close()

    serve(tmp_path, check)


def test_streams(tmp_path: Path) -> None:
    async def check(address: str, handlers: Handlers) -> None:
        caller = AsyncCaller(address)
        assert [r.number async for r in caller.stream(COUNT, Ask(3), 5)] == [0, 1, 2]
        with pytest.raises(CapacityError):
            [r async for r in caller.stream(COUNT, Ask(0), 5)]
        handlers.cancelled.clear()
        replies = caller.stream(COUNT, Ask(100), 30)
        assert (await anext(aiter(replies))).number == 0
        await replies.aclose()
        await asyncio.wait_for(handlers.cancelled.wait(), 5)
        await caller.close()

    serve(tmp_path, check)


def test_nobody_there(tmp_path: Path) -> None:
    caller = Caller(f"unix:{tmp_path}/nobody.sock")
    with pytest.raises(PeerUnreachableError):
        caller.call(ASK, Ask(1), 5)
    caller.close()


def test_a_new_server_is_found_at_once(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/test.sock"
    for _ in range(5):  # gRPC would make a shared channel pause for 1 s and more by now
        caller = Caller(address)
        with pytest.raises(PeerUnreachableError):
            caller.call(ASK, Ask(1), 5)
        caller.close()

    async def check(address: str, handlers: Handlers) -> None:
        caller = AsyncCaller(address)
        assert (await caller.call(ASK, Ask(1), 0.9)).number == 2
        await caller.close()

    serve(tmp_path, check)


def test_an_address_that_cannot_be_had(tmp_path: Path) -> None:
    async def main() -> None:
        service = Service()
        service.add(ASK, Handlers().ask)
        with pytest.raises(UsageError, match="cannot listen"):
            await service.start(f"unix:{tmp_path}/no/such/folder.sock")
        await service.stop(0)

    asyncio.run(main())


def test_limits(tmp_path: Path) -> None:
    async def check(address: str, handlers: Handlers) -> None:
        caller = AsyncCaller(address)
        stuck = [asyncio.create_task(caller.call(ASK, Ask(100), 1)) for _ in range(3)]
        done, _ = await asyncio.wait(stuck, return_when=asyncio.FIRST_COMPLETED)
        assert [type(task.exception()) for task in done] == [CapacityError]
        await asyncio.gather(*stuck, return_exceptions=True)
        assert (await caller.call(ASK, Ask(1), 5)).number == 2
        with pytest.raises(UsageError, match="larger than max"):
            await caller.call(MISREAD, Text("x" * (MESSAGE_BYTES_MAX + 1)), 5)
        await caller.close()

    serve(tmp_path, check, calls_max=2)
