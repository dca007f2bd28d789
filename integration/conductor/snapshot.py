"""What a decision looks at: workers, queues, caches, links and objectives at one moment.

Owns the types of a snapshot and of a request. It never changes anything: `cluster.py` keeps the
arrays up to date, one small update per event, and hands them out read-only. Who calls it: the
planner, and whoever asks it (the live Conductor, the simulator).

Everything about many workers is a column (one numpy array, one number per worker), so that a
decision costs a few array operations, whatever the number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class WorkerState(IntEnum):
    """Whether a worker takes new requests.

    READY does. DRAINING finishes what it has, and its node still gives blocks away. DEAD does
    nothing; its node may live on.
    """

    READY = 0
    DRAINING = 1
    DEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, as the planner sees it.

    Attributes:
        number: Position in the order of arrival. With the snapshot's seed it decides ties.
        tokens: Length of the prompt, at least 1.
        chain: Hashes of the prompt's blocks, first block first, concatenated: 32 bytes each in the
            Conductor, the trace's numbers in the simulator. A trailing partial block may have a
            hash (the public traces number it) or none (kvpool never does).
        output_tokens: Tokens that the answer is expected to have. Decode memory is set aside for
            them. At least 1.
    """

    number: int
    tokens: int
    chain: bytes
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What a request must be served within, to count.

    Attributes:
        ttft_s: Time to first token, seconds, above 0. Infinite: none.
        tbt_s: Time between tokens, seconds, above 0. Infinite: none.
    """

    ttft_s: float
    tbt_s: float


@dataclass(frozen=True, slots=True)
class Nodes:
    """Columns over nodes. A node has a link, and a store that its workers share.

    Attributes:
        alive: Whether the node's store answers. What a dead one holds is no match.
        send_free_at_s, receive_free_at_s: When all that is in flight on this side of its link
            will have passed. In the past: the link is idle.
        link_bytes_per_s: Bandwidth of the link, each way.
    """

    alive: Bools
    send_free_at_s: Floats
    receive_free_at_s: Floats
    link_bytes_per_s: Floats


@dataclass(frozen=True, slots=True)
class PrefillWorkers:
    """Columns over prefill workers.

    Attributes:
        node: The worker's node.
        state: A `WorkerState`.
        free_at_s: When all that is queued will have been computed, as predicted. In the past:
            the worker is idle.
        queued: Requests that wait or are being computed.
        queued_max: Limit of ``queued``.
        tokens_max: Longest prompt that fits.
    """

    node: Ints
    state: Ints
    free_at_s: Floats
    queued: Ints
    queued_max: Ints
    tokens_max: Ints


@dataclass(frozen=True, slots=True)
class DecodeWorkers:
    """Columns over decode workers.

    Attributes:
        node: The worker's node.
        state: A `WorkerState`.
        running: Requests in the batch now.
        context_tokens: KV that one step reads now: tokens of all running requests.
        joining: Requests that were promised to this worker and are not in the batch yet.
        joining_tokens: Tokens of their prompts.
        running_max: Limit of ``running + joining``.
        free_tokens: KV room that is neither used nor promised, in tokens.
        tokens_max: All KV room, in tokens.
    """

    node: Ints
    state: Ints
    running: Ints
    context_tokens: Ints
    joining: Ints
    joining_tokens: Ints
    running_max: Ints
    free_tokens: Ints
    tokens_max: Ints


@dataclass(frozen=True, slots=True)
class Flow:
    """How requests move through the cluster: what early rejection by prediction looks at.

    Attributes:
        prefill_ends_s: When each admitted request that is not in a decode batch yet will have
            left prefill, ascending.
        decode_starts_s: When each request that is in a decode batch entered it, ascending.
        decode_s: How long a request decodes, on average.
    """

    prefill_ends_s: Sequence[float]
    decode_starts_s: Sequence[float]
    decode_s: float


class Matches(Protocol):
    """Answers where the leading blocks of a chain are, without asking each worker."""

    def match(self, chain: bytes) -> Ints:
        """Count, for each node, the leading blocks of ``chain`` that it holds.

        Returns:
            One count per node, in blocks, 0 where the first block is missing. Owned by the
            caller.
        """
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at one moment. Read-only, and valid until the cluster's next update.

    Attributes:
        now_s: The moment, on the clock of all other ``_s`` columns.
        seed: What random choices and ties follow; equal snapshots give equal plans.
        block_tokens: Tokens of one block of a chain.
        nodes, prefill, decode: Columns; see there.
        flow: Requests on their way.
        caches: The inverted index from block hash to nodes.
        objectives: What to serve within.
    """

    now_s: float
    seed: int
    block_tokens: int
    nodes: Nodes
    prefill: PrefillWorkers
    decode: DecodeWorkers
    flow: Flow
    caches: Matches
    objectives: Objectives
