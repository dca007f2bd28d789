"""Lookups: the longest prefix that is valid everywhere, found without the scheduler waiting."""

import threading
from collections.abc import Callable, Iterator

import pytest

from kvpool.base import Chain, Match
from kvpool.block import HASH_BYTES
from kvpool.clock import ManualClock
from kvpool.config import PoolConfig
from kvpool.integration.vllm import lookup
from kvpool.integration.vllm.lookup import Looked, Lookups, Questions, longest_prefix, look_at
from kvpool.integration.vllm.publishing import Doubt
from kvpool.integration.vllm.shape import Group, part_chain
from kvpool.memory import BlockView, Span
from kvpool.pool import Pool
from tests.unit.integration.vllm.scene import (
    FULL,
    LAYOUT,
    NAMESPACE,
    WINDOW,
    hashes,
    part,
    shape,
)
from tests.waiting import until


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
        until(lambda: lookups._begun is not None, "its begin")
        clock.advance(0.9)
        assert lookups.ask("one", NAMESPACE, hashes(4)) is None
        clock.advance(0.2)
        assert lookups.ask("one", NAMESPACE, hashes(4)) == 0
        # The pool was too slow once: none of the next requests is told to wait, not even once.
        answers = [lookups.ask(f"next {number}", NAMESPACE, hashes(4)) for number in range(200)]
        assert answers == [0] * 200
        assert lookups._waiting == 1  # nor do they pile up behind the thread
        pool.go.set()
        until(lambda: not lookups._waiting, "the end of the first")
        assert lookups._failing  # an answer that nobody waited for proves nothing

        def found() -> bool:
            lookups.forget("one")
            lookups.ask("one", NAMESPACE, hashes(4))
            until(lambda: lookups.answer("one") is not None, "an answer")
            return lookups.answer("one") == 4

        until(found, "patience")
        lookups.close()


class BusyPool(Pool):
    """Takes half of the patience for each match; the last in line asks meanwhile."""

    clock: ManualClock
    meanwhile: Callable[[], None]

    def match(self, chain: Chain) -> Match:
        self.clock.advance(0.5)
        self.meanwhile()
        return super().match(chain)


def test_a_burst_of_requests_is_no_fault_of_the_pool() -> None:
    """They wait for each other, longer than one may wait for the pool: all of them find their blocks."""
    with BusyPool.open(LAYOUT, PoolConfig(dram_bytes=64 * 4096)) as pool:
        pool.clock = ManualClock()
        store(pool, FULL, list(range(10)))
        lookups = Lookups(pool, shape(FULL), pool.clock, patience_s=1.0)
        names = [f"request {number}" for number in range(16)]
        told: list[int | None] = []
        pool.meanwhile = lambda: told.append(lookups.ask(names[-1], NAMESPACE, hashes(4)))
        go = threading.Event()
        lookups._thread.submit(go.wait, 30)
        for name in names:
            assert lookups.ask(name, NAMESPACE, hashes(4)) is None
        go.set()
        until(lambda: not lookups._waiting, "the end of all")
        assert told == [None] * 16
        assert [lookups.answer(name) for name in names] == [4] * 16
        assert not lookups._failing
        lookups.close()


def test_the_line_has_an_end(pool: Pool) -> None:
    """Whoever waited long behind others is computed; the pool is not blamed."""
    clock, go = ManualClock(), threading.Event()
    lookups = Lookups(pool, shape(FULL), clock, patience_s=1.0)
    lookups._thread.submit(go.wait, 30)
    assert lookups.ask("one", NAMESPACE, hashes(4)) is None
    clock.advance(9.9)
    assert lookups.ask("one", NAMESPACE, hashes(4)) is None
    clock.advance(0.2)
    assert lookups.ask("one", NAMESPACE, hashes(4)) == 0
    assert not lookups._failing
    go.set()
    lookups.close()


def look(pool: Pool, doubts: list[Doubt], clock: ManualClock, *groups: Group) -> Looked:
    questions = Questions(pool, clock, 1.0, lambda: False)
    return look_at(shape(*groups), NAMESPACE, doubts, questions)


def test_claims_that_were_lost_are_found(pool: Pool) -> None:
    """Whatever is gone, in any part, is named; what is there is not, in any number of questions."""
    store(pool, FULL, [0, 1, 2, 5, 6, 9])
    store(pool, WINDOW, [8, 9])
    doubts = [Doubt(0, name, 7) for name in hashes(10)] + [Doubt(1, name, 7) for name in hashes(10)]
    clock = ManualClock()
    lost = [doubts[index] for index in (3, 4, 7, 8, *range(10, 18))]
    assert look(pool, doubts, clock, FULL, WINDOW) == Looked(lost, [])
    # A pool that answers late may have had no answer: nothing is said of what it did not find.
    match, late = pool.match, [6]

    def matched(chain: Chain) -> Match:
        late[0] -= 1
        clock.advance(0 if late[0] else 2)
        return match(chain)

    pool.match = matched  # type: ignore[method-assign]
    assert look(pool, doubts, clock, FULL, WINDOW) == Looked(lost[:4], doubts[10:])


def test_no_part_is_looked_at_before_its_turn(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few questions may be asked: the second part of the first claims comes before others."""
    monkeypatch.setattr(lookup, "_CHECK_BLOCKS", 2)
    monkeypatch.setattr(lookup, "_CHECKS_MAX", 4)
    two = Group(number=0, layers=("a", "b"), window_tokens=None, parts=(part(0), part(0, head=1)))
    store(pool, two, list(range(10)), rank=0)
    store(pool, two, [0, *range(2, 10)], rank=1)
    left = [Doubt(0, name, 7) for name in hashes(10)]
    lost: list[Doubt] = []
    rounds = 0
    while left:
        looked = look(pool, left, ManualClock(), two)
        assert len(looked.unseen) < len(left)
        left, lost, rounds = list(looked.unseen), [*lost, *looked.lost], rounds + 1
    assert [doubt.block for doubt in lost] == hashes(2)[1:]
    assert rounds == 3


def test_who_wants_the_thread_waits_for_a_few_questions(pool: Pool) -> None:
    asked: list[int] = []
    match = pool.match

    def counted(chain: Chain) -> Match:
        asked.append(len(chain))
        return match(chain)

    pool.match = counted  # type: ignore[method-assign]
    doubts = [Doubt(0, name, 7) for name in hashes(32)]  # none is there: a question each
    questions = Questions(pool, ManualClock(), 1.0, lambda: len(asked) >= 20)
    assert look_at(shape(FULL), NAMESPACE, doubts, questions) == Looked([], doubts)
    assert len(asked) == 20
    questions = Questions(pool, ManualClock(), 1.0, lambda: True)
    assert look_at(shape(FULL), NAMESPACE, doubts[:4], questions) == Looked(doubts[:4], [])


def test_a_check_never_holds_up_a_lookup(pool: Pool) -> None:
    store(pool, FULL, [0])
    lookups = Lookups(pool, shape(FULL), ManualClock(), patience_s=1.0)
    doubts = [Doubt(0, name, number) for number, name in enumerate(hashes(2))]
    assert lookups.check(NAMESPACE, doubts)
    until(lambda: not lookups._waiting, "the check")
    assert lookups.take_looked() == Looked((doubts[1],), ())
    assert lookups.take_looked() == Looked()
    with lookups._lock:
        lookups._waiting += 1  # somebody asks
    assert not lookups.check(NAMESPACE, doubts)
    with lookups._lock:
        lookups._waiting -= 1
    assert lookups.take_looked() == Looked()
    pool.close()
    assert lookups.check(NAMESPACE, doubts)
    until(lambda: not lookups._waiting, "the check")
    assert lookups.take_looked() == Looked(unseen=tuple(doubts))  # nobody could be asked
    lookups.close()


def test_a_lookup_that_fails_is_a_miss(pool: Pool) -> None:
    lookups = Lookups(pool, shape(FULL), ManualClock(), patience_s=1.0)
    pool.close()
    until(lambda: lookups.ask("one", NAMESPACE, hashes(4)) == 0, "a miss")
    assert lookups.ask("two", NAMESPACE, hashes(4)) == 0  # at once: the clock stands still
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
