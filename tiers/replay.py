"""Replay: what share of a trace's blocks a policy would have found, in a pool of a given room.

Owns nothing but the order of calls, which is that of a tier: found blocks are pinned, room is made,
the rest is admitted. Pure. Who calls it: ``kvpool bench policy``, and tests of policies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpool.block import HASH_BYTES, BlockHash
from kvpool.tiers.eviction import EvictionPolicy, Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        at_s: Seconds since the trace began.
        keys: Names of its prompt's blocks, in order; the last one may be shorter than the others.
        last_share: Length of the last block over that of the others, above 0 and at most 1.
    """

    at_s: float
    keys: Sequence[BlockHash]
    last_share: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """Leading blocks that were there, and all blocks asked for."""

    found: int
    asked: int

    @property
    def hit_rate(self) -> float:
        """Share of the blocks that were found."""
        return self.found / self.asked if self.asked else 0.0


# The size of a whole block: large enough to show how much shorter a last one is.
_BLOCK_BYTES = 1 << 20
_WHOLE = Facts(size_bytes=_BLOCK_BYTES, cost_s=1.0)


def number_key(number: int) -> BlockHash:
    """Return a key for a block that a trace names by a number."""
    return BlockHash(number.to_bytes(HASH_BYTES, "little"))


def replay(
    policy: EvictionPolicy,
    requests: Iterable[TraceRequest],
    capacity: int,
    *,
    count_from: int = 0,
    parents: bool = True,
) -> ReplayCounts:
    """Run requests through a pool of ``capacity`` blocks that evicts as ``policy`` says.

    Args:
        policy: A new one.
        requests: In order of time.
        capacity: Blocks that the pool holds.
        count_from: Index of the first request that counts; those before it fill the pool.
        parents: False hides from the policy which block is whose parent, so that it orders blocks by
            themselves; with ``LRUPolicy`` that is exact LRU, as published tables have it.
    """
    here: set[BlockHash] = set()
    found = asked = 0
    for index, request in enumerate(requests):
        leading = _serve(policy, request, capacity, here, parents)
        if index >= count_from:
            found += leading
            asked += len(request.keys)
    return ReplayCounts(found, asked)


def _serve(
    policy: EvictionPolicy,
    request: TraceRequest,
    capacity: int,
    here: set[BlockHash],
    parents: bool,
) -> int:
    """Look a request's blocks up and admit the others; return how many leading ones were there."""
    keys, now = request.keys, request.at_s
    leading = _run(keys, 0, here, present=True)
    at = 0
    while at < len(keys):
        end = _run(keys, at, here, present=True)
        policy.pin_run(keys[at:end], now)
        held, at = keys[at:end], end
        end = _run(keys, at, here, present=False)
        need = len(here) + end - at - capacity
        while need > 0 and (victim := policy.victim()) is not None:
            here.remove(victim)
            need -= 1
        end -= max(0, need)  # what finds no room is left out
        if end > at:
            _admit(policy, request, at, end, parents)
            here.update(keys[at:end])
        policy.unpin_run(held)
        if need > 0:
            break
        at = end
    return leading


def _run(keys: Sequence[BlockHash], begin: int, here: set[BlockHash], *, present: bool) -> int:
    """Return the end of the run from ``begin`` on whose blocks are all here, or all not."""
    while begin < len(keys) and (keys[begin] in here) == present:
        begin += 1
    return begin


def _admit(
    policy: EvictionPolicy, request: TraceRequest, begin: int, end: int, parents: bool
) -> None:
    keys, now = request.keys, request.at_s
    share = request.last_share if end == len(keys) else 1.0
    whole = end if share == 1.0 else end - 1
    if not parents:
        for key in keys[begin:whole]:
            policy.admit(key, None, now, _WHOLE)
    elif whole > begin:
        policy.admit_run(keys[begin:whole], keys[begin - 1] if begin else None, now, _WHOLE)
    if whole < end:
        parent = keys[whole - 1] if parents and whole else None
        facts = Facts(size_bytes=max(1, int(share * _BLOCK_BYTES)), cost_s=share)
        policy.admit(keys[whole], parent, now, facts)
