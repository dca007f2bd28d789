"""What a decision is: a plan, or a rejection with its reason.

Owns the outcome types and the contract of a policy. Who calls it: the planner makes plans; the live
Conductor and the simulator carry them out.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvpool.integration.conductor.snapshot import Request, Snapshot


class Reason(StrEnum):
    """Why a request was rejected.

    TOO_LONG: no worker is large enough, now or ever. NO_WORKER: none that is large enough is
    ready. QUEUE: all queues are full. MEMORY: no decode worker has room now. TTFT, TBT: the
    objective would be missed.
    """

    TOO_LONG = "too-long"
    NO_WORKER = "no-worker"
    QUEUE = "queue"
    MEMORY = "memory"
    TTFT = "ttft"
    TBT = "tbt"


@dataclass(frozen=True, slots=True)
class PrefixTransfer:
    """A run of blocks to copy before prefill. The source keeps its copy.

    Attributes:
        source: Node that holds the blocks.
        target: Node of the plan's prefill worker.
        first_block: Blocks of the chain that the target has already, 0-based index of the first
            to copy.
        block_count: Blocks to copy, at least 1.
    """

    source: int
    target: int
    first_block: int
    block_count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request goes, and what was predicted.

    Attributes:
        prefill: Index of the prefill worker.
        decode: Index of the decode worker.
        cached_tokens: Tokens that prefill does not compute, those that are transferred included.
            Less than the prompt's: at least one token is always computed.
        transfer: What to copy first, or None.
        wait_s: Time in the prefill worker's queue.
        transfer_s: Time that the transfer takes, congestion included; 0 without one.
        prefill_s: Time to compute the rest of the prompt.
        ttft_s: Time to first token. Not less than ``prefill_s``.
        tbt_s: Time between tokens once the request decodes.
    """

    prefill: int
    decode: int
    cached_tokens: int
    transfer: PrefixTransfer | None
    wait_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float
    tbt_s: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not served, and what was predicted.

    Attributes:
        reason: The first rule that was broken.
        ttft_s, tbt_s: The predictions that broke it; infinite where none could be made.
    """

    reason: Reason
    ttft_s: float
    tbt_s: float


Decision = Plan | Rejection


class Policy(Protocol):
    """Decides where requests go. Pure: no clock, no I/O, no state, no randomness of its own."""

    def decide(self, snapshot: Snapshot, request: Request) -> Decision:
        """Plan one request that has just arrived.

        Never blocks. Changes nothing: `Cluster.commit` carries the plan's promises into the
        arrays, before the next decision.
        """
        ...

    def recheck(self, snapshot: Snapshot, request: Request, plan: Plan) -> Rejection | None:
        """Decide again, when prefill is done, whether the planned decode worker takes it.

        Returns:
            None if it does. A rejection here wastes the prefill.
        """
        ...
