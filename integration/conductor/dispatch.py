"""One request across the two workers: decode makes room, prefill streams into it, decode goes on.

Owns the links to the workers, the order of the two calls, and the one retry. Never sees text or
HTTP. Everything runs in one asyncio loop. Who calls it: the Conductor's app.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from kvpool.client.rpc import AsyncCaller
from kvpool.completion import Deadline
from kvpool.errors import (
    CapacityError,
    ClosedError,
    KVPoolError,
    PeerUnreachableError,
    UnavailableError,
)
from kvpool.integration.runtime.handoff import (
    PREFILL,
    RUN,
    STATUS,
    Empty,
    FinishReason,
    Prefilled,
    PrefillRequest,
    RunEvent,
    RunRequest,
    Sampling,
    TopLogprobs,
    WorkerStatus,
)

logger = logging.getLogger(__name__)

# How often a worker is asked for its status, and how long it may take to answer.
STATUS_PERIOD_S: Final = 0.5
STATUS_TIMEOUT_S: Final = 2.0
# A request is tried again once, if nothing of it has been answered yet.
ATTEMPTS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to generate: tokens in, at most ``max_tokens`` out, ending before ``stop_tokens``."""

    tokens: list[int]
    max_tokens: int
    stop_tokens: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """One step of an output. The first carries ``cached_tokens``, the last only why it ended.

    Attributes:
        token: The token; None on the last step. Stop tokens are not produced.
        logprob: The natural log of its probability.
        top: The likeliest tokens, if the job's sampling asks for them.
        cached_tokens: Prompt tokens whose KV came from the pool.
        finish_reason: On the last step.
        restart: The steps so far are void: the request begins anew.
    """

    token: int | None = None
    logprob: float = 0.0
    top: TopLogprobs = ()
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    restart: bool = False


class WorkerLink:
    """The Conductor's connection to one worker, which may die and come back at the same address.

    Args:
        name: For messages and metrics.
        address: Where the worker listens, ``unix:PATH``.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.caller = AsyncCaller(address)
        self.status: WorkerStatus | None = None
        self._changed = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether the last status was answered in time."""
        return self.status is not None

    async def refresh(self) -> WorkerStatus | None:
        """Ask for the status once. None if there was no answer in time."""
        try:
            self.status = await self.caller.call(STATUS, Empty(), STATUS_TIMEOUT_S)
        except KVPoolError as error:
            logger.debug("worker %s: %s", self.name, error)
            self.status = None
        self._changed.set()
        return self.status

    async def watch(self) -> None:
        """Keep ``status`` up to date until cancelled."""
        while True:
            was = self.alive
            await self.refresh()
            if self.alive != was:
                logger.info("worker %s is %s", self.name, "up" if self.alive else "gone")
            await asyncio.sleep(STATUS_PERIOD_S)

    async def wait_alive(self, timeout_s: float) -> None:
        """Wait until a status asked for from now on is answered.

        Raises:
            PeerUnreachableError: The worker did not come back in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.refresh():
                    await asyncio.sleep(STATUS_PERIOD_S / 5)
        except TimeoutError as late:
            raise PeerUnreachableError(
                f"worker {self.name} is gone and did not come back within {timeout_s:.1f} s",
                node=self.name,
            ) from late

    async def close(self) -> None:
        """Close the connection."""
        await self.caller.close()


class Dispatcher:
    """Generates tokens with one prefill and one decode worker.

    Args:
        prefill, decode: Links to the workers. Closed by ``close``.
        request_timeout_s: Longest life of a request, both tries together.
        recovery_timeout_s: How long a retry waits for a worker that died to come back.
    """

    def __init__(
        self,
        prefill: WorkerLink,
        decode: WorkerLink,
        *,
        request_timeout_s: float = 600.0,
        recovery_timeout_s: float = 30.0,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.retries = 0
        self._request_timeout_s = request_timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def links(self) -> tuple[WorkerLink, WorkerLink]:
        """Both workers."""
        return self.prefill, self.decode

    def start(self) -> None:
        """Watch the workers from now on. Call from the running loop."""
        self._watchers = [asyncio.create_task(link.watch()) for link in self.links]

    async def close(self) -> None:
        """Stop watching and close the links. Idempotent."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for link in self.links:
            await link.close()

    async def stream(self, job: Job, *, restart: bool = False) -> AsyncGenerator[Produced]:
        """Generate, step by step. Tried again once if a worker is lost before the first step.

        Closing the iterator cancels the request in both workers.

        Args:
            job: What to generate.
            restart: Try again even after the first step; the caller drops what it has when a step
                says ``restart``.

        Raises:
            UsageError: The request can never be served, say, it is longer than a worker's memory.
            CapacityError: Too many requests wait already.
            UnavailableError: A worker was lost, or the time is up.
        """
        deadline = Deadline(self._request_timeout_s)
        for attempt in range(1, ATTEMPTS + 1):
            answered = False
            try:
                async with aclosing(self._attempt(job, deadline)) as steps:
                    async for step in steps:
                        answered = True
                        yield step
                return
            except (UnavailableError, ClosedError) as error:
                if (answered and not restart) or not _may_retry(error, attempt, deadline):
                    raise
                await self._recover(error, deadline)
                if answered:
                    yield Produced(restart=True)

    async def _recover(self, error: KVPoolError, deadline: Deadline) -> None:
        """Wait until both workers answer again."""
        logger.warning("trying a request again: %s", error)
        self.retries += 1
        timeout_s = min(self._recovery_timeout_s, deadline.remaining_s())
        await asyncio.gather(*(link.wait_alive(timeout_s) for link in self.links))

    async def _attempt(self, job: Job, deadline: Deadline) -> AsyncGenerator[Produced]:
        request, timeout_s = uuid.uuid4().hex, deadline.remaining_s()
        run = RunRequest(
            request=request,
            tokens=job.tokens,
            max_tokens=job.max_tokens,
            stop_tokens=job.stop_tokens,
            sampling=job.sampling,
            salt=job.salt,
            handoff_timeout_s=timeout_s,
        )
        async with aclosing(self.decode.caller.stream(RUN, run, timeout_s)) as events:
            ready = await _next(events)
            calls = asyncio.create_task(self._prefill(job, request, ready, deadline))
            following = asyncio.create_task(_next(events))
            try:
                await asyncio.wait({calls, following}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()  # a decode worker that failed need not be waited for
                prefilled = await calls
                cached: int | None = prefilled.cached_tokens
                if prefilled.token not in job.stop_tokens:
                    yield Produced(
                        token=prefilled.token,
                        logprob=prefilled.logprob,
                        top=prefilled.top,
                        cached_tokens=cached,
                    )
                    cached = None
                event = await following
                while event.finish_reason is None:
                    yield Produced(
                        token=event.token, logprob=event.logprob or 0.0, top=event.top
                    )
                    event = await _next(events)
                yield Produced(cached_tokens=cached, finish_reason=event.finish_reason)
            finally:
                calls.cancel()
                following.cancel()
                await asyncio.gather(calls, following, return_exceptions=True)

    async def _prefill(
        self, job: Job, request: str, ready: RunEvent, deadline: Deadline
    ) -> Prefilled:
        timeout_s = deadline.remaining_s()
        message = PrefillRequest(
            request=request,
            tokens=job.tokens,
            sampling=job.sampling,
            decode_address=ready.address,
            decode_incarnation=ready.incarnation,
            salt=job.salt,
            timeout_s=timeout_s,
        )
        return await self.prefill.caller.call(PREFILL, message, timeout_s)


def _may_retry(error: KVPoolError, attempt: int, deadline: Deadline) -> bool:
    """Say whether trying again can help: a full queue would only grow, spent time is gone."""
    return attempt < ATTEMPTS and not isinstance(error, CapacityError) and not deadline.passed()


async def _next(events: AsyncIterator[RunEvent]) -> RunEvent:
    """Return the next event of a run. It ends with a finish reason, so an early end is a failure."""
    try:
        return await anext(events)
    except StopAsyncIteration as ended:
        raise PeerUnreachableError("the decode worker ended a request before its time") from ended
