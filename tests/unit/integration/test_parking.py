"""Out of blocks: the youngest is parked and goes on later, and nobody can tell from its tokens."""

import asyncio
from typing import Any

import pytest
import torch

from kvpool.errors import CapacityError, CorruptionError, InternalError, KVPoolError, UsageError
from kvpool.integration.runtime.batch import HEADROOM_BLOCKS, blocks_wanted
from kvpool.integration.runtime.handoff import RunRequest, Sampling
from kvpool.integration.runtime.parking import Parking
from kvpool.memory import Span
from tests.unit.integration.pair import (
    LAYOUT,
    SIZE,
    WAIT_S,
    Pair,
    expected,
    failure,
    pair,
    prompt,
)

LONG = 100
# 8 requests of 20 + 100 tokens need 64 blocks in the end; 4 are let in with 6 each.
ARENA = 24


async def until_parked(both: Pair, count: int = 1) -> None:
    while both.decode.status().parked < count:
        await asyncio.sleep(0.001)


def test_long_outputs_over_a_small_arena_are_those_of_a_large_one() -> None:
    async def story() -> None:
        prompts = [prompt(20 + number, seed=number) for number in range(8)]
        async with pair(gpu_blocks=ARENA) as both, asyncio.timeout(2 * WAIT_S):
            answers = await asyncio.gather(*(both.generate(tokens, LONG) for tokens in prompts))
            for tokens, (out, _, reason) in zip(prompts, answers, strict=True):
                assert out == expected(tokens, LONG)
                assert reason == "length"
            status = both.decode.status()
            assert status.parks > 0
            assert status.parked == 0
            await both.wait_idle()
            # What was stored meanwhile, before and after a park, is what the model computes.
            longer = [*prompts[7], *answers[7][0], *prompt(3, seed=99)]
            again, prefilled, _ = await both.generate(longer)
            assert prefilled.cached_tokens == (27 + LONG - 1) // SIZE * SIZE
            assert again == expected(longer, 8)

    asyncio.run(story())


def test_the_oldest_is_never_parked_for_a_younger_one() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=11) as both, asyncio.timeout(WAIT_S):
            old = asyncio.create_task(both.generate(prompt(30), LONG))  # 9 blocks in the end
            while not both.decode.status().forwards:
                await asyncio.sleep(0.001)
            young = asyncio.create_task(both.generate(prompt(12, seed=1), LONG))
            await until_parked(both)
            done, _ = await asyncio.wait({old, young}, return_when=asyncio.FIRST_COMPLETED)
            assert done == {old}
            assert (await old)[0] == expected(prompt(30), LONG)
            assert (await young)[0] == expected(prompt(12, seed=1), LONG)

    asyncio.run(story())


def test_nobody_new_is_let_in_while_one_is_parked() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=11) as both, asyncio.timeout(WAIT_S):
            old = asyncio.create_task(both.generate(prompt(30), LONG))
            while not both.decode.status().forwards:
                await asyncio.sleep(0.001)
            young = asyncio.create_task(both.generate(prompt(12, seed=1), LONG))
            await until_parked(both)
            late = asyncio.create_task(both.generate(prompt(3, seed=2), 2))
            while not both.decode.status().waiting:
                await asyncio.sleep(0.001)
            await old
            await young
            assert (await late)[0] == expected(prompt(3, seed=2), 2)

    asyncio.run(story())


@pytest.mark.parametrize("leaves", ["young", "both"])
def test_a_parked_request_can_be_cancelled(leaves: str) -> None:
    async def story() -> None:
        async with pair(gpu_blocks=11) as both, asyncio.timeout(WAIT_S):
            old = asyncio.create_task(both.generate(prompt(30), LONG))
            while not both.decode.status().forwards:
                await asyncio.sleep(0.001)
            young = asyncio.create_task(both.generate(prompt(12, seed=1), LONG))
            await until_parked(both)
            young.cancel()
            if leaves == "both":
                old.cancel()
            else:
                assert (await old)[0] == expected(prompt(30), LONG)
            await asyncio.wait({old, young})
            await both.wait_idle()
            assert both.decode.status().parked == 0
            assert (await both.generate(prompt(5), 4))[0] == expected(prompt(5), 4)

    asyncio.run(story())


def test_close_with_a_parked_request() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=11) as both, asyncio.timeout(WAIT_S):
            tasks = [
                asyncio.create_task(both.generate(prompt(12, seed=seed), LONG)) for seed in range(3)
            ]
            await until_parked(both)
            await both.decode.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    asyncio.run(story())


def test_an_error_of_one_request_ends_that_one_alone() -> None:
    """A forward that fails for one row: the others do not notice."""
    good, bad = prompt(30), prompt(31, seed=1)
    said = set(expected(good, LONG))
    poison = next(token for token in expected(bad, LONG)[10:] if token not in said)

    def trip(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if armed and kwargs["input_ids"].shape[1] == 1 and poison in kwargs["input_ids"][:, 0]:
            raise ZeroDivisionError("tripped")

    armed: list[bool] = []

    async def story() -> None:
        async with pair() as both, asyncio.timeout(WAIT_S):
            runner: Any = both.parts["decode"].runner
            hook = runner._model.register_forward_pre_hook(trip, with_kwargs=True)
            armed.append(True)
            failing = asyncio.create_task(both.generate(bad, LONG))
            out, _, _ = await both.generate(good, LONG)
            assert out == expected(good, LONG)
            with pytest.raises(InternalError, match="tripped"):
                await failing
            hook.remove()
            await both.wait_idle()

    asyncio.run(story())


def test_what_a_request_begins_with() -> None:
    def request(tokens: int, max_tokens: int) -> RunRequest:
        return RunRequest(
            request="r",
            tokens=[1] * tokens,
            max_tokens=max_tokens,
            stop_tokens=[],
            sampling=Sampling(),
        )

    assert blocks_wanted(request(33, 1000), 33, 16) == 3 + HEADROOM_BLOCKS
    assert blocks_wanted(request(33, 4), 33, 16) == 3, "never more than it can use"
    assert blocks_wanted(request(33, 1000), 49, 16) == 4 + HEADROOM_BLOCKS


def filled(count: int) -> Span:
    data = bytearray(torch.arange(count * LAYOUT.block_bytes, dtype=torch.uint8).numpy().tobytes())
    return Span.of(data)


def test_parking_is_bounded_and_gives_back() -> None:
    from kvpool.memory import BlockView

    parking = Parking(LAYOUT, 3)
    source = BlockView.of_buffer(LAYOUT, filled(2))
    parked = parking.park(source)
    with pytest.raises(CapacityError, match="kv-bytes"):
        parking.park(source)
    assert (parking.blocks, parking.parks) == (2, 1)
    back = filled(2)
    dest = BlockView.of_buffer(LAYOUT, back)
    back.view()[:] = bytes(back.size)
    parking.resume(parked, dest)
    assert bytes(back.view()) == bytes(filled(2).view())
    parking.forget(parked)
    assert parking.blocks == 0


def test_damage_while_parked_is_an_error_never_wrong_tokens() -> None:
    from kvpool.memory import BlockView

    parking = Parking(LAYOUT, 3)
    parked = parking.park(BlockView.of_buffer(LAYOUT, filled(2)))
    Span(parked.view.base, LAYOUT.block_bytes, parked.view.owner).view()[5] ^= 1
    with pytest.raises(CorruptionError):
        parking.resume(parked, BlockView.of_buffer(LAYOUT, filled(2)))


def test_no_room_to_park_ends_the_youngest_with_a_typed_error() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=11) as both, asyncio.timeout(WAIT_S):
            batch: Any = both.decode._batch
            batch._parking = Parking(LAYOUT, 1)
            old = asyncio.create_task(both.generate(prompt(30), LONG))
            while not both.decode.status().forwards:
                await asyncio.sleep(0.001)
            with pytest.raises(CapacityError, match="park"):
                await both.generate(prompt(12, seed=1), LONG)
            assert (await old)[0] == expected(prompt(30), LONG)
            await both.wait_idle()

    asyncio.run(story())


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    async def story() -> None:
        async with pair(gpu_blocks=8) as both, asyncio.timeout(WAIT_S):
            error: KVPoolError = await failure(both.run(prompt(20), 8 * SIZE - 19))
            assert isinstance(error, UsageError)
            assert "kv-bytes" in str(error)

    asyncio.run(story())
