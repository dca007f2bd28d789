"""One request across two workers: decode makes room, prefill streams into it, decode goes on.

Owns which workers a request goes to, the order of the two calls, and the retries. Never sees text or
HTTP. Everything runs in one asyncio loop. Who calls it: the Conductor's app.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from kvpool.completion import Deadline
from kvpool.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    KVPoolError,
    PeerUnreachableError,
    UnavailableError,
)
from kvpool.events import EventSink, NullSink, RequestResumed
from kvpool.integration.conductor.links import WorkerLink, least_loaded
from kvpool.integration.runtime.handoff import (
    PREFILL,
    RUN,
    FinishReason,
    Prefilled,
    PrefillRequest,
    RunEvent,
    RunRequest,
    Sampling,
    TopLogprobs,
)

logger = logging.getLogger(__name__)

# Times that a request is begun without a step further: it may meet two faults in a row.
ATTEMPTS: Final = 3
# Times that it goes on elsewhere in all: a request that brings its workers down must not go round.
RESUMES_MAX: Final = 8
# Pause between two looks for a worker while none is up.
_LOOK_S: Final = 0.1


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
    """

    token: int | None = None
    logprob: float = 0.0
    top: TopLogprobs = ()
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None


class _NobodyUpError(PeerUnreachableError):
    """No worker of a role came up in time; trying again would wait as long once more."""


class Dispatcher:
    """Generates tokens with the least loaded prefill worker and the least loaded decode worker.

    Args:
        prefill, decode: Links to the workers, at least one each. Closed by ``close``.
        request_timeout_s: Longest life of a request, all its attempts together.
        recovery_timeout_s: How long a request waits for a worker while none is up.
        sink: Takes RequestResumed.
    """

    def __init__(
        self,
        prefill: Sequence[WorkerLink],
        decode: Sequence[WorkerLink],
        *,
        request_timeout_s: float = 600.0,
        recovery_timeout_s: float = 60.0,
        sink: EventSink | None = None,
    ) -> None:
        self.prefill = tuple(prefill)
        self.decode = tuple(decode)
        self._sink = NullSink() if sink is None else sink
        self._request_timeout_s = request_timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        """All workers."""
        return self.prefill + self.decode

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

    def deadline(self) -> Deadline:
        """Return the deadline of a request that begins now."""
        return Deadline(self._request_timeout_s)

    async def stream(self, job: Job, deadline: Deadline) -> AsyncGenerator[Produced]:
        """Generate, step by step. It goes on, elsewhere if it can, when a worker is lost.

        The output so far becomes part of the prompt of the next attempt, so no step is void and
        each follows from those before it. Closing the iterator cancels the request in both workers.

        Args:
            job: What to generate.
            deadline: Of the whole request, all its attempts together.

        Raises:
            UsageError: The request can never be served, say, it is longer than a worker's memory.
            CapacityError: Too many requests wait already.
            UnavailableError, ClosedError, CorruptionError: A worker was lost, or the time is up.
        """
        used: dict[str, WorkerLink] = {}
        output: list[int] = []
        attempts, resumes = 0, 0
        while len(output) < job.max_tokens:
            attempts += 1
            try:
                async with aclosing(self._attempt(job, output, deadline, used)) as steps:
                    async for step in steps:
                        attempts = 0
                        if step.token is not None:
                            output.append(step.token)
                        yield step
                return
            except (UnavailableError, ClosedError, CorruptionError) as error:
                if resumes == RESUMES_MAX or not _may_retry(error, attempts, deadline):
                    raise
                resumes += 1
                logger.warning("a request of %d tokens so far goes on: %s", len(output), error)
                self._sink.emit(RequestResumed(tokens=len(output), reason=type(error).__name__))
                await asyncio.gather(*(link.suspect() for link in used.values() if link.alive))
        yield Produced(finish_reason="length")  # only why it ended was lost

    async def _choose(
        self, links: Sequence[WorkerLink], avoid: Collection[str], deadline: Deadline
    ) -> WorkerLink:
        """Return the least loaded of the workers that are up, none of ``avoid`` if possible.

        Raises:
            _NobodyUpError: None is up, and none came up in time.
        """
        timeout_s = min(self._recovery_timeout_s, deadline.remaining_s())
        limit = Deadline(timeout_s)
        while (name := least_loaded([link.load for link in links], avoid)) is None:
            if limit.passed():
                names = ", ".join(link.name for link in links)
                raise _NobodyUpError(f"{names}: none was up within {timeout_s:.1f} s")
            await _look(links, limit)
        return next(link for link in links if link.name == name)

    async def _attempt(
        self, job: Job, output: Sequence[int], deadline: Deadline, used: dict[str, WorkerLink]
    ) -> AsyncGenerator[Produced]:
        """Go on after ``output``, with other workers than those it ``used`` before; says which."""
        avoid = tuple(used)
        used.clear()
        # Nothing is held at a decode worker while there is nobody to compute the prompt.
        await self._choose(self.prefill, avoid, deadline)
        decode = await self._choose(self.decode, avoid, deadline)
        used[decode.name] = decode
        request, timeout_s = uuid.uuid4().hex, deadline.remaining_s()
        drawn = len(output)
        run = RunRequest(
            request=request,
            tokens=[*job.tokens, *output],
            drawn=drawn,
            max_tokens=job.max_tokens - drawn,
            stop_tokens=job.stop_tokens,
            sampling=job.sampling,
            salt=job.salt,
            handoff_timeout_s=timeout_s,
        )
        with decode.working(len(run.tokens)) as work:
            async with aclosing(decode.caller.stream(RUN, run, timeout_s)) as events:
                ready = await _next(decode, events)
                prefill = await self._choose(self.prefill, avoid, deadline)
                used[prefill.name] = prefill
                calls = asyncio.create_task(_prefill(prefill, run, ready, deadline))
                following = asyncio.create_task(_next(decode, events))
                try:
                    await asyncio.wait({calls, following}, return_when=asyncio.FIRST_COMPLETED)
                    if following.done():
                        following.result()  # a decode worker that failed need not be waited for
                    prefilled = await calls
                    # What a later attempt finds in the pool is of its own making.
                    cached = None if drawn else prefilled.cached_tokens
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
                        work.tokens += 1
                        yield Produced(
                            token=event.token, logprob=event.logprob or 0.0, top=event.top
                        )
                        event = await _next(decode, events)
                    yield Produced(cached_tokens=cached, finish_reason=event.finish_reason)
                finally:
                    calls.cancel()
                    following.cancel()
                    await asyncio.gather(calls, following, return_exceptions=True)


async def _prefill(
    link: WorkerLink, run: RunRequest, ready: RunEvent, deadline: Deadline
) -> Prefilled:
    timeout_s = deadline.remaining_s()
    message = PrefillRequest(
        request=run.request,
        tokens=run.tokens,
        drawn=run.drawn,
        sampling=run.sampling,
        decode_address=ready.address,
        decode_incarnation=ready.incarnation,
        salt=run.salt,
        timeout_s=timeout_s,
    )
    with link.working(len(run.tokens)):
        async with link.needed():
            return await link.caller.call(PREFILL, message, timeout_s)


async def _look(links: Sequence[WorkerLink], limit: Deadline) -> None:
    """Ask all of them until the first one has answered in whatever way, then pause."""
    asked = [asyncio.create_task(link.refresh()) for link in links]
    try:
        await asyncio.wait(asked, timeout=limit.remaining_s(), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(min(_LOOK_S, limit.remaining_s()))
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def _may_retry(error: KVPoolError, attempts: int, deadline: Deadline) -> bool:
    """Say whether trying again can help: a full queue would only grow, spent time is gone."""
    hopeless = isinstance(error, CapacityError | _NobodyUpError)
    return attempts < ATTEMPTS and not hopeless and not deadline.passed()


async def _next(link: WorkerLink, events: AsyncIterator[RunEvent]) -> RunEvent:
    """Return the next event of a run. It ends with a finish reason, so an early end is a failure."""
    try:
        async with link.needed():
            return await anext(events)
    except StopAsyncIteration as ended:
        raise PeerUnreachableError(
            f"{link.name} ended a request before its time", node=link.name
        ) from ended
