import asyncio
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from kvpool.completion import LONGEST_S, CompletionSource, Deadline
from kvpool.errors import (
    CancelledTransferError,
    CorruptionError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)

WAIT_S = 20.0


def test_the_longest_wait_is_one_that_the_system_can_wait() -> None:
    for seconds in (float("inf"), 1e300, 1e12, 1e9):
        assert 0.9 * LONGEST_S < Deadline(seconds).remaining_s() <= LONGEST_S
        source: CompletionSource[int] = CompletionSource()
        waiter = threading.Timer(0.01, source.finish, [1])
        waiter.start()
        assert source.completion.wait(seconds) == 1
        waiter.join()
    assert threading.TIMEOUT_MAX > LONGEST_S


def interrupting(at: int) -> Callable[[FrameType, str, object], None]:
    """Press Ctrl-C at one of the points where Python looks for it."""
    looks = itertools.count()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and next(looks) == at:
            raise KeyboardInterrupt

    return look


def test_ctrl_c_at_any_point_of_a_wait_leaves_the_completion_whole() -> None:
    """Python looks for Ctrl-C where a function begins, and where one of C has ended."""
    for at in itertools.count():
        source: CompletionSource[int] = CompletionSource()
        passed_all = False
        sys.setprofile(interrupting(at))
        try:
            source.completion.wait(0.0)
        except (KeyboardInterrupt, RuntimeError):  # of a condition that lost its lock to Ctrl-C
            pass
        except TransferTimeoutError:
            passed_all = True
        finally:
            sys.setprofile(None)
        finisher = threading.Thread(target=source.finish, args=(at,), daemon=True)
        finisher.start()
        finisher.join(WAIT_S)
        assert not finisher.is_alive(), f"the lock is taken for good after look {at}"
        assert source.completion.wait(WAIT_S) == at
        if passed_all:
            break
    assert at > 10


@pytest.mark.parametrize("nonsense", [None, "1", b"1", float("nan"), [1.0], 10**400])
def test_a_deadline_that_is_no_number_is_refused(nonsense: float) -> None:
    with pytest.raises(UsageError):
        Deadline(nonsense)


def test_a_result_is_given_once() -> None:
    source: CompletionSource[int] = CompletionSource()
    done = source.completion
    assert not done.done()
    with pytest.raises(TransferTimeoutError):
        done.result()
    with pytest.raises(TransferTimeoutError):
        done.wait(0)
    assert source.finish(3)
    assert not source.finish(4)
    assert not source.fail(CorruptionError("late"))
    assert (done.done(), done.result(), done.wait(0)) == (True, 3, 3)


def test_an_error_is_raised_at_every_look() -> None:
    source: CompletionSource[int] = CompletionSource()
    assert source.fail(PeerUnreachableError("gone"))
    for _ in range(2):
        with pytest.raises(PeerUnreachableError, match="gone"):
            source.completion.wait(0)


def test_none_is_a_result() -> None:
    source: CompletionSource[None] = CompletionSource()
    source.finish(None)
    assert source.completion.done()
    source.completion.wait(0)


def test_cancel_is_a_request_and_the_source_decides() -> None:
    source: CompletionSource[int] = CompletionSource()
    requested = [source.cancel_requested]
    for _ in range(2):
        source.completion.cancel()
        requested.append(source.cancel_requested)
    assert requested == [False, True, True]
    assert not source.completion.done()
    source.cancelled()
    with pytest.raises(CancelledTransferError):
        source.completion.result()


def test_a_result_that_came_first_wins_over_a_cancel() -> None:
    source: CompletionSource[int] = CompletionSource()
    source.finish(1)
    source.completion.cancel()
    source.cancelled()
    assert source.completion.result() == 1


def test_layers_only_go_forward_and_stop_at_the_end() -> None:
    source: CompletionSource[int] = CompletionSource()
    done = source.completion
    source.advance(2)
    source.advance(1)
    assert done.layers_ready() == 2
    assert done.wait_layer(1, 0)
    with pytest.raises(TransferTimeoutError):
        done.wait_layer(2, 0)
    source.finish(0)
    source.advance(3)
    assert done.layers_ready() == 2
    assert not done.wait_layer(2, WAIT_S)


def test_waiting_threads_wake_at_a_layer_and_at_the_end() -> None:
    source: CompletionSource[int] = CompletionSource()
    seen: list[object] = []
    threads = [
        threading.Thread(target=lambda: seen.append(source.completion.wait_layer(0, WAIT_S))),
        threading.Thread(target=lambda: seen.append(source.completion.wait(WAIT_S))),
    ]
    for thread in threads:
        thread.start()
    source.advance(1)
    threads[0].join(WAIT_S)
    assert seen == [True]
    source.finish(7)
    threads[1].join(WAIT_S)
    assert seen == [True, 7]


def test_callbacks_run_once_before_or_after_the_end() -> None:
    source: CompletionSource[int] = CompletionSource()
    calls: list[str] = []
    source.completion.add_done_callback(lambda: calls.append("before"))
    assert calls == []
    source.finish(1)
    source.finish(2)
    source.completion.add_done_callback(lambda: calls.append("after"))
    assert calls == ["before", "after"]


def test_a_callback_that_raises_takes_nobody_elses_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source: CompletionSource[int] = CompletionSource()
    calls: list[int] = []
    source.completion.add_done_callback(lambda: 1 // 0)
    source.completion.add_done_callback(lambda: calls.append(source.completion.result()))
    assert source.finish(5)
    assert calls == [5]
    assert "callback" in caplog.text


def test_await_gives_the_result_and_the_error() -> None:
    async def both() -> None:
        good: CompletionSource[int] = CompletionSource()
        bad: CompletionSource[int] = CompletionSource()
        thread = threading.Thread(
            target=lambda: (good.finish(9), bad.fail(CorruptionError("a flipped bit")))
        )
        thread.start()
        assert await good.completion == 9
        with pytest.raises(CorruptionError):
            await bad.completion
        assert await good.completion == 9
        thread.join(WAIT_S)

    asyncio.run(both())


def test_cancelling_an_awaiting_task_leaves_the_operation_alone() -> None:
    source: CompletionSource[int] = CompletionSource()

    async def cancel() -> None:
        async def wait() -> int:
            return await source.completion

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not source.cancel_requested
    assert source.finish(1)  # the loop that waited is closed by now
    assert source.completion.result() == 1


def test_the_end_reaches_nobody_when_the_loop_has_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source: CompletionSource[int] = CompletionSource()

    async def begin() -> None:
        source.completion.__await__().send(None)

    asyncio.run(begin())
    assert source.finish(1)
    assert caplog.text == ""


def test_a_deadline_passes() -> None:
    assert Deadline(0).passed()
    assert Deadline(-1).remaining_s() == 0
    later = Deadline(1000)
    assert not later.passed()
    assert 0 < later.remaining_s() <= 1000
