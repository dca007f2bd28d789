"""Choose the next token from logits: greedy, or drawn with temperature, top-k and top-p.

Owns the rule that makes a draw repeatable anywhere: draw k of a request depends on its seed, on k
and on the logits, and on nothing else, so a request can move between workers in mid-output. Keeps
no state: (seed, drawn) is the state and travels with the request. Who calls it: both workers.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import torch

from kvpool.block import sha256
from kvpool.errors import UsageError
from kvpool.integration.runtime.handoff import Sampling

# The top 53 bits of a hash fill the mantissa of a float64: a uniform number in [0, 1).
_UNIFORM_BITS: Final = 53


def check_sampling(sampling: Sampling) -> None:
    """Raise UsageError, naming the field, unless ``sampling`` can be used."""
    if not 0.0 <= sampling.temperature < float("inf"):
        raise UsageError(f"temperature is {sampling.temperature}: use a finite number >= 0")
    if not 0.0 < sampling.top_p <= 1.0:
        raise UsageError(f"top_p is {sampling.top_p}: use a number in (0, 1]")
    if sampling.top_k < 0:
        raise UsageError(f"top_k is {sampling.top_k}: use 0 for no limit, or a count")


def uniform(seed: int, draw: int) -> float:
    """Return the number in [0, 1) that draw ``draw`` (0-based) of a request with ``seed`` uses."""
    digest = sha256(b"kvpool-draw-1" + struct.pack("<QQ", seed % 2**64, draw))
    bits = int.from_bytes(digest[:8], "little") >> (64 - _UNIFORM_BITS)
    return math.ldexp(bits, -_UNIFORM_BITS)


def sample(
    logits: Any, samplings: Sequence[Sampling], drawn: Sequence[int]
) -> list[tuple[int, float]]:
    """Choose one token for each row.

    Args:
        logits: Tensor [rows, vocabulary], any float dtype. Not changed.
        samplings: One for each row; greedy rows are done together.
        drawn: Tokens drawn so far by each row's request.

    Returns:
        For each row the token and the natural log of its probability under the *unmodified*
        distribution (temperature 1, no cut), also where another one was drawn from.

    Raises:
        UsageError: The counts differ, or a sampling is out of range.
    """
    if not len(logits) == len(samplings) == len(drawn):
        raise UsageError(f"{len(logits)} rows, {len(samplings)} samplings, {len(drawn)} counts")
    for sampling in samplings:
        check_sampling(sampling)
    wide = logits.float()
    tokens = wide.argmax(dim=-1)
    for row, (sampling, draw) in enumerate(zip(samplings, drawn, strict=True)):
        if sampling.temperature > 0.0:
            tokens[row] = _draw(wide[row], sampling, uniform(sampling.seed, draw))
    chosen = wide.gather(-1, tokens[:, None])[:, 0]
    logprobs = chosen - wide.logsumexp(dim=-1)
    return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))


def _draw(logits: Any, sampling: Sampling, number: float) -> int:
    """Return the token at which the cumulative probability of one row passes ``number``."""
    scaled = logits.double() / sampling.temperature
    ids = None
    if sampling.top_k:
        scaled, ids = scaled.topk(min(sampling.top_k, scaled.numel()))  # sorted, largest first
    elif sampling.top_p < 1.0:
        scaled, ids = scaled.sort(descending=True, stable=True)
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    if sampling.top_p < 1.0:
        # Keep the smallest leading set whose probability reaches top_p: at least one token.
        kept = int(torch.searchsorted(cumulative, sampling.top_p)) + 1
        cumulative = cumulative[:kept]
    target = torch.tensor(number, dtype=cumulative.dtype) * cumulative[-1].cpu()
    index = int(torch.searchsorted(cumulative, target.to(cumulative.device), right=True))
    index = min(index, cumulative.numel() - 1)
    return index if ids is None else int(ids[index])
