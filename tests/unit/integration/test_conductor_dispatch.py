"""One request over two workers: the order of the calls, the retries, and what a cancel reaches.

The workers are real RPC services with a script for a model.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.client.rpc_service import Service
from kvpool.errors import (
    CapacityError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.events import ListSink, RequestResumed
from kvpool.integration.conductor.dispatch import ATTEMPTS, RESUMES_MAX, Dispatcher, Job, Produced
from kvpool.integration.conductor.links import WorkerLink
from kvpool.integration.runtime.handoff import (
    PREFILL,
    RUN,
    STATUS,
    Empty,
    Prefilled,
    PrefillRequest,
    RunEvent,
    RunRequest,
    WorkerStatus,
)

WAIT_S = 30.0
JOB = Job(tokens=[1, 2, 3], max_tokens=4, stop_tokens=[0])


class Script:
    """Two workers that say 10, 11, 12, ... and fail as told."""

    def __init__(self) -> None:
        self.run_errors: list[KVPoolError] = []
        self.prefill_errors: list[KVPoolError] = []
        self.break_after: list[int] = []  # tokens after which a run fails
        self.first_token = 10
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.requests: list[str] = []
        self.asked: list[tuple[list[int], int, int]] = []  # tokens, drawn and max_tokens of runs
        self.served: list[str] = []  # workers, in the order in which they were asked
        self.sink = ListSink()

    def resumed(self) -> int:
        """How often a request went on elsewhere."""
        return sum(isinstance(event, RequestResumed) for event in self.sink.events)

    async def run(self, request: RunRequest) -> AsyncIterator[RunEvent]:
        if self.run_errors:
            raise self.run_errors.pop()
        self.requests.append(request.request)
        self.asked.append((request.tokens, request.drawn, request.max_tokens))
        self.running += 1
        try:
            yield RunEvent(ready=True, address="here", incarnation=bytes(16))
            await self.gate.wait()
            last = self.break_after.pop() if self.break_after else None
            if self.first_token not in request.stop_tokens:
                for number in range(1, request.max_tokens + 1):
                    if number == last:
                        raise PeerUnreachableError("broken")
                    if number < request.max_tokens:
                        count = request.drawn + number
                        yield RunEvent(
                            token=10 + count, logprob=-float(count), top=((count, -0.5),)
                        )
            yield RunEvent(finish_reason="length")
        finally:
            self.running -= 1

    async def prefill(self, request: PrefillRequest) -> Prefilled:
        assert request.request == self.requests[-1]
        assert (request.tokens, request.drawn) == self.asked[-1][:2]
        assert request.decode_address == "here"
        if self.prefill_errors:
            raise self.prefill_errors.pop()
        await self.gate.wait()
        return Prefilled(
            token=self.first_token + request.drawn, logprob=-0.25, cached_tokens=2 + request.drawn
        )

    async def status(self, _: Empty) -> WorkerStatus:
        return WorkerStatus(
            role="decode",
            running=self.running,
            waiting=0,
            blocks=1,
            blocks_free=1,
            outbox_slots=0,
            outbox_free=0,
            outbox_quarantined=0,
            forwards=0,
            tokens=0,
        )

    def service(self, name: str) -> Service:
        """A worker of that name."""

        def run(request: RunRequest) -> AsyncIterator[RunEvent]:
            self.served.append(name)
            return self.run(request)

        def prefill(request: PrefillRequest) -> Awaitable[Prefilled]:
            self.served.append(name)
            return self.prefill(request)

        service = Service()
        service.add(STATUS, self.status)
        service.add(PREFILL, prefill)
        service.add(RUN, run)
        return service


Story = Callable[[Dispatcher, Script], Awaitable[None]]


def play(folder: Path, story: Story, each: int = 1, *, recovery_timeout_s: float = WAIT_S) -> None:
    async def all_of_it() -> None:
        script = Script()
        async with contextlib.AsyncExitStack() as stack:
            links: dict[str, list[WorkerLink]] = {"p": [], "d": []}
            for role, number in itertools.product(links, range(each)):
                name = f"{role}{number}"
                service = script.service(name)
                address = f"unix:{folder / name}"
                await service.start(address)
                stack.push_async_callback(service.stop, 0.0)
                links[role].append(WorkerLink(name, address))
            dispatcher = Dispatcher(
                links["p"],
                links["d"],
                request_timeout_s=WAIT_S,
                recovery_timeout_s=recovery_timeout_s,
                sink=script.sink,
            )
            stack.push_async_callback(dispatcher.close)
            async with asyncio.timeout(WAIT_S):
                await story(dispatcher, script)

    asyncio.run(all_of_it())


async def everything(dispatcher: Dispatcher, job: Job = JOB) -> list[Produced]:
    async with contextlib.aclosing(dispatcher.stream(job, dispatcher.deadline())) as steps:
        return [step async for step in steps]


WHOLE = [
    Produced(token=10, logprob=-0.25, cached_tokens=2),
    *(Produced(token=10 + n, logprob=-float(n), top=((n, -0.5),)) for n in (1, 2, 3)),
    Produced(finish_reason="length"),
]


def test_the_first_token_is_prefills_and_the_rest_are_decodes(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        assert await everything(dispatcher) == WHOLE
        assert script.running == 0

    play(tmp_path, story)


def test_a_first_token_that_stops_is_not_produced(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        script.first_token = 0
        assert await everything(dispatcher) == [Produced(cached_tokens=2, finish_reason="length")]

    play(tmp_path, story)


@pytest.mark.parametrize("worker", ["run_errors", "prefill_errors"])
def test_a_request_that_fails_before_the_first_token_is_tried_again(
    tmp_path: Path, worker: str
) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        getattr(script, worker).append(PeerUnreachableError("gone"))
        assert await everything(dispatcher) == WHOLE
        assert script.resumed() == 1
        assert len(set(script.requests)) == len(script.requests), "a retry has a name of its own"
        getattr(script, worker).extend([PeerUnreachableError("gone")] * ATTEMPTS)
        with pytest.raises(PeerUnreachableError, match="gone"):
            await everything(dispatcher)

    play(tmp_path, story)


@pytest.mark.parametrize("error", [CapacityError("full"), UsageError("never")])
def test_what_a_retry_cannot_mend_is_not_tried_again(tmp_path: Path, error: KVPoolError) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        script.run_errors.append(error)
        with pytest.raises(type(error), match=str(error)):
            await everything(dispatcher)
        assert script.resumed() == 0

    play(tmp_path, story)


@pytest.mark.parametrize("told", [2, 3, 4])
def test_an_output_goes_on_after_a_loss_in_its_middle(tmp_path: Path, told: int) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        script.break_after.append(told)
        steps = await everything(dispatcher)
        assert steps[:told] == WHOLE[:told]
        assert steps[-1] == WHOLE[-1]
        assert [step.token for step in steps] == [step.token for step in WHOLE]
        assert all(step.cached_tokens is None for step in steps[1:]), "its own output is no hit"
        goes_on = [([1, 2, 3, 10, 11, 12][: 3 + told], told, 4 - told)] if told < 4 else []
        assert script.asked == [([1, 2, 3], 0, 4), *goes_on]
        assert script.resumed() == 1

    play(tmp_path, story)


def test_every_step_further_earns_new_attempts_but_not_for_ever(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        count = RESUMES_MAX
        assert count > ATTEMPTS
        script.break_after = [2] * count
        job = Job(tokens=[1], max_tokens=2 * count + 1, stop_tokens=[0])
        steps = await everything(dispatcher, job)
        assert [step.token for step in steps] == [*range(10, 11 + 2 * count), None]
        assert script.resumed() == count
        script.break_after = [2] * (count + 1)
        job = replace(job, max_tokens=2 * count + 3)
        with pytest.raises(PeerUnreachableError, match="broken"):
            await everything(dispatcher, job)

    play(tmp_path, story)


def test_closing_the_stream_cancels_both_calls(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        script.gate.clear()
        task = asyncio.create_task(everything(dispatcher))
        while not script.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while script.running:
            await asyncio.sleep(0.001)

    play(tmp_path, story)


async def until_running(script: Script, count: int) -> None:
    while script.running < count:
        await asyncio.sleep(0.001)


def test_requests_are_spread_by_the_tokens_that_each_worker_has(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        await asyncio.gather(*(link.wait_alive(WAIT_S) for link in dispatcher.links))
        script.gate.clear()
        tasks = []
        for number, count in enumerate((3, 1, 1, 9), 1):
            job = Job(tokens=[1] * count, max_tokens=4, stop_tokens=[0])
            tasks.append(asyncio.create_task(everything(dispatcher, job)))
            await until_running(script, number)
            while len(script.served) < 2 * number:
                await asyncio.sleep(0.001)
        assert script.served == ["d0", "p0", "d1", "p1", "d1", "p1", "d1", "p1"]
        assert [link.load.tokens for link in dispatcher.links] == [3, 11, 3, 11]
        script.gate.set()
        await asyncio.gather(*tasks)
        assert [link.load.tokens for link in dispatcher.links] == [0] * 4

    play(tmp_path, story, 2)


def test_a_retry_goes_to_other_workers(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        await asyncio.gather(*(link.wait_alive(WAIT_S) for link in dispatcher.links))
        script.prefill_errors.append(PeerUnreachableError("gone"))
        assert await everything(dispatcher) == WHOLE
        assert script.served == ["d0", "p0", "d1", "p1"]

    play(tmp_path, story, 2)


def test_a_worker_that_is_down_is_not_asked(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        await asyncio.gather(*(link.wait_alive(WAIT_S) for link in dispatcher.links))
        nobody = WorkerLink("nobody", f"unix:{tmp_path / 'nobody'}")
        dispatcher.decode = (nobody, *dispatcher.decode)
        assert await everything(dispatcher) == WHOLE
        assert script.served == ["d0", "p0"]
        assert script.resumed() == 0

    play(tmp_path, story)


def test_a_worker_that_falls_silent_loses_its_requests_to_another(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        await asyncio.gather(*(link.wait_alive(WAIT_S) for link in dispatcher.links))
        script.gate.clear()
        task = asyncio.create_task(everything(dispatcher))
        await until_running(script, 1)
        silent = dispatcher.decode[0]

        async def late(timeout_s: float) -> None:
            raise TransferTimeoutError("no heartbeat")

        silent._ask = late
        assert not await silent.refresh()
        assert silent.silent_since is not None
        script.gate.set()
        assert await task == WHOLE
        assert [name for name in script.served if name[0] == "d"] == ["d0", "d1"]

    play(tmp_path, story, 2)


def test_nobody_up_is_an_error_in_time(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        nobody = WorkerLink("nobody", f"unix:{tmp_path / 'nobody'}")
        dispatcher.decode = (nobody,)
        with pytest.raises(PeerUnreachableError, match="nobody: none was up within"):
            await everything(dispatcher)
        assert script.resumed() == 0, "it waited once more"
        dispatcher.prefill, dispatcher.decode = (nobody,), dispatcher.decode[:0]
        with pytest.raises(PeerUnreachableError, match="nobody: none was up within"):
            await everything(dispatcher)
        assert not script.served, "a decode worker holds blocks for a prompt that nobody computes"
        await nobody.close()

    play(tmp_path, story, recovery_timeout_s=0.05)


def test_a_request_waits_for_a_worker_that_comes_back(tmp_path: Path) -> None:
    async def story(dispatcher: Dispatcher, script: Script) -> None:
        later = WorkerLink("later", f"unix:{tmp_path / 'later'}")
        dispatcher.decode = (later,)
        task = asyncio.create_task(everything(dispatcher))
        await later.refresh()
        service = script.service("later")
        await service.start(f"unix:{tmp_path / 'later'}")
        assert await task == WHOLE
        await later.close()
        await service.stop(0.0)

    play(tmp_path, story)
