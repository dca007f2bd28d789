"""The prefill worker: what it computes, loads, sends, stores, and gives back."""

import asyncio

import pytest

from kvpool.errors import (
    CancelledTransferError,
    KVPoolError,
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.events import LayerComputed, SliceAnnounced
from kvpool.integration.runtime.handoff import RunEvent
from tests.unit.integration.pair import SIZE, WAIT_S, expected, failure, pair, prompt


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 50, 100])
@pytest.mark.parametrize("chunk_tokens", [7, 16, 256])
def test_the_first_token_is_the_models(length: int, chunk_tokens: int) -> None:
    async def story() -> None:
        async with pair(chunk_tokens=chunk_tokens) as both:
            tokens = prompt(length)
            out, prefilled, _ = await both.generate(tokens, 4)
            assert out == expected(tokens, 4)
            assert prefilled.cached_tokens == 0
            assert prefilled.logprob < 0

    asyncio.run(story())


@pytest.mark.parametrize("length", [16, 17, 32, 50, 100])
def test_what_the_pool_has_is_loaded_and_the_same_comes_out(length: int) -> None:
    async def story() -> None:
        async with pair() as both:
            tokens = prompt(length)
            cold, _, _ = await both.generate(tokens)
            await both.wait_idle()
            computed = both.prefill.status().tokens
            warm, prefilled, _ = await both.generate(tokens)
            assert warm == cold == expected(tokens, 8)
            # All full blocks, but at least one token is computed.
            assert prefilled.cached_tokens == (length - 1) // SIZE * SIZE
            assert both.prefill.status().tokens - computed == length - prefilled.cached_tokens

    asyncio.run(story())


def test_a_shared_prefix_is_loaded() -> None:
    async def story() -> None:
        async with pair() as both:
            shared = prompt(40)
            await both.generate([*shared, *prompt(20, seed=1)])
            await both.wait_idle()
            longer = [*shared, *prompt(33, seed=2)]
            out, prefilled, _ = await both.generate(longer)
            assert out == expected(longer, 8)
            assert prefilled.cached_tokens == 32

    asyncio.run(story())


def test_a_salt_keeps_prefixes_apart() -> None:
    async def story() -> None:
        async with pair() as both:
            tokens = prompt(40)
            await both.generate(tokens)
            await both.wait_idle()
            events = both.run(tokens, salt="other")
            ready = await anext(events)
            task = both.ask_prefill(both.names[-1], tokens, ready, salt="other")
            assert (await task).cached_tokens == 0
            await events.aclose()

    asyncio.run(story())


def test_a_pool_that_is_closed_only_costs_the_compute() -> None:
    async def story() -> None:
        async with pair() as both:
            tokens = prompt(50)
            await both.generate(tokens)
            await both.wait_idle()
            both.pool.close()
            out, prefilled, _ = await both.generate(tokens)
            assert out == expected(tokens, 8)
            assert prefilled.cached_tokens == 0

    asyncio.run(story())


def test_layers_leave_while_the_next_ones_are_computed() -> None:
    async def story() -> None:
        async with pair(chunk_tokens=32) as both:
            await both.generate(prompt(100))
            events = both.sinks["prefill"].events
            first = [e for e in events if getattr(e, "chunk", None) == 1]
            order = [
                (type(e).__name__, e.layer)
                for e in first
                if isinstance(e, LayerComputed | SliceAnnounced)
            ]
            for layer in range(3):
                announced = order.index(("SliceAnnounced", layer))
                assert announced < order.index(("LayerComputed", layer))

    asyncio.run(story())


@pytest.mark.parametrize("outbox_slots", [1, 2, 5])
def test_an_outbox_smaller_than_a_layer_is_enough(outbox_slots: int) -> None:
    async def story() -> None:
        async with pair(outbox_slots=outbox_slots) as both:
            tokens = prompt(120)
            for _ in range(2):
                out, _, _ = await both.generate(tokens)
                assert out == expected(tokens, 8)
                await both.wait_idle()
            announced = [e for e in both.sinks["prefill"].events if isinstance(e, SliceAnnounced)]
            slots = max(e.staged_bytes for e in announced)
            assert slots <= outbox_slots * both.parts["prefill"].runner.tier.layout.layer_bytes

    asyncio.run(story())


@pytest.mark.parametrize(
    ("tokens", "says"),
    [([], "empty"), ([96], "within 0..95"), ([-1], "within 0..95"), (prompt(257), "context")],
)
def test_what_can_never_be_served_is_refused(tokens: list[int], says: str) -> None:
    async def story() -> None:
        async with pair() as both:
            with pytest.raises(UsageError, match=says):
                await both.ask_prefill("x", tokens, RunEvent(ready=True))

    asyncio.run(story())


def test_a_prompt_larger_than_the_memory_is_refused() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=3) as both:
            with pytest.raises(UsageError, match="kv-bytes"):
                await both.ask_prefill("x", prompt(100), RunEvent(ready=True))

    asyncio.run(story())


def test_a_decode_worker_that_is_gone_is_said() -> None:
    async def story() -> None:
        async with pair() as both:
            ready = RunEvent(ready=True, address="nowhere", incarnation=bytes(16))
            assert isinstance(
                await failure(both.ask_prefill("x", prompt(40), ready)), PeerUnreachableError
            )
            events = both.run(prompt(40))
            ready = await anext(events)
            other = RunEvent(ready=True, address=ready.address, incarnation=bytes(16))
            task = both.ask_prefill(both.names[-1], prompt(40), other)
            assert isinstance(await failure(task), StaleIncarnationError)
            await events.aclose()
            await both.wait_idle()

    asyncio.run(story())


def test_a_request_that_nobody_expects_ends_and_frees() -> None:
    async def story() -> None:
        async with pair() as both:
            events = both.run(prompt(40))
            ready = await anext(events)
            error = await failure(both.ask_prefill("unexpected", prompt(40), ready))
            assert isinstance(error, CancelledTransferError)
            await events.aclose()
            await both.wait_idle()

    asyncio.run(story())


def test_a_cancel_at_any_moment_frees_everything() -> None:
    async def story() -> None:
        async with pair(chunk_tokens=4, outbox_slots=4) as both:
            tokens = prompt(150)
            for pause_s in [0.0, 0.001, 0.003, 0.01, 0.03, 0.06, 0.1]:
                events = both.run(tokens)
                ready = await anext(events)
                task = both.ask_prefill(both.names[-1], tokens, ready)
                await asyncio.wait([task], timeout=pause_s)
                ended = task.done()
                task.cancel()
                if not ended:
                    with pytest.raises(asyncio.CancelledError):
                        await task
                await events.aclose()
                await both.wait_idle()
            out, _, _ = await both.generate(tokens)
            assert out == expected(tokens, 8)

    asyncio.run(story())


def test_a_deadline_ends_a_prompt_and_frees_everything() -> None:
    async def story() -> None:
        async with pair(chunk_tokens=1) as both:
            tokens = prompt(200)
            events = both.run(tokens)
            ready = await anext(events)
            task = both.ask_prefill(both.names[-1], tokens, ready, timeout_s=0.01)
            error: KVPoolError = await failure(task)
            assert isinstance(error, TransferTimeoutError)
            await events.aclose()
            await both.wait_idle()

    asyncio.run(story())


def test_prompts_wait_for_room_in_turn() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=10) as both, asyncio.timeout(WAIT_S):
            prompts = [prompt(60, seed=seed) for seed in range(4)]
            answers = await asyncio.gather(*(both.generate(tokens, 4) for tokens in prompts))
            assert [out for out, _, _ in answers] == [expected(tokens, 4) for tokens in prompts]
            await both.wait_idle()

    asyncio.run(story())
