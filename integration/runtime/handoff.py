"""The handoff: what the Conductor, a prefill worker and a decode worker tell each other.

Owns the messages of one request's life. KV bytes travel beside it in a layer stream named by the
request id. The order is:

1. Conductor -> decode ``Run``: the decode worker reserves blocks for prompt and output, expects the
   stream, and answers ``Ready`` as the stream's first event.
2. Conductor -> prefill ``Prefill``: the prefill worker leases what the pool has, computes the rest
   in chunks, streams every layer to the decode worker as soon as it is computed, samples the first
   token, ends the stream with ``StreamEnd`` and answers ``Prefilled``.
3. The decode worker joins the request to its batch when its last layer has arrived, and goes on
   with ``Run``'s stream: one event per token from the second token on, then ``finish_reason``.

Cancelling either call, at any point, frees everything the request holds in that worker. A request
whose worker was lost in mid-output goes on elsewhere: the same two calls again, with the output so
far at the end of ``tokens``.
"""

from typing import Literal

import msgspec

from kvpool.client.rpc import Method
from kvpool.errors import UsageError

FinishReason = Literal["stop", "length"]


# Token ids with the natural log of their probability, largest first.
TopLogprobs = tuple[tuple[int, float], ...]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. ``temperature`` 0 is greedy.

    The state of a request's sampler is (seed, tokens drawn so far) and the output so far: draw k of
    a request depends on nothing else, so it survives a handoff.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p, top_k: What is drawn from; 1.0 and 0 leave all of the vocabulary.
        seed: Of the draws.
        presence_penalty: Taken off the logit of every token that the output holds already.
        frequency_penalty: The same, once for each time that the output holds it.
        logit_bias: Pairs of a token id and what is added to its logit.
        top_logprobs: How many of the likeliest tokens are reported with each token.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Conductor to decode worker: hold room for a request and decode it.

    Attributes:
        request: Unique id; also names the layer stream.
        tokens: The whole prompt, and the output so far if the request goes on.
        drawn: How many tokens at the end of ``tokens`` are its output: workers before these drew
            them.
        max_tokens: Most tokens to produce, the first one included.
        stop_tokens: Token ids that end the output (they are not emitted).
        handoff_timeout_s: How long to hold blocks until the stream has ended.
    """

    request: str
    tokens: list[int]
    max_tokens: int
    stop_tokens: list[int]
    sampling: Sampling
    drawn: int = 0
    salt: str = ""
    handoff_timeout_s: float = 120.0


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Decode worker to Conductor: ``ready`` once, then tokens, then one ``finish_reason``.

    Attributes:
        ready: True on the first event: blocks are reserved, the stream is expected.
        address: On the ready event: where the decode worker's transport listens.
        incarnation: On the ready event: of the decode worker.
        token, logprob: The token and the natural log of its probability, on token events.
        top: The likeliest tokens, on token events, if ``Sampling.top_logprobs`` asks for them.
        finish_reason: On the last event.
    """

    ready: bool = False
    address: str = ""
    incarnation: bytes = b""
    token: int | None = None
    logprob: float | None = None
    top: TopLogprobs = ()
    finish_reason: FinishReason | None = None


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Conductor to prefill worker: compute a prompt and stream it to a decode worker.

    Attributes:
        request, tokens, sampling, drawn, salt: As in ``RunRequest``.
        decode_address, decode_incarnation: Of the decode worker, from its ready event.
        timeout_s: How long all of it may take.
    """

    request: str
    tokens: list[int]
    sampling: Sampling
    drawn: int = 0
    decode_address: str
    decode_incarnation: bytes
    salt: str = ""
    timeout_s: float = 120.0


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to Conductor: the first token, and where the prompt's KV came from.

    Attributes:
        token, logprob: The first output token and the natural log of its probability.
        cached_tokens: Prompt tokens whose KV was loaded from the pool rather than computed.
        top: The likeliest tokens, if ``Sampling.top_logprobs`` asks for them.
    """

    token: int
    logprob: float
    cached_tokens: int
    top: TopLogprobs = ()


class StreamEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to decode worker, as the end of the layer stream.

    Attributes:
        token, logprob: The first output token, drawn by the prefill worker.
        drawn: Tokens drawn so far by the request's sampler.
        position: Position of ``token`` in the sequence: how many tokens are before it.
        tail_tokens: Tokens in the partial last block, which is private and never enters the pool.
    """

    token: int
    logprob: float
    drawn: int
    position: int
    tail_tokens: int


class Empty(msgspec.Struct, frozen=True):
    """No arguments."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker holds: for health checks, metrics and leak tests.

    Attributes:
        role: ``"prefill"`` or ``"decode"``.
        running, waiting: Requests.
        blocks, blocks_free: Of the gpu tier's arena.
        outbox_slots, outbox_free, outbox_quarantined: Of the staging of layer slices.
        forwards: Forward passes since the start.
        tokens: Tokens computed since the start.
        parked: Of the running requests, those whose KV lies in DRAM until there are blocks.
        parks: How often a request was parked since the start.
    """

    role: str
    running: int
    waiting: int
    blocks: int
    blocks_free: int
    outbox_slots: int
    outbox_free: int
    outbox_quarantined: int
    forwards: int
    tokens: int
    parked: int = 0
    parks: int = 0


PREFILL = Method("Prefill", "Prefill", PrefillRequest, Prefilled)
RUN = Method("Decode", "Run", RunRequest, RunEvent, streams=True)
STATUS = Method("Worker", "Status", Empty, WorkerStatus)


def require_drawn(request: RunRequest | PrefillRequest) -> None:
    """Raise UsageError unless a request's output so far leaves a prompt before it."""
    if not 0 <= request.drawn < max(1, len(request.tokens)):
        raise UsageError(f"{request.drawn} of {len(request.tokens)} tokens cannot be output")


def output_of(request: RunRequest | PrefillRequest) -> list[int]:
    """Return the output so far that a request came with."""
    return request.tokens[len(request.tokens) - request.drawn :]
