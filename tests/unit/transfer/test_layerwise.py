"""Layer streams: arrival, order, and what does not fit."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvpool.errors import (
    LayoutMismatchError,
    PeerUnreachableError,
    UsageError,
)
from kvpool.events import LayerRead, LayerReadBegun, SliceAnnounced, SliceArrived
from kvpool.testing.blocks import view_of
from kvpool.testing.lossy import Faults
from kvpool.testing.pair import empty
from kvpool.transfer.layerwise import Outbox
from kvpool.transfer.stream_wire import (
    slice_layout,
)
from tests.unit.transfer.streams import (
    BLOCKS,
    LAYERS,
    LAYOUT,
    SLOTS,
    WAIT_S,
    Two,
)


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


def test_layers_arrive_in_place_with_the_payload(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    for layer in range(LAYERS):
        two.send(sender, range(layer, layer + 1))
        assert receiver.completion.wait_layer(layer, WAIT_S)
        assert receiver.completion.layers_ready() == layer + 1
        size = (layer + 1) * LAYOUT.layer_bytes
        np.testing.assert_array_equal(two.out[:, :size], two.blocks[:, :size])
        assert not two.out[:, size:].any()
    assert not receiver.completion.done()
    sender.finish(b"tail", deadline_s=WAIT_S)
    assert receiver.completion.wait(WAIT_S) == b"tail"
    two.require_free()


def test_a_prompt_in_parts_in_any_order(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    view = view_of(LAYOUT, two.blocks)
    for begin in (12, 0, 7):
        end = {0: 7, 7: 12, 12: BLOCKS}[begin]
        for layer in reversed(range(LAYERS)):
            sender.send(layer, begin, view.take(begin, end), chunk=begin)
    sender.finish(b"", deadline_s=WAIT_S)
    assert receiver.completion.wait(WAIT_S) == b""
    np.testing.assert_array_equal(two.out, two.blocks)


def test_many_streams_share_one_outbox(two: Two) -> None:
    count = 12
    outs = [empty(LAYOUT, BLOCKS) for _ in range(count)]
    receivers = [
        two.receiving.expect(f"r{number}", view_of(LAYOUT, out), deadline_s=WAIT_S)
        for number, out in enumerate(outs)
    ]
    senders = [two.open(f"r{number}") for number in range(count)]
    for layer in range(LAYERS):
        for sender in senders:
            two.send(sender, range(layer, layer + 1))
    threads = [
        threading.Thread(target=sender.finish, args=(b"x",), kwargs={"deadline_s": WAIT_S})
        for sender in senders
    ]
    for thread in threads:
        thread.start()
    for receiver, out in zip(receivers, outs, strict=True):
        assert receiver.completion.wait(WAIT_S) == b"x"
        np.testing.assert_array_equal(out, two.blocks)
    for thread in threads:
        thread.join(WAIT_S)
    two.require_free()


def test_a_stream_of_no_blocks_carries_its_payload(two: Two) -> None:
    receiver = two.receiving.expect("r", view_of(LAYOUT, two.out[:0]), deadline_s=WAIT_S)
    sender = two.sending.open(two.endpoint, "r", two.outbox, LAYOUT, 0, deadline_s=WAIT_S)
    sender.finish(b"only this", deadline_s=WAIT_S)
    assert receiver.completion.wait(WAIT_S) == b"only this"
    assert receiver.completion.layers_ready() == LAYERS


def test_events_tell_the_order_and_the_bound_of_staging(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    two.send(sender)
    sender.finish(b"", deadline_s=WAIT_S)
    receiver.completion.wait(WAIT_S)
    events = two.events.events
    for kind in (SliceAnnounced, SliceArrived, LayerReadBegun, LayerRead):
        slices = sum(event.blocks for event in events if isinstance(event, kind))
        assert slices == LAYERS * BLOCKS
    announced = [event for event in events if isinstance(event, SliceAnnounced)]
    assert 0 < max(event.staged_bytes for event in announced) <= SLOTS * LAYOUT.layer_bytes
    for layer in range(LAYERS):
        # In the order in which they were written, none is ahead of its cause.
        kinds = [type(e) for e in events if getattr(e, "layer", -1) == layer]
        for cause, effect in ((SliceArrived, LayerReadBegun), (SliceArrived, LayerRead)):
            for end in range(len(kinds) + 1):
                assert kinds[:end].count(effect) <= kinds[:end].count(cause)
        arrived = [e.at_ns for e in events if isinstance(e, SliceArrived) and e.layer == layer]
        read = [e.at_ns for e in events if isinstance(e, LayerRead) and e.layer == layer]
        sent = [e.at_ns for e in announced if e.layer == layer]
        assert all(a <= b <= c for a, b, c in zip(sorted(sent), sorted(arrived), sorted(read),
                                                  strict=True))  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_a_busy_ring_only_slows_a_stream(seed: int) -> None:
    two = Two(Faults(busy=0.5), seed)
    receiver, sender = two.expect(), two.open()
    two.send(sender)
    sender.finish(b"tail", deadline_s=WAIT_S)
    assert receiver.completion.wait(WAIT_S) == b"tail"
    np.testing.assert_array_equal(two.out, two.blocks)
    assert two.here.faulted + two.there.faulted > 0
    two.require_free()
    two.close()


# ---- bad input ------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_anything_is_sent(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    view = view_of(LAYOUT, two.blocks)
    for layer, first, source in (
        (-1, 0, view),
        (LAYERS, 0, view),
        (0, -1, view),
        (0, 1, view),
        (0, 0, view.take(0, 0)),
        (0, BLOCKS, view.take(0, 1)),
    ):
        with pytest.raises(UsageError):
            sender.send(layer, first, source, chunk=0)
    with pytest.raises(LayoutMismatchError):
        sender.send(0, 0, view_of(slice_layout(LAYOUT), empty(slice_layout(LAYOUT), 1)), chunk=0)
    sender.send(0, 0, view.take(0, 5), chunk=0)
    with pytest.raises(UsageError):
        sender.send(0, 4, view.take(4, 6), chunk=0)
    with pytest.raises(UsageError):
        sender.finish(b"", deadline_s=WAIT_S)
    with pytest.raises(UsageError):
        sender.finish(bytes(901), deadline_s=WAIT_S)
    sender.send(0, 5, view.take(5, BLOCKS), chunk=0)
    two.send(sender, range(1, LAYERS))
    sender.finish(b"", deadline_s=WAIT_S)
    receiver.completion.wait(WAIT_S)
    np.testing.assert_array_equal(two.out, two.blocks)
    with pytest.raises(UsageError):
        sender.send(0, 0, view, chunk=0)


def test_the_hub_refuses_what_does_not_fit(two: Two) -> None:
    two.expect("twice")
    for request in ("twice", "", "x" * 257):
        with pytest.raises(UsageError):
            two.expect(request)
    with pytest.raises(UsageError):
        two.expect("r", deadline_s=float("inf"))
    with pytest.raises(UsageError):
        two.receiving.expect("r", replace(view_of(LAYOUT, two.out), writable=False), deadline_s=1.0)
    with pytest.raises(UsageError):
        two.sending.attach(two.endpoint)
    with pytest.raises(UsageError):
        two.sending.open(two.answering, "r", two.outbox, LAYOUT, 1, deadline_s=WAIT_S)
    with pytest.raises(LayoutMismatchError):
        wide = replace(LAYOUT, k_dim=8)
        two.sending.open(two.endpoint, "r", two.outbox, wide, 1, deadline_s=WAIT_S)
    with pytest.raises(LayoutMismatchError):
        Outbox(two.here, LAYOUT, 1)
    two.endpoint.close()
    with pytest.raises(PeerUnreachableError):
        two.open()
