"""The cluster as the Conductor believes it to be, kept up to date one event at a time.

Owns the arrays behind a snapshot: each event (a plan carried out, a prefill done, a request that
joins or leaves a decode batch, a block that comes or goes) is a few additions, never a pass over
all workers. It decides nothing and has no clock: moments come in as arguments. Who calls it: the
live Conductor and the simulator, from one thread.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import numpy as np

from kvpool.block import HASH_BYTES
from kvpool.errors import UsageError
from kvpool.integration.conductor.block_index import BlockIndex
from kvpool.integration.conductor.plan import Plan
from kvpool.integration.conductor.snapshot import (
    DecodeWorkers,
    Flow,
    Nodes,
    Objectives,
    PrefillWorkers,
    Request,
    Snapshot,
    WorkerState,
)

_Columns = TypeVar("_Columns", Nodes, PrefillWorkers, DecodeWorkers)

# A finished request moves the mean decode time by this share: about the last hundred count.
_DECODE_SHARE: Final = 0.01


@dataclass(slots=True)
class _Promise:
    """What was set aside for one request."""

    prefill: int
    decode: int
    tokens: int
    reserved_tokens: int
    prefill_end_s: float
    raw_end_s: float  # the same without the drift of its queue
    in_prefill: bool = True
    joined_at_s: float | None = None


class Cluster:
    """Columns over nodes and workers, the block index, and the requests under way.

    The columns are writable here (`nodes`, `prefill`, `decode`): whoever knows better, by a
    measurement or a report, may set a number. Snapshots show the same memory read-only.

    Args:
        objectives: What requests must be served within.
        block_tokens: Tokens of one block.
        decode_s: A first guess of how long a request decodes; the mean of those that finish
            takes its place.
        seed: What random choices and ties follow.
        hash_bytes: Length of a block's hash.
    """

    def __init__(
        self,
        *,
        objectives: Objectives,
        block_tokens: int,
        decode_s: float,
        seed: int = 0,
        hash_bytes: int = HASH_BYTES,
    ) -> None:
        self.objectives = objectives
        self.block_tokens = block_tokens
        self.seed = seed
        self.decode_s = decode_s
        self.caches = BlockIndex(0, hash_bytes)
        self.nodes = _empty(Nodes)
        self.prefill = _empty(PrefillWorkers)
        self.decode = _empty(DecodeWorkers)
        self._read_nodes = _read_only(self.nodes)
        self._read_prefill = _read_only(self.prefill)
        self._read_decode = _read_only(self.decode)
        self._drift_s: list[float] = []  # how late each prefill queue runs, since its first request
        self._promises: dict[int, _Promise] = {}
        self._prefill_ends_s: list[float] = []
        self._decode_starts_s: list[float] = []

    def add_node(self, *, link_bytes_per_s: float) -> int:
        """Add a node with an empty store and an idle link; return its index."""
        self.nodes = _append(
            self.nodes,
            alive=True,
            send_free_at_s=0.0,
            receive_free_at_s=0.0,
            link_bytes_per_s=link_bytes_per_s,
        )
        self._read_nodes = _read_only(self.nodes)
        self.caches.grow(len(self.nodes.alive))
        return len(self.nodes.alive) - 1

    def add_prefill_worker(self, node: int, *, queued_max: int, tokens_max: int) -> int:
        """Add an idle prefill worker on ``node``; return its index."""
        self.prefill = _append(
            self.prefill,
            node=self._checked_node(node),
            state=WorkerState.READY,
            free_at_s=0.0,
            queued=0,
            queued_max=queued_max,
            tokens_max=tokens_max,
        )
        self._read_prefill = _read_only(self.prefill)
        self._drift_s.append(0.0)
        return len(self.prefill.node) - 1

    def add_decode_worker(self, node: int, *, running_max: int, tokens_max: int) -> int:
        """Add an empty decode worker on ``node``; return its index."""
        self.decode = _append(
            self.decode,
            node=self._checked_node(node),
            state=WorkerState.READY,
            running=0,
            context_tokens=0,
            joining=0,
            joining_tokens=0,
            running_max=running_max,
            free_tokens=tokens_max,
            tokens_max=tokens_max,
        )
        self._read_decode = _read_only(self.decode)
        return len(self.decode.node) - 1

    def lose_node(self, node: int) -> None:
        """Note that a node's store is gone, with all it held. Its workers have states of their own.

        Set ``nodes.alive[node]`` to have it back, empty.
        """
        self.nodes.alive[node] = False
        self.caches.clear(node)

    def snapshot(self, now_s: float) -> Snapshot:
        """Show the cluster at a moment. Copies nothing: valid until the next update."""
        return Snapshot(
            now_s,
            self.seed,
            self.block_tokens,
            self._read_nodes,
            self._read_prefill,
            self._read_decode,
            Flow(self._prefill_ends_s, self._decode_starts_s, self.decode_s),
            self.caches,
            self.objectives,
        )

    def commit(self, now_s: float, request: Request, plan: Plan) -> None:
        """Set aside what a plan promises: queue, links, decode room. Call before the next decision.

        The blocks that the plan will bring to the prefill worker's node are not noted: call
        ``caches.add`` when they are there, or at once to have later requests count on them.

        Raises:
            UsageError: A request of this number is under way.
        """
        if request.number in self._promises:
            raise UsageError(f"request {request.number} is under way: commit each request once")
        worker, start_s = plan.prefill, max(plan.wait_s, plan.transfer_s)
        queue = self.prefill
        queue.free_at_s[worker] = now_s + start_s + plan.prefill_s
        queue.queued[worker] += 1
        if plan.transfer is not None:
            self.nodes.send_free_at_s[plan.transfer.source] = now_s + plan.transfer_s
            self.nodes.receive_free_at_s[plan.transfer.target] = now_s + plan.transfer_s
        end_s = now_s + plan.ttft_s
        insort(self._prefill_ends_s, end_s)
        reserved = request.tokens + request.output_tokens
        decode = self.decode
        decode.joining[plan.decode] += 1
        decode.joining_tokens[plan.decode] += request.tokens
        decode.free_tokens[plan.decode] -= reserved
        self._promises[request.number] = _Promise(
            prefill=worker,
            decode=plan.decode,
            tokens=request.tokens,
            reserved_tokens=reserved,
            prefill_end_s=end_s,
            raw_end_s=now_s + start_s + plan.prefill_s - self._drift_s[worker],
        )

    def prefill_done(self, number: int, now_s: float) -> None:
        """Note that a request has left its prefill worker, and how late the queue runs.

        Raises:
            UsageError: The request is not in prefill.
        """
        promise = self._promise(number)
        if not promise.in_prefill:
            raise UsageError(f"the prefill of request {number} has been noted already")
        self._leave_queue(promise, now_s)
        worker = promise.prefill
        if self.prefill.queued[worker]:
            drift_s = now_s - promise.raw_end_s
            self.prefill.free_at_s[worker] += drift_s - self._drift_s[worker]
            self._drift_s[worker] = drift_s

    def joined(self, number: int, now_s: float) -> None:
        """Note that a request is in its decode worker's batch now. Its prefill is done.

        Raises:
            UsageError: It is still in prefill, or has joined already.
        """
        promise = self._promise(number)
        if promise.in_prefill or promise.joined_at_s is not None:
            raise UsageError(f"request {number} cannot join a batch: it is not between the two")
        decode, worker = self.decode, promise.decode
        self._stop_waiting(promise)
        decode.running[worker] += 1
        decode.context_tokens[worker] += promise.tokens
        promise.joined_at_s = now_s
        insort(self._decode_starts_s, now_s)

    def advance(self, decode: int, tokens: int) -> None:
        """Note that a decode worker's batch has grown by ``tokens``: one a request and step."""
        self.decode.context_tokens[decode] += tokens

    def left(self, number: int, now_s: float, produced_tokens: int) -> None:
        """Note that a request has left its batch, after ``advance`` counted ``produced_tokens``.

        Raises:
            UsageError: It is in no batch.
        """
        promise = self._promise(number)
        if promise.joined_at_s is None:
            raise UsageError(f"request {number} is in no decode batch: cancel it instead")
        decode, worker = self.decode, promise.decode
        decode.running[worker] -= 1
        decode.context_tokens[worker] -= promise.tokens + produced_tokens
        decode.free_tokens[worker] += promise.reserved_tokens
        _take(self._decode_starts_s, promise.joined_at_s)
        self.decode_s += _DECODE_SHARE * (now_s - promise.joined_at_s - self.decode_s)
        del self._promises[number]

    def cancel(self, number: int, now_s: float) -> None:
        """Give back all that was set aside for a request that has not joined a batch.

        Its place in the prefill queue closes up: what was queued behind it is earlier by what
        the drift shows, once the next prefill is done.

        Raises:
            UsageError: It is in a batch: say `left`.
        """
        promise = self._promise(number)
        if promise.joined_at_s is not None:
            raise UsageError(f"request {number} is in a decode batch: say `left`")
        if promise.in_prefill:
            self._leave_queue(promise, now_s)
        self._stop_waiting(promise)
        self.decode.free_tokens[promise.decode] += promise.reserved_tokens
        del self._promises[number]

    def _leave_queue(self, promise: _Promise, now_s: float) -> None:
        promise.in_prefill = False
        worker = promise.prefill
        self.prefill.queued[worker] -= 1
        if not self.prefill.queued[worker]:
            self.prefill.free_at_s[worker] = now_s

    def _stop_waiting(self, promise: _Promise) -> None:
        _take(self._prefill_ends_s, promise.prefill_end_s)
        self.decode.joining[promise.decode] -= 1
        self.decode.joining_tokens[promise.decode] -= promise.tokens

    def _promise(self, number: int) -> _Promise:
        promise = self._promises.get(number)
        if promise is None:
            raise UsageError(f"request {number} is not under way: commit its plan first")
        return promise

    def _checked_node(self, node: int) -> int:
        if not 0 <= node < len(self.nodes.alive):
            raise UsageError(f"there is no node {node}: add it before its workers")
        return node


def _take(ascending: list[float], moment_s: float) -> None:
    del ascending[bisect_left(ascending, moment_s)]


def _empty(kind: type[_Columns]) -> _Columns:
    columns: list[Any] = [
        np.zeros(0, dtype=np.float64 if field.name.endswith("_s") else np.int64)
        for field in fields(kind)
    ]
    if kind is Nodes:
        columns[0] = np.zeros(0, dtype=np.bool_)
    return kind(*columns)


def _append(columns: _Columns, **row: float) -> _Columns:
    kind = type(columns)
    return kind(
        *(
            np.append(column, np.asarray([row[field.name]], dtype=column.dtype))
            for field in fields(kind)
            for column in (getattr(columns, field.name),)
        )
    )


def _read_only(columns: _Columns) -> _Columns:
    shown = []
    for field in fields(columns):
        view = getattr(columns, field.name).view()
        view.flags.writeable = False
        shown.append(view)
    return type(columns)(*shown)
