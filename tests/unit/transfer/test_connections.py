"""Endpoints by address: made once, again after a loss, and not too often when that fails."""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvpool.block import Incarnation, new_incarnation
from kvpool.clock import ManualClock
from kvpool.errors import (
    CapacityError,
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
)
from kvpool.testing.pair import WAIT_S, Collected
from kvpool.transfer import connections
from kvpool.transfer.base import Endpoint
from kvpool.transfer.connections import PAUSE_MAX_S, PAUSE_MIN_S, Connections
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport
from tests.waiting import until


class Ours(LoopbackTransport):
    """Counts how often it connects, and can be held up."""

    def __init__(self, network: LoopbackNetwork) -> None:
        super().__init__(network)
        self.tried: list[str] = []
        self.go = threading.Event()
        self.go.set()

    def connect(
        self, address: str, timeout_s: float, expected: Incarnation | None = None
    ) -> Endpoint:
        self.tried.append(address)
        assert self.go.wait(WAIT_S)
        return super().connect(address, timeout_s, expected)


class Scene:
    """Our transport, and peers that come and go in one network."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.network = LoopbackNetwork()
        self.ours = stack.enter_context(Ours(self.network))
        self.clock = ManualClock()
        self.attached = Collected()
        self.connections = Connections(self.ours, self.clock, self.attached, random.Random(1))

    def peer(self, address: str = "there") -> LoopbackTransport:
        """Let a peer listen."""
        transport = self._stack.enter_context(LoopbackTransport(self.network))
        transport.listen(address, lambda endpoint: None)
        return transport

    def get(self, expected: Incarnation, address: str = "there") -> Endpoint:
        return self.connections.endpoint(address, expected, WAIT_S)

    def refused(self, expected: Incarnation) -> bool:
        """Say whether an attempt was made, that failed; otherwise it was not its time."""
        before = len(self.ours.tried)
        with pytest.raises((PeerUnreachableError, StaleIncarnationError)):
            self.get(expected)
        return len(self.ours.tried) > before


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def test_one_endpoint_serves_everybody(scene: Scene) -> None:
    peer = scene.peer()
    endpoint = scene.get(peer.incarnation)
    assert scene.get(peer.incarnation) is endpoint
    assert scene.attached.items == [endpoint]
    assert scene.ours.tried == ["there"]
    scene.connections.close()
    assert not endpoint.alive()


def test_a_lost_endpoint_is_made_again(scene: Scene) -> None:
    peer = scene.peer()
    endpoint = scene.get(peer.incarnation)
    endpoint.close()
    again = scene.get(peer.incarnation)
    assert again is not endpoint
    assert again.alive()


def test_failures_are_further_and_further_apart(scene: Scene) -> None:
    gone = new_incarnation()
    assert scene.refused(gone)
    longest_s = PAUSE_MIN_S
    for _ in range(12):
        shortest_s = longest_s / 2
        scene.clock.advance(shortest_s * 0.99)
        assert not scene.refused(gone)
        scene.clock.advance(longest_s - shortest_s * 0.99)
        assert scene.refused(gone)
        longest_s = min(PAUSE_MAX_S, longest_s * 2)
    assert longest_s == PAUSE_MAX_S


def test_success_ends_the_pauses(scene: Scene) -> None:
    gone = new_incarnation()
    for _ in range(8):
        scene.clock.advance(PAUSE_MAX_S)
        assert scene.refused(gone)
    scene.clock.advance(PAUSE_MAX_S)
    peer = scene.peer()
    assert scene.refused(gone)  # another run answers
    assert scene.get(peer.incarnation).alive()  # which is tried at once, when it is meant
    scene.get(peer.incarnation).close()
    assert scene.get(peer.incarnation).alive()


def test_a_peer_that_does_not_answer_holds_up_no_other(scene: Scene) -> None:
    slow, quick = scene.peer("slow"), scene.peer("quick")
    scene.get(quick.incarnation, "quick")
    scene.ours.go.clear()
    ended = Collected()
    thread = threading.Thread(target=lambda: ended(scene.get(slow.incarnation, "slow")))
    thread.start()
    until(lambda: scene.ours.tried[-1] == "slow")
    assert scene.get(quick.incarnation, "quick").alive()
    with pytest.raises(TransferTimeoutError):
        scene.connections.endpoint("slow", slow.incarnation, 0.01)
    scene.ours.go.set()
    endpoint = ended.wait(1)[0]
    thread.join(WAIT_S)
    assert scene.get(slow.incarnation, "slow") is endpoint
    assert scene.ours.tried == ["quick", "slow"]


def test_peers_that_are_gone_are_forgotten(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PEERS_MAX", 2)
    one, two, three = (scene.peer(name) for name in "123")
    first = scene.get(one.incarnation, "1")
    scene.get(two.incarnation, "2")
    with pytest.raises(CapacityError):
        scene.get(three.incarnation, "3")
    first.close()
    assert scene.get(three.incarnation, "3").alive()


def test_an_endpoint_that_nobody_can_use_is_closed(scene: Scene) -> None:
    made = Collected()

    def refuse(endpoint: Endpoint) -> None:
        made(endpoint)
        raise CapacityError("planted")

    peer = scene.peer()
    table = Connections(scene.ours, scene.clock, refuse, random.Random(1))
    with pytest.raises(CapacityError, match="planted"):
        table.endpoint("there", peer.incarnation, WAIT_S)
    endpoint = made.items[0]
    assert isinstance(endpoint, Endpoint)
    assert not endpoint.alive()
