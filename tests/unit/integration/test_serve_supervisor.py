"""Children are started again, and all of them end, also those that do not want to."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvpool.errors import UnavailableError, UsageError
from kvpool.integration import serve
from kvpool.integration.conductor.links import Heartbeat
from kvpool.integration.serve import SILENT_KILL_S, end_silent
from kvpool.integration.supervisor import Supervisor
from tests.stopped import stop

WAIT_S = 30.0
SLEEPS = "import time; time.sleep(600)"
# Says that it is ready by making a file, so that a signal cannot come before its handler is there.
STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, *arguments)


def play(
    commands: dict[str, tuple[str, ...]], story: Callable[[Supervisor], Awaitable[None]]
) -> None:
    async def all_of_it() -> None:
        supervisor = Supervisor(commands)
        await supervisor.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await story(supervisor)
        finally:
            await supervisor.stop(WAIT_S)

    asyncio.run(all_of_it())


def pid(supervisor: Supervisor, name: str) -> int:
    process = supervisor.children[name].process
    assert process is not None
    return process.pid


def test_a_child_that_dies_is_said_and_started_again() -> None:
    async def story(supervisor: Supervisor) -> None:
        first, other = pid(supervisor, "a"), pid(supervisor, "b")
        os.kill(first, signal.SIGKILL)
        while not supervisor.problems():
            await asyncio.sleep(0.001)
        assert "process a ended (SIGKILL)" in supervisor.problems()[0]
        while supervisor.problems():
            await asyncio.sleep(0.001)
        assert pid(supervisor, "a") != first
        assert pid(supervisor, "b") == other
        assert supervisor.children["a"].restarts == 1

    play({"a": python(SLEEPS), "b": python(SLEEPS)}, story)


@pytest.mark.parametrize(("code", "kind"), [(2, UsageError), (1, UnavailableError)])
def test_a_failed_start_says_who_and_why(code: int, kind: type[Exception]) -> None:
    async def story(supervisor: Supervisor) -> None:
        with pytest.raises(kind, match=rf"the b process did not start \(exit code {code}\)"):
            await supervisor.failed_start()

    play({"a": python(SLEEPS), "b": python(f"raise SystemExit({code})")}, story)


def test_all_children_end_also_stubborn_and_stopped_ones(tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    async def story(supervisor: Supervisor) -> None:
        while not ready.exists():
            await asyncio.sleep(0.001)
        stop(pid(supervisor, "stopped"))
        processes = [child.process for child in supervisor.children.values()]
        await supervisor.stop(0.5)
        codes = [process.returncode for process in processes if process is not None]
        assert codes == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]
        assert supervisor.children["plain"].restarts == 0

    commands = {
        "plain": python(SLEEPS),
        "stubborn": python(STUBBORN, str(ready)),
        "stopped": python(SLEEPS),
    }
    play(commands, story)


def test_a_terminals_ctrl_c_does_not_reach_them() -> None:
    async def story(supervisor: Supervisor) -> None:
        assert os.getpgid(pid(supervisor, "a")) != os.getpgid(0)

    play({"a": python(SLEEPS)}, story)


class Silent(Heartbeat):
    """A process that has been silent, or down, since a time ago."""

    def __init__(self, name: str, *, silent_s: float | None, down_s: float) -> None:
        super().__init__(name, lambda _: asyncio.sleep(0))
        now = time.monotonic()
        self.silent_since = None if silent_s is None else now - silent_s
        self.down_since = now - down_s


@pytest.mark.parametrize(
    ("silent_s", "down_s", "age_s", "killed"),
    [
        (SILENT_KILL_S + 1, SILENT_KILL_S + 1, 1000.0, True),
        (SILENT_KILL_S / 2, SILENT_KILL_S / 2, 1000.0, False),
        (SILENT_KILL_S + 1, SILENT_KILL_S + 1, 1.0, False),  # its predecessor was
        (None, 90.0, 1000.0, False),  # it is being started: a model takes a while
        (None, 101.0, 1000.0, True),
        (None, 101.0, 1.0, False),
    ],
)
def test_who_is_silent_or_does_not_come_up_is_killed_and_started_again(
    silent_s: float | None, down_s: float, age_s: float, killed: bool
) -> None:
    async def story(supervisor: Supervisor) -> None:
        # "b" ends the wait: it is always to be killed.
        for name, age in (("a", age_s), ("b", 1000.0)):
            supervisor.children[name].began = time.monotonic() - age
        hearts = [
            Silent("a", silent_s=silent_s, down_s=down_s),
            Silent("b", silent_s=1000.0, down_s=1000.0),
        ]
        first = pid(supervisor, "a")
        ending = asyncio.create_task(end_silent(hearts, supervisor, start_timeout_s=100.0))
        while not supervisor.children["b"].restarts:
            await asyncio.sleep(0.001)
        ending.cancel()
        if killed:
            while not supervisor.children["a"].restarts:
                await asyncio.sleep(0.001)
        else:
            assert pid(supervisor, "a") == first

    play({"a": python(SLEEPS), "b": python(SLEEPS)}, story)


def test_an_error_that_nobody_foresaw_does_not_end_the_look_for_silent_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "_SILENCE_CHECK_S", 0.001)

    class Strange(Silent):
        looks = 0

        @property
        def name(self) -> str:
            self.looks += 1
            return "nobody" if self.looks < 5 else "a"  # a KeyError, four times

        @name.setter
        def name(self, _: str) -> None:
            pass

    async def story(supervisor: Supervisor) -> None:
        hearts = [Strange("a", silent_s=1000.0, down_s=1000.0)]
        supervisor.children["a"].began = -1000.0
        ending = asyncio.create_task(end_silent(hearts, supervisor, start_timeout_s=100.0))
        while not supervisor.children["a"].restarts:
            await asyncio.sleep(0.001)
        ending.cancel()

    play({"a": python(SLEEPS)}, story)
    assert sum("stay silent are not ended" in one.getMessage() for one in caplog.records) == 1


def test_a_killed_child_is_started_again() -> None:
    async def story(supervisor: Supervisor) -> None:
        first = pid(supervisor, "a")
        supervisor.kill("a", "a test")
        while not supervisor.children["a"].restarts or supervisor.children["a"].process is None:
            await asyncio.sleep(0.001)
        assert pid(supervisor, "a") != first

    play({"a": python(SLEEPS)}, story)
