"""What a load or a store over several servers began has ended before its caller is told of the end."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kvpool.base import StoreResult
from kvpool.client.gathering import Gathering, end_all, given_up
from kvpool.client.placing import ends_of
from kvpool.completion import Completion, CompletionSource
from kvpool.config import TransferConfig
from kvpool.errors import (
    CancelledTransferError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    UsageError,
)
from kvpool.testing.blocks import SMALL_LAYOUT, view_of
from kvpool.testing.pair import empty

if TYPE_CHECKING:
    from kvpool.client.nodes import Nodes
    from kvpool.client.parts import ClusterLease, Leaser

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


def test_a_load_whose_second_part_does_not_begin_leaves_nothing_under_way() -> None:
    """Whatever it raises: the first part writes no more, and the pool can close."""
    source: CompletionSource[int] = CompletionSource()

    def load(part: str, *_: object, **__: object) -> Completion[int]:
        if part == "second":
            raise RuntimeError("a bug")
        return source.completion

    node = SimpleNamespace(pool=SimpleNamespace(load=load))
    parts = [
        SimpleNamespace(begin=at, end=at + 1, node=node, lease=name)
        for at, name in enumerate(["first", "second"])
    ]
    gathering = Gathering(cast("Nodes", None), cast("Leaser", None), SMALL_LAYOUT, TransferConfig())
    dest = view_of(SMALL_LAYOUT, empty(SMALL_LAYOUT, 2))
    lease = cast("ClusterLease", SimpleNamespace(parts=parts))
    call = Beside(lambda: _error_of(lambda: gathering.start(lease, dest, 0, WAIT_S)))
    assert call.goes_on()
    assert source.cancel_requested
    source.cancelled()
    assert call.ended()
    assert isinstance(call.returned, RuntimeError)
    assert gathering._operations._count == 0
    gathering.join()


def _error_of(call: Callable[[], object]) -> RuntimeError | None:
    try:
        call()
    except RuntimeError as error:
        return error
    return None


def _listed(found: object) -> list[object]:
    assert isinstance(found, list)
    return found
