"""The decode worker: takes prompts over a layer stream and decodes all of them in one batch.

Owns the life of one request here: room for it, the stream it waits for, its place in
the batch, its tokens on their way out, and the full blocks it made on their way into the pool. Who
calls it: the Conductor, over RPC.
"""

import asyncio
import itertools
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from kvpool.base import StoreResult
from kvpool.client.rpc_service import Service
from kvpool.completion import Completion, Deadline
from kvpool.errors import InternalError, KVPoolError, TransferTimeoutError, UsageError
from kvpool.integration.runtime.batch import Batch, Running, Step, blocks_wanted
from kvpool.integration.runtime.blocks import Blocks
from kvpool.integration.runtime.handoff import (
    RUN,
    RunEvent,
    RunRequest,
    StreamEnd,
    WorkerStatus,
    require_drawn,
)
from kvpool.integration.runtime.sampling import check_sampling
from kvpool.integration.runtime.worker import Parts, Tasks, run
from kvpool.transfer.layerwise import LayerReceiver

logger = logging.getLogger(__name__)

# How long the last event of an output waits for its blocks to be in the pool, so that a client that
# goes on with the conversation at once finds them.
STORE_WAIT_S: Final = 0.5
_CLOSE_TIMEOUT_S: Final = 1.0
# A deadline that has just passed is still a valid argument: it fails where it is looked at.
_DEADLINE_MIN_S: Final = 0.001


class _Request:
    """One request while this worker has it. Used in the loop only."""

    def __init__(self, request: RunRequest, blocks: Blocks, block_tokens: int, turn: int) -> None:
        self.request = request
        self.blocks = blocks  # until it runs; then they are the batch's
        self.turn = turn
        self.steps: asyncio.Queue[Step] = asyncio.Queue()  # at most max_tokens entries
        self.stores: list[Completion[StoreResult]] = []
        # Full blocks of the prompt are stored by the prefill worker.
        self.stored = len(request.tokens) // block_tokens
        self.receiver: LayerReceiver | None = None
        self.running: Running | None = None


class DecodeWorker:
    """Serves ``RUN``. Used from one asyncio loop.

    Args:
        parts: What it is made of. Its transport listens from now on.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._layout = parts.runner.tier.layout
        self._batch = Batch(parts.runner, parts.room, parts.loop, self._on_steps)
        self._turns = itertools.count()
        self._requests: dict[str, _Request] = {}
        self._tasks = Tasks()
        self._address = parts.transport.listen(parts.config.transport_address, parts.hub.attach)

    def add_methods(self, service: Service) -> None:
        """Add ``RUN``."""
        service.add(RUN, self.run)

    def status(self) -> WorkerStatus:
        """Say what this worker holds."""
        running, waiting = len(self._requests), self._parts.room.waiting
        return msgspec.structs.replace(
            self._parts.status("decode", running, waiting, (0, 0, 0)),
            parked=self._batch.parked,
            parks=self._batch.parks,
        )

    async def run(self, request: RunRequest) -> AsyncIterator[RunEvent]:
        """Make room for a request, wait for its prompt's KV, and yield its tokens.

        Raises:
            UsageError: The request can never be served.
            CapacityError: No room in time.
            PeerUnreachableError: The prefill worker is gone.
            TransferTimeoutError: The stream did not end within ``handoff_timeout_s``.

        Closing the iterator frees everything, once no thread is in the request's blocks any more.
        """
        deadline = Deadline(request.handoff_timeout_s)
        self._check(request)
        size, room = self._layout.block_tokens, self._parts.room
        room.require(-(-(len(request.tokens) + request.max_tokens) // size))
        count = blocks_wanted(request, len(request.tokens), size)
        blocks = await room.take(count, deadline.remaining_s())
        mine = _Request(request, blocks, size, next(self._turns))
        self._requests[request.request] = mine
        try:
            prompt_blocks = -(-len(request.tokens) // size)
            mine.receiver = self._parts.hub.expect(
                request.request,
                blocks.view(0, prompt_blocks),
                deadline_s=max(deadline.remaining_s(), _DEADLINE_MIN_S),
            )
            incarnation = bytes(self._parts.transport.incarnation)
            yield RunEvent(ready=True, address=self._address, incarnation=incarnation)
            async for event in self._decode(mine, deadline):
                yield event
        finally:
            # Not awaited: a caller that went away cancels this, and the blocks must wait for threads.
            self._tasks.start(self._let_go(mine))

    async def close(self) -> None:
        """Free what runs and end the batch's thread. Idempotent, bounded."""
        for mine in list(self._requests.values()):
            if mine.receiver is not None:
                mine.receiver.cancel("the request ended")
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self._batch.close)

    def _check(self, request: RunRequest) -> None:
        spec = self._parts.runner.spec
        total = len(request.tokens) + request.max_tokens
        if not request.tokens or request.max_tokens < 1:
            raise UsageError("a request needs at least one token in and one out")
        if total > spec.context_tokens:
            raise UsageError(f"{total} tokens pass the model's context of {spec.context_tokens}")
        if request.request in self._requests:
            raise UsageError(f"request {request.request} is here already: use a fresh id")
        require_drawn(request)
        check_sampling(request.sampling, spec.vocabulary)

    async def _decode(self, mine: _Request, deadline: Deadline) -> AsyncIterator[RunEvent]:
        """Wait for the stream, join the batch, and yield events to the last one."""
        end = await self._received(mine, deadline)
        request = mine.request
        running = Running(request, mine.blocks, end.token, end.drawn, mine.turn)
        reason = running.verdict()
        if reason is None:
            mine.running = running
            self._batch.join(running)
        while reason is None:
            step = await mine.steps.get()
            if step.error is not None:
                raise step.error
            reason = step.finish_reason
            if reason != "stop":
                yield RunEvent(token=step.token, logprob=step.logprob, top=step.top)
        await self._stored(mine)
        yield RunEvent(finish_reason=reason)

    async def _received(self, mine: _Request, deadline: Deadline) -> StreamEnd:
        """Wait until all layers have arrived."""
        assert mine.receiver is not None
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                payload = await mine.receiver.completion
        except TimeoutError as late:
            raise TransferTimeoutError(
                f"the prompt did not arrive within {mine.request.handoff_timeout_s} s"
            ) from late
        end = msgspec.msgpack.decode(payload, type=StreamEnd)
        if end.position != len(mine.request.tokens):
            raise InternalError(
                f"the stream is of {end.position} tokens, the request of {len(mine.request.tokens)}"
            )
        return end

    def _on_steps(self, steps: list[Step]) -> None:
        """Take what one forward did, in the loop. A store that fails is no request's concern."""
        for step in steps:
            mine = self._requests.get(step.running.request.request)
            if mine is not None:
                mine.steps.put_nowait(step)
        for step in steps:
            if step.blocks is None:
                continue
            mine = self._requests.get(step.running.request.request)
            try:
                if mine is not None:
                    self._store(mine, step, step.blocks)
            except Exception:
                logger.exception("blocks of an output were not stored")
            finally:
                step.blocks.drop()

    def _store(self, mine: _Request, step: Step, blocks: Blocks) -> None:
        """Store the blocks that became full."""
        size, full = self._layout.block_tokens, step.full_blocks
        namespace = self._parts.runner.spec.namespace(size, mine.request.salt)
        chain = self._parts.pool.chain(namespace, step.running.tokens[: full * size])
        done = self._parts.store(chain, blocks, mine.stored, full)
        mine.stored = full
        if done is not None:
            mine.stores.append(done)

    async def _stored(self, mine: _Request) -> None:
        """Wait for the stores under way, for a short while."""
        deadline = Deadline(STORE_WAIT_S)
        for done in mine.stores:
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await done
            except (TimeoutError, KVPoolError) as error:
                logger.debug("blocks of an output are not in the pool yet: %r", error)

    async def _let_go(self, mine: _Request) -> None:
        """Leave batch and stream, then give the blocks back."""
        blocks: Blocks | None = mine.blocks
        try:
            if mine.running is not None:
                await self._batch.leave(mine.running)
                blocks = mine.running.blocks
            elif mine.receiver is not None:
                completion = mine.receiver.completion
                mine.receiver.cancel("the request ended")
                # Nothing writes into the blocks once it is done, and not before.
                completion.add_done_callback(mine.blocks.hold().drop)
        finally:
            del self._requests[mine.request.request]
            if blocks is not None:
                blocks.drop()


def main(argv: Sequence[str] | None = None) -> int:
    """Be a decode worker process."""
    return run("decode", DecodeWorker, argv)


if __name__ == "__main__":
    sys.exit(main())
