"""Who may announce to a shard: one run of a node at a time, whatever its clock says."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpool.block import NodeId, sha256
from kvpool.client import protocol
from kvpool.client.rpc import AsyncCaller
from kvpool.client.rpc_service import Service
from kvpool.errors import StaleIncarnationError
from kvpool.index.directory import Store
from kvpool.metrics import Metrics
from kvpool.server.shard import STORE_NAME, Shard

WAIT_S = 20.0
NODE = NodeId("b")
NAME = sha256(b"a block")
OLD, NEW = b"o" * 16, b"n" * 16


class Scene:
    """A shard behind a real address, whose peers are silent after 0.25 s."""

    def __init__(self, shard: Shard, caller: AsyncCaller) -> None:
        self.shard = shard
        self._caller = caller

    async def say(
        self, began: int, run: bytes, *, names: bytes = b"", leaving: bool = False
    ) -> None:
        request = protocol.AnnounceRequest(
            version=protocol.PROTOCOL_VERSION,
            node=NODE,
            incarnation=run,
            began=began,
            names=names,
            leaving=leaving,
        )
        await self._caller.call(protocol.ANNOUNCE, request, WAIT_S)

    async def found(self) -> bool:
        request = protocol.LookupRequest(names=NAME)
        return bool((await self._caller.call(protocol.LOOKUP, request, WAIT_S)).holders)

    async def until_silent(self) -> None:
        give_up = asyncio.get_running_loop().time() + WAIT_S
        while self.shard.heard(NODE):
            assert asyncio.get_running_loop().time() < give_up
            self.shard.tick()
            await asyncio.sleep(0.01)


def _run(play: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(folder: str) -> None:
        with ThreadPoolExecutor(1) as executor:
            shard = Shard(Store(NodeId("a"), STORE_NAME, b"a" * 16), 100, 0.05, executor, Metrics())
            service = Service()
            shard.serve(service)
            address = f"unix:{Path(folder) / 'sock'}"
            await service.start(address)
            caller = AsyncCaller(address)
            try:
                await play(Scene(shard, caller))
            finally:
                await caller.close()
                await service.stop(0)
                shard.close()

    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        asyncio.run(main(folder))


@pytest.mark.parametrize("earlier", [(1, NEW), (2, b"a" * 16)])
def test_an_earlier_run_is_refused_while_the_later_one_is_heard(earlier: tuple[int, bytes]) -> None:
    async def play(scene: Scene) -> None:
        await scene.say(2, OLD, names=NAME)
        with pytest.raises(StaleIncarnationError, match="a later run of node b has been heard"):
            await scene.say(*earlier)
        assert await scene.found()

    _run(play)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_run_whose_clock_was_set_back_is_heard_once_the_one_before_is_silent(
    leaves: bool,
) -> None:
    async def play(scene: Scene) -> None:
        await scene.say(2 * 10**18, OLD, names=NAME)
        if leaves:
            await scene.say(2 * 10**18, OLD, leaving=True)
        else:
            await scene.until_silent()
        await scene.say(10**18, NEW)
        assert scene.shard.heard(NODE)
        assert not await scene.found()  # what the run before held is not the new one's
        await scene.say(10**18, NEW, names=NAME)
        assert await scene.found()
        with pytest.raises(StaleIncarnationError):
            await scene.say(10**18, b"a" * 16)

    _run(play)


def test_a_later_run_takes_over_at_once() -> None:
    async def play(scene: Scene) -> None:
        await scene.say(2, OLD, names=NAME)
        await scene.say(3, NEW)
        assert not await scene.found()
        with pytest.raises(StaleIncarnationError):
            await scene.say(2, OLD, names=NAME)

    _run(play)


def test_what_a_silent_node_holds_is_hidden_until_it_is_heard_again() -> None:
    async def play(scene: Scene) -> None:
        await scene.say(2, OLD, names=NAME)
        assert await scene.found()
        await scene.until_silent()
        assert not await scene.found()
        await scene.say(2, OLD)
        assert await scene.found()

    _run(play)
