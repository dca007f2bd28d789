"""Layer streams in one process: both sides, what they refuse, and every slot comes back."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvpool.errors import (
    CancelledTransferError,
    ClosedError,
    CorruptionError,
    KVPoolError,
    LayoutMismatchError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.events import LayerRead, LayerReadBegun, ListSink, SliceAnnounced, SliceArrived
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.lossy import Faults, LossyTransport
from kvpool.testing.pair import Collected, empty
from kvpool.transfer.base import Endpoint
from kvpool.transfer.layerwise import LayerReceiver, LayerSender, Outbox, StreamHub
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kvpool.transfer.stream_wire import (
    slice_layout,
)

LAYOUT = SMALL_LAYOUT
LAYERS = LAYOUT.num_layers
BLOCKS = 20
SLOTS = 6
# What one peer may have of them.
SHARE = 4
WAIT_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S * 500)):
        if condition():
            return
        pause.wait(0.002)
    pytest.fail("the condition never came true")


class Two:
    """A sender with an outbox and a receiver, joined by a transport that can be made lossy."""

    def __init__(self, faults: Faults | None = None, seed: int = 1) -> None:
        network = LoopbackNetwork()
        self.events = ListSink()
        self.here = LossyTransport(LoopbackTransport(network), seed=seed, faults=faults)
        self.there = LossyTransport(LoopbackTransport(network), seed=seed + 1, faults=faults)
        self.sending, self.receiving = StreamHub(self.events), StreamHub(self.events)
        self.outbox = Outbox(self.here, slice_layout(LAYOUT), SLOTS)
        self.start = self.outbox.counts()
        connected = Collected()
        self.there.listen("there", connected)
        self.endpoint = self.here.connect("there", WAIT_S)
        answering = connected.wait(1)[0]
        assert isinstance(answering, Endpoint)
        self.answering = answering
        self.sending.attach(self.endpoint)
        self.receiving.attach(self.answering)
        self.blocks = payload(LAYOUT, BLOCKS, seed=3)
        self.out = empty(LAYOUT, BLOCKS)

    def expect(self, request: str = "r", deadline_s: float = WAIT_S) -> LayerReceiver:
        return self.receiving.expect(request, view_of(LAYOUT, self.out), deadline_s=deadline_s)

    def open(self, request: str = "r", deadline_s: float = WAIT_S) -> LayerSender:
        return self.sending.open(
            self.endpoint, request, self.outbox, LAYOUT, BLOCKS, deadline_s=deadline_s
        )

    def send(self, sender: LayerSender, layers: range = range(LAYERS)) -> None:
        for layer in layers:
            sender.send(layer, 0, view_of(LAYOUT, self.blocks), chunk=0)

    def require_free(self) -> None:
        until(lambda: self.outbox.counts() == self.start)

    def close(self) -> None:
        self.sending.close()
        self.receiving.close()
        self.here.close()
        self.there.close()
        self.outbox.close()


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


def fails(receiver: LayerReceiver, error: type[KVPoolError]) -> None:
    with pytest.raises(error):
        receiver.completion.wait(WAIT_S)


def sender_fails(sender: LayerSender, error: type[KVPoolError], reason: str = "") -> None:
    """The sender hears of a failure, soon; until then layers are missing for its finish."""

    def heard() -> bool:
        try:
            sender.finish(b"", deadline_s=WAIT_S)
        except error as raised:
            return reason in str(raised)
        except UsageError:
            return False
        return False

    until(heard)


# ---- streams that arrive --------------------------------------------------------------------------


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


# ---- streams that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("faults", [Faults(drop=0.1), Faults(short=0.2), Faults(lose=0.05)])
def test_under_faults_a_stream_is_exact_or_a_typed_error(faults: Faults, seed: int) -> None:
    two = Two(seed=seed)
    two.here.faults = two.there.faults = faults
    receiver = two.expect(deadline_s=0.5)
    try:
        sender = two.open(deadline_s=0.5)
        two.send(sender)
        sender.finish(b"tail", deadline_s=0.5)
    except KVPoolError as error:
        assert isinstance(
            error,
            CancelledTransferError | ClosedError | CorruptionError | PeerUnreachableError
            | TransferTimeoutError,
        )  # fmt: skip
    try:
        assert receiver.completion.wait(WAIT_S) == b"tail"
        np.testing.assert_array_equal(two.out, two.blocks)
    except KVPoolError as error:
        assert not isinstance(error, UsageError)
    assert receiver.completion.done()
    two.endpoint.close()
    two.require_free()
    two.close()


def test_a_slice_that_is_short_at_the_receiver_fails_both_sides(two: Two) -> None:
    two.there.faults = Faults(short=1.0)
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(1))
    fails(receiver, CorruptionError)
    sender_fails(sender, CorruptionError)
    two.require_free()


def test_abort_fails_the_receiver(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(1))
    assert receiver.completion.wait_layer(0, WAIT_S)
    sender.abort("out of memory")
    sender.abort("idempotent")
    with pytest.raises(CancelledTransferError, match="out of memory"):
        receiver.completion.wait(WAIT_S)
    with pytest.raises(CancelledTransferError):
        two.send(sender, range(1, 2))
    with pytest.raises(CancelledTransferError):
        sender.finish(b"", deadline_s=WAIT_S)
    two.require_free()


def test_cancel_fails_the_sender(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(1))
    assert receiver.completion.wait_layer(0, WAIT_S)  # before that the stream may be nobody's
    receiver.cancel("client went away")
    receiver.cancel("idempotent")
    fails(receiver, CancelledTransferError)

    sender_fails(sender, CancelledTransferError, "client went away")
    two.require_free()
    # The same request may be tried again.
    receiver, sender = two.expect(), two.open()
    two.send(sender)
    sender.finish(b"again", deadline_s=WAIT_S)
    assert receiver.completion.wait(WAIT_S) == b"again"


def test_cancelling_the_completion_cancels_the_stream(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(1))
    receiver.completion.cancel()
    fails(receiver, CancelledTransferError)
    two.require_free()


def test_cancel_before_the_sender_comes(two: Two) -> None:
    two.expect().cancel("changed its mind")
    sender = two.open()
    with pytest.raises(CancelledTransferError):
        two.send(sender)
        sender.finish(b"", deadline_s=WAIT_S)
    two.require_free()


def test_deadlines_of_either_side(two: Two) -> None:
    fails(two.expect("early", deadline_s=0.0), TransferTimeoutError)
    receiver, sender = two.expect("r", deadline_s=0.2), two.open("r")
    two.send(sender, range(1))
    fails(receiver, TransferTimeoutError)
    two.require_free()
    receiver, sender = two.expect("s"), two.open("s", deadline_s=0.2)
    two.send(sender, range(1))
    fails(receiver, TransferTimeoutError)
    with pytest.raises(TransferTimeoutError):
        sender.finish(b"", deadline_s=WAIT_S)
    two.require_free()


def test_finish_gives_up_at_its_deadline(two: Two) -> None:
    two.here.faults = Faults(drop=1.0)
    receiver, sender = two.expect(), two.open()
    two.send(sender)
    with pytest.raises(TransferTimeoutError):
        sender.finish(b"", deadline_s=0.05)
    assert two.outbox.counts().quarantined == SHARE  # the receiver may be reading, for all we know
    two.here.faults = Faults()
    two.endpoint.close()
    two.require_free()
    receiver.cancel("")


def test_another_layout_or_count_is_refused_on_both_sides(two: Two) -> None:
    other = replace(LAYOUT, num_layers=LAYERS + 1)
    for layout, count in ((other, BLOCKS), (LAYOUT, BLOCKS - 1)):
        receiver = two.expect()
        sender = two.sending.open(two.endpoint, "r", two.outbox, layout, count, deadline_s=WAIT_S)
        fails(receiver, LayoutMismatchError)
        sender_fails(sender, LayoutMismatchError)
    two.require_free()


def test_closing_a_hub_ends_its_streams_on_both_sides(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(2))
    two.receiving.close()
    two.receiving.close()
    assert receiver.completion.done()
    fails(receiver, ClosedError)
    with pytest.raises(ClosedError):
        two.expect("later")
    two.require_free()
    two.sending.close()
    with pytest.raises(ClosedError):
        two.open("later")


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
