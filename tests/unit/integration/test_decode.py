"""The decode worker: one batch, its tokens, its ends, and what it gives back."""

import asyncio

import pytest

from kvpool.errors import CapacityError, TransferTimeoutError, UnavailableError, UsageError
from kvpool.events import ForwardRan
from kvpool.integration.runtime.handoff import RunEvent, Sampling
from tests.unit.integration.pair import (
    GREEDY,
    SIZE,
    WAIT_S,
    Pair,
    expected,
    failure,
    pair,
    prompt,
)


def forwards(both: Pair) -> list[int]:
    events = both.sinks["decode"].events
    return [event.requests for event in events if isinstance(event, ForwardRan)]


def test_eight_requests_share_each_forward() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=128) as both, asyncio.timeout(WAIT_S):
            prompts = [prompt(10 + 7 * number, seed=number) for number in range(8)]
            answers = await asyncio.gather(*(both.generate(tokens, 40) for tokens in prompts))
            for tokens, (out, _, reason) in zip(prompts, answers, strict=True):
                assert out == expected(tokens, 40)
                assert reason == "length"
            assert sum(forwards(both)) == 8 * 39
            assert both.decode.status().forwards == len(forwards(both)) < 4 * 39
            await both.wait_idle()

    asyncio.run(story())


def test_no_more_than_running_max_run_and_the_rest_follow() -> None:
    async def story() -> None:
        async with pair(running_max=2) as both, asyncio.timeout(WAIT_S):
            prompts = [prompt(20, seed=number) for number in range(5)]
            answers = await asyncio.gather(*(both.generate(tokens, 10) for tokens in prompts))
            assert [out for out, _, _ in answers] == [expected(t, 10) for t in prompts]
            assert max(forwards(both)) <= 2

    asyncio.run(story())


def test_a_stop_token_ends_an_output_and_is_not_emitted() -> None:
    async def story() -> None:
        async with pair() as both:
            tokens = prompt(30)
            said = expected(tokens, 12)
            stop = said[5]
            out, _, reason = await both.generate(tokens, 12, stop_tokens=[stop])
            assert out == said[: said.index(stop)]
            assert reason == "stop"

    asyncio.run(story())


def test_a_first_token_that_stops_ends_it_without_a_forward() -> None:
    async def story() -> None:
        async with pair() as both:
            tokens = prompt(30)
            first = expected(tokens, 1)[0]
            out, _, reason = await both.generate(tokens, 12, stop_tokens=[first])
            assert (out, reason) == ([first], "stop")
            out, _, reason = await both.generate(tokens, 1)
            assert (out, reason) == ([first], "length")
            assert forwards(both) == []

    asyncio.run(story())


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=1.0, seed=7, presence_penalty=0.5)]
)
def test_an_output_goes_on_at_other_workers_as_if_nothing_had_happened(sampling: Sampling) -> None:
    async def story() -> None:
        async with pair() as both, asyncio.timeout(WAIT_S):
            tokens = prompt(30)
            whole, _, _ = await both.generate(tokens, 20, sampling=sampling)
            for drawn in (1, 2, 7, 19):
                rest, _, reason = await both.generate(
                    [*tokens, *whole[:drawn]], 20 - drawn, sampling=sampling, drawn=drawn
                )
                assert rest == whole[drawn:]
                assert reason == "length"
            await both.wait_idle()

    asyncio.run(story())


@pytest.mark.parametrize("drawn", [-1, 10, 11])
def test_an_output_without_a_prompt_is_refused(drawn: int) -> None:
    async def story() -> None:
        async with pair() as both:
            assert isinstance(await failure(both.run(prompt(10), drawn=drawn)), UsageError)
            ready = RunEvent(ready=True, address="there", incarnation=bytes(16))
            asked = both.ask_prefill("r", prompt(10), ready, drawn=drawn)
            assert isinstance(await failure(asked), UsageError)
            await both.wait_idle()

    asyncio.run(story())


def test_full_blocks_that_decode_made_are_in_the_pool_when_the_output_ends() -> None:
    async def story() -> None:
        async with pair() as both:
            tokens = prompt(30)
            out, _, _ = await both.generate(tokens, 40)
            # At once, without waiting: the last event says that they are there.
            longer = [*tokens, *out, *prompt(9, seed=5)]
            again, prefilled, _ = await both.generate(longer)
            # The last token's KV was never computed.
            assert prefilled.cached_tokens == (30 + 40 - 1) // SIZE * SIZE
            assert again == expected(longer, 8)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("count", "max_tokens", "says"),
    [(0, 4, "at least one"), (10, 0, "at least one"), (200, 100, "context")],
)
def test_what_can_never_be_served_is_refused(count: int, max_tokens: int, says: str) -> None:
    async def story() -> None:
        async with pair() as both:
            with pytest.raises(UsageError, match=says):
                await anext(both.run(prompt(count), max_tokens))

    asyncio.run(story())


def test_a_request_larger_than_the_memory_is_refused() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=4) as both:
            with pytest.raises(UsageError, match="kv-bytes"):
                await anext(both.run(prompt(60), 20))

    asyncio.run(story())


def test_a_stream_that_never_comes_frees_its_room_at_the_deadline() -> None:
    async def story() -> None:
        async with pair() as both:
            events = both.run(prompt(40), handoff_timeout_s=0.05)
            assert isinstance(await failure(events), TransferTimeoutError)
            await both.wait_idle()

    asyncio.run(story())


def test_a_full_queue_refuses_and_a_long_wait_ends() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=8) as both:
            holder = both.run(prompt(100), 20)  # all blocks
            await anext(holder)
            waiting = [
                asyncio.create_task(failure(both.run(prompt(20), 4, handoff_timeout_s=0.2)))
                for _ in range(4)
            ]
            async with asyncio.timeout(WAIT_S):
                while both.decode.status().waiting < 4:
                    await asyncio.sleep(0.002)
            with pytest.raises(CapacityError, match="4 requests wait"):
                await anext(both.run(prompt(20), 4))
            for error in await asyncio.gather(*waiting):
                assert isinstance(error, CapacityError)
            await holder.aclose()
            await both.wait_idle()

    asyncio.run(story())


def test_who_leaves_in_mid_stream_frees_its_room_and_disturbs_nobody() -> None:
    async def story() -> None:
        async with pair() as both, asyncio.timeout(WAIT_S):
            stays = asyncio.create_task(both.generate(prompt(30), 60))
            leaves = prompt(40, seed=1)
            events = both.run(leaves, 200)
            name = both.names[-1]
            ready = await anext(events)
            await both.ask_prefill(name, leaves, ready)
            for _ in range(3):
                await anext(events)
            await events.aclose()
            out, _, _ = await stays
            assert out == expected(prompt(30), 60)
            await both.wait_idle()

    asyncio.run(story())


def test_a_sender_that_gives_up_ends_the_request() -> None:
    async def story() -> None:
        async with pair(chunk_tokens=1) as both, asyncio.timeout(WAIT_S):
            tokens = prompt(150)
            events = both.run(tokens)
            name = both.names[-1]
            ready = await anext(events)
            task = both.ask_prefill(name, tokens, ready)
            while both.prefill.status().tokens < 20:
                await asyncio.sleep(0.001)
            task.cancel()
            assert isinstance(await failure(events), UnavailableError)
            await both.wait_idle()

    asyncio.run(story())
