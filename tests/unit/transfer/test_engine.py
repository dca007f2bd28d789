"""The copy engine: batches, ends, limits. Reads here are driven step by step."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from kvpool.completion import Completion, Deadline
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    CorruptionError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.transfer.engine import CopyEngine
from tests.waiting import until

WAIT_S = 20.0


class Steps:
    """A read of ``count`` items, one a batch, that waits in each batch until it is let go."""

    def __init__(
        self,
        count: int,
        *,
        bad: int | None = None,
        error: Exception | None = None,
        refuses: bool = False,
    ) -> None:
        self.batches = [(index, index + 1) for index in range(count)]
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.copied: list[int] = []
        self._bad = bad
        self._error = error
        self._refuses = refuses

    def copy(self, begin: int, end: int) -> int:
        self.begun.release()
        assert self.go.acquire(timeout=WAIT_S)
        if self._error is not None:
            raise self._error
        self.copied.append(begin)
        return 0 if begin == self._bad else end - begin

    def result(self, good: int) -> int:
        if self._refuses:
            raise CorruptionError("planted")
        return good

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=WAIT_S)

    def let_go(self, batches: int) -> None:
        self.go.release(batches)


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    engine = CopyEngine("test", threads=2)
    yield engine
    engine.close()


def one_thread() -> CopyEngine:
    return CopyEngine("test", threads=1, reads_max=4)


def ends_with(completion: Completion[int], error: type[KVPoolError]) -> None:
    until(completion.done)  # a wait would copy
    with pytest.raises(error):
        completion.result()


def test_all_batches_are_copied_once(engine: CopyEngine) -> None:
    steps = Steps(50)
    steps.let_go(50)
    assert engine.submit(steps, None, WAIT_S).wait(WAIT_S) == 50
    assert sorted(steps.copied) == list(range(50))


def test_one_read_runs_on_all_threads(engine: CopyEngine) -> None:
    steps = Steps(2)
    completion = engine.submit(steps, None, WAIT_S)
    steps.wait_begun()
    steps.wait_begun()  # both have begun before either has ended
    steps.let_go(2)
    assert completion.wait(WAIT_S) == 2


def test_the_first_bad_item_bounds_the_result(engine: CopyEngine) -> None:
    steps = Steps(30, bad=7)
    steps.let_go(30)
    assert engine.submit(steps, None, WAIT_S).wait(WAIT_S) == 7


def test_nothing_behind_a_bad_item_is_begun() -> None:
    engine = one_thread()
    steps = Steps(30, bad=7)
    steps.let_go(30)
    assert engine.submit(steps, None, WAIT_S).wait(WAIT_S) == 7
    assert steps.copied == list(range(8))
    engine.close()


def test_a_completion_waits_for_the_copy_that_a_cancel_finds_running(engine: CopyEngine) -> None:
    steps = Steps(10)
    completion = engine.submit(steps, None, WAIT_S)
    steps.wait_begun()
    completion.cancel()
    other = Steps(1)
    other.let_go(1)
    assert not completion.done()
    steps.let_go(2)
    ends_with(completion, CancelledTransferError)
    assert len(steps.copied) <= 2
    assert engine.submit(other, None, WAIT_S).wait(WAIT_S) == 1


def test_a_completion_waits_for_the_copy_that_its_deadline_finds_running() -> None:
    engine = one_thread()
    steps = Steps(10)
    deadline = Deadline(0.05)
    completion = engine.submit(steps, None, 0.05)
    begun = steps.begun.acquire(timeout=0.2)  # or the deadline passed first, on a slow machine
    until(deadline.passed)
    assert not (begun and completion.done())
    steps.let_go(1)
    ends_with(completion, TransferTimeoutError)
    assert len(steps.copied) == begun
    engine.close()


def test_a_queued_read_ends_at_its_deadline_while_another_is_copied(engine: CopyEngine) -> None:
    long = Steps(1000)
    running = engine.submit(long, None, WAIT_S)
    long.wait_begun()
    queued = engine.submit(Steps(1), None, 0.0)

    def ended_after_one_more() -> bool:
        long.let_go(1)
        return queued.done()

    until(ended_after_one_more)
    ends_with(queued, TransferTimeoutError)
    assert not running.done()
    long.let_go(1000)
    assert running.wait(WAIT_S) == 1000


def test_what_arrived_whole_is_a_result_however_late() -> None:
    engine = one_thread()
    steps = Steps(1)
    completion = engine.submit(steps, None, WAIT_S)
    steps.wait_begun()
    completion.cancel()
    steps.let_go(1)
    assert completion.wait(WAIT_S) == 1
    engine.close()


def test_end_reads_spares_other_owners(engine: CopyEngine) -> None:
    mine, others = Steps(5), Steps(5)
    ours = engine.submit(mine, "us", WAIT_S)
    theirs = engine.submit(others, "them", WAIT_S)
    mine.wait_begun()
    engine.end_reads("us", PeerUnreachableError("gone"))
    assert not ours.done()
    assert not engine.drain("us", 0.0)
    mine.let_go(5)
    ends_with(ours, PeerUnreachableError)
    assert engine.drain("us", WAIT_S)
    others.let_go(5)
    assert theirs.wait(WAIT_S) == 5


def test_close_ends_everything() -> None:
    engine = one_thread()
    running, queued = Steps(5), Steps(5)
    first, second = engine.submit(running, None, WAIT_S), engine.submit(queued, None, WAIT_S)
    running.wait_begun()
    thread = threading.Thread(target=engine.close)
    thread.start()
    ends_with(second, ClosedError)
    assert not first.done()
    running.let_go(1)
    ends_with(first, ClosedError)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert queued.copied == []
    with pytest.raises(ClosedError):
        engine.submit(Steps(1), None, WAIT_S)
    engine.close()


def test_more_reads_than_the_limit_are_refused() -> None:
    engine = one_thread()
    reads = [Steps(1) for _ in range(4)]
    completions = [engine.submit(read, None, WAIT_S) for read in reads]
    with pytest.raises(CapacityError):
        engine.submit(Steps(1), None, WAIT_S)
    for read in reads:
        read.let_go(1)
    for completion in completions:
        assert completion.wait(WAIT_S) == 1
    assert engine.submit(reads[0], None, 0.0) is not None
    engine.close()


@pytest.mark.parametrize(
    ("raised", "error"),
    [(CorruptionError("planted"), CorruptionError), (ValueError("planted"), InternalError)],
)
def test_a_copy_that_fails_ends_its_read(
    engine: CopyEngine, raised: Exception, error: type[KVPoolError]
) -> None:
    steps = Steps(5, error=raised)
    steps.let_go(5)
    ends_with(engine.submit(steps, None, WAIT_S), error)
    fine = Steps(1)
    fine.let_go(1)
    assert engine.submit(fine, None, WAIT_S).wait(WAIT_S) == 1


def _cancelled(engine: CopyEngine, read: Steps, completion: Completion[int]) -> None:
    completion.cancel()
    read.let_go(1)


def _lost(engine: CopyEngine, read: Steps, completion: Completion[int]) -> None:
    engine.end_reads(read, PeerUnreachableError("gone"))
    read.let_go(1)


def _to_its_end(engine: CopyEngine, read: Steps, completion: Completion[int]) -> None:
    read.let_go(2)


@pytest.mark.parametrize(
    ("end", "read"),
    [
        (_cancelled, lambda: Steps(2)),
        (_lost, lambda: Steps(2)),
        (_to_its_end, lambda: Steps(2)),
        (_to_its_end, lambda: Steps(2, error=CorruptionError("planted"))),
        (_to_its_end, lambda: Steps(2, error=ValueError("planted"))),
        (_to_its_end, lambda: Steps(2, refuses=True)),
    ],
)
@pytest.mark.parametrize("queued", [False, True])
def test_a_read_that_has_ended_is_kept_by_nobody(
    end: Callable[[CopyEngine, Steps, Completion[int]], None],
    read: Callable[[], Steps],
    queued: bool,
) -> None:
    """Not by an idle thread, and not by whoever keeps its error: it holds the peer's memory."""
    gc.disable()
    try:
        with_one = CopyEngine("test", threads=1)
        before = Steps(1)
        first = with_one.submit(before, before, WAIT_S)
        before.wait_begun()
        pull = read()
        kept = weakref.ref(pull)
        completion = with_one.submit(pull, pull, WAIT_S)
        if not queued:
            before.let_go(1)
            pull.wait_begun()
        end(with_one, pull, completion)
        del pull
        before.let_go(1)
        first.wait(WAIT_S)
        error: KVPoolError | None = None
        try:
            completion.wait(WAIT_S)
        except KVPoolError as failure:
            error = failure
        until(lambda: kept() is None)
        del error
        with_one.close()
    finally:
        gc.enable()


def test_bad_input(engine: CopyEngine) -> None:
    with pytest.raises(UsageError):
        engine.submit(Steps(0), None, WAIT_S)
    for deadline_s in (float("inf"), float("nan")):
        with pytest.raises(UsageError):
            engine.submit(Steps(1), None, deadline_s)


def test_who_waits_copies_too() -> None:
    """With every thread of the engine in another read, the waiter's read ends all the same."""
    engine = one_thread()
    long, short = Steps(2), Steps(3)
    running = engine.submit(long, None, WAIT_S)
    long.wait_begun()
    waited = engine.submit(short, None, WAIT_S)
    short.let_go(3)
    assert waited.wait(WAIT_S) == 3
    assert not running.done()
    long.let_go(2)
    assert running.wait(WAIT_S) == 2
    engine.close()


def test_a_wait_that_may_not_take_time_copies_nothing() -> None:
    engine = one_thread()
    long, short = Steps(1), Steps(1)
    running = engine.submit(long, None, WAIT_S)
    long.wait_begun()
    queued = engine.submit(short, None, WAIT_S)
    with pytest.raises(TransferTimeoutError):
        queued.wait(0.0)
    assert short.copied == []
    long.let_go(1)
    short.let_go(1)
    assert [running.wait(WAIT_S), queued.wait(WAIT_S)] == [1, 1]
    engine.close()


def test_who_helped_keeps_no_read(engine: CopyEngine) -> None:
    steps = Steps(1)
    steps.let_go(1)
    kept = engine.submit(steps, None, WAIT_S)
    assert kept.wait(WAIT_S) == 1
    gone = weakref.ref(steps)
    gc.disable()
    try:
        del steps
        until(lambda: gone() is None)
    finally:
        gc.enable()
    assert kept.done()


def test_a_read_that_nobody_waits_for_is_copied_all_the_same(engine: CopyEngine) -> None:
    for _ in range(3):  # the first finds everything asleep
        steps = Steps(1)
        steps.let_go(1)
        completion = engine.submit(steps, None, WAIT_S)
        until(completion.done)
        assert completion.result() == 1


def test_a_read_that_is_waited_for_is_copied_by_its_waiter_and_wakes_no_thread() -> None:
    class Named(Steps):
        def copy(self, begin: int, end: int) -> int:
            self.thread = threading.current_thread()
            return super().copy(begin, end)

    engine = CopyEngine("test", threads=0)
    steps = Named(1)
    steps.let_go(1)
    assert engine.submit(steps, None, WAIT_S).wait(WAIT_S) == 1
    assert steps.thread is threading.current_thread()
    engine.close()


def test_a_callback_has_a_read_begun_at_once(
    engine: CopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._bell, "ring", lambda: None)
    steps = Steps(1)
    steps.let_go(1)
    ended = threading.Event()
    engine.submit(steps, None, WAIT_S).add_done_callback(ended.set)
    assert ended.wait(WAIT_S)
