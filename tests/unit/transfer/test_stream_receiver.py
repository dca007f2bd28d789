"""What a receiver does with a sender that does not keep to the rules."""

from collections.abc import Iterator

import pytest

from kvpool.block import BlockLayout
from kvpool.errors import (
    ClosedError,
    CorruptionError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.events import ListSink
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import Collected, empty, flip, publish
from kvpool.transfer.layerwise import LayerReceiver, Outbox, StreamHub
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kvpool.transfer.stream_wire import (
    Ack,
    Announce,
    Done,
    End,
    Message,
    Open,
    Refuse,
    decode,
    encode,
    pack_layout,
    slice_layout,
)
from tests.waiting import until

LAYOUT = SMALL_LAYOUT
LAYERS = LAYOUT.num_layers
SLOTS = 6
WAIT_S = 20.0


def fails(receiver: LayerReceiver, error: type[KVPoolError]) -> None:
    with pytest.raises(error):
        receiver.completion.wait(WAIT_S)


class Rogue:
    """Speaks to a receiver's hub by hand, with real slices in an outbox."""

    def __init__(self) -> None:
        network = LoopbackNetwork()
        self.transport, self.target = LoopbackTransport(network), LoopbackTransport(network)
        self.hub = StreamHub(ListSink())
        self.target.listen("target", self.hub.attach)
        self.endpoint = self.transport.connect("target", WAIT_S)
        self.heard = Collected()
        self.endpoint.on_notification(self.heard)
        self.outbox = Outbox(self.transport, slice_layout(LAYOUT), SLOTS)
        self.out = empty(LAYOUT, 2)

    def say(self, message: Message) -> None:
        assert self.endpoint.notify(encode(message))

    def hear(self, count: int) -> list[Message]:
        return [decode(item) for item in self.heard.wait(count) if isinstance(item, bytes)]

    def open(self, layout: BlockLayout = LAYOUT, count: int = 2, region: int = 0) -> LayerReceiver:
        receiver = self.hub.expect("r", view_of(LAYOUT, self.out), deadline_s=WAIT_S)
        sizes, dtype = pack_layout(layout)
        self.say(Open(1, "r", region, count, sizes, dtype))
        return receiver

    def close(self) -> None:
        self.hub.close()
        self.transport.close()
        self.target.close()


@pytest.fixture
def rogue() -> Iterator[Rogue]:
    rogue = Rogue()
    yield rogue
    rogue.close()


@pytest.mark.parametrize(
    "message",
    [
        Announce(1, LAYERS, 0, [0], [1]),
        Announce(1, 0, 2, [0], [1]),
        Announce(1, 0, 1, [0, 1], [1, 1]),
        Announce(1, 0, 0, [], []),
        Announce(1, 0, 0, [0], [1, 2]),
        End(1, b"too early"),
    ],
)
def test_a_sender_that_says_what_cannot_be_fails_its_stream(rogue: Rogue, message: Message) -> None:
    receiver = rogue.open()
    rogue.say(message)
    fails(receiver, CorruptionError)
    assert not rogue.out.any()


@pytest.mark.parametrize(("slots", "generations"), [([0], [9]), ([SLOTS], [1]), ([0], [0])])
def test_slots_that_are_not_there_fail_the_stream(
    rogue: Rogue, slots: list[int], generations: list[int]
) -> None:
    receiver = rogue.open()
    rogue.say(Announce(1, 0, 0, slots, generations))
    fails(receiver, CorruptionError)
    assert Ack(1, slots, generations) in rogue.hear(2)
    assert not rogue.out.any()


def test_a_corrupt_slice_fails_the_stream_and_is_acknowledged(rogue: Rogue) -> None:
    receiver = rogue.open()
    slots = publish(rogue.outbox.arena, payload(slice_layout(LAYOUT), 2, seed=1))
    flip(rogue.outbox.arena, slots[1], 5)
    generations = [slot.generation for slot in slots]
    rogue.say(Announce(1, 0, 0, [int(slot.index) for slot in slots], generations))
    fails(receiver, CorruptionError)
    assert receiver.completion.layers_ready() == 0
    answers = rogue.hear(2)
    assert answers[0] == Ack(1, [int(slot.index) for slot in slots], generations)
    assert isinstance(answers[1], Refuse)


def test_a_slice_announced_twice_fails_the_stream(rogue: Rogue) -> None:
    receiver = rogue.open()
    slot = publish(rogue.outbox.arena, payload(slice_layout(LAYOUT), 1, seed=1))[0]
    for _ in range(2):
        rogue.say(Announce(1, 0, 0, [int(slot.index)], [slot.generation]))
    fails(receiver, CorruptionError)
    assert sum(isinstance(answer, Ack) for answer in rogue.hear(3)) == 2


def test_a_region_that_never_comes_is_waited_for_until_the_deadline(rogue: Rogue) -> None:
    receiver = rogue.hub.expect("r", view_of(LAYOUT, rogue.out), deadline_s=0.2)
    sizes, dtype = pack_layout(LAYOUT)
    rogue.say(Open(1, "r", 7, 2, sizes, dtype))
    rogue.say(Announce(1, 0, 0, [0], [1]))
    fails(receiver, TransferTimeoutError)
    assert Ack(1, [0], [1]) in rogue.hear(2)


def test_unknown_streams_are_answered_and_change_nothing(rogue: Rogue) -> None:
    rogue.say(Announce(5, 0, 0, [3], [4]))
    rogue.say(End(6, b""))
    rogue.say(Done(7))
    rogue.say(Ack(8, [1], [1]))
    answers = rogue.hear(2)
    assert answers[0] == Ack(5, [3], [4])
    assert isinstance(answers[1], Refuse)
    assert rogue.endpoint.alive()


def test_garbage_ends_the_endpoint(rogue: Rogue) -> None:
    lost = Collected()
    rogue.endpoint.on_lost(lost)
    assert rogue.endpoint.notify(b"garbage")
    lost.wait(1)


def test_a_peer_that_asks_and_never_reads_is_cut_off() -> None:
    network = LoopbackNetwork()
    with (
        LoopbackTransport(network) as transport,
        LoopbackTransport(network) as target,
        StreamHub(ListSink()) as hub,
    ):
        target.listen("target", hub.attach)
        endpoint = transport.connect("target", WAIT_S)

        def ask() -> bool:
            for _ in range(1000):
                if not endpoint.alive():
                    return True
                endpoint.notify(encode(Announce(1, 0, 0, [0], [1])))
            return False

        def cut_off() -> bool:
            try:
                return ask()
            except (PeerUnreachableError, ClosedError):
                return True

        until(cut_off)
