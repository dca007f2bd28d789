"""Lookups: the longest prefix that is valid everywhere, found without the scheduler waiting."""

import threading
from collections.abc import Iterator

import pytest

from kvpool.base import Chain, Match
from kvpool.block import HASH_BYTES
from kvpool.clock import ManualClock
from kvpool.config import PoolConfig
from kvpool.integration.vllm.lookup import FAILING_PATIENCE_S, Lookups, longest_prefix
from kvpool.integration.vllm.shape import Group, part_chain
from kvpool.memory import BlockView, Span
from kvpool.pool import Pool
from tests.server_process import until
from tests.unit.integration.vllm.scene import (
    FULL,
    LAYOUT,
    NAMESPACE,
    WINDOW,
    hashes,
    part,
    shape,
)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.open(LAYOUT, PoolConfig(dram_bytes=64 * 4096)) as pool:
        yield pool


def store(pool: Pool, group: Group, indices: list[int], rank: int = 0) -> None:
    """Store some of ten blocks of one part."""
    chain = part_chain(NAMESPACE, group.parts[rank], hashes(10))
    for index in indices:
        view = BlockView.of_buffer(LAYOUT, Span.of(bytearray(LAYOUT.block_bytes)))
        assert pool.store(chain, view, first=index, deadline_s=5).wait(10).stored == 1


@pytest.mark.parametrize(
    ("full", "window", "found"),
    [
        (range(10), range(10), 10),
        (range(6), range(10), 6),
        (range(10), [8, 9], 10),
        (range(10), [7, 9], 0),  # block 8 is needed at 10, then at 9; 7 at 8 but not 6
        (range(10), [6, 7, 9], 8),
        (range(1, 10), range(10), 0),
        (range(10), [], 0),
        ([], range(10), 0),
    ],
)
def test_a_prefix_is_valid_in_every_group(
    pool: Pool, full: list[int], window: list[int], found: int
) -> None:
    store(pool, FULL, list(full))
    store(pool, WINDOW, list(window))
    assert longest_prefix(pool, shape(FULL, WINDOW), NAMESPACE, hashes(10)) == found


def test_every_rank_has_its_part(pool: Pool) -> None:
    two = Group(number=0, layers=("a", "b"), window_tokens=None, parts=(part(0), part(0, head=1)))
    store(pool, two, list(range(5)), rank=0)
    assert longest_prefix(pool, shape(two), NAMESPACE, hashes(10)) == 0
    store(pool, two, list(range(3)), rank=1)
    assert longest_prefix(pool, shape(two), NAMESPACE, hashes(10)) == 3


class SlowPool(Pool):
    """Matches when it is told to."""

    go = threading.Event()

    def match(self, chain: Chain) -> Match:
        assert self.go.wait(30)
        return super().match(chain)


def test_asking_never_waits_and_patience_ends() -> None:
    clock = ManualClock()
    with SlowPool.open(LAYOUT, PoolConfig(dram_bytes=64 * 4096)) as pool:
        pool.go = threading.Event()
        store(pool, FULL, list(range(10)))
        lookups = Lookups(pool, shape(FULL), clock, patience_s=1.0)
        assert lookups.ask("one", NAMESPACE, hashes(4)) is None
        assert lookups.answer("one") is None
        clock.advance(0.9)
        assert lookups.ask("one", NAMESPACE, hashes(4)) is None
        clock.advance(0.2)
        assert lookups.ask("one", NAMESPACE, hashes(4)) == 0
        # The pool was too slow once: the next request is not made to wait as long.
        assert lookups.ask("two", NAMESPACE, hashes(4)) is None
        clock.advance(2 * FAILING_PATIENCE_S)
        assert lookups.ask("two", NAMESPACE, hashes(4)) == 0
        pool.go.set()
        until(lambda: not lookups._waiting, "the end of both")
        assert lookups._failing  # an answer that nobody waited for proves nothing
        lookups.forget("one")
        until(lambda: lookups.ask("one", NAMESPACE, hashes(4)) is not None, "an answer")
        lookups.forget("one")
        until(lambda: lookups.ask("one", NAMESPACE, hashes(4)) == 4, "patience")
        lookups.close()


def test_a_lookup_that_fails_is_a_miss(pool: Pool) -> None:
    lookups = Lookups(pool, shape(FULL), ManualClock(), patience_s=1.0)
    pool.close()
    until(lambda: lookups.ask("one", NAMESPACE, hashes(4)) == 0, "a miss")
    lookups.close()


def test_names_are_whole_hashes() -> None:
    assert len(part_chain(NAMESPACE, part(0), hashes(2)).hashes) == 2 * HASH_BYTES


def test_what_was_forgotten_is_not_looked_for() -> None:
    """Requests that were aborted while they waited do not hold up those that come after them."""
    with SlowPool.open(LAYOUT, PoolConfig(dram_bytes=64 * 4096)) as pool:
        pool.go = threading.Event()
        asked: list[int] = []
        match = pool.match

        def counted(chain: Chain) -> Match:
            asked.append(len(chain))
            return match(chain)

        pool.match = counted  # type: ignore[method-assign]
        lookups = Lookups(pool, shape(FULL), ManualClock(), patience_s=1.0)
        lookups.ask("first", NAMESPACE, hashes(4))
        until(lambda: asked == [4], "the first lookup")
        lookups.ask("aborted", NAMESPACE, hashes(6))
        lookups.forget("aborted")
        pool.go.set()
        until(lambda: not lookups._waiting, "the end of both")
        assert asked == [4]
        lookups.close()
