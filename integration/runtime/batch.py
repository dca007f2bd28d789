"""Continuous batching: one thread, one forward per step for all running requests.

Owns which sequences are in the next step, which are parked for want of blocks, and the thread that
computes. Knows nothing of streams, pools or RPC: finished steps are handed to a callback in the
asyncio loop. Who calls it: the decode worker.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvpool.errors import InternalError, KVPoolError
from kvpool.integration.runtime.blocks import Blocks, Room
from kvpool.integration.runtime.handoff import FinishReason, RunRequest, TopLogprobs
from kvpool.integration.runtime.parking import PARKED_ARENAS, Parked, Parking
from kvpool.integration.runtime.runner import ModelRunner, Row
from kvpool.integration.runtime.sampling import sample

logger = logging.getLogger(__name__)

# Blocks beyond its prompt that a request is admitted or resumed with, so that it does not have to
# make room at once: 64 tokens with blocks of 16.
HEADROOM_BLOCKS: Final = 4
# An idle thread looks up this often; a join or close wakes it at once.
_IDLE_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 4.0

T = TypeVar("T")


class Running:
    """One request while it is decoded. Its tokens and blocks are changed by the batch's thread only.

    Args:
        request: What to do.
        blocks: Room for the prompt and some output; its first blocks hold the prompt's KV.
        token: The first output token, whose KV is not computed yet.
        drawn: Tokens drawn so far.
        turn: Its place in the order of admission: the youngest has the largest.

    Attributes:
        blocks: Its slots, or None while it is parked. Whoever awaited ``out`` drops them.
        parked: Its KV while it is parked.
        tokens: Prompt and output so far.
        computed: Leading tokens whose KV is in the blocks.
        out: Set in the loop when the batch no longer touches the blocks.
    """

    def __init__(
        self, request: RunRequest, blocks: Blocks, token: int, drawn: int, turn: int = 0
    ) -> None:
        self.request = request
        self.blocks: Blocks | None = blocks
        self.parked: Parked | None = None
        self.turn = turn
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


def blocks_wanted(request: RunRequest, computed: int, size: int) -> int:
    """Return with how many blocks of ``size`` tokens a request begins or goes on.

    Args:
        request: The request.
        computed: Leading tokens that have their KV, or will have when it joins.
        size: Tokens of a block.
    """
    whole = -(-(len(request.tokens) + request.max_tokens) // size)
    return min(whole, -(-computed // size) + HEADROOM_BLOCKS)


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward did for one sequence: a token, or the error that ended it.

    Attributes:
        full_blocks: How many leading blocks are full, if one became full in this step.
        blocks: The slots at that moment, held for the taker of the step, who drops them; else None.
    """

    running: Running
    token: int
    logprob: float
    finish_reason: FinishReason | None
    error: KVPoolError | None = None
    top: TopLogprobs = ()
    full_blocks: int = 0
    blocks: Blocks | None = None


class Batch:
    """The running sequences and their thread. ``join``, ``leave`` and ``close`` from the loop.

    One condition guards ``_joining`` and ``_stirred``. Members and parked ones are changed by the
    batch's thread only. A member that needs a block when none is free parks the youngest member;
    parked ones go on, the oldest first, as soon as there is room for them.

    Args:
        runner: Used by the batch's thread alone from now on.
        room: Where members get their blocks.
        loop: Where ``on_step`` is called.
        on_step: Takes the results of each step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        room: Room,
        loop: asyncio.AbstractEventLoop,
        on_step: Callable[[list[Step]], None],
    ) -> None:
        self._runner = runner
        self._room = room
        self._loop = loop
        self._on_step = on_step
        self._size = runner.tier.layout.block_tokens
        self._parking = Parking(runner.tier.layout, PARKED_ARENAS * room.total)
        self._changed = threading.Condition()
        self._joining: list[Running] = []
        self._members: list[Running] = []
        self._parked: list[Running] = []
        self._stirred = False
        self._slots_are_coming = False  # of a parked one, when the stores that read them end
        self._closed = False
        room.on_free = self._freed
        self._thread = threading.Thread(target=self._work, name="kvpool-decode", daemon=True)
        self._thread.start()

    @property
    def parked(self) -> int:
        """Requests that are parked now."""
        return len(self._parked)

    @property
    def parks(self) -> int:
        """Requests parked since the start."""
        return self._parking.parks

    def join(self, running: Running) -> None:
        """Take a sequence into the next step."""
        with self._changed:
            self._joining.append(running)
        self._stir()

    async def leave(self, running: Running) -> None:
        """End a sequence early, and wait until the step that it is in has ended. Idempotent."""
        running.leaving = True
        self._stir()
        await running.out.wait()

    def close(self) -> None:
        """Stop after the step that runs. Idempotent, bounded."""
        self._closed = True
        self._stir()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _freed(self) -> None:
        self._slots_are_coming = False
        self._stir()

    def _stir(self) -> None:
        with self._changed:
            self._stirred = True
            self._changed.notify()

    # ---- the batch's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        while (members := self._next_members()) is not None:
            steps = self._step(members)
            ended = [step.running for step in steps if step.finish_reason or step.error]
            self._tell(self._on_step, steps)
            self._remove(ended)

    def _next_members(self) -> list[Running] | None:
        """Wait for work. Returns who is in the next step, or None once closed."""
        idle = not self._members
        while True:
            with self._changed:
                if idle and not self._stirred:
                    self._changed.wait(_IDLE_S)
                self._stirred = False
                self._members = [*self._members, *self._joining]
                self._joining.clear()
            here = [*self._members, *self._parked]
            if self._closed:
                self._remove(here)
                return None
            self._remove([one for one in here if one.leaving])
            if ready := self._make_room():
                return ready
            idle = True

    def _remove(self, ended: Sequence[Running]) -> None:
        """Let sequences go: their blocks are no longer touched here."""
        for one in ended:
            if one.parked is not None:
                self._parking.forget(one.parked)
                one.parked = None
        self._members = [one for one in self._members if one not in ended]
        self._parked = [one for one in self._parked if one not in ended]
        self._room.keep_for_parked(len(self._parked))
        self._tell(_set_out, list(ended))

    def _make_room(self) -> list[Running]:
        """Give members a block for their next token, parking the youngest; resume who fits.

        Returns:
            The members that can take a step now.
        """
        ready, crowded = [], False
        for one in sorted(self._members, key=_turn):
            while self._needs_block(one) and not (one.blocks and one.blocks.grow()):
                crowded = True
                if self._slots_are_coming:
                    break
                self._park(max(self._members, key=_turn))
            if one.blocks is not None and not self._needs_block(one):
                ready.append(one)
        for one in sorted(self._parked, key=_turn):
            if crowded or not self._resume(one):
                break
            ready += [one] if one.blocks is not None and one in self._members else []
        return ready

    def _needs_block(self, one: Running) -> bool:
        return one.blocks is not None and len(one.blocks) * self._size <= one.computed

    def _park(self, one: Running) -> None:
        """Copy the KV of a member away and free its slots, once the stores that read them end."""
        assert one.blocks is not None
        self._members = [other for other in self._members if other is not one]
        blocks, one.blocks = one.blocks, None
        try:
            one.parked = self._parking.park(blocks.view(0, -(-one.computed // self._size)))
        except KVPoolError as error:
            self._fail(one, error)
        else:
            self._parked = [*self._parked, one]
            self._room.keep_for_parked(len(self._parked))
        self._slots_are_coming = True
        blocks.drop()

    def _resume(self, one: Running) -> bool:
        """Copy the KV of a parked sequence back. False if there is no room for it yet."""
        assert one.parked is not None
        blocks = self._room.reserve(blocks_wanted(one.request, one.computed + 1, self._size))
        if blocks is None:
            return False
        one.blocks = blocks
        try:
            self._parking.resume(one.parked, blocks.view(0, len(one.parked.view)))
        except KVPoolError as error:
            self._fail(one, error)
            return True
        self._parking.forget(one.parked)
        one.parked = None
        self._parked = [other for other in self._parked if other is not one]
        self._members = [*self._members, one]
        self._room.keep_for_parked(len(self._parked))
        return True

    def _step(self, members: Sequence[Running]) -> list[Step]:
        """Compute the next token of each. An error ends those alone that it is the fault of."""
        try:
            return self._computed(members)
        except Exception as error:
            if len(members) > 1:
                logger.warning("a step of %d requests failed: each alone", len(members))
                # Nothing has changed but KV past `computed`, which is computed again.
                return [step for one in members for step in self._step([one])]
            logger.exception("a decode step failed")
            typed = error if isinstance(error, KVPoolError) else InternalError(str(error))
            return [Step(members[0], 0, 0.0, None, typed)]

    def _computed(self, members: Sequence[Running]) -> list[Step]:
        rows = []
        for one in members:
            assert one.blocks is not None
            rows.append(Row(one.tokens[one.computed :], one.computed, one.blocks.indices))
        picks = sample(
            self._runner.forward(rows),
            [one.request.sampling for one in members],
            [one.drawn for one in members],
            [one.tokens[len(one.request.tokens) - one.request.drawn :] for one in members],
        )
        steps = []
        for one, pick in zip(members, picks, strict=True):
            one.computed = len(one.tokens)
            one.tokens.append(pick.token)
            one.drawn += 1
            full, rest = divmod(one.computed, self._size)
            blocks = one.blocks.hold() if one.blocks is not None and not rest else None
            steps.append(
                Step(
                    one,
                    pick.token,
                    pick.logprob,
                    one.verdict(),
                    top=pick.top,
                    full_blocks=full,
                    blocks=blocks,
                )
            )
        return steps

    def _fail(self, one: Running, error: KVPoolError) -> None:
        logger.warning("a request ends because it cannot be parked: %s", error)
        self._tell(self._on_step, [Step(one, 0, 0.0, None, error)])
        self._remove([one])

    def _tell(self, callback: Callable[[list[T]], None], items: list[T]) -> None:
        if items:
            try:
                self._loop.call_soon_threadsafe(callback, items)
            except RuntimeError:  # the loop is closed: nobody listens any more
                logger.debug("a step ended after the end of the loop")


def _set_out(ended: list[Running]) -> None:
    for running in ended:
        running.out.set()


def _turn(running: Running) -> int:
    return running.turn
