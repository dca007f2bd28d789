"""Heartbeats, and the choice of a worker."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvpool.errors import PeerUnreachableError, TransferTimeoutError
from kvpool.integration.conductor import links
from kvpool.integration.conductor.links import Heartbeat, Load, WorkerLink, least_loaded

WAIT_S = 30.0


class Process:
    """Answers heartbeats as told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.heart = Heartbeat("x", self.ask)

    async def ask(self, timeout_s: float) -> None:
        if self.error is not None:
            raise self.error


def play(story: Callable[[Process], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await story(Process())

    asyncio.run(bounded())


def load(name: str, tokens: int, requests: int = 1, *, alive: bool = True) -> Load:
    return Load(name=name, alive=alive, tokens=tokens, requests=requests)


@pytest.mark.parametrize(
    ("loads", "avoid", "chosen"),
    [
        ([load("a", 5), load("b", 4)], (), "b"),
        ([load("a", 4, 2), load("b", 4, 1)], (), "b"),
        ([load("a", 0, 0), load("b", 0, 0)], (), "a"),
        ([load("a", 0, alive=False), load("b", 9)], (), "b"),
        ([load("a", 0), load("b", 9)], ("a",), "b"),
        ([load("a", 0), load("b", 9, alive=False)], ("a",), "a"),
        ([load("a", 0, alive=False)], (), None),
        ([], (), None),
    ],
)
def test_the_least_loaded_is_chosen(
    loads: list[Load], avoid: tuple[str, ...], chosen: str | None
) -> None:
    assert least_loaded(loads, avoid) == chosen


@pytest.mark.parametrize("silent", [True, False])
def test_a_wait_for_a_process_ends_when_it_is_lost(silent: bool) -> None:
    async def story(process: Process) -> None:
        heart = process.heart
        assert await heart.refresh()

        async def wait() -> None:
            async with heart.needed():
                await asyncio.sleep(10 * WAIT_S)

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        kind = TransferTimeoutError if silent else PeerUnreachableError
        process.error = kind("nothing")
        assert not await heart.refresh()
        with pytest.raises(PeerUnreachableError, match="x was lost"):
            await waiting
        assert (heart.silent_since is not None) is silent
        assert heart.down_since is not None
        with pytest.raises(PeerUnreachableError, match="x does not answer"):
            await wait()
        process.error = None
        assert await heart.refresh()
        assert heart.silent_since is heart.down_since is None

    play(story)


def test_silence_is_counted_from_its_begin_and_ends_with_the_process() -> None:
    async def story(process: Process) -> None:
        heart = process.heart
        process.error = TransferTimeoutError("nothing")
        await heart.refresh()
        began = heart.silent_since
        await heart.refresh()
        assert heart.silent_since == began is not None
        process.error = PeerUnreachableError("dead")
        await heart.refresh()
        assert heart.silent_since is None

    play(story)


def test_only_who_is_gone_is_down_at_a_suspicion() -> None:
    async def story(process: Process) -> None:
        heart = process.heart
        await heart.refresh()
        process.error = TransferTimeoutError("busy")
        await heart.suspect()
        assert heart.alive
        process.error = PeerUnreachableError("dead")
        await heart.suspect()
        assert not heart.alive

    play(story)


def test_an_error_that_nobody_foresaw_is_no_sign_of_life_and_ends_no_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "HEARTBEAT_PERIOD_S", 0.001)

    async def story(process: Process) -> None:
        watch = asyncio.create_task(process.heart.watch())
        for error in (None, ZeroDivisionError("x"), None, ZeroDivisionError("y")):
            process.error = error
            while process.heart.alive is not (error is None):
                await asyncio.sleep(0.001)
        assert not watch.done()
        watch.cancel()

    play(story)
    assert sum("a heartbeat of x failed" in one.getMessage() for one in caplog.records) == 2


def test_an_error_of_the_work_itself_names_the_process() -> None:
    async def story(process: Process) -> None:
        await process.heart.refresh()
        with pytest.raises(PeerUnreachableError, match="x: broken pipe"):
            async with process.heart.needed():
                raise PeerUnreachableError("broken pipe")
        with pytest.raises(TimeoutError):  # its own, not the loss of the process
            async with process.heart.needed():
                raise TimeoutError

    play(story)


def test_nobody_at_the_address(tmp_path: Path) -> None:
    async def story(_: Process) -> None:
        nobody = WorkerLink("nobody", f"unix:{tmp_path / 'nobody'}")
        with pytest.raises(PeerUnreachableError, match="nobody is gone"):
            await nobody.wait_alive(0.05)
        assert nobody.status is None
        await nobody.close()

    play(story)


def test_work_counts_while_it_lasts() -> None:
    async def story(_: Process) -> None:
        link = WorkerLink("w", "unix:/nowhere")
        with link.working(5), link.working(2) as work:
            work.tokens += 1
            assert (link.load.tokens, link.load.requests) == (8, 2)
        assert (link.load.tokens, link.load.requests) == (0, 0)
        await link.close()

    play(story)
