"""What a load or a store over several servers began has ended before its caller is told of the end."""

import threading
from collections.abc import Callable

import pytest

from kvpool.base import StoreResult
from kvpool.client.gathering import end_all, given_up
from kvpool.client.placing import ends_of
from kvpool.completion import CompletionSource
from kvpool.errors import (
    CancelledTransferError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    UsageError,
)

WAIT_S = 20.0


class Beside:
    """A call on a thread of its own, and what it returned."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.returned: object = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.returned = self._call()

    def goes_on(self) -> bool:
        self._thread.join(0.2)
        return self._thread.is_alive()

    def ended(self) -> bool:
        self._thread.join(WAIT_S)
        return not self._thread.is_alive()


@pytest.mark.parametrize("error", [UsageError("not yours"), InternalError("a bug")])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_store_that_fails_waits_for_the_others(error: KVPoolError, at_once: bool) -> None:
    failed, slow = CompletionSource[StoreResult](), CompletionSource[StoreResult]()
    failed.fail(error)
    sent = [error if at_once else failed.completion, slow.completion]
    call = Beside(lambda: ends_of(sent, CompletionSource()))
    assert call.goes_on()
    slow.finish(StoreResult(3, 3))
    assert call.ended()
    assert call.returned == [error, StoreResult(3, 3)]


def test_a_store_that_is_cancelled_waits_for_all() -> None:
    ended: CompletionSource[StoreResult] = CompletionSource()
    first, second = (CompletionSource[StoreResult]() for _ in range(2))
    ended.completion.cancel()
    call = Beside(lambda: ends_of([first.completion, second.completion], ended))
    assert call.goes_on()
    assert first.cancel_requested
    assert second.cancel_requested
    first.cancelled()
    assert call.goes_on()
    second.cancelled()
    assert call.ended()
    assert [type(one) for one in _listed(call.returned)] == 2 * [CancelledTransferError]


@pytest.mark.parametrize("good", [0, 2])
def test_a_pull_that_is_given_up_is_waited_for(good: int) -> None:
    """Another replica is read into the same memory then."""
    source: CompletionSource[int] = CompletionSource()
    call = Beside(lambda: given_up(source.completion))
    assert call.goes_on()
    assert source.cancel_requested
    if good:
        source.finish(good)
    else:
        source.cancelled()
    assert call.ended()
    assert call.returned == good
    assert given_up(PeerUnreachableError("it did not begin")) == 0


def test_pulls_are_all_cancelled_and_then_waited_for() -> None:
    done, first, second = (CompletionSource[int]() for _ in range(3))
    done.finish(1)
    call = Beside(lambda: end_all([done.completion, first.completion, second.completion]))
    assert call.goes_on()
    assert first.cancel_requested
    assert second.cancel_requested
    first.cancelled()
    assert call.goes_on()
    second.finish(2)
    assert call.ended()


def _listed(found: object) -> list[object]:
    assert isinstance(found, list)
    return found
