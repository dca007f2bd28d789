"""Child processes of ``kvpool-serve``: started, watched, started again, stopped.

Owns when a process is started again and how all of them end. Knows nothing of what they do. A child
has a session of its own, so a terminal's Ctrl-C reaches the launcher alone. Who calls it: serve.py.
"""

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool.errors import UnavailableError, UsageError

logger = logging.getLogger(__name__)

# Pause before a child is started again: doubled each time, back to the first after a good run.
BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 10.0
_GOOD_RUN_S: Final = 30.0
# What a child answers with when its arguments are wrong: starting it again would not help.
USAGE_EXIT: Final = 2


@dataclass(slots=True)
class Child:
    """One child process, over all its runs.

    Attributes:
        name: For logs and health.
        command: Program and arguments.
        process: Its current run, or None between two.
        restarts: How often it was started again.
        ended: How its last run ended.
        began: When its current run began, on the monotonic clock.
    """

    name: str
    command: Sequence[str]
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    ended: str = ""
    began: float = 0.0
    first_exit: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Keeps children running. Used from one asyncio loop.

    Args:
        commands: Program and arguments of each child, by name.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self.children = {name: Child(name, command) for name, command in commands.items()}
        self._stopping = False
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all children, and watch them from now on."""
        for child in self.children.values():
            await self._spawn(child)
        self._watchers = [
            asyncio.create_task(self._watch(child)) for child in self.children.values()
        ]

    def problems(self) -> list[str]:
        """Say which children are not running, for people."""
        return [
            f"process {child.name} ended ({child.ended}) and is being started again"
            for child in self.children.values()
            if child.process is None
        ]

    async def failed_start(self) -> None:
        """Return never; raise as soon as a child has ended for the first time.

        Raises:
            UsageError: It says that its arguments are wrong.
            UnavailableError: Anything else.
        """
        waiters = {
            asyncio.create_task(child.first_exit.wait()): child for child in self.children.values()
        }
        try:
            done, _ = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        child = waiters[done.pop()]
        kind = UsageError if child.ended == f"exit code {USAGE_EXIT}" else UnavailableError
        raise kind(f"the {child.name} process did not start ({child.ended}): its message is above")

    async def stop(self, timeout_s: float) -> None:
        """End all children: SIGTERM, and SIGKILL for those that are left after ``timeout_s``."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        running = [child.process for child in self.children.values() if child.process is not None]
        for process in running:
            _signal(process, signal.SIGTERM)
            # A stopped process takes no SIGTERM before it goes on.
            _signal(process, signal.SIGCONT)
        waiting = [asyncio.create_task(process.wait()) for process in running]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        for process in running:
            _signal(process, signal.SIGKILL)
        await asyncio.gather(*waiting)

    def kill(self, name: str, why: str) -> None:
        """End a child that is of no use any more; it is started again as if it had died."""
        process = self.children[name].process
        if process is not None and not self._stopping:
            logger.warning("killing process %s: %s", name, why)
            _signal(process, signal.SIGKILL)

    async def _spawn(self, child: Child) -> None:
        child.began = time.monotonic()
        child.process = await asyncio.create_subprocess_exec(
            *child.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )

    async def _watch(self, child: Child) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            assert child.process is not None
            code = await child.process.wait()
            if self._stopping:
                return
            child.process = None
            child.ended = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            child.first_exit.set()
            if time.monotonic() - child.began > _GOOD_RUN_S:
                backoff_s = BACKOFF_MIN_S
            logger.warning(
                "process %s ended (%s): starting it again in %.1f s",
                child.name,
                child.ended,
                backoff_s,
            )
            while child.process is None:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
                child.restarts += 1
                try:
                    await self._spawn(child)
                except OSError as error:  # no memory or no process number left: perhaps later
                    logger.error("process %s cannot be started: %s", child.name, error)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
