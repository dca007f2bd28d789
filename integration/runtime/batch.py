"""Continuous batching: one thread, one forward per step for all running requests.

Owns which sequences are in the next step, and the thread that computes it. Knows nothing of streams,
pools or RPC: finished steps are handed to a callback in the asyncio loop. Who calls it: the decode
worker.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvpool.errors import InternalError, KVPoolError
from kvpool.integration.runtime.blocks import Blocks
from kvpool.integration.runtime.handoff import FinishReason, RunRequest, TopLogprobs
from kvpool.integration.runtime.runner import ModelRunner, Row
from kvpool.integration.runtime.sampling import sample

logger = logging.getLogger(__name__)

# An idle thread looks up this often; a join or close wakes it at once.
_IDLE_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 4.0

T = TypeVar("T")


class Running:
    """One request while it is decoded. Its tokens are written by the batch's thread only.

    Args:
        request: What to do.
        blocks: Room for prompt and output; its first blocks hold the prompt's KV.
        token: The first output token, whose KV is not computed yet.
        drawn: Tokens drawn so far.

    Attributes:
        tokens: Prompt and output so far.
        computed: Leading tokens whose KV is in the blocks.
        out: Set in the loop when the batch no longer touches the blocks.
    """

    def __init__(self, request: RunRequest, blocks: Blocks, token: int, drawn: int) -> None:
        self.request = request
        self.blocks = blocks
        self.tokens = [*request.tokens, token]
        self.computed = len(request.tokens)
        self.drawn = drawn
        self.leaving = False
        self.out = asyncio.Event()

    def verdict(self) -> FinishReason | None:
        """Say why the output ends with its newest token, or None if it goes on."""
        if self.tokens[-1] in self.request.stop_tokens:
            return "stop"
        if len(self.tokens) - len(self.request.tokens) >= self.request.max_tokens:
            return "length"
        return None


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward did for one sequence: a token, or the error that ended it."""

    running: Running
    token: int
    logprob: float
    finish_reason: FinishReason | None
    error: KVPoolError | None = None
    top: TopLogprobs = ()


class Batch:
    """The running sequences and their thread. ``join``, ``leave`` and ``close`` from the loop.

    One condition guards ``_joining`` and ``_members``; the forward runs outside it.

    Args:
        runner: Used by the batch's thread alone from now on.
        loop: Where ``on_step`` is called.
        on_step: Takes the results of each step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        loop: asyncio.AbstractEventLoop,
        on_step: Callable[[list[Step]], None],
    ) -> None:
        self._runner = runner
        self._loop = loop
        self._on_step = on_step
        self._changed = threading.Condition()
        self._joining: list[Running] = []
        self._members: list[Running] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvpool-decode", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        with self._changed:
            return len(self._members) + len(self._joining)

    def join(self, running: Running) -> None:
        """Take a sequence into the next step."""
        with self._changed:
            self._joining.append(running)
            self._changed.notify()

    async def leave(self, running: Running) -> None:
        """End a sequence early, and wait until the step that it is in has ended. Idempotent."""
        with self._changed:
            running.leaving = True
            self._changed.notify()
        await running.out.wait()

    def close(self) -> None:
        """Stop after the step that runs. Idempotent, bounded."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while (members := self._next_members()) is not None:
            steps = self._step(members)
            ended = [step.running for step in steps if step.finish_reason or step.error]
            with self._changed:
                self._members = [member for member in self._members if member not in ended]
            self._tell(self._on_step, steps)
            self._tell(_set_out, ended)

    def _next_members(self) -> list[Running] | None:
        """Wait for work. Returns who is in the next step, or None once closed."""
        with self._changed:
            while True:
                left = [one for one in (*self._members, *self._joining) if one.leaving]
                self._members = [one for one in (*self._members, *self._joining) if not one.leaving]
                self._joining.clear()
                self._tell(_set_out, left)
                if self._closed:
                    self._tell(_set_out, self._members)
                    self._members = []
                    return None
                if self._members:
                    return list(self._members)
                self._changed.wait(_IDLE_S)

    def _step(self, members: Sequence[Running]) -> list[Step]:
        try:
            rows = [
                Row(one.tokens[one.computed :], one.computed, one.blocks.indices) for one in members
            ]
            logits = self._runner.forward(rows)
            picks = sample(
                logits,
                [one.request.sampling for one in members],
                [one.drawn for one in members],
                [one.tokens[len(one.request.tokens) :] for one in members],
            )
        except Exception as error:
            logger.exception("a decode step failed")
            typed = error if isinstance(error, KVPoolError) else InternalError(str(error))
            return [Step(one, 0, 0.0, None, typed) for one in members]
        steps = []
        for one, pick in zip(members, picks, strict=True):
            one.computed = len(one.tokens)
            one.tokens.append(pick.token)
            one.drawn += 1
            steps.append(Step(one, pick.token, pick.logprob, one.verdict(), top=pick.top))
        return steps

    def _tell(self, callback: Callable[[list[T]], None], items: list[T]) -> None:
        if items:
            try:
                self._loop.call_soon_threadsafe(callback, items)
            except RuntimeError:  # the loop is closed: nobody listens any more
                logger.debug("a step ended after the end of the loop")


def _set_out(ended: list[Running]) -> None:
    for running in ended:
        running.out.set()
