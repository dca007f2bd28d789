"""Calls over a connection: each ends, with its own answer, an error by its class, or its deadline."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from kvpool.client import protocol
from kvpool.client.asking import LinkCaller, Near
from kvpool.client.call_wire import CALL_BYTES_MAX, CALLS_MAX, Answer, Call, Message, Parts, cut
from kvpool.client.rpc import Asked
from kvpool.errors import (
    CapacityError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.transfer.base import Endpoint
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport

PATIENCE_S = 20.0
ENDLESS_S = 300.0  # longer than a test may take
REPLY = protocol.MatchReply(blocks=5)


@dataclass
class Server:
    """The other side of a connection: what it heard, and what it says."""

    endpoint: Endpoint
    answers: Callable[[Call], Answer | None]
    heard: list[Message] = field(default_factory=list)
    parts: Parts = field(default_factory=Parts)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        self.endpoint.on_notification(self.take)

    def take(self, notification: bytes) -> None:
        message = self.parts.take(notification)
        if message is None:
            return
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()
        if isinstance(message, Call) and (answer := self.answers(message)) is not None:
            for part in cut(answer.number, answer):
                assert self.endpoint.notify(part)

    def wait_heard(self, count: int) -> list[Message]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.heard) >= count, PATIENCE_S)
            return list(self.heard)


def good(call: Call) -> Answer:
    return Answer(call.number, "", REPLY.SerializeToString())


def silent(call: Call) -> None:
    return None


@pytest.fixture
def ends() -> Iterator[tuple[Endpoint, Server]]:
    with ExitStack() as stack:
        network = LoopbackNetwork()
        owner, reader = (stack.enter_context(LoopbackTransport(network)) for _ in range(2))
        found: list[Endpoint] = []
        came = threading.Event()

        def on_connect(endpoint: Endpoint) -> None:
            found.append(endpoint)
            came.set()

        owner.listen("server", on_connect)
        endpoint = reader.connect("server", PATIENCE_S)
        assert came.wait(PATIENCE_S)
        server = Server(found[0], good)
        server.start()
        yield endpoint, server


def ask(near: Near, timeout_s: float = PATIENCE_S) -> Asked[protocol.MatchReply]:
    asked = near.ask(protocol.MATCH, b"", timeout_s)
    assert asked is not None
    return asked


def test_a_call_is_answered(ends: tuple[Endpoint, Server]) -> None:
    near = Near(ends[0], CALL_BYTES_MAX)
    assert ask(near).reply() == REPLY
    asked = near.ask(protocol.MATCH, bytes(CALL_BYTES_MAX), PATIENCE_S)
    assert asked is not None and asked.wait(PATIENCE_S) and asked.reply() == REPLY
    assert [len(call.request) for call in ends[1].heard if isinstance(call, Call)] == [
        0,
        CALL_BYTES_MAX,
    ]


@pytest.mark.parametrize(
    ("name", "kind"), [("CapacityError", CapacityError), ("Exception", InternalError)]
)
def test_an_error_is_raised_by_its_class(
    ends: tuple[Endpoint, Server], name: str, kind: type[KVPoolError]
) -> None:
    ends[1].answers = lambda call: Answer(call.number, name, b"too many")
    with pytest.raises(kind, match="too many"):
        ask(Near(ends[0], CALL_BYTES_MAX)).reply()


def test_a_call_ends_at_its_deadline_and_the_server_is_told(
    ends: tuple[Endpoint, Server],
) -> None:
    ends[1].answers = silent
    near = Near(ends[0], CALL_BYTES_MAX)
    asked = ask(near, 0.02)
    with pytest.raises(TransferTimeoutError):
        asked.reply()
    assert [type(each).__name__ for each in ends[1].wait_heard(2)] == ["Call", "Cancel"]
    ends[1].answers = good
    assert ask(near).reply() == REPLY


def test_a_call_that_is_given_up_ends(ends: tuple[Endpoint, Server]) -> None:
    ends[1].answers = silent
    asked = ask(Near(ends[0], CALL_BYTES_MAX))
    assert not asked.wait(0.0)
    asked.cancel()
    asked.cancel()
    with pytest.raises(PeerUnreachableError):
        asked.reply()


def test_a_lost_connection_ends_every_call(ends: tuple[Endpoint, Server]) -> None:
    ends[1].answers = silent
    near = Near(ends[0], CALL_BYTES_MAX)
    asked = [ask(near) for _ in range(5)]
    ends[1].endpoint.close()
    for each in asked:
        with pytest.raises(PeerUnreachableError):
            each.reply()
    with pytest.raises(KVPoolError):
        near.ask(protocol.MATCH, b"", PATIENCE_S)


def test_an_answer_to_nobody_is_let_go(ends: tuple[Endpoint, Server]) -> None:
    ends[1].answers = lambda call: Answer(call.number + 1000, "", b"")
    near = Near(ends[0], CALL_BYTES_MAX)
    lost = ask(near, 0.02)
    with pytest.raises(TransferTimeoutError):
        lost.reply()
    assert ends[1].endpoint.notify(b"noise")
    ends[1].answers = good
    assert ask(near).reply() == REPLY


def test_what_does_not_fit_goes_another_way(ends: tuple[Endpoint, Server]) -> None:
    ends[1].answers = silent
    near = Near(ends[0], 100)
    assert near.ask(protocol.MATCH, bytes(101), PATIENCE_S) is None
    assert not near.tell(protocol.MATCH, bytes(101))
    asked = [ask(near) for _ in range(CALLS_MAX // 2)]
    assert near.ask(protocol.MATCH, b"", PATIENCE_S) is None
    asked[0].cancel()
    ask(near)


def test_calls_are_heard_in_their_order(ends: tuple[Endpoint, Server]) -> None:
    caller = LinkCaller("127.0.0.1:1")
    assert not caller.tell(protocol.RELEASE, protocol.ReleaseRequest())
    caller.use(ends[0], CALL_BYTES_MAX)
    assert caller.tell(protocol.RELEASE, protocol.ReleaseRequest(lease=3))
    assert caller.call(protocol.MATCH, protocol.MatchRequest(), PATIENCE_S) == REPLY
    # One that goes through gRPC, to nobody here, waits for what was told before.
    assert caller.tell(protocol.RELEASE, protocol.ReleaseRequest(lease=4))
    long = protocol.MatchRequest(hashes=bytes(CALL_BYTES_MAX + 32))
    with pytest.raises(KVPoolError):
        caller.call(protocol.MATCH, long, 0.2)
    methods = [call.method for call in ends[1].heard if isinstance(call, Call)]
    release, match = protocol.RELEASE.path, protocol.MATCH.path
    assert methods == [release, match, release, match]
    caller.close()
    with pytest.raises(PeerUnreachableError):
        caller.call(protocol.MATCH, protocol.MatchRequest(), PATIENCE_S)


def test_a_call_that_has_to_be_begun_first_waits_for_that_no_longer_than_it_may(
    ends: tuple[Endpoint, Server],
) -> None:
    """A server that is silent is given up then, whatever time its answer would have had."""
    ends[1].answers = silent
    caller = LinkCaller("127.0.0.1:1")
    caller.use(ends[0], CALL_BYTES_MAX)
    assert caller.tell(protocol.RELEASE, protocol.ReleaseRequest(lease=3))
    long = protocol.MatchRequest(hashes=bytes(CALL_BYTES_MAX + 32))
    with pytest.raises(TransferTimeoutError):
        caller.ask(protocol.MATCH, long, ENDLESS_S, 0.01)
    caller.close()
