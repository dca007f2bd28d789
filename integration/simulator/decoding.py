"""A decode worker: continuous batching, one step for all running requests.

Owns the batch, who waits for room, and the time of each token. Steps of an unchanged batch pass as
one event: a run. Who calls it: the cluster.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import simpy

from kvpool.integration.conductor.cost import CostModel
from kvpool.integration.simulator.job import Job, longest_gaps_mean
from kvpool.integration.simulator.setting import ClusterSetting

# A run is cut after so many steps, so that a growing context is priced anew.
RUN_STEPS_MAX = 64


@dataclass(slots=True)
class _Run:
    """Steps of one batch.

    Attributes:
        began_s: When its first step began.
        gap_s: How long each step takes.
        steps: How many there are, or were.
    """

    began_s: float
    gap_s: float
    steps: int


@dataclass(slots=True)
class _Member:
    job: Job
    run: int  # number of the first run it took part in
    tokens: int  # KV room it holds


class DecodeWorker:
    """One decode worker.

    Args:
        joined: Told of a job that enters the batch.
        advanced: Told how many tokens the batch grew by.
        ended: Told of a job that has its last token.
        setting: Its limits; who finds no room waits, first come first served.
    """

    def __init__(
        self,
        clock: simpy.Environment,
        cost: CostModel,
        setting: ClusterSetting,
        joined: Callable[[Job], None],
        advanced: Callable[[int], None],
        ended: Callable[[Job], None],
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._setting = setting
        self._joined = joined
        self._advanced = advanced
        self._ended = ended
        self._waiting: deque[Job] = deque()
        self._batch: list[tuple[int, int, _Member]] = []  # heap: last step, number, member
        self._runs: dict[int, _Run] = {}  # those that a member still asks about
        self._run_number = 0
        self._run: _Run | None = None
        self._turn = 0
        self._step = 0
        self.context_tokens = 0
        self.held_tokens = 0

    def __len__(self) -> int:
        """Return how many requests run or wait."""
        return len(self._batch) + len(self._waiting)

    @property
    def running(self) -> int:
        """How many requests are in the batch."""
        return len(self._batch)

    def step_s(self) -> float:
        """Return how long a step takes now; 0 without a batch."""
        if not self._batch:
            return 0.0
        return self._cost.decode_step_s(len(self._batch), self.context_tokens)

    def join(self, job: Job) -> None:
        """Take a request whose KV is here; it runs from the next step on that has room."""
        self._waiting.append(job)
        run = self._run
        if run is None:
            self._next_run()
        elif self._has_room(self._waiting[0]):
            passed = math.floor((self._clock.now - run.began_s) / run.gap_s) + 1
            if passed < run.steps:
                run.steps = passed
                self._set_timer(run)

    def _has_room(self, job: Job) -> bool:
        setting, request, running = self._setting, job.request, len(self._batch)
        need = request.input_tokens + request.output_tokens
        if self.held_tokens + need > setting.decode_tokens_max or running >= setting.running_max:
            return False
        if not running or math.isinf(setting.held_tbt_s):
            return True
        context = self.context_tokens + request.input_tokens + 1
        return self._cost.decode_step_s(running + 1, context) <= setting.held_tbt_s

    def _next_run(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            self._enter(self._waiting.popleft())
        if not self._batch:
            self._run = None
            self._runs.clear()
            return
        running = len(self._batch)
        steps = min(self._batch[0][0] - self._step, RUN_STEPS_MAX)
        middle = self.context_tokens + running * (steps - 1) / 2
        run = _Run(self._clock.now, self._cost.decode_step_s(running, middle), steps)
        self._run = run
        self._runs[self._run_number] = run
        self._set_timer(run)

    def _enter(self, job: Job) -> None:
        request = job.request
        tokens = request.input_tokens + request.output_tokens
        self.held_tokens += tokens
        self.context_tokens += request.input_tokens + 1
        last = self._step + request.output_tokens - 1
        heapq.heappush(self._batch, (last, request.number, _Member(job, self._run_number, tokens)))
        self._joined(job)

    def _set_timer(self, run: _Run) -> None:
        self._turn += 1
        turn = self._turn
        timer = self._clock.timeout(max(run.began_s + run.steps * run.gap_s - self._clock.now, 0.0))
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self._ring(turn))

    def _ring(self, turn: int) -> None:
        run = self._run
        if turn != self._turn or run is None:
            return
        self._step += run.steps
        produced = run.steps * len(self._batch)
        self.context_tokens += produced
        self._advanced(produced)
        self._run_number += 1
        while self._batch and self._batch[0][0] <= self._step:
            _, _, member = heapq.heappop(self._batch)
            self._leave(member)
            self._ended(member.job)
        self._next_run()
        self._forget()

    def _leave(self, member: _Member) -> None:
        job = member.job
        self.held_tokens -= member.tokens
        self.context_tokens -= job.request.input_tokens + job.request.output_tokens
        job.tbt_s = longest_gaps_mean(
            [
                (run.gap_s, run.steps)
                for run in map(self._runs.__getitem__, range(member.run, self._run_number))
            ]
        )

    def _forget(self) -> None:
        """Drop runs that nobody in the batch took part in, now and then."""
        if len(self._runs) > 256 + 8 * len(self._batch):
            oldest = min((member.run for _, _, member in self._batch), default=self._run_number)
            self._runs = {number: run for number, run in self._runs.items() if number >= oldest}
