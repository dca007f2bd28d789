"""The progress thread: descriptors, posted calls, timers, and its end."""

import os
import selectors
import threading
from collections.abc import Iterator

import pytest

from kvpool.errors import UsageError
from kvpool.transfer.progress import ProgressLoop

WAIT_S = 20.0


@pytest.fixture
def loop() -> Iterator[ProgressLoop]:
    loop = ProgressLoop("test-progress")
    yield loop
    loop.close()


def test_posted_calls_run_in_order_on_its_thread(loop: ProgressLoop) -> None:
    ran: list[tuple[int, bool]] = []
    for number in range(100):
        assert loop.post(lambda number=number: ran.append((number, loop.on_thread())))  # type: ignore[misc]
    assert loop.run(lambda: None, WAIT_S)
    assert ran == [(number, True) for number in range(100)]
    assert not loop.on_thread()


def test_run_from_its_own_thread_runs_at_once(loop: ProgressLoop) -> None:
    inner: list[bool] = []
    assert loop.run(lambda: inner.append(loop.run(lambda: None, 0.0)), WAIT_S)
    assert inner == [True]


def test_a_callback_that_raises_is_logged_and_the_loop_goes_on(
    loop: ProgressLoop, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("planted")

    assert loop.run(fail, WAIT_S)
    assert loop.run(lambda: None, WAIT_S)
    assert "planted" in caplog.text


def test_a_descriptor_is_watched_until_it_is_not(loop: ProgressLoop) -> None:
    reader, writer = os.pipe()
    seen = threading.Semaphore(0)

    def readable() -> None:
        os.read(reader, 1)
        seen.release()

    assert loop.run(lambda: loop.watch(reader, selectors.EVENT_READ, readable), WAIT_S)
    for _ in range(3):
        os.write(writer, b"x")
        assert seen.acquire(timeout=WAIT_S)
    assert loop.run(lambda: loop.unwatch(reader), WAIT_S)
    assert loop.run(lambda: loop.unwatch(reader), WAIT_S)
    os.write(writer, b"x")
    assert loop.run(lambda: None, WAIT_S)
    assert not seen.acquire(blocking=False)
    os.close(reader)
    os.close(writer)


def test_a_callback_may_unwatch_another_that_is_ready(loop: ProgressLoop) -> None:
    pipes = [os.pipe(), os.pipe()]
    ran: list[int] = []

    def ready(number: int) -> None:
        ran.append(number)
        for reader, _ in pipes:
            loop.unwatch(reader)

    def watch() -> None:
        for number, (reader, writer) in enumerate(pipes):
            os.write(writer, b"x")
            loop.watch(reader, selectors.EVENT_READ, lambda number=number: ready(number))  # type: ignore[misc]

    assert loop.run(watch, WAIT_S)
    assert loop.run(lambda: None, WAIT_S)
    assert loop.run(lambda: None, WAIT_S)
    assert len(ran) == 1
    for pair in pipes:
        for fd in pair:
            os.close(fd)


def test_timers_run_in_the_order_of_their_times(loop: ProgressLoop) -> None:
    ran: list[str] = []
    done = threading.Event()

    def set_timers() -> None:
        loop.call_later(0.02, done.set)
        loop.call_later(0.01, lambda: ran.append("second"))
        loop.call_later(0.0, lambda: ran.append("first"))

    assert loop.post(set_timers)
    assert done.wait(WAIT_S)
    assert ran == ["first", "second"]


def test_a_timer_of_years_does_not_end_the_thread(loop: ProgressLoop) -> None:
    assert loop.run(lambda: loop.call_later(1e12, lambda: None), WAIT_S)
    ran = threading.Event()
    assert loop.post(ran.set)
    assert ran.wait(WAIT_S)
    assert loop.run(lambda: None, WAIT_S)


def test_close_runs_what_was_posted_and_refuses_more() -> None:
    loop = ProgressLoop("test-progress")
    ran: list[int] = []
    assert loop.post(lambda: ran.append(1))
    loop.close()
    loop.close()
    assert ran == [1]
    assert not loop.post(lambda: ran.append(2))
    assert not loop.run(lambda: ran.append(3), WAIT_S)
    assert ran == [1]


def test_it_cannot_close_itself(loop: ProgressLoop) -> None:
    refused: list[bool] = []

    def close() -> None:
        try:
            loop.close()
        except UsageError:
            refused.append(True)

    assert loop.run(close, WAIT_S)
    assert refused == [True]


def test_it_leaves_no_descriptor_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ProgressLoop("test-progress").close()
    assert len(os.listdir("/proc/self/fd")) <= before
