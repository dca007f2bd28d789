"""The Conductor's links to the processes it needs: who answers, how loaded each is, whom to take.

Owns the heartbeat of each process and what the Conductor itself has given each worker to do. The
choice is a pure function. Everything runs in one asyncio loop. Who calls it: the dispatcher, and
``kvpool-serve``, which ends a process that stays silent.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from kvpool.client.rpc import AsyncCaller
from kvpool.errors import (
    ClosedError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.integration.runtime.handoff import STATUS, Empty, WorkerStatus

logger = logging.getLogger(__name__)

# How often a process is asked whether it is there.
HEARTBEAT_PERIOD_S: Final = 0.5
# A process that does not answer for this long is down: its requests go elsewhere. A worker answers
# within milliseconds, but its machine may be busy.
HEARTBEAT_TIMEOUT_S: Final = 5.0
# How long a process that a request has just failed at may take to show that it is there.
_SUSPECT_TIMEOUT_S: Final = 1.0


class Heartbeat:
    """Whether one process answers. It may die and come back at the same address.

    Args:
        name: For messages and metrics.
        ask: Asks it anything, within the seconds given; raises as ``AsyncCaller.call``.

    Attributes:
        alive: Whether the last heartbeat was answered in time.
        down_since: Since when it is not alive, on the monotonic clock; None while it is.
        silent_since: Since when it has been there without an answer, as a stopped process is; None
            if it answers, or is gone.
    """

    def __init__(self, name: str, ask: Callable[[float], Awaitable[object]]) -> None:
        self.name = name
        self.alive = False
        self.down_since: float | None = time.monotonic()
        self.silent_since: float | None = None
        self._ask = ask
        self._waits: set[asyncio.Timeout] = set()
        self._strange = ""  # the last error that nobody foresaw

    async def refresh(self) -> bool:
        """Send one heartbeat. Returns whether it was answered in time."""
        began = time.monotonic()
        try:
            await self._ask(HEARTBEAT_TIMEOUT_S)
        except TransferTimeoutError as late:
            self.silent_since = self.silent_since or began
            self._down(late)
        except (PeerUnreachableError, ClosedError) as gone:
            self.silent_since = None
            self._down(gone)
        except KVPoolError as error:  # an answer, of a kind
            logger.warning("%s has no time for a heartbeat: %s", self.name, error)
        else:
            if not self.alive:
                logger.info("%s is up", self.name)
            self.alive, self.down_since, self.silent_since = True, None, None
        return self.alive

    async def suspect(self) -> None:
        """Look whether the process is gone, because a request failed at it."""
        try:
            await self._ask(_SUSPECT_TIMEOUT_S)
        except TransferTimeoutError:
            pass  # busy or stopped: the next heartbeats will tell
        except (PeerUnreachableError, ClosedError) as gone:
            self._down(gone)
        except KVPoolError as error:
            logger.debug("%s: %s", self.name, error)

    async def watch(self) -> None:
        """Send heartbeats until cancelled, whatever becomes of one."""
        while True:
            try:
                await self.refresh()
            except Exception as error:
                if repr(error) != self._strange:  # else it would be said twice a second
                    logger.exception("a heartbeat of %s failed: please report this", self.name)
                self._strange = repr(error)
                self._down(InternalError(f"a heartbeat failed: {error}"))
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def wait_alive(self, timeout_s: float) -> None:
        """Wait until a heartbeat sent from now on is answered.

        Raises:
            PeerUnreachableError: None was, in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.refresh():
                    await asyncio.sleep(HEARTBEAT_PERIOD_S / 5)
        except TimeoutError as late:
            raise PeerUnreachableError(
                f"{self.name} is gone and did not come back within {timeout_s:.1f} s",
                node=self.name,
            ) from late

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """Wait inside for something that only this process can bring; not across a ``yield``.

        Raises:
            PeerUnreachableError: It is down, or was lost meanwhile; also what the block itself
                raises of that kind, with the process's name.
        """
        if not self.alive:
            raise PeerUnreachableError(f"{self.name} does not answer", node=self.name)
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError as lost:
            if not wait.expired():
                raise
            raise PeerUnreachableError(
                f"{self.name} was lost, or does not answer", node=self.name
            ) from lost
        except PeerUnreachableError as error:
            raise PeerUnreachableError(f"{self.name}: {error}", node=self.name) from error

    def _down(self, error: KVPoolError) -> None:
        if self.alive:
            logger.warning("%s is down: %s", self.name, error)
            self.down_since = time.monotonic()
        self.alive = False
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())
        self._waits.clear()


@dataclass(slots=True)
class Work:
    """What one request is to a worker, as the Conductor counts it: tokens of prompt and output."""

    tokens: int


class WorkerLink(Heartbeat):
    """The Conductor's connection to one worker.

    Args:
        name: For messages and metrics.
        address: Where the worker listens, ``unix:PATH``.

    Attributes:
        status: What the worker last said of itself; for show, no decision looks at it.
    """

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name, self._ask_status)
        self.caller = AsyncCaller(address)
        self._said: WorkerStatus | None = None
        self._work: list[Work] = []

    @property
    def status(self) -> WorkerStatus | None:
        """The worker's last status; None while it does not answer."""
        return self._said if self.alive else None

    @property
    def load(self) -> "Load":
        """What the Conductor has given this worker to do, running or waiting."""
        tokens = sum(work.tokens for work in self._work)
        return Load(name=self.name, alive=self.alive, tokens=tokens, requests=len(self._work))

    @contextmanager
    def working(self, tokens: int) -> Iterator[Work]:
        """Count a request of ``tokens`` as this worker's inside the block."""
        work = Work(tokens)
        self._work.append(work)
        try:
            yield work
        finally:
            self._work = [other for other in self._work if other is not work]

    async def close(self) -> None:
        """Close the connection."""
        await self.caller.close()

    async def _ask_status(self, timeout_s: float) -> None:
        self._said = await self.caller.call(STATUS, Empty(), timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One worker, as far as the choice of one goes.

    Attributes:
        name: The worker's.
        alive: Whether it answers.
        tokens: Of the requests that it runs, and of those that wait for it.
        requests: How many those are.
    """

    name: str
    alive: bool
    tokens: int
    requests: int


def least_loaded(loads: Sequence[Load], avoid: Collection[str] = ()) -> str | None:
    """Choose a worker: one with the fewest tokens, then the fewest requests, then the first.

    Args:
        loads: All workers of a role.
        avoid: Names of those that are taken only if no other one is alive.

    Returns:
        Its name, or None if none is alive. Pure.
    """
    alive = [load for load in loads if load.alive]
    wanted = [load for load in alive if load.name not in avoid] or alive
    return min(wanted, key=lambda load: (load.tokens, load.requests)).name if wanted else None
