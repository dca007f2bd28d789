"""The outbox: what one peer may have of it."""

from collections.abc import Iterator

import pytest

from kvpool.errors import LayoutMismatchError
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kvpool.transfer.outbox import Outbox
from kvpool.transfer.stream_wire import slice_layout


@pytest.fixture
def transport() -> Iterator[LoopbackTransport]:
    with LoopbackTransport(LoopbackNetwork()) as transport:
        yield transport


def fill(outbox: Outbox, peer: str) -> int:
    """Reserve for a peer until it gets no more."""
    total = 0
    while taken := len(outbox.reserve(3, peer)):
        total += taken
    return total


@pytest.mark.parametrize("slots", [2, 8, 100, 1000])
def test_peers_that_stop_leave_room_for_others(transport: LoopbackTransport, slots: int) -> None:
    outbox = Outbox(transport, slice_layout(SMALL_LAYOUT), slots)
    assert 1 <= fill(outbox, "stopped") <= max(1, slots * 4 // 5)
    assert fill(outbox, "stopped") == 0
    left = outbox.counts().free
    assert 1 <= fill(outbox, "well") <= max(1, left * 4 // 5)
    outbox.close()


def test_what_comes_back_may_be_taken_again(transport: LoopbackTransport) -> None:
    outbox = Outbox(transport, slice_layout(SMALL_LAYOUT), 10)
    first = fill(outbox, "a")
    slots = outbox.reserve(1, "b")
    outbox.arena.release(slots)
    outbox.give_back(len(slots), "b")
    assert fill(outbox, "a") == 0
    outbox.give_back(first, "a")  # as a peer that is gone: nothing is counted for it any more
    assert outbox._held == {}
    assert len(outbox.reserve(5, "a")) == 1
    outbox.close()


def test_one_slot_is_enough(transport: LoopbackTransport) -> None:
    outbox = Outbox(transport, slice_layout(SMALL_LAYOUT), 1)
    assert fill(outbox, "a") == 1
    assert fill(outbox, "b") == 0
    outbox.close()


def test_an_outbox_holds_single_layers(transport: LoopbackTransport) -> None:
    with pytest.raises(LayoutMismatchError):
        Outbox(transport, SMALL_LAYOUT, 1)
