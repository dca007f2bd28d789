"""Loads and stores of the worker's side, between an engine's tensors and a real pool."""

import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from kvpool.base import Lease, Match
from kvpool.completion import Completion, CompletionSource
from kvpool.config import PoolConfig
from kvpool.integration.vllm import loading
from kvpool.integration.vllm.cache import GroupCache
from kvpool.integration.vllm.lane import Lane
from kvpool.integration.vllm.loading import Loader
from kvpool.integration.vllm.plan import LoadOrder
from kvpool.integration.vllm.saving import Saver
from kvpool.integration.vllm.shape import BlockRun, part_chain
from kvpool.integration.vllm.slots import Slots
from kvpool.memory import BlockView
from kvpool.pool import Pool, PoolLease
from tests.unit.integration.vllm.scene import FULL, LAYOUT, NAMESPACE, hashes, shape
from tests.waiting import until

BLOCKS = 12
SHAPE = shape(FULL)
RUN = BlockRun(0, tuple(hashes(3)), (4, 2, 7), None, 0)


class CountingPool(Pool):
    """Counts leases."""

    asked = 0

    def lease(self, match: Match, seconds: float, *, recompute_s: float | None = None) -> PoolLease:
        self.asked += 1
        return super().lease(match, seconds, recompute_s=recompute_s)


@pytest.fixture
def pool() -> Iterator[CountingPool]:
    with CountingPool.open(LAYOUT, PoolConfig(dram_bytes=64 * 4096)) as pool:
        yield pool


@pytest.fixture
def memory() -> torch.Tensor:
    """The engine's KV: [layers, blocks, bytes of a block's layer]."""
    source = torch.Generator().manual_seed(1)
    return torch.randint(256, (2, BLOCKS, 128), dtype=torch.uint8, generator=source)


def caches(memory: torch.Tensor) -> Mapping[int, GroupCache]:
    tensors = {name: memory[layer] for layer, name in enumerate(FULL.layers)}
    return {0: GroupCache.of_tensors(LAYOUT, FULL, tensors)}


def lane(pool: Pool, caches: Mapping[int, GroupCache], slots: Slots, timeout_s: float) -> Lane:
    return Lane(pool=pool, shape=SHAPE, rank=0, caches=caches, slots=slots, timeout_s=timeout_s)


def save(saver: Saver, *layers: str) -> None:
    """Run one step that completes the run's blocks, but computes these layers only."""
    saver.begin_step(NAMESPACE, [RUN])
    for name in layers:
        saver.save_layer(name)
    saver.finish_step()


def found(pool: Pool) -> int:
    return pool.match(part_chain(NAMESPACE, FULL.parts[0], RUN.hashes)).blocks


@pytest.mark.parametrize("computed", [(), ("a",), ("b",), ("a", "a")])
def test_a_step_that_failed_stores_nothing(
    pool: CountingPool, memory: torch.Tensor, computed: tuple[str, ...]
) -> None:
    """vLLM ends the step in every case; what it did not compute is another request's old KV."""
    slots = Slots(LAYOUT, 8 * LAYOUT.block_bytes)
    saver = Saver(lane(pool, caches(memory), slots, 20.0))
    save(saver, *computed)
    until(lambda: slots.free == slots.count, "the slots")
    assert found(pool) == 0
    assert saver.counts() == {"stored_blocks": 0, "skipped_blocks": 3}
    save(saver, "a", "b")
    until(lambda: slots.free == slots.count, "the slots")
    assert found(pool) == 3
    saver.close()


class BrokenCache(GroupCache):
    """Fails to copy the second layer."""

    def copy_out(self, block_ids: Sequence[int], slots: BlockView, layers: range) -> None:
        if 1 in layers:
            raise OSError("planted")
        super().copy_out(block_ids, slots, layers)


def test_a_copy_that_failed_is_not_stored(pool: CountingPool, memory: torch.Tensor) -> None:
    slots = Slots(LAYOUT, 8 * LAYOUT.block_bytes)
    whole = caches(memory)[0]
    broken = {0: BrokenCache(whole.view, whole.tensors)}
    saver = Saver(lane(pool, broken, slots, 20.0))
    save(saver, "a", "b")
    until(lambda: slots.free == slots.count, "the slots")
    assert found(pool) == 0
    saver.close()


class ShortPool(CountingPool):
    """Says of each load that so many blocks came; None: says nothing until it is asked to."""

    delivers: int | None = None
    under_way: list[CompletionSource[int]]

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        source: CompletionSource[int] = CompletionSource()
        if self.delivers is None:
            self.under_way.append(source)
        else:
            source.finish(self.delivers)
        return source.completion


@pytest.fixture
def short() -> Iterator[ShortPool]:
    with ShortPool.open(LAYOUT, PoolConfig(dram_bytes=64 * 4096)) as pool:
        pool.under_way = []
        yield pool


def fill(pool: Pool, memory: torch.Tensor) -> None:
    saver = Saver(lane(pool, caches(memory), Slots(LAYOUT, 8 * LAYOUT.block_bytes), 20.0))
    save(saver, "a", "b")
    until(lambda: found(pool) == 3, "the store")
    saver.close()


def failed_load(loader: Loader) -> bool:
    """Run one load, which fails, to its end."""
    loader.start(NAMESPACE, LoadOrder("r", (RUN,)))
    until(lambda: loader.counts()["failed_loads"] == 1, "the end")
    return loader.take_ended() == ({"r"}, {"r"})


def test_a_load_that_falls_short_enters_nothing(short: ShortPool, memory: torch.Tensor) -> None:
    fill(short, memory)
    short.delivers = 2
    other = torch.zeros_like(memory)
    slots = Slots(LAYOUT, 8 * LAYOUT.block_bytes)
    loader = Loader(lane(short, caches(other), slots, 20.0), near=False)
    assert failed_load(loader)
    assert not other.any()
    until(lambda: slots.free == slots.count, "the slots")
    loader.close()


def test_slots_that_may_still_be_written_are_not_free(
    short: ShortPool, memory: torch.Tensor
) -> None:
    """The load's time is over and its end told, but the pool has not let go of its slots."""
    fill(short, memory)
    slots = Slots(LAYOUT, 8 * LAYOUT.block_bytes)
    loader = Loader(lane(short, caches(memory), slots, 0.2), near=False)
    until(lambda: failed_load(loader) and bool(short.under_way), "a load that was begun in time")
    assert slots.free == slots.count - 3
    short.under_way[0].finish(3)
    until(lambda: slots.free == slots.count, "the slots")
    loader.close()


def test_a_near_load_that_falls_short_leaves_zeros(short: ShortPool, memory: torch.Tensor) -> None:
    """The pool writes into the engine's cache itself: what failed to verify may be no numbers."""
    fill(short, memory)
    short.delivers = 2
    other = torch.ones_like(memory)
    loader = Loader(lane(short, caches(other), Slots(LAYOUT, LAYOUT.block_bytes), 20.0), near=True)
    assert failed_load(loader)
    assert not other[:, RUN.block_ids].any()
    rest = [block for block in range(BLOCKS) if block not in RUN.block_ids]
    assert other[:, rest].all()
    loader.close()


def test_blocks_that_may_still_be_written_are_not_given_back(
    short: ShortPool, memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has a request's blocks again when its end is told: not while the pool writes into them."""
    monkeypatch.setattr(loading, "_END_SPARE_S", 0.0)
    fill(short, memory)
    loader = Loader(lane(short, caches(memory), Slots(LAYOUT, LAYOUT.block_bytes), 0.2), near=True)
    tries = 0
    while not short.under_way:  # until a load was begun in time
        loader.start(NAMESPACE, LoadOrder(f"r{tries}", (RUN,)))
        until(lambda: bool(short.under_way) or bool(loader.take_ended()[0]), "a load")
        tries += 1
    (under_way,) = short.under_way
    until(lambda: under_way.cancel_requested, "the end of patience")
    assert loader.take_ended(patience_s=0.05) == (set(), set())
    memory[:, RUN.block_ids] = 1  # written late
    under_way.finish(3)
    assert loader.take_ended(patience_s=20.0) == ({f"r{tries - 1}"},) * 2
    assert not memory[:, RUN.block_ids].any()
    loader.close()


def test_stores_under_way_end_before_the_saver_does(
    pool: CountingPool, memory: torch.Tensor
) -> None:
    slots = Slots(LAYOUT, 8 * LAYOUT.block_bytes)
    saver = Saver(lane(pool, caches(memory), slots, 20.0))
    held = slots.take(1)
    save(saver, "a", "b")
    late = threading.Timer(0.1, slots.give_back, [held])
    late.start()
    saver.close()
    assert slots.free == slots.count
    late.join()


@pytest.mark.parametrize("near", [False, True])
def test_the_same_bytes_come_back(pool: CountingPool, memory: torch.Tensor, near: bool) -> None:
    slots = Slots(LAYOUT, 2 * LAYOUT.block_bytes)  # fewer than blocks: two rounds
    saver = Saver(lane(pool, caches(memory), Slots(LAYOUT, 8 * LAYOUT.block_bytes), 20.0))
    save(saver, "a", "b")
    until(lambda: found(pool) == 3, "the store")
    other = torch.zeros_like(memory)
    loader = Loader(lane(pool, caches(other), slots, 20.0), near)
    to = (9, 1, 5)
    loader.start(NAMESPACE, LoadOrder("r", (BlockRun(0, RUN.hashes, to, None, 0),)))
    ended: set[str] = set()
    failed: set[str] = set()

    def over() -> bool:
        now = loader.take_ended()
        ended.update(now[0])
        failed.update(now[1])
        return bool(ended)

    until(over, "the load")
    assert (ended, failed) == ({"r"}, set())
    assert torch.equal(other[:, to], memory[:, RUN.block_ids])
    rest = [block for block in range(BLOCKS) if block not in to]
    assert not other[:, rest].any()
    until(lambda: slots.free == slots.count, "the slots")
    loader.close()
    saver.close()


def test_a_load_whose_time_is_over_asks_nobody(pool: CountingPool, memory: torch.Tensor) -> None:
    """With a hung server loads wait in line: those behind end at their deadline too."""
    loader = Loader(lane(pool, caches(memory), Slots(LAYOUT, LAYOUT.block_bytes), 0.0), near=True)
    loader.start(NAMESPACE, LoadOrder("r", (RUN,)))
    until(lambda: loader.counts()["failed_loads"] == 1, "the end")
    assert loader.take_ended() == ({"r"}, {"r"})
    assert pool.asked == 0
    loader.close()


def test_loads_have_a_limit(
    pool: CountingPool, memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would wait behind too many others has failed at once; each end is told once."""
    monkeypatch.setattr(loading, "LOADS_MAX", 2)
    slots = Slots(LAYOUT, LAYOUT.block_bytes)
    held = slots.take(1)  # loads wait for it
    saver = Saver(lane(pool, caches(memory), Slots(LAYOUT, 8 * LAYOUT.block_bytes), 20.0))
    save(saver, "a", "b")
    until(lambda: found(pool) == 3, "the store")
    loader = Loader(lane(pool, caches(memory), slots, 20.0), near=False)
    for name in ("one", "two", "three"):
        loader.start(NAMESPACE, LoadOrder(name, (RUN,)))
    assert loader.take_ended() == ({"three"}, {"three"})
    slots.give_back(held)
    ended: set[str] = set()

    def over() -> bool:
        ended.update(loader.take_ended()[0])
        return ended == {"one", "two"}

    until(over, "the loads")
    assert loader.counts()["failed_loads"] == 1
    loader.close()
    saver.close()


def test_a_step_that_computes_nothing_gives_loads_a_moment(
    pool: CountingPool, memory: torch.Tensor
) -> None:
    saver = Saver(lane(pool, caches(memory), Slots(LAYOUT, 8 * LAYOUT.block_bytes), 20.0))
    save(saver, "a", "b")
    until(lambda: found(pool) == 3, "the store")
    slots = Slots(LAYOUT, 8 * LAYOUT.block_bytes)
    loader = Loader(lane(pool, caches(memory), slots, 20.0), near=True)
    loader.start(NAMESPACE, LoadOrder("r", (RUN,)))
    assert loader.take_ended(patience_s=20.0) == ({"r"}, set())
    assert loader.take_ended(patience_s=0.001) == (set(), set())  # nobody is waited for long
    loader.close()
    saver.close()
