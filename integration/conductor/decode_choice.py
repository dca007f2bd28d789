"""Which decode worker, and how loaded decode is or will be.

Owns decode selection by predicted TBT and memory, and the three views of decode load that early
rejection distinguishes: as promised, as it is now, as it will be. Pure. Who calls it: the planner.
"""

import bisect

import numpy as np

from kvpool.integration.conductor.cost import CostModel
from kvpool.integration.conductor.snapshot import Bools, Floats, Request, Snapshot, WorkerState


def with_room(snapshot: Snapshot, request: Request) -> Bools:
    """Tell which decode workers have room now: a place in the batch, and KV memory for it all."""
    decode = snapshot.decode
    needed = request.tokens + request.output_tokens
    return (decode.running + decode.joining < decode.running_max) & (decode.free_tokens >= needed)


def promised_tbt_s(snapshot: Snapshot, request: Request, cost: CostModel) -> Floats:
    """Predict each worker's TBT with this request and all that were promised to it."""
    decode = snapshot.decode
    return cost.decode_step_s(
        decode.running + decode.joining + 1,
        decode.context_tokens + decode.joining_tokens + request.tokens,
    )


def current_tbt_s(snapshot: Snapshot, request: Request, cost: CostModel, worker: int) -> float:
    """Predict one worker's TBT if this request joined its batch as it is now."""
    decode = snapshot.decode
    return cost.decode_step_s(
        int(decode.running[worker]) + 1, int(decode.context_tokens[worker]) + request.tokens
    )


def predicted_tbt_s(
    snapshot: Snapshot, request: Request, cost: CostModel, prefill_end_s: float
) -> float:
    """Predict the mean TBT of decode at the moment this request's prefill ends.

    Counted by then: requests that decode now, less those that will have decoded for
    ``flow.decode_s``; requests that will have left prefill, less those of them that will have
    decoded so long too; and this one. They are spread evenly over the workers that live.
    """
    flow, decode = snapshot.flow, snapshot.decode
    over_s = prefill_end_s - flow.decode_s
    running = len(flow.decode_starts_s) - bisect.bisect_right(flow.decode_starts_s, over_s)
    arrived = bisect.bisect_right(flow.prefill_ends_s, prefill_end_s)
    arrived -= bisect.bisect_right(flow.prefill_ends_s, over_s)
    tokens = int(decode.context_tokens.sum()) + int(decode.joining_tokens.sum()) + request.tokens
    requests = int(decode.running.sum()) + int(decode.joining.sum()) + 1
    workers = int(np.count_nonzero(decode.state != WorkerState.DEAD))
    share = (running + arrived + 1) / workers
    return cost.decode_step_s(share, share * tokens / requests)
