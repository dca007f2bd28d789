"""Which prefill worker, and which blocks to copy to it first.

Owns the scheduling policies: each is a way to score every prefill worker at once, the lowest score
wins, and ties are spread. Pure. Who calls it: the planner.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from kvpool.integration.conductor.cost import CostModel
from kvpool.integration.conductor.snapshot import Floats, Ints, Request, Snapshot

PolicyName = Literal["random", "load-balancing", "cache-aware", "kvcache-centric", "slack-aware"]

_WORD: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PrefillEstimates:
    """Columns over prefill workers: what one request would meet at each.

    Attributes:
        cached_tokens: Tokens that need no computing, after the copy.
        local_blocks: Leading blocks that the worker's node holds now.
        moved_blocks: Blocks to copy from ``holder`` first; 0: none.
        holder: The node to copy from, where there is something to copy.
        wait_s, transfer_s, prefill_s, ttft_s: See `Plan`.
    """

    cached_tokens: Ints
    local_blocks: Ints
    moved_blocks: Ints
    holder: int
    wait_s: Floats
    transfer_s: Floats
    prefill_s: Floats
    ttft_s: Floats


def draw(seed: int, number: int, count: int) -> int:
    """Pick one of ``count`` by the snapshot's seed and the request's number (splitmix64)."""
    word = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return (word ^ (word >> 31)) % count


def lowest(scores: Floats, seed: int, number: int) -> int:
    """Return the index of the lowest score; equal ones are drawn from, so that load spreads."""
    ties = np.flatnonzero(scores == scores.min())
    return int(ties[draw(seed, number, len(ties))])


def stay(snapshot: Snapshot, request: Request, cost: CostModel) -> PrefillEstimates:
    """Estimate each worker with what its own node holds: nothing is copied."""
    held = _held_blocks(snapshot, request)
    local = held[snapshot.prefill.node]
    cached = _cached_tokens(snapshot, request, local)
    wait_s = _wait_s(snapshot)
    prefill_s = cost.prefill_s(request.tokens, cached)
    none = np.zeros_like(wait_s)
    return PrefillEstimates(
        cached, local, np.zeros_like(local), 0, wait_s, none, prefill_s, wait_s + prefill_s
    )


def balance(
    snapshot: Snapshot, request: Request, cost: CostModel, threshold: float
) -> PrefillEstimates:
    """Estimate each worker as the papers' algorithm 1 does.

    A worker that is far behind the longest holder, by more than ``threshold`` in the ratio of
    their matches, copies what it lacks; the others compute it. A worker that matches nothing is
    behind anybody who matches something. The copy is counted before the wait and the prefill. An
    infinite threshold copies nothing.
    """
    if math.isinf(threshold):
        return stay(snapshot, request, cost)
    held = _held_blocks(snapshot, request)
    local = held[snapshot.prefill.node]
    best, holder = _holder(snapshot, request, held)
    behind = best > threshold * local
    moved = np.where(behind, best - local, 0)
    cached = _cached_tokens(snapshot, request, local + moved)
    transfer_s = _transfer_s(snapshot, request, cost, holder, moved)
    wait_s = _wait_s(snapshot)
    prefill_s = cost.prefill_s(request.tokens, cached)
    return PrefillEstimates(
        cached, local, moved, holder, wait_s, transfer_s, prefill_s, transfer_s + wait_s + prefill_s
    )


def weigh(
    snapshot: Snapshot, request: Request, cost: CostModel, work_price: float
) -> PrefillEstimates:
    """Estimate each worker with the cheaper of copying and computing, whatever their ratio.

    The copy goes on while the request waits, so only what is left of it counts. Cheaper is less
    of (time to first token + ``work_price`` * time to compute).
    """
    held = _held_blocks(snapshot, request)
    local = held[snapshot.prefill.node]
    best, holder = _holder(snapshot, request, held)
    lacking = best - local
    wait_s = _wait_s(snapshot)
    cached = _cached_tokens(snapshot, request, local)
    compute_s = cost.prefill_s(request.tokens, cached)
    all_cached = min(best * snapshot.block_tokens, request.tokens - 1)
    rest_s = cost.prefill_s(request.tokens, all_cached)
    transfer_s = _transfer_s(snapshot, request, cost, holder, lacking)
    start_s = np.maximum(wait_s, transfer_s)
    work = 1 + work_price
    copies = start_s + work * rest_s < wait_s + work * compute_s
    prefill_s = np.where(copies, rest_s, compute_s)
    return PrefillEstimates(
        np.where(copies, all_cached, cached),
        local,
        np.where(copies, lacking, 0),
        holder,
        wait_s,
        np.where(copies, transfer_s, 0.0),
        prefill_s,
        np.where(copies, start_s, wait_s) + prefill_s,
    )


def _held_blocks(snapshot: Snapshot, request: Request) -> Ints:
    """Leading blocks per node; a store that does not answer holds none."""
    return np.where(snapshot.nodes.alive, snapshot.caches.match(request.chain), 0)


def _holder(snapshot: Snapshot, request: Request, held: Ints) -> tuple[int, int]:
    """Find the longest match and the node to copy it from: of equal ones, the least busy link."""
    best = int(held.max())
    busy_s = np.maximum(snapshot.nodes.send_free_at_s - snapshot.now_s, 0.0)
    busy_s = np.where(held == best, busy_s, np.inf)
    return best, lowest(busy_s, snapshot.seed, request.number)


def _cached_tokens(snapshot: Snapshot, request: Request, blocks: Ints) -> Ints:
    """Tokens of so many leading blocks. The last token of a prompt is always computed."""
    return np.minimum(blocks * snapshot.block_tokens, request.tokens - 1)


def _wait_s(snapshot: Snapshot) -> Floats:
    return np.maximum(snapshot.prefill.free_at_s - snapshot.now_s, 0.0)


def _transfer_s(
    snapshot: Snapshot, request: Request, cost: CostModel, holder: int, moved: Ints
) -> Floats:
    """Time to copy ``moved`` blocks to each worker: after what is in flight at either end."""
    nodes, node = snapshot.nodes, snapshot.prefill.node
    free_at_s = np.maximum(nodes.send_free_at_s[holder], nodes.receive_free_at_s[node])
    busy_s = np.maximum(free_at_s - snapshot.now_s, 0.0)
    link = np.minimum(nodes.link_bytes_per_s[holder], nodes.link_bytes_per_s[node])
    moved_tokens = np.minimum(moved * snapshot.block_tokens, request.tokens)
    return np.where(moved > 0, busy_s + cost.transfer_s(moved_tokens, link), 0.0)
