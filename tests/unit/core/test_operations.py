import gc
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpool.completion import Completion, CompletionSource
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    CorruptionError,
    InternalError,
    TransferTimeoutError,
)
from kvpool.operations import Operations

WAIT_S = 20.0


@pytest.fixture
def operations() -> Iterator[Operations]:
    operations = Operations(threads=1, operations_max=2)
    yield operations
    operations.close(WAIT_S)


@contextmanager
def held_back() -> Iterator[Operations]:
    """Operations whose one thread is busy until the end of the ``with``."""
    operations = Operations(threads=1, operations_max=4)
    end = threading.Event()
    operations._threads.submit(end.wait, WAIT_S)
    try:
        yield operations
    finally:
        end.set()
        operations.close(WAIT_S)


def test_a_result_ends_the_completion(operations: Operations) -> None:
    source: CompletionSource[str] = CompletionSource()
    operations.enter()
    done = operations.run(source, lambda: threading.current_thread().name)
    assert done.wait(WAIT_S).startswith("kvpool-copy")


def test_an_error_of_ours_ends_it_as_it_is(operations: Operations) -> None:
    def work() -> int:
        raise CorruptionError("a flipped bit")

    operations.enter()
    with pytest.raises(CorruptionError, match="flipped"):
        operations.run(CompletionSource[int](), work).wait(WAIT_S)


def test_any_other_error_is_a_bug_of_ours(
    operations: Operations, caplog: pytest.LogCaptureFixture
) -> None:
    operations.enter()
    with pytest.raises(InternalError, match="ZeroDivisionError") as caught:
        operations.run(CompletionSource[int](), lambda: 1 // 0).wait(WAIT_S)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "failed" in caplog.text


def test_more_than_the_limit_is_refused(operations: Operations) -> None:
    gate = threading.Event()
    started = [CompletionSource[bool](), CompletionSource[bool]()]
    for source in started:
        operations.enter()
        operations.run(source, lambda: gate.wait(WAIT_S))
    with pytest.raises(CapacityError, match="2 loads and stores"):
        operations.enter()
    gate.set()
    for source in started:
        assert source.completion.wait(WAIT_S)
    operations.enter()
    operations.leave()


def test_a_look_raises_what_ends_the_operation(operations: Operations) -> None:
    source: CompletionSource[int] = CompletionSource()
    look = operations.look(source, WAIT_S)
    look()
    source.completion.cancel()
    with pytest.raises(CancelledTransferError):
        look()
    with pytest.raises(TransferTimeoutError):
        operations.look(CompletionSource[int](), 0)()
    operations.close(WAIT_S)
    with pytest.raises(ClosedError):
        look()


def test_close_waits_for_what_is_under_way_and_ends_what_is_queued(operations: Operations) -> None:
    running, gate = threading.Event(), threading.Event()
    first: CompletionSource[int] = CompletionSource()
    second: CompletionSource[int] = CompletionSource()

    def work() -> int:
        running.set()
        assert gate.wait(WAIT_S)
        return 1

    def look_first() -> int:
        operations.look(second, WAIT_S)()
        return 2

    operations.enter()
    operations.run(first, work)
    operations.enter()
    operations.run(second, look_first)
    assert running.wait(WAIT_S)
    closing = threading.Thread(target=operations.close, args=(WAIT_S,))
    closing.start()
    assert not first.completion.done()
    while not operations._closed:
        assert closing.is_alive()
    gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert first.completion.result() == 1
    with pytest.raises(ClosedError):
        second.completion.result()
    with pytest.raises(ClosedError):
        operations.enter()


def test_close_gives_up_after_its_time(operations: Operations) -> None:
    gate = threading.Event()
    source: CompletionSource[bool] = CompletionSource()
    operations.enter()
    operations.run(source, lambda: gate.wait(WAIT_S))
    operations.close(0.01)
    assert not source.completion.done()
    gate.set()
    assert source.completion.wait(WAIT_S)


def test_an_operation_entered_before_close_still_ends(operations: Operations) -> None:
    source: CompletionSource[int] = CompletionSource()
    operations.enter()
    operations.close(0)

    def work() -> int:
        operations.look(source, WAIT_S)()
        return 1

    with pytest.raises(ClosedError):
        operations.run(source, work).wait(0)


def test_an_operation_that_is_alone_runs_in_the_thread_that_waits() -> None:
    with held_back() as operations:
        source: CompletionSource[str] = CompletionSource()
        operations.enter()
        operations.look(source, WAIT_S)
        done = operations.run(source, lambda: threading.current_thread().name)
        assert done.wait(WAIT_S) == threading.current_thread().name


def test_a_waiter_with_less_time_than_the_operation_leaves_it_to_a_thread() -> None:
    with held_back() as operations:
        source: CompletionSource[str] = CompletionSource()
        operations.enter()
        operations.look(source, WAIT_S)
        done = operations.run(source, lambda: threading.current_thread().name)
        with pytest.raises(TransferTimeoutError):
            done.wait(0.0)
    assert done.wait(WAIT_S).startswith("kvpool-copy")


def test_of_several_operations_none_runs_in_the_thread_that_waits() -> None:
    with held_back() as operations:
        started: list[Completion[str]] = []
        for _ in range(2):
            source: CompletionSource[str] = CompletionSource()
            operations.enter()
            operations.look(source, 0.0)
            started.append(operations.run(source, lambda: threading.current_thread().name))
        for done in started:
            with pytest.raises(TransferTimeoutError):
                done.wait(0.0)
    assert all(done.wait(WAIT_S).startswith("kvpool-copy") for done in started)


def test_who_waits_for_a_device_holds_nobody_up_and_is_no_waiters_to_run() -> None:
    operations = Operations(threads=1, operations_max=4, device_max=2)
    end = threading.Event()

    def wait() -> str:
        assert end.wait(WAIT_S)
        return threading.current_thread().name

    waiting: list[Completion[str]] = []
    for _ in range(2):
        operations.enter_device()
        waiting.append(operations.run_device(CompletionSource(), wait))
    with pytest.raises(CapacityError, match="2 stores wait for the device"):
        operations.enter_device()
    for done in waiting:
        with pytest.raises(TransferTimeoutError):
            done.wait(0.0)
    source: CompletionSource[str] = CompletionSource()
    operations.enter()
    operations.look(source, 0.0)
    copied = operations.run(source, lambda: threading.current_thread().name)
    assert (
        copied.wait(WAIT_S) == threading.current_thread().name
    )  # alone, as if the others were not
    end.set()
    assert all("device" in done.wait(WAIT_S) for done in waiting)
    operations.enter_device()
    assert "device" in operations.run_device(CompletionSource(), wait).wait(WAIT_S)
    operations.enter_device()
    operations.close(0.0)  # one is entered, and not begun
    assert operations.run_device(CompletionSource(), lambda: "here").wait(0.0) == "here"
    with pytest.raises(ClosedError):
        operations.enter_device()
    operations.close(WAIT_S)


def test_a_waiter_that_is_interrupted_ends_the_operation_that_it_ran() -> None:
    def work() -> int:
        raise KeyboardInterrupt

    with held_back() as operations:
        source: CompletionSource[int] = CompletionSource()
        operations.enter()
        operations.look(source, WAIT_S)
        done = operations.run(source, work)
        with pytest.raises(KeyboardInterrupt):
            done.wait(WAIT_S)
        with pytest.raises(CancelledTransferError, match="interrupted"):
            done.wait(WAIT_S)


def test_a_forked_child_runs_nothing_of_its_parents() -> None:
    with held_back() as operations:
        source: CompletionSource[int] = CompletionSource()
        operations.enter()
        operations.look(source, 0.0)
        done = operations.run(source, lambda: 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from 3.12 on
            child = os.fork()
        if child == 0:
            try:
                done.wait(0.0)
            except TransferTimeoutError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    assert done.wait(WAIT_S) == 1


def test_an_operation_that_nobody_waits_for_runs_all_the_same(operations: Operations) -> None:
    for _ in range(3):  # the first finds everything asleep
        ran = threading.Event()
        operations.enter()
        done = operations.run(CompletionSource[None](), ran.set)
        assert ran.wait(WAIT_S)
        assert done.wait(WAIT_S) is None


def never_late(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it to those who ask for an operation to have it begun."""
    monkeypatch.setattr(operations._bell, "ring", lambda: None)


def test_a_waiter_wakes_no_thread(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    never_late(operations, monkeypatch)
    monkeypatch.setattr(operations._threads, "submit", lambda run: pytest.fail("a thread is woken"))
    source: CompletionSource[int] = CompletionSource()
    operations.enter()
    operations.look(source, WAIT_S)
    assert operations.run(source, lambda: 1).wait(WAIT_S) == 1
    assert operations._late is None


def test_whoever_asks_for_an_operation_has_it_begun(
    operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_late(operations, monkeypatch)
    ended = threading.Event()
    operations.enter()
    operations.run(CompletionSource[int](), lambda: 1).add_done_callback(ended.set)
    assert ended.wait(WAIT_S)
    source: CompletionSource[int] = CompletionSource()

    def work() -> int:
        source.advance(1)
        return 1

    operations.enter()
    assert operations.run(source, work).wait_layer(0, WAIT_S)


def test_a_second_operation_has_the_first_begun(
    operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_late(operations, monkeypatch)
    begun = [threading.Event(), threading.Event()]
    operations.enter()
    operations.run(CompletionSource[None](), begun[0].set)
    operations.enter()
    operations.run(CompletionSource[None](), begun[1].set)
    assert all(event.wait(WAIT_S) for event in begun)


def test_close_ends_what_nobody_has_asked_for(
    operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_late(operations, monkeypatch)
    source: CompletionSource[int] = CompletionSource()
    look = operations.look(source, WAIT_S)

    def work() -> int:
        look()
        return 1

    operations.enter()
    done = operations.run(source, work)
    operations.close(WAIT_S)
    with pytest.raises(ClosedError):
        done.result()


def test_operations_that_are_forgotten_leave_no_thread() -> None:
    operations = Operations(threads=1, operations_max=1)
    bell = operations._bell._thread
    assert bell.is_alive()
    del operations
    gc.collect()
    bell.join(WAIT_S)
    assert not bell.is_alive()
