"""What cannot be encoded is a typed error at the caller, whichever side it is on, and nothing hangs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvpool.client.rpc import AsyncCaller, Caller, Method
from kvpool.client.rpc_service import Service
from kvpool.errors import InternalError

WAIT_S = 30.0


class Said(msgspec.Struct, frozen=True):
    """One value; the wrong ones pass no type checker, which is the point."""

    value: object


ONE = Method("Test", "One", Said, Said)
MANY = Method("Test", "Many", Said, Said, streams=True)
# A lone surrogate, more than 64 bits, and no type of msgpack's.
WRONG = ["\ud800", 1 << 70, object()]


async def wrong(request: Said) -> Said:
    assert isinstance(request.value, int)
    return Said(WRONG[request.value])


async def wrong_later(request: Said) -> AsyncIterator[Said]:
    yield Said("fine")
    yield await wrong(request)


async def served(path: Path) -> Service:
    service = Service()
    service.add(ONE, wrong)
    service.add(MANY, wrong_later)
    await service.start(f"unix:{path}")
    return service


@pytest.mark.parametrize("value", range(len(WRONG)))
def test_an_answer(tmp_path: Path, value: int) -> None:
    async def story() -> None:
        service, caller = await served(tmp_path / "s"), AsyncCaller(f"unix:{tmp_path / 's'}")
        with pytest.raises(InternalError, match="a Said cannot be encoded"):
            await caller.call(ONE, Said(value), WAIT_S)
        replies = caller.stream(MANY, Said(value), WAIT_S)
        assert await anext(replies) == Said("fine")
        with pytest.raises(InternalError, match="a Said cannot be encoded"):
            await anext(replies)
        await caller.close()
        await service.stop(0.0)

    asyncio.run(story())


@pytest.mark.parametrize("value", WRONG, ids=["surrogate", "large", "object"])
def test_a_request(tmp_path: Path, value: object) -> None:
    async def story() -> None:
        caller = AsyncCaller(f"unix:{tmp_path / 'nobody'}")
        with pytest.raises(InternalError, match="a Said cannot be encoded"):
            await caller.call(ONE, Said(value), WAIT_S)
        with pytest.raises(InternalError, match="a Said cannot be encoded"):
            await anext(caller.stream(MANY, Said(value), WAIT_S))
        await caller.close()

    asyncio.run(story())
    blocking = Caller(f"unix:{tmp_path / 'nobody'}")
    with pytest.raises(InternalError, match="a Said cannot be encoded"):
        blocking.call(ONE, Said(value), WAIT_S)
    blocking.close()
