"""The prefill worker: computes prompts in chunks and streams them to a decode worker, layer by layer.

Owns the life of one prompt here: room, what the pool has of it, the compute, the stream, and its
full blocks on their way into the pool. One engine thread computes; bounded waits run in other
threads. Who calls it: the Conductor, over RPC.
"""

import asyncio
import logging
import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvpool.base import Chain, Match
from kvpool.block import BlockLayout, Incarnation
from kvpool.client.rpc_service import Service
from kvpool.clock import SystemClock
from kvpool.completion import Completion, Deadline
from kvpool.errors import (
    CancelledTransferError,
    ClosedError,
    CorruptionError,
    TransferTimeoutError,
    UnavailableError,
    UsageError,
)
from kvpool.integration.runtime.blocks import Blocks
from kvpool.integration.runtime.handoff import (
    PREFILL,
    Prefilled,
    PrefillRequest,
    StreamEnd,
    WorkerStatus,
    output_of,
    require_drawn,
)
from kvpool.integration.runtime.runner import Chunk, Row
from kvpool.integration.runtime.sampling import Pick, check_sampling, sample
from kvpool.integration.runtime.worker import Parts, Tasks, run
from kvpool.transfer.base import Endpoint
from kvpool.transfer.connections import Connections
from kvpool.transfer.layerwise import LayerSender, Outbox

logger = logging.getLogger(__name__)

# Longest wait for a decode worker's transport to answer.
CONNECT_TIMEOUT_S: Final = 5.0
# The ``chunk`` of slices that were loaded from the pool; computed chunks count from 1.
PREFIX_CHUNK: Final = 0
_CLOSE_TIMEOUT_S: Final = 1.0
# A deadline that has just passed is still a valid argument: it fails where it is looked at.
_DEADLINE_MIN_S: Final = 0.001


@dataclass(slots=True)
class _Prompt:
    """One request while this worker has it."""

    request: PrefillRequest
    blocks: Blocks
    chain: Chain
    deadline: Deadline
    cached_blocks: int = 0
    sender: LayerSender | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise if there is no more use in going on."""
        if self.cancelled.is_set():
            raise CancelledTransferError("the request was cancelled")
        if self.deadline.passed():
            raise TransferTimeoutError(
                f"the prompt was not ready within {self.request.timeout_s} s"
            )


class PrefillWorker:
    """Serves ``PREFILL``. Used from one asyncio loop.

    Args:
        parts: What it is made of.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._layout = parts.runner.tier.layout
        self._slice = _one_layer(self._layout)
        slots = max(1, parts.config.outbox_bytes // self._slice.block_bytes)
        self._outbox = Outbox(parts.transport, self._slice, slots)
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="kvpool-prefill")
        self._connections = Connections(
            parts.transport, SystemClock(), parts.hub.attach, random.Random()
        )
        self._prompts: dict[str, _Prompt] = {}
        self._tasks = Tasks()

    def add_methods(self, service: Service) -> None:
        """Add ``PREFILL``."""
        service.add(PREFILL, self.prefill)

    def status(self) -> WorkerStatus:
        """Say what this worker holds."""
        counts = self._outbox.counts()
        outbox = (self._outbox.arena.slot_count, counts.free, counts.quarantined)
        running, waiting = len(self._prompts), self._parts.room.waiting
        return self._parts.status("prefill", running, waiting, outbox)

    async def prefill(self, request: PrefillRequest) -> Prefilled:
        """Compute a prompt, stream it to its decode worker and return the first token.

        Raises:
            UsageError: The request can never be served.
            CapacityError: No room in time.
            PeerUnreachableError, StaleIncarnationError: The decode worker is gone.
            TransferTimeoutError: Not within ``request.timeout_s``.

        Cancelling it frees everything, once no thread is in the request's blocks any more.
        """
        deadline = Deadline(request.timeout_s)
        self._check(request)
        parts = self._parts
        tokens, size = len(request.tokens), self._layout.block_tokens
        spec = parts.runner.spec
        chain = parts.pool.chain(spec.namespace(size, request.salt), request.tokens)
        blocks = await parts.room.take(-(-tokens // size), deadline.remaining_s())
        prompt = _Prompt(request, blocks, chain, deadline)
        work = self._tasks.start(self._run(prompt))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._cancel(prompt)
            raise

    async def close(self) -> None:
        """Cancel what runs and end the engine thread. Idempotent, bounded."""
        for prompt in list(self._prompts.values()):
            self._cancel(prompt)
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        self._engine.shutdown(wait=False, cancel_futures=True)
        self._connections.close()
        self._parts.hub.close()
        self._outbox.close()

    def _check(self, request: PrefillRequest) -> None:
        spec = self._parts.runner.spec
        if not request.tokens:
            raise UsageError("the prompt is empty: give at least one token")
        if not 0 <= min(request.tokens) <= max(request.tokens) < spec.vocabulary:
            raise UsageError(f"a token is not within 0..{spec.vocabulary - 1}")
        if len(request.tokens) > spec.context_tokens:
            raise UsageError(
                f"{len(request.tokens)} tokens pass the model's context of {spec.context_tokens}"
            )
        if request.request in self._prompts:
            raise UsageError(f"request {request.request} is here already: use a fresh id")
        require_drawn(request)
        check_sampling(request.sampling, spec.vocabulary)

    def _cancel(self, prompt: _Prompt) -> None:
        prompt.cancelled.set()
        if prompt.sender is not None:
            prompt.sender.abort("the request was cancelled")

    async def _run(self, prompt: _Prompt) -> Prefilled:
        """Take a prompt from its room to its end. Every step ends by itself once cancelled."""
        parts, request = self._parts, prompt.request
        self._prompts[request.request] = prompt
        try:
            await parts.loop.run_in_executor(parts.threads, self._begin, prompt)
            picked = await parts.loop.run_in_executor(self._engine, self._compute, prompt)
            await parts.loop.run_in_executor(parts.threads, self._finish, prompt, picked)
        except BaseException as error:
            if prompt.sender is not None:
                prompt.sender.abort(str(error) or type(error).__name__)
            raise
        finally:
            del self._prompts[request.request]
            prompt.blocks.drop()
        cached_tokens = prompt.cached_blocks * self._layout.block_tokens
        return Prefilled(
            token=picked.token,
            logprob=picked.logprob,
            cached_tokens=cached_tokens,
            top=picked.top,
        )

    # ---- in threads -------------------------------------------------------------------------

    def _begin(self, prompt: _Prompt) -> None:
        """Open the stream, load what the pool has, and send that on."""
        request = prompt.request
        prompt.check()
        endpoint = self._endpoint(request, prompt.deadline)
        prompt.sender = self._parts.hub.open(
            endpoint,
            request.request,
            self._outbox,
            self._layout,
            len(prompt.blocks),
            deadline_s=max(prompt.deadline.remaining_s(), _DEADLINE_MIN_S),
        )
        prompt.check()
        prompt.cached_blocks = self._load(prompt)
        if prompt.cached_blocks:
            view = prompt.blocks.view(0, prompt.cached_blocks)
            for layer in range(self._layout.num_layers):
                prompt.check()
                prompt.sender.send(layer, 0, view, chunk=PREFIX_CHUNK)

    def _endpoint(self, request: PrefillRequest, deadline: Deadline) -> Endpoint:
        """Return a connection to the decode worker, made once for each run of it."""
        return self._connections.endpoint(
            request.decode_address,
            Incarnation(request.decode_incarnation),
            min(CONNECT_TIMEOUT_S, deadline.remaining_s()),
        )

    def _load(self, prompt: _Prompt) -> int:
        """Load leading blocks from the pool; return how many came whole. The rest is computed."""
        size, pool = self._layout.block_tokens, self._parts.pool
        # At least one token is computed, since its logits are wanted.
        limit = (len(prompt.request.tokens) - 1) // size
        deadline_s = min(self._parts.config.runtime.pool_timeout_s, prompt.deadline.remaining_s())
        done: Completion[int] | None = None
        try:
            count = min(pool.match(prompt.chain).blocks, limit)
            if not count:
                return 0
            with pool.lease(Match(prompt.chain, count), 2 * deadline_s) as lease:
                if not lease.blocks:
                    return 0
                dest = prompt.blocks.view(0, lease.blocks)
                done = pool.load(lease, dest, deadline_s=deadline_s)
                # The blocks are the load's until it is done, whatever becomes of this request.
                done.add_done_callback(prompt.blocks.hold().drop)
                return done.wait(2 * deadline_s)
        except (UnavailableError, ClosedError, CorruptionError) as error:
            if done is not None and not done.done():
                raise  # it may still write: nothing else may be computed into these blocks
            logger.debug("nothing loaded: %s", error)
            return 0

    def _compute(self, prompt: _Prompt) -> Pick:
        """Compute what is not loaded, chunk by chunk, and choose the first token."""
        parts, tokens = self._parts, prompt.request.tokens
        size, chunk_tokens = self._layout.block_tokens, parts.config.runtime.chunk_tokens
        begin = prompt.cached_blocks * size
        stored, number = prompt.cached_blocks, PREFIX_CHUNK + 1
        logits: Any = None
        while begin < len(tokens):
            prompt.check()
            end = min(begin + chunk_tokens, len(tokens))
            logits = parts.runner.forward(
                [Row(tokens[begin:end], begin, prompt.blocks.indices)],
                on_layer=_SliceSender(prompt, number, begin // size, end, size),
                traced=Chunk(prompt.request.request, number),
            )
            if end // size > stored:
                parts.store(prompt.chain, prompt.blocks, stored, end // size)
                stored = end // size
            begin, number = end, number + 1
        request = prompt.request
        return sample(logits, [request.sampling], [request.drawn], [output_of(request)])[0]

    def _finish(self, prompt: _Prompt, picked: Pick) -> None:
        """End the stream: return when the decode worker has all of it."""
        tokens = len(prompt.request.tokens)
        end = StreamEnd(
            token=picked.token,
            logprob=picked.logprob,
            drawn=prompt.request.drawn + 1,
            position=tokens,
            tail_tokens=tokens % self._layout.block_tokens,
        )
        prompt.check()
        assert prompt.sender is not None
        prompt.sender.finish(msgspec.msgpack.encode(end), deadline_s=prompt.deadline.remaining_s())


class _SliceSender:
    """The layer hook of one chunk: sends the blocks that the chunk completes, layer by layer."""

    def __init__(self, prompt: _Prompt, chunk: int, first: int, end: int, size: int) -> None:
        last = end == len(prompt.request.tokens)
        self._prompt = prompt
        self._chunk = chunk
        self._first = first
        # The partial last block goes too, with the last chunk.
        stop = -(-end // size) if last else end // size
        self._view = prompt.blocks.view(first, stop) if stop > first else None

    def __call__(self, layer: int) -> None:
        """Send one layer's blocks, and what earlier layers had to leave for want of room."""
        sender = self._prompt.sender
        assert sender is not None
        self._prompt.check()
        if self._view is not None:
            sender.send(layer, self._first, self._view, chunk=self._chunk)
        sender.pump()


def _one_layer(layout: BlockLayout) -> BlockLayout:
    """Return the layout of one layer slice."""
    return BlockLayout(
        num_layers=1,
        kv_heads=layout.kv_heads,
        block_tokens=layout.block_tokens,
        k_dim=layout.k_dim,
        v_dim=layout.v_dim,
        dtype=layout.dtype,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Be a prefill worker process."""
    return run("prefill", PrefillWorker, argv)


if __name__ == "__main__":
    sys.exit(main())
