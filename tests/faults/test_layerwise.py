"""Layer streams between processes, one of which dies or stops: typed errors in time, and no slot lost."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import (
    CancelledTransferError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.events import ListSink
from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import Collected, empty
from kvpool.transfer.base import Endpoint
from kvpool.transfer.choice import TransportKind, listen_address, open_transport
from kvpool.transfer.layerwise import LayerReceiver, LayerSender, Outbox, StreamHub
from kvpool.transfer.stream_wire import slice_layout
from tests.conftest import Count
from tests.faults.peer import BLOCKS, LAYOUT, SEED, WAIT_S, Peer, peer
from tests.waiting import until

# Few enough that a stream stands still at once when its receiver does.
OUTBOX_SLOTS = 8
# What one peer may have of them.
SHARE = 6
# The deadline of what is expected to time out; long enough for everything else.
SHORT_S = 0.5


class Survivor:
    """This process: a transport that listens, a hub and an outbox."""

    def __init__(self, folder: Path, kind: TransportKind) -> None:
        self.kind: TransportKind = kind
        self.transport = open_transport(kind, "survivor")
        self.hub = StreamHub(ListSink())
        self.outbox = Outbox(self.transport, slice_layout(LAYOUT), OUTBOX_SLOTS)
        self.start = self.outbox.counts()
        self.connected = Collected()
        self.path = self.transport.listen(listen_address(kind, folder / "survivor"), self._connect)
        self.blocks = payload(LAYOUT, BLOCKS, SEED)

    def _connect(self, endpoint: Endpoint) -> None:
        self.hub.attach(endpoint)
        self.connected(endpoint)

    def meet(self, other: Peer) -> Endpoint:
        """Let a peer connect."""
        before = len(self.connected.items)
        other.do("connect", path=self.path)
        endpoint = self.connected.wait(before + 1)[-1]
        assert isinstance(endpoint, Endpoint)
        return endpoint

    def open(self, endpoint: Endpoint, request: str, deadline_s: float = WAIT_S) -> LayerSender:
        """Open a stream of BLOCKS blocks."""
        return self.hub.open(endpoint, request, self.outbox, LAYOUT, BLOCKS, deadline_s=deadline_s)

    def send_all(self, sender: LayerSender) -> None:
        """Send every layer."""
        for layer in range(LAYOUT.num_layers):
            sender.send(layer, 0, view_of(LAYOUT, self.blocks), chunk=0)

    def require_free(self) -> None:
        """Wait until the outbox is as it was at the start."""
        until(lambda: self.outbox.counts() == self.start)

    def close(self) -> None:
        self.hub.close()
        self.transport.close()
        self.outbox.close()


@pytest.fixture(params=["host", pytest.param("ucx", marks=pytest.mark.ucx)])
def survivor(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Survivor]:
    survivor = Survivor(tmp_path, request.param)
    yield survivor
    survivor.close()


def require_unwritten(out: np.ndarray, receiver: LayerReceiver) -> None:
    """Nothing writes to a destination whose completion is done."""
    assert receiver.completion.done()
    out[:] = 7
    assert bool((out == 7).all())


# ---- we send, the receiver is a process -----------------------------------------------------------


def test_a_stream_between_processes(survivor: Survivor) -> None:
    with peer(survivor.kind) as other:
        endpoint = survivor.meet(other)
        for number in range(3):
            other.do("expect", request=f"r{number}", deadline_s=WAIT_S)
            sender = survivor.open(endpoint, f"r{number}")
            survivor.send_all(sender)
            sender.finish(b"tail", deadline_s=WAIT_S)
            assert other.do("received") == "tail"
            assert other.do("exact")
            survivor.require_free()


def test_the_receiver_is_killed(survivor: Survivor) -> None:
    with peer(survivor.kind) as other:
        endpoint = survivor.meet(other)
        other.do("expect", request="r", deadline_s=WAIT_S)
        sender = survivor.open(endpoint, "r")
        other.stop()
        survivor.send_all(sender)
        assert survivor.outbox.counts().ready == SHARE
        other.kill()
        with pytest.raises(PeerUnreachableError):
            sender.finish(b"", deadline_s=WAIT_S)
        with pytest.raises(PeerUnreachableError):
            sender.send(0, 0, view_of(LAYOUT, survivor.blocks), chunk=0)
        sender.abort("harmless now")
        survivor.require_free()
        with pytest.raises(PeerUnreachableError):
            survivor.open(endpoint, "another")
    with peer(survivor.kind) as next_one:  # the survivor serves on
        endpoint = survivor.meet(next_one)
        next_one.do("expect", request="r", deadline_s=WAIT_S)
        sender = survivor.open(endpoint, "r")
        survivor.send_all(sender)
        sender.finish(b"tail", deadline_s=WAIT_S)
        assert next_one.do("received") == "tail"
        assert next_one.do("exact")


def test_the_receiver_stops_and_goes_on(survivor: Survivor) -> None:
    with peer(survivor.kind) as other:
        endpoint = survivor.meet(other)
        other.do("expect", request="r", deadline_s=WAIT_S)
        sender = survivor.open(endpoint, "r")
        other.stop()
        survivor.send_all(sender)
        with pytest.raises(TransferTimeoutError):
            sender.finish(b"", deadline_s=SHORT_S)
        counts = survivor.outbox.counts()
        assert (counts.quarantined, counts.grants) == (SHARE, SHARE)
        assert counts.free == OUTBOX_SLOTS - SHARE
        other.resume()
        survivor.require_free()
        assert other.do("received") == "TransferTimeoutError"
        # The same two go on with another stream.
        other.do("expect", request="r2", deadline_s=WAIT_S)
        sender = survivor.open(endpoint, "r2")
        survivor.send_all(sender)
        sender.finish(b"tail", deadline_s=WAIT_S)
        assert other.do("received") == "tail"
        assert other.do("exact")


def test_the_receiver_stops_and_is_killed(survivor: Survivor) -> None:
    with peer(survivor.kind) as other:
        endpoint = survivor.meet(other)
        other.do("expect", request="r", deadline_s=WAIT_S)
        sender = survivor.open(endpoint, "r")
        other.stop()
        survivor.send_all(sender)
        sender.abort("enough")
        assert survivor.outbox.counts().quarantined == SHARE
        other.kill()
        survivor.require_free()


def test_a_stopped_receiver_leaves_room_for_others(survivor: Survivor) -> None:
    """What it does not acknowledge fills its share of the outbox, and no more."""
    with peer(survivor.kind) as stopped, peer(survivor.kind) as other:
        first, second = survivor.meet(stopped), survivor.meet(other)
        stopped.do("expect", request="r", deadline_s=WAIT_S)
        other.do("expect", request="r", deadline_s=WAIT_S)
        held_up = survivor.open(first, "r")
        stopped.stop()
        survivor.send_all(held_up)
        sender = survivor.open(second, "r")
        survivor.send_all(sender)
        sender.finish(b"tail", deadline_s=WAIT_S)
        assert other.do("received") == "tail"
        assert other.do("exact")
        assert survivor.outbox.counts().ready == SHARE
        stopped.resume()
        held_up.finish(b"late", deadline_s=WAIT_S)
        assert stopped.do("received") == "late"
        survivor.require_free()


def test_a_stream_that_nobody_expects(survivor: Survivor) -> None:
    with peer(survivor.kind) as other:
        sender = survivor.open(survivor.meet(other), "unknown")
        with pytest.raises(CancelledTransferError):
            survivor.send_all(sender)
            sender.finish(b"", deadline_s=WAIT_S)
        survivor.require_free()


# ---- we receive, the sender is a process ----------------------------------------------------------


def test_the_sender_is_killed(survivor: Survivor) -> None:
    with peer(survivor.kind) as other:
        survivor.meet(other)
        out = empty(LAYOUT, BLOCKS)
        receiver = survivor.hub.expect("r", view_of(LAYOUT, out), deadline_s=WAIT_S)
        other.do("open", request="r", slots=OUTBOX_SLOTS, deadline_s=WAIT_S)
        assert other.do("send", layers=2) == "sent"
        assert receiver.completion.wait_layer(1, WAIT_S)
        other.kill()
        with pytest.raises(PeerUnreachableError):
            receiver.completion.wait(WAIT_S)
        assert receiver.completion.layers_ready() == 2
        size = 2 * LAYOUT.layer_bytes
        np.testing.assert_array_equal(out[:, :size], survivor.blocks[:, :size])
        require_unwritten(out, receiver)


def test_the_sender_is_killed_while_slices_are_on_their_way(
    survivor: Survivor, count: Count
) -> None:
    rng = random.Random(3)
    pause = threading.Event()
    for number in range(count(3, 100)):
        with peer(survivor.kind) as other:
            survivor.meet(other)
            out = empty(LAYOUT, BLOCKS)
            receiver = survivor.hub.expect(f"r{number}", view_of(LAYOUT, out), deadline_s=WAIT_S)
            other.do("open", request=f"r{number}", slots=2, deadline_s=WAIT_S)
            other.start("send", layers=LAYOUT.num_layers)
            pause.wait(rng.random() * 0.05)
            other.kill()
            with pytest.raises(PeerUnreachableError):
                receiver.completion.wait(WAIT_S)
            require_unwritten(out, receiver)


def test_the_sender_stops_and_goes_on(survivor: Survivor) -> None:
    with peer(survivor.kind) as other:
        survivor.meet(other)
        out = empty(LAYOUT, BLOCKS)
        receiver = survivor.hub.expect("r", view_of(LAYOUT, out), deadline_s=SHORT_S)
        other.do("open", request="r", slots=OUTBOX_SLOTS, deadline_s=WAIT_S)
        assert other.do("send", layers=1) == "sent"
        other.stop()
        with pytest.raises(TransferTimeoutError):
            receiver.completion.wait(WAIT_S)
        require_unwritten(out, receiver)
        other.resume()
        # Until it has read the refusal, the stream is open there, and not all of it was sent.
        until(lambda: other.do("send", layers=1) != "UsageError")  # sent before
        assert other.do("finish", deadline_s=WAIT_S) == "TransferTimeoutError"
        assert other.do("outbox_free") == OUTBOX_SLOTS


def test_the_receiver_cancels(survivor: Survivor) -> None:
    with peer(survivor.kind) as other:
        survivor.meet(other)
        out = empty(LAYOUT, BLOCKS)
        receiver = survivor.hub.expect("r", view_of(LAYOUT, out), deadline_s=WAIT_S)
        other.do("open", request="r", slots=OUTBOX_SLOTS, deadline_s=WAIT_S)
        other.start("send", layers=1)
        receiver.cancel("the client went away")
        receiver.cancel("idempotent")
        with pytest.raises(CancelledTransferError):
            receiver.completion.wait(WAIT_S)
        require_unwritten(out, receiver)
        assert other.answer() in ("sent", "CancelledTransferError")
        other.do("finish", deadline_s=WAIT_S)
        assert other.do("outbox_free") == OUTBOX_SLOTS


def test_the_receivers_process_is_killed_at_any_moment(survivor: Survivor, count: Count) -> None:
    rng = random.Random(4)
    for number in range(count(3, 100)):
        with peer(survivor.kind) as other:
            endpoint = survivor.meet(other)
            other.do("expect", request=f"r{number}", deadline_s=WAIT_S)
            timer = threading.Timer(rng.random() * 0.02, other.kill)
            timer.start()
            try:
                sender = survivor.open(endpoint, f"r{number}")
                survivor.send_all(sender)
                sender.finish(b"", deadline_s=WAIT_S)
            except KVPoolError as error:
                assert isinstance(error, PeerUnreachableError)
            timer.join(WAIT_S)
            survivor.require_free()
