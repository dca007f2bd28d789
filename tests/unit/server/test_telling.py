"""What one node says to another: that it is there, whatever fails, until it says that it leaves."""

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpool.block import NodeId
from kvpool.client import protocol
from kvpool.client.access import OPEN
from kvpool.client.rpc_service import Service
from kvpool.index.directory import Kind
from kvpool.index.ring import Ring
from kvpool.metrics import Metrics
from kvpool.server.naming import Naming
from kvpool.server.telling import TRIES_MAX, Teller

WAIT_S = 20.0
NODE = NodeId("b")


class Forgetful(Naming):
    """Fails at finding out what a node is owed."""

    async def renew(self, node: NodeId) -> None:
        raise MemoryError("no room for all the names")


class Noting(Naming):
    """Notes who is to be told everything anew."""

    lost = 0

    def lose(self, node: NodeId, untold: tuple[Kind, bytes] = ("stored", b"")) -> None:
        type(self).lost += 1
        super().lose(node, untold)


def _run(
    kind: type[Naming],
    play: Callable[[Teller, list[protocol.AnnounceRequest]], Awaitable[None]],
    *,
    at: str = "sock",
    runs_of: int = 1 << 30,
) -> None:
    async def main(folder: str) -> None:
        heard: list[protocol.AnnounceRequest] = []

        async def hear(request: protocol.AnnounceRequest) -> protocol.AnnounceReply:
            heard.append(request)
            return protocol.AnnounceReply(incarnation=bytes([len(heard) // runs_of]) * 16)

        service = Service()
        service.add(protocol.ANNOUNCE, hear)
        address = f"unix:{Path(folder) / 'sock'}"
        await service.start(address)
        with ThreadPoolExecutor(1) as executor:
            naming = kind(Ring([NODE]), executor, Metrics(), lambda: None)
            teller = Teller(
                naming,
                lambda _, names, leaving: protocol.AnnounceRequest(names=names, leaving=leaving),
                NODE,
                f"unix:{Path(folder) / at}",
                access=OPEN,
                interval_s=0.005,
            )
            try:
                await play(teller, heard)
            finally:
                await teller.close()
                await service.stop(0)

    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        asyncio.run(main(folder))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


def test_nothing_is_said_behind_the_farewell() -> None:
    async def play(teller: Teller, heard: list[protocol.AnnounceRequest]) -> None:
        await _until(lambda: len(heard) > 2)
        await teller.say_farewell(WAIT_S)
        count = len(heard)
        teller.wake()
        await asyncio.sleep(0.1)
        assert heard[-1].leaving
        assert [one.leaving for one in heard] == [False] * (count - 1) + [True]

    _run(Naming, play)


def test_a_node_that_cannot_say_what_it_holds_says_that_it_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play(teller: Teller, heard: list[protocol.AnnounceRequest]) -> None:
        await _until(lambda: len(heard) > 4)

    _run(Forgetful, play)
    assert "what node b is to be told is not known" in caplog.text


def test_an_operator_is_told_once_of_a_node_that_is_not_where_it_is_said_to_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def said() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]

    async def play(teller: Teller, heard: list[protocol.AnnounceRequest]) -> None:
        await _until(lambda: bool(said()))
        tries = sum("has not been reached" in one.getMessage() for one in caplog.records)
        await _until(
            lambda: (
                sum("has not been reached" in one.getMessage() for one in caplog.records)
                > tries + 2 * TRIES_MAX
            )
        )
        assert not heard

    caplog.set_level(logging.DEBUG)
    _run(Naming, play, at="nobody")
    (warning,) = said()
    assert "node b has not been reached at unix:" in warning
    assert "listen.advertise" in warning


@pytest.mark.parametrize(("runs_of", "anew"), [(1 << 30, False), (4, True)])
def test_a_node_that_forgot_between_two_announcements_is_told_everything_anew(
    runs_of: int, anew: bool
) -> None:
    """It was restarted so quickly that none of them failed: only its answer says so."""

    async def play(teller: Teller, heard: list[protocol.AnnounceRequest]) -> None:
        await _until(lambda: len(heard) > 6)
        assert (Noting.lost > 0) == anew

    Noting.lost = 0
    _run(Noting, play, runs_of=runs_of)
