"""Clients that are huge, slow or gone: each costs a bounded time and a bounded memory, no more."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from kvpool.integration.conductor.app import create_app
from kvpool.integration.conductor.edge import HttpLimits
from tests.faults.http_client import Asked
from tests.unit.integration.front import Front, front
from tests.unit.integration.pair import WAIT_S

MIB = 1 << 20
# Times that a stalled client certainly uses up.
LIMITS = HttpLimits(
    body_bytes=MIB,
    discard_bytes=64 * MIB,
    body_timeout_s=3.0,
    send_timeout_s=0.2,
    requests=4,
    bodies=3,
)
STREAM = {"prompt": "Hello", "max_tokens": 64, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Front]:
    with front(LIMITS) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left(served: Front) -> Iterator[None]:
    yield
    served.run(served.wait_idle())


class Sender:
    """A body of as many parts as asked for, made as they are taken."""

    def __init__(self, count: int) -> None:
        self.taken = 0
        self._count = count

    async def __aiter__(self) -> AsyncIterator[bytes]:
        part = b" " * MIB
        for _ in range(self._count):
            self.taken += 1
            yield part


def shown(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_50_megabytes_are_refused_and_not_kept(served: Front, route: str) -> None:
    sender = Sender(50)

    async def story() -> httpx.Response:
        return await served.client.post(route, content=sender)

    tracemalloc.start()
    answer = served.run(story())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shown(answer) == (413, "body_too_large")
    assert str(MIB) in answer.json()["error"]["message"]
    assert sender.taken == 50, "the client was not heard out, so it may not see the answer"
    assert peak < 8 * MIB


def test_a_body_without_end_is_not_heard_out(served: Front) -> None:
    sender = Sender(10**6)

    async def story() -> httpx.Response:
        return await served.client.post("/v1/completions", content=sender)

    assert shown(served.run(story())) == (413, "body_too_large")
    assert sender.taken <= 67


@pytest.mark.parametrize("declared", [str(10**10), "9" * 5000])
def test_a_body_that_says_it_is_huge_is_refused_at_once(served: Front, declared: str) -> None:
    asked = Asked("/v1/completions", headers={"content-length": declared}, whole=False)
    served.run(asked.of(create_app(served.conductor)))
    assert asked.status == 413


def test_a_body_that_does_not_come_ends_in_time(served: Front) -> None:
    asked = Asked("/v1/completions", body=[b'{"prompt": '], whole=False)
    served.run(asked.of(create_app(served.conductor)))
    assert (asked.status, json.loads(asked.answer)["error"]["code"]) == (408, "body_timeout")


def test_a_client_that_goes_away_while_it_sends_is_no_fault_of_ours(served: Front) -> None:
    asked = Asked("/v1/completions", body=[b'{"prompt": '], gone_after=-1)
    served.run(asked.of(create_app(served.conductor)))
    assert asked.status == 499, "nobody reads it, but it is no 500"


def test_one_body_too_many_is_refused_at_once(served: Front) -> None:
    async def story() -> None:
        app = create_app(served.conductor)
        halves = [
            asyncio.create_task(
                Asked("/v1/completions", body=[b'{"prompt": '], whole=False).of(app)
            )
            for _ in range(LIMITS.bodies)
        ]
        await asyncio.sleep(0)
        answer = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert shown(answer) == (503, "overloaded")
        assert served.conductor.active == 0, "a body that has not come is no request at work"
        assert [asked.status for asked in await asyncio.gather(*halves)] == [408] * LIMITS.bodies
        await served.complete("a", max_tokens=1)

    served.run(story())


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_client_that_goes_away_frees_everything(served: Front, after: int) -> None:
    before = served.workers.decode.status().tokens
    body = json.dumps({**STREAM, "max_tokens": 240}).encode()
    asked = Asked("/v1/completions", body=[body], gone_after=after)
    served.run(asked.of(create_app(served.conductor)))
    served.run(served.wait_idle())
    assert b"[DONE]" not in asked.answer
    assert served.workers.decode.status().tokens - before < 200, "nobody wanted the rest"


def test_a_client_that_takes_nothing_is_gone(served: Front) -> None:
    body = json.dumps(STREAM).encode()
    asked = Asked("/v1/completions", body=[body], stalled_after=3)
    served.run(asked.of(create_app(served.conductor)))
    assert b"[DONE]" not in asked.answer


def test_one_request_too_many_is_refused_at_once(served: Front) -> None:
    async def story() -> None:
        app = create_app(served.conductor)
        slow = [
            asyncio.create_task(
                Asked("/v1/completions", body=[json.dumps(STREAM).encode()]).of(app)
            )
            for _ in range(LIMITS.requests)
        ]
        async with asyncio.timeout(WAIT_S):
            while served.conductor.active < LIMITS.requests:
                await asyncio.sleep(0)
        for route in ("/v1/completions", "/tokenize", "/detokenize"):
            answer = await served.post(route, {"prompt": "a", "max_tokens": 1, "tokens": [7]})
            assert shown(answer) == (503, "overloaded")
            assert answer.headers["retry-after"] == "1"
        for answered in await asyncio.gather(*slow):
            assert answered.answer.endswith(b"data: [DONE]\n\n")
        await served.complete("a", max_tokens=1)

    served.run(story())
