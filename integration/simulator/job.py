"""One request under way, and what became of it.

Owns the record that workers hand from one to the next. Who calls it: the cluster and its workers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvpool.block import BlockHash
from kvpool.integration.conductor.plan import Plan
from kvpool.integration.conductor.snapshot import Request
from kvpool.integration.simulator.trace import Arrival

TBT_SHARE = 0.1  # time between tokens is the mean of this share of the gaps, the longest ones


class End(IntEnum):
    """How a request ended. Every request ends once."""

    DONE = 0
    REJECTED = 1  # on arrival
    DROPPED = 2  # after its prefill, which was wasted


@dataclass(slots=True, eq=False)
class Job:
    """A request and its fate so far; times are of the simulation's clock, NaN until they happen.

    Attributes:
        request: What arrived.
        asked: The same as the planner sees it.
        plan: Where it goes; None once rejected on arrival.
        held: Blocks that are pinned for it in its prefill node's store.
        coming_blocks: Leading blocks that it will find once its copying is done.
        computed_s: When its prefill ended.
        first_token_s: When it joined a decode batch. The first token is counted there, so that the
            handoff is in the time to first token, and every gap after it is a decode step.
        prefill_s: Seconds that prefill was busy with it.
        cached_tokens: Prompt tokens that were not computed.
        moved_tokens: Those of them that came from other nodes.
        tbt_s: Its time between tokens; 0 for an output of one token.
        ended_s, end: When and how it ended.
    """

    request: Arrival
    asked: Request
    plan: Plan | None = None
    held: Sequence[BlockHash] = field(default=())
    coming_blocks: int = 0
    computed_s: float = math.nan
    first_token_s: float = math.nan
    prefill_s: float = 0.0
    cached_tokens: int = 0
    moved_tokens: int = 0
    tbt_s: float = 0.0
    ended_s: float = math.nan
    end: End | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.request.arrival_s


def longest_gaps_mean(gaps: list[tuple[float, int]]) -> float:
    """Return the mean of the longest tenth of token gaps, given as (seconds, how many); 0 if none."""
    total = sum(count for _, count in gaps)
    wanted = left = math.ceil(total * TBT_SHARE)
    if not wanted:
        return 0.0
    gathered = 0.0
    for gap, count in sorted(gaps, reverse=True):
        taken = min(count, left)
        gathered += gap * taken
        left -= taken
        if not left:
            break
    return gathered / wanted
