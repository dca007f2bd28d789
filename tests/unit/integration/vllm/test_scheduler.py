"""The scheduler's side: what is loaded, what is stored, and what is not."""

from collections.abc import Iterator

import pytest

from kvpool.clock import SystemClock
from kvpool.config import PoolConfig
from kvpool.integration.vllm.lookup import Lookups
from kvpool.integration.vllm.scheduler import SchedulerSide
from kvpool.pool import Pool
from tests.unit.integration.vllm.scene import (
    FULL,
    LAYOUT,
    NAMESPACE,
    SIZE,
    WINDOW,
    request,
    shape,
    step,
)
from tests.unit.integration.vllm.test_lookup import store
from tests.waiting import until


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.open(LAYOUT, PoolConfig(dram_bytes=64 * 4096)) as pool:
        yield pool


@pytest.fixture
def side(pool: Pool) -> Iterator[SchedulerSide]:
    lookups = Lookups(pool, shape(FULL, WINDOW), SystemClock(), patience_s=30)
    yield SchedulerSide(shape(FULL, WINDOW), NAMESPACE, lookups)
    lookups.close()


def matched(side: SchedulerSide, asked: object, local: int) -> tuple[int | None, bool]:
    until(lambda: side.matched(asked, local)[0] is not None, "an answer")
    return side.matched(asked, local)


def test_a_hit_is_loaded_and_the_rest_stored(pool: Pool, side: SchedulerSide) -> None:
    store(pool, FULL, [0, 1, 2])
    store(pool, WINDOW, [1, 2])
    asked = request("r", 6 * SIZE + 3)
    side.arrived(asked)
    assert matched(side, asked, SIZE) == (2 * SIZE, True)
    assert matched(side, asked, 3 * SIZE) == (0, False)
    assert matched(side, asked, SIZE) == (2 * SIZE, True)
    side.allocated(asked, ([5, 6, 7], [0, 8, 9]), 2 * SIZE)
    plan = side.plan(step({}, {}))
    (order,) = plan.loads
    assert [(run.group, run.block_ids) for run in order.runs] == [(0, (6, 7)), (1, (8, 9))]
    assert not plan.stores
    # vLLM says it again when the load is over.
    side.allocated(asked, ([5, 6, 7, 10], [0, 8, 9, 11]), 0)
    tables = {"r": ([5, 6, 7, 10, 12, 13, 14], [0, 0, 9, 11, 15, 16, 17])}
    plan = side.plan(step(tables, {"r": (3 * SIZE, 2 * SIZE + 5)}))
    assert not plan.loads
    assert [(run.group, run.block_ids) for run in plan.stores] == [(0, (10, 12)), (1, (11, 15))]
    plan = side.plan(step(tables, {"r": (5 * SIZE + 5, SIZE)}))
    assert [run.block_ids for run in plan.stores] == [(13,), (16,)]
    side.finished(asked)
    assert not side.plan(step(tables, {"r": (6 * SIZE, 1)})).stores


def test_one_token_is_always_computed(pool: Pool, side: SchedulerSide) -> None:
    store(pool, FULL, list(range(10)))
    store(pool, WINDOW, list(range(10)))
    asked = request("r", 4 * SIZE)
    side.arrived(asked)
    assert matched(side, asked, 0) == (3 * SIZE, True)


def test_what_the_pool_lost_is_stored_again(side: SchedulerSide) -> None:
    """The engine has the first blocks in its own cache, the pool has none of them any more."""
    asked = request("r", 4 * SIZE)
    side.arrived(asked)
    assert matched(side, asked, 2 * SIZE) == (0, False)
    side.allocated(asked, ([3, 4, 5, 6], [0, 4, 5, 6]), 0)
    plan = side.plan(step({"r": ([3, 4, 5, 6], [0, 4, 5, 6])}, {"r": (2 * SIZE, 2 * SIZE)}))
    assert [run.block_ids for run in plan.stores] == [(3, 4, 5, 6), (4, 5, 6)]


def test_a_request_whose_loads_fail_is_computed(pool: Pool, side: SchedulerSide) -> None:
    store(pool, FULL, list(range(10)))
    store(pool, WINDOW, list(range(10)))
    asked = request("r", 4 * SIZE)
    side.arrived(asked)
    for expected in ((3 * SIZE, True), (3 * SIZE, True), (0, False)):
        assert matched(side, asked, 0) == expected
        side.allocated(asked, ([3, 4, 5], [3, 4, 5]), expected[0] or 0)
        assert len(side.plan(step({}, {})).loads) == bool(expected[0])
        side.failed(["r", "gone"])
    # What the pool had once is stored with the rest: it is not there any more.
    tables = {"r": ([3, 4, 5, 6], [3, 4, 5, 6])}
    plan = side.plan(step(tables, {"r": (0, 4 * SIZE)}))
    assert [run.block_ids for run in plan.stores] == [(3, 4, 5, 6)] * 2


@pytest.mark.parametrize("why", ["adapter", "reset"])
def test_what_cannot_be_named_is_left_alone(pool: Pool, side: SchedulerSide, why: str) -> None:
    store(pool, FULL, list(range(10)))
    store(pool, WINDOW, list(range(10)))
    asked = request("r", 4 * SIZE, lora_request=object() if why == "adapter" else None)
    side.arrived(asked)
    if why == "reset":
        side.reset()
    assert matched(side, asked, 0) == (0, False)
    side.allocated(asked, ([3, 4, 5, 6], [3, 4, 5, 6]), 0)
    tables = {"r": ([3, 4, 5, 6], [3, 4, 5, 6])}
    assert not side.plan(step(tables, {"r": (0, 4 * SIZE)})).stores
    after = request("s", 4 * SIZE)
    side.arrived(after)
    assert matched(side, after, 0) == ((3 * SIZE, True) if why == "adapter" else (0, False))


def test_without_a_pool_all_is_computed() -> None:
    side = SchedulerSide(shape(FULL), NAMESPACE, None)
    asked = request("r", 4 * SIZE)
    side.arrived(asked)
    assert side.matched(asked, 0) == (0, False)
    side.allocated(asked, ([3, 4, 5, 6],), 0)
    assert not side.plan(step({"r": ([3, 4, 5, 6],)}, {"r": (0, 4 * SIZE)})).stores
    side.finished(asked)
