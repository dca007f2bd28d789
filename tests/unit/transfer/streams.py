"""Two stream hubs over a transport that can be made lossy, for the tests of streams."""

import pytest

from kvpool.errors import (
    KVPoolError,
    UsageError,
)
from kvpool.events import ListSink
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.lossy import Faults, LossyTransport
from kvpool.testing.pair import Collected, empty
from kvpool.transfer.base import Endpoint
from kvpool.transfer.layerwise import LayerReceiver, LayerSender, Outbox, StreamHub
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kvpool.transfer.stream_wire import (
    slice_layout,
)
from tests.waiting import until

LAYOUT = SMALL_LAYOUT
LAYERS = LAYOUT.num_layers
BLOCKS = 20
SLOTS = 6
# What one peer may have of them.
SHARE = 4
WAIT_S = 20.0


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
