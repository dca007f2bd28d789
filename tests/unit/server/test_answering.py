"""Calls over a connection at the server: who may call, as whom, and that each call has an end."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvpool.block import HASH_BYTES
from kvpool.client import protocol
from kvpool.client.asking import Near
from kvpool.client.call_wire import (
    ANSWER_BYTES_MAX,
    CALL_BYTES_MAX,
    CALLS_MAX,
    UNANSWERED,
    Answer,
    Call,
    Cancel,
    Parts,
    cut,
)
from kvpool.errors import CapacityError
from kvpool.server.answering import Answering
from kvpool.server.sessions import Session
from kvpool.server.tenant import Tenant, calling_tenant
from kvpool.transfer.base import Endpoint
from kvpool.transfer.loopback import INBOX_MAX, LoopbackNetwork, LoopbackTransport

PATIENCE_S = 20.0
MATCH = protocol.MATCH.path
RED = Tenant(name="red", operator=False)
Handler = Callable[[Any], Awaitable[Any]]


class Client:
    """A client's side of a connection, and its session at a server that answers."""

    def __init__(self, answering: Answering, reader: Endpoint, owner: Endpoint) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts = Parts()
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._answering = answering
        self.endpoint = reader
        self._standing = threading.Event()
        self._standing.set()
        self.session = Session(bytes(16), owner, greeted=True, tenant="red", caller=RED)
        reader.on_notification(self._take)

    def stand(self) -> None:
        """Take no answers until ``go_on``."""
        self._standing.clear()

    def go_on(self) -> None:
        self._standing.set()

    def _take(self, notification: bytes) -> None:
        assert self._standing.wait(PATIENCE_S)
        message = self._parts.take(notification)
        assert isinstance(message, Answer)
        self._loop.call_soon_threadsafe(self._answers.put_nowait, message)

    def say(self, message: Call | Cancel) -> None:
        for part in cut(message.number, message):
            self._answering.take(self.session, part)

    def call(self, number: int, method: str = MATCH, timeout_s: float = PATIENCE_S) -> None:
        self.say(Call(number, method, timeout_s, protocol.MatchRequest().SerializeToString()))

    async def answer(self) -> Answer:
        return await asyncio.wait_for(self._answers.get(), PATIENCE_S)


def play(handler: Handler, scene: Callable[[Client, Answering], Awaitable[None]]) -> None:
    """Play a scene with a client whose calls of Match ``handler`` answers."""

    async def main() -> None:
        network = LoopbackNetwork()
        with LoopbackTransport(network) as owner, LoopbackTransport(network) as reader:
            came: asyncio.Queue[Endpoint] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def connected(endpoint: Endpoint) -> None:
                loop.call_soon_threadsafe(came.put_nowait, endpoint)

            owner.listen("s", connected)
            endpoint = reader.connect("s", PATIENCE_S)
            answering = Answering()
            answering.add(protocol.MATCH, handler)
            await scene(Client(answering, endpoint, await came.get()), answering)

    asyncio.run(main())


async def five(request: object) -> protocol.MatchReply:
    assert isinstance(request, protocol.MatchRequest)
    return protocol.MatchReply(blocks=5)


class Lasting:
    """A handler that lasts until it is cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, request: object) -> protocol.MatchReply:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError


def test_a_call_is_made_as_its_client() -> None:
    async def who(request: object) -> protocol.MatchReply:
        return protocol.MatchReply(blocks=5 if calling_tenant.get() is RED else 0)

    async def scene(client: Client, answering: Answering) -> None:
        client.call(7)
        answer = await client.answer()
        assert (answer.number, answer.error) == (7, "")
        assert protocol.MatchReply.FromString(answer.reply).blocks == 5

    play(who, scene)


@pytest.mark.parametrize(
    ("method", "request_bytes", "error"),
    [
        ("/kvpool.v1.Pool/Read", b"", "UsageError"),
        ("nothing", b"", "UsageError"),
        (MATCH, b"\xff\xff", "UsageError"),
    ],
)
def test_a_call_that_is_none_is_refused(method: str, request_bytes: bytes, error: str) -> None:
    async def scene(client: Client, answering: Answering) -> None:
        client.say(Call(7, method, PATIENCE_S, request_bytes))
        assert (await client.answer()).error == error

    play(five, scene)


def test_an_error_that_nobody_foresaw_is_a_bug() -> None:
    async def fails(request: object) -> protocol.MatchReply:
        raise ZeroDivisionError

    async def scene(client: Client, answering: Answering) -> None:
        client.call(7)
        assert (await client.answer()).error == "InternalError"

    play(fails, scene)


def test_a_stranger_is_not_answered() -> None:
    async def scene(client: Client, answering: Answering) -> None:
        client.session.greeted = False
        client.call(7)
        client.session.greeted = True
        client.call(8)
        assert (await client.answer()).number == 8

    play(five, scene)


def test_what_is_no_call_is_left_alone() -> None:
    async def scene(client: Client, answering: Answering) -> None:
        answering.take(client.session, b"noise of some length")
        client.say(Cancel(99))
        client.call(7)
        assert (await client.answer()).number == 7

    play(five, scene)


@pytest.mark.parametrize("how", ["cancel", "deadline", "lost", "stop"])
def test_a_call_ends_early(how: str) -> None:
    async def scene(client: Client, answering: Answering) -> None:
        client.call(7, timeout_s=0.02 if how == "deadline" else PATIENCE_S)
        await asyncio.wait_for(lasting.begun.wait(), PATIENCE_S)
        if how == "cancel":
            client.say(Cancel(7))
        elif how == "lost":
            answering.lose(client.session)
        elif how == "stop":
            await answering.stop(0.01)
        await asyncio.wait_for(lasting.ended.wait(), PATIENCE_S)
        if how == "stop":
            client.call(8)
            assert (await client.answer()).error == "PeerUnreachableError"

    lasting = Lasting()
    play(lasting, scene)


def test_a_client_has_so_many_calls_and_no_more() -> None:
    async def scene(client: Client, answering: Answering) -> None:
        for number in range(1, CALLS_MAX + 2):
            client.call(number)
        assert (await client.answer()) == Answer(
            CALLS_MAX + 1,
            "CapacityError",
            f"{CALLS_MAX} calls of this client are under way".encode(),
        )
        client.call(UNANSWERED)
        for number in range(1, CALLS_MAX + 1):
            client.say(Cancel(number))
        await asyncio.wait_for(lasting.ended.wait(), PATIENCE_S)

    lasting = Lasting()
    play(lasting, scene)


class Threads:
    """A prompt that notes where it ran; ``ready`` says whether it can answer."""

    def __init__(self) -> None:
        self.ready = True
        self.ran: list[int] = []

    def __call__(self, request: object) -> protocol.MatchReply | None:
        if not self.ready:
            return None
        self.ran.append(threading.get_ident())
        return protocol.MatchReply(blocks=3)


async def blocks(client: Client) -> int:
    return protocol.MatchReply.FromString((await client.answer()).reply).blocks


async def say_aside(client: Client, number: int) -> int:
    """Have a thread say a call, as a transport's does; return which it was."""

    def say() -> int:
        client.call(number)
        return threading.get_ident()

    return await asyncio.to_thread(say)


def test_a_call_that_waits_for_nothing_is_answered_where_it_came() -> None:
    prompt = Threads()

    async def scene(client: Client, answering: Answering) -> None:
        answering.add_prompt(protocol.MATCH, prompt)
        client.session.caller = Tenant()
        thread = await say_aside(client, 7)
        assert await blocks(client) == 3
        assert prompt.ran == [thread] != [threading.get_ident()]
        prompt.ready = False
        await say_aside(client, 8)
        assert await blocks(client) == 5  # the loop has made it

    play(five, scene)


@pytest.mark.parametrize(
    "caller",
    [RED, Tenant(lease_bytes_max=1), Tenant(store_bytes_max=1), Tenant(name="red")],
)
def test_a_call_of_a_tenant_is_made_in_the_loop(caller: Tenant) -> None:
    prompt = Threads()

    async def scene(client: Client, answering: Answering) -> None:
        answering.add_prompt(protocol.MATCH, prompt)
        client.session.caller = caller
        await say_aside(client, 7)
        assert await blocks(client) == 5
        assert not prompt.ran

    play(five, scene)


def test_no_call_overtakes_one_that_the_loop_has() -> None:
    prompt, lasting = Threads(), Lasting()

    async def scene(client: Client, answering: Answering) -> None:
        answering.add_prompt(protocol.MATCH, prompt)
        client.session.caller = Tenant()
        prompt.ready = False
        await say_aside(client, UNANSWERED)
        await asyncio.wait_for(lasting.begun.wait(), PATIENCE_S)
        prompt.ready = True
        await say_aside(client, 8)
        assert not prompt.ran
        answering.lose(client.session)

    play(lasting, scene)


def test_an_error_of_a_call_that_is_made_where_it_came_is_the_same() -> None:
    def refuses(request: object) -> protocol.MatchReply:
        raise CapacityError("no room")

    def fails(request: object) -> protocol.MatchReply:
        raise ZeroDivisionError

    async def scene(client: Client, answering: Answering) -> None:
        client.session.caller = Tenant()
        for number, (prompt, error) in enumerate(
            ((refuses, "CapacityError"), (fails, "InternalError")), 1
        ):
            answering.add_prompt(protocol.MATCH, prompt)
            await say_aside(client, number)
            assert (await client.answer()).error == error
        await answering.stop(0)
        await say_aside(client, 9)
        assert (await client.answer()).error == "PeerUnreachableError"

    play(five, scene)


def test_answers_that_find_no_room_come_later() -> None:
    async def scene(client: Client, answering: Answering) -> None:
        answering.add_prompt(protocol.MATCH, Threads())
        client.session.caller = Tenant()
        client.stand()
        for number in range(1, INBOX_MAX + 20):
            await say_aside(client, number)
        client.go_on()
        numbers = [(await client.answer()).number for _ in range(1, INBOX_MAX + 20)]
        assert sorted(numbers) == list(range(1, INBOX_MAX + 20))

    play(five, scene)


def test_calls_begin_in_their_order() -> None:
    begun: list[int] = []

    async def note(request: object) -> protocol.MatchReply:
        begun.append(len(begun))
        return protocol.MatchReply(blocks=len(begun))

    async def scene(client: Client, answering: Answering) -> None:
        client.call(UNANSWERED)
        client.call(7)
        answer = await client.answer()
        assert protocol.MatchReply.FromString(answer.reply).blocks == 2

    play(note, scene)


def lookup(nodes: int) -> protocol.LookupReply:
    """Return who holds the names of a call as long as may be: of each, that many other nodes."""
    names = CALL_BYTES_MAX // HASH_BYTES
    sets = [
        protocol.NodeSet(nodes=[f"{name:031}.{node:032}" for node in range(nodes)])
        for name in range(names)
    ]
    return protocol.LookupReply(holders=list(range(names)), sets=sets)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("nodes", [3, 64])
def test_who_holds_what_fits_into_an_answer_or_is_refused(nodes: int, prompt: bool) -> None:
    """An answer that its client took for none would be waited for, and its shard be called silent."""
    reply = lookup(nodes)
    fits = reply.ByteSize() <= ANSWER_BYTES_MAX
    assert fits == (nodes == 3) and reply.ByteSize() > 2 * CALL_BYTES_MAX

    async def answer(request: object) -> protocol.LookupReply:
        return reply

    async def scene(client: Client, answering: Answering) -> None:
        answering.add(protocol.LOOKUP, answer)
        if prompt:
            answering.add_prompt(protocol.LOOKUP, lambda request: reply)
            client.session.caller = Tenant()
        assert client.session.endpoint is not None
        client.session.endpoint.on_notification(lambda said: answering.take(client.session, said))
        near = Near(client.endpoint, CALL_BYTES_MAX)
        asked = near.ask(protocol.LOOKUP, b"", PATIENCE_S)
        assert asked is not None
        if fits:
            assert await asyncio.to_thread(asked.reply) == reply
        else:
            with pytest.raises(CapacityError, match="ask for less"):
                await asyncio.to_thread(asked.reply)

    play(five, scene)
