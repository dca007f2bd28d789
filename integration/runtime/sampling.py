"""Choose the next token from logits: greedy, or drawn with temperature, top-k and top-p.

Owns the rule that makes a draw repeatable anywhere: draw k of a request depends on its seed, on k,
on the logits and on the output so far, and on nothing else, so a request can move between workers
in mid-output. Keeps no state: (seed, drawn) and the output travel with the request. Who calls it:
both workers.
"""

import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from kvpool.block import sha256
from kvpool.errors import UsageError
from kvpool.integration.runtime.handoff import Sampling, TopLogprobs

# As many bits as the mantissa of a float64 holds.
_UNIFORM_BITS: Final = 53
# The OpenAI API's own limit.
TOP_LOGPROBS_MAX: Final = 20


class Pick(NamedTuple):
    """A chosen token.

    Attributes:
        token: Its id.
        logprob: The natural log of its probability under the *unmodified* distribution
            (temperature 1, no penalty, bias or cut), also where another one was drawn from.
        top: The likeliest tokens of that distribution, if asked for.
    """

    token: int
    logprob: float
    top: TopLogprobs = ()


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise UsageError, naming the field, unless ``sampling`` can be used with that many tokens."""
    if not 0.0 <= sampling.temperature < float("inf"):
        raise UsageError(f"temperature is {sampling.temperature}: use a finite number >= 0")
    if not 0.0 < sampling.top_p <= 1.0:
        raise UsageError(f"top_p is {sampling.top_p}: use a number in (0, 1]")
    if sampling.top_k < 0:
        raise UsageError(f"top_k is {sampling.top_k}: use 0 for no limit, or a count")
    if not 0 <= sampling.top_logprobs <= TOP_LOGPROBS_MAX:
        raise UsageError(f"top_logprobs is {sampling.top_logprobs}: use 0 to {TOP_LOGPROBS_MAX}")
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            raise UsageError(f"{name} is {getattr(sampling, name)}: use a finite number")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocabulary or not math.isfinite(bias):
            raise UsageError(
                f"logit_bias is {bias} for token {token}: use finite numbers and tokens within "
                f"0..{vocabulary - 1}"
            )


def gumbel(seed: int, draw: int, count: int) -> Any:
    """Return the noise that draw ``draw`` (0-based) of a request with ``seed`` adds, float64 [count].

    Number i depends on nothing but seed, draw and i: a counter-based generator makes it.
    """
    digest = sha256(b"kvpool-draw-2" + struct.pack("<QQ", seed % 2**64, draw))
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)
    # In the middle of each of 2**53 equal steps: never 0 and never 1.
    uniform = ((bits >> np.uint64(64 - _UNIFORM_BITS)) + 0.5) * 2.0**-_UNIFORM_BITS
    return torch.from_numpy(-np.log(-np.log(uniform)))


def sample(
    logits: Any,
    samplings: Sequence[Sampling],
    drawn: Sequence[int],
    outputs: Sequence[Sequence[int]],
) -> list[Pick]:
    """Choose one token for each row.

    Args:
        logits: Tensor [rows, vocabulary], any float dtype. Not changed.
        samplings: One for each row; plain greedy rows are done together.
        drawn: Tokens drawn so far by each row's request.
        outputs: Output tokens so far of each row's request: for the penalties.

    Returns:
        One pick for each row.

    Raises:
        UsageError: The counts differ, or a sampling is out of range.
    """
    if not len(logits) == len(samplings) == len(drawn) == len(outputs):
        raise UsageError(
            f"{len(logits)} rows, {len(samplings)} samplings, {len(drawn)} counts, "
            f"{len(outputs)} outputs"
        )
    wide = logits.float()
    tokens = wide.argmax(dim=-1)
    for row, sampling in enumerate(samplings):
        check_sampling(sampling, wide.shape[-1])
        if sampling.temperature > 0.0 or _shifts(sampling):
            shifted = _shifted(wide[row], sampling, outputs[row])
            greedy = sampling.temperature == 0.0
            tokens[row] = shifted.argmax() if greedy else _draw(shifted, sampling, drawn[row])
    chosen = wide.gather(-1, tokens[:, None])[:, 0]
    sums = wide.logsumexp(dim=-1)
    logprobs: list[float] = (chosen - sums).tolist()
    return [
        Pick(token, logprob, _top(wide[row], sums[row], samplings[row].top_logprobs))
        for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs, strict=True))
    ]


def _top(logits: Any, total: Any, count: int) -> TopLogprobs:
    """Return the ``count`` likeliest tokens of one row."""
    if not count:
        return ()
    values, ids = logits.topk(min(count, logits.numel()))
    return tuple(zip(ids.tolist(), (values - total).tolist(), strict=True))


def _shifts(sampling: Sampling) -> bool:
    """Say whether a sampling changes logits before anything is chosen."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias)


def _shifted(logits: Any, sampling: Sampling, output: Sequence[int]) -> Any:
    """Return one row's logits with penalties and biases applied."""
    if not _shifts(sampling):
        return logits
    shifts: dict[int, float] = dict(sampling.logit_bias)
    for token, times in Counter(output).items():
        penalty = sampling.presence_penalty + times * sampling.frequency_penalty
        shifts[token] = shifts.get(token, 0.0) - penalty
    ids = torch.tensor(list(shifts), device=logits.device, dtype=torch.long)
    return logits.index_add(0, ids, logits.new_tensor(list(shifts.values())))


def _draw(logits: Any, sampling: Sampling, drawn: int) -> int:
    """Draw a token of one row: the largest of scaled logit plus Gumbel noise (the Gumbel-max trick).

    Each token has a noise of its own, so logits that another batch rounds differently draw the same
    token unless two sums are that close. Walking the cumulative probability of sorted tokens would
    not: in the flat tail of a hot distribution a last bit changes their order.
    """
    # The largest becomes 0: no temperature, however low, makes it infinite.
    scaled = (logits.double() - logits.max()) / sampling.temperature
    noise = gumbel(sampling.seed, drawn, scaled.numel()).to(scaled.device)
    ids = None
    if sampling.top_k:
        scaled, ids = scaled.topk(min(sampling.top_k, scaled.numel()))  # sorted, largest first
    elif sampling.top_p < 1.0:
        scaled, ids = scaled.sort(descending=True, stable=True)
    if sampling.top_p < 1.0:
        # Keep the smallest leading set whose probability reaches top_p: at least one token.
        cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
        kept = int(torch.searchsorted(cumulative, sampling.top_p)) + 1
        scaled = scaled[:kept]
    if ids is None:
        return int((scaled + noise).argmax())
    ids = ids[: scaled.numel()]
    return int(ids[(scaled + noise[ids]).argmax()])
