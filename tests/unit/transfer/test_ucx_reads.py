"""Windows of the inbox, and the ends of reads over UCX. The peer is the test: nothing is timed."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    KVPoolError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import Span
from kvpool.transfer.calls import Call, Calls
from kvpool.transfer.engine import CopyEngine
from kvpool.transfer.ucx_cuts import Cut
from kvpool.transfer.ucx_reads import READS_MAX, Reads
from kvpool.transfer.ucx_wire import ASKS_MAX, Answer, Ask

WINDOW = 256
WAIT_S = 20.0


class Items:
    """A job of one item a cut, which notes what is copied, and can hold a copy or let it fail."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.cuts = [Cut(0, index, (index,), (1,), 0, 64, 0, 1) for index in range(count)]
        self.copied: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.began = threading.Event()
        self.error: KVPoolError | None = None

    def copy(self, cut: Cut, good: int, window: Span) -> int:
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.copied.append(cut.first)
        return good

    def result(self, good: int) -> int:
        return good


class Side:
    """The reads of one connection, what they asked, and calls that the test runs."""

    def __init__(self, copies: CopyEngine) -> None:
        self.asks: list[Ask] = []
        self.calls = Calls(lambda: None)
        inbox = Span.of(np.zeros(WINDOW * ASKS_MAX, dtype=np.uint8))
        self.reads = Reads(inbox, self.asks.append, copies, self.calls.post, self.calls.call_later)

    def answer(self, ask: Ask, good: int = 1) -> bool:
        return self.reads.answered(Answer(ask.number, good))

    def run(self) -> list[Call]:
        """Run what is due, as the engine's thread would."""
        calls = self.calls.due()
        for call in calls:
            call()
        return calls


@pytest.fixture
def side() -> Iterator[Side]:
    copies = CopyEngine("test-copy", threads=1)
    side = Side(copies)
    yield side
    side.reads.end(ClosedError("the test ended"))
    copies.close()


def test_a_read_asks_into_every_window_and_goes_on_with_each_answer(side: Side) -> None:
    job = Items(20)
    read = side.reads.submit(job, WAIT_S)
    assert len(side.asks) == ASKS_MAX
    assert len({ask.at for ask in side.asks}) == ASKS_MAX
    answered = 0
    while answered < 20:
        ask = side.asks[answered]
        assert side.answer(ask)
        answered += 1
        waits = min(20, ASKS_MAX + answered)
        give_up = threading.Event()
        for _ in range(2000):
            if len(side.asks) >= waits:
                break
            give_up.wait(0.01)
        assert len(side.asks) == waits
    assert read.wait(WAIT_S) == 20
    assert sorted(job.copied) == list(range(20))
    assert side.reads.counts() == (ASKS_MAX, 0)


def test_a_window_of_an_ended_read_is_owed_until_its_answer_comes(side: Side) -> None:
    late = side.reads.submit(Items(ASKS_MAX), WAIT_S)
    late.cancel()
    assert side.run()
    with pytest.raises(CancelledTransferError):
        late.wait(WAIT_S)
    assert side.reads.counts() == (0, ASKS_MAX)
    # Nothing is asked into a window that the peer may still write.
    job = Items(1)
    after = side.reads.submit(job, WAIT_S)
    assert len(side.asks) == ASKS_MAX
    assert side.answer(side.asks[3])
    assert side.asks[-1].at == side.asks[3].at
    assert side.reads.counts() == (0, ASKS_MAX - 1)
    assert side.answer(side.asks[-1])
    assert after.wait(WAIT_S) == 1
    for number in (0, 1, 2, 4, 5, 6, 7):
        assert side.answer(side.asks[number])
    assert side.reads.counts() == (ASKS_MAX, 0)


def test_a_passed_deadline_ends_a_read_without_its_peer(side: Side) -> None:
    at_once = side.reads.submit(Items(1), 0.0)
    with pytest.raises(TransferTimeoutError):
        at_once.wait(0.0)
    assert side.asks == []
    soon = side.reads.submit(Items(1), 0.01)
    for _ in range(2000):
        if side.run() and soon.done():
            break
        threading.Event().wait(0.005)
    with pytest.raises(TransferTimeoutError):
        soon.wait(0.0)
    assert side.reads.counts() == (ASKS_MAX - 1, 1)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_read_is_not_done_while_a_copy_runs(side: Side, end: str) -> None:
    job = Items(2)
    job.go_on.clear()
    read = side.reads.submit(job, WAIT_S)
    assert side.answer(side.asks[0])
    assert job.began.wait(WAIT_S)
    if end == "cancel":
        read.cancel()
        side.run()
    else:
        side.reads.end(ClosedError("closed"))
    assert not read.done()
    assert not side.reads.drain(0.01)
    job.go_on.set()
    with pytest.raises((CancelledTransferError, ClosedError)):
        read.wait(WAIT_S)
    assert side.reads.drain(WAIT_S)


def test_a_stale_item_ends_the_leading_ones_and_what_comes_after_is_not_awaited(
    side: Side,
) -> None:
    job = Items(6)
    read = side.reads.submit(job, WAIT_S)
    assert side.answer(side.asks[2], good=0)
    assert not read.done()
    assert side.answer(side.asks[0])
    assert side.answer(side.asks[1])
    assert read.wait(WAIT_S) == 2
    assert sorted(job.copied) == [0, 1]
    assert side.reads.counts() == (ASKS_MAX - 3, 3)


def test_a_copy_that_fails_ends_the_read(side: Side) -> None:
    job = Items(2)
    job.error = UsageError("planted")
    read = side.reads.submit(job, WAIT_S)
    assert side.answer(side.asks[0])
    with pytest.raises(UsageError, match="planted"):
        read.wait(WAIT_S)


def test_answers_that_fit_no_ask_are_told(side: Side) -> None:
    assert not side.answer(Ask(7, 0, 0, 0, 1, 0, 0, [0], [1]))
    side.reads.submit(Items(1), WAIT_S)
    assert not side.answer(side.asks[0], good=2)
    assert not side.answer(side.asks[0])


def test_reads_are_limited_and_refused_after_the_end(side: Side) -> None:
    for _ in range(READS_MAX):
        side.reads.submit(Items(1), WAIT_S)
    with pytest.raises(CapacityError):
        side.reads.submit(Items(1), WAIT_S)
    for deadline_s in (float("inf"), float("nan")):
        with pytest.raises(UsageError):
            side.reads.submit(Items(1), deadline_s)
    side.reads.end(ClosedError("closed"))
    with pytest.raises(ClosedError):
        side.reads.submit(Items(1), WAIT_S)


def test_timers_do_not_pile_up(side: Side) -> None:
    """Each read has a deadline; only the earliest has a timer."""
    for number in range(100):
        side.reads.submit(Items(1), 50.0 + number)
    side.calls.call_later(-1.0, lambda: None)
    assert len(side.calls.due()) == 1
    assert len(side.calls._timers) == 1
