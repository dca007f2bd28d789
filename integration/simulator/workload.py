"""Generated workloads: Poisson arrivals of prompts, some of which go on where an earlier one ended.

Owns the shape of a generated workload. Requests are made one by one, so that one may be longer than
memory. Who calls it: ``kvpool simulate``, its scale check, tests.
"""

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvpool.block import BlockHash
from kvpool.errors import ConfigError
from kvpool.integration.simulator.trace import BLOCK_TOKENS, Arrival, block_name

_SPREAD: Final = 1.0  # sigma of the logarithm of a length


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A generated workload. Lengths are log-normal.

    Attributes:
        request_count: How many requests there are.
        rate_per_s: Mean arrivals per second; gaps are exponential.
        reuse: Share of requests that go on with an earlier prompt, of 0 to 1.
        prompt_tokens: Mean length of a first prompt.
        turn_tokens: Mean length of what is added to an earlier prompt.
        output_tokens: Mean length of an output.
        prompt_tokens_max: Longest prompt; one that would be longer starts anew.
        sessions_max: How many earlier prompts may be gone on with: the latest ones.
    """

    request_count: int
    rate_per_s: float
    reuse: float = 0.5
    prompt_tokens: int = 6000
    turn_tokens: int = 3000
    output_tokens: int = 250
    prompt_tokens_max: int = 128_000
    sessions_max: int = 2000

    def __post_init__(self) -> None:
        if not 0 <= self.reuse <= 1:
            raise ConfigError(f"reuse is {self.reuse}: it must be 0 to 1", key="reuse")
        for key in self.__dataclass_fields__:
            value = getattr(self, key)
            if key != "reuse" and not 0 < value < math.inf:
                raise ConfigError(f"{key} is {value}: it must be above 0", key=key)


@dataclass(slots=True)
class _Session:
    """A prompt that may be gone on with: its length and its full blocks."""

    tokens: int
    blocks: tuple[BlockHash, ...]


def generated(workload: Workload, seed: int) -> Iterator[Arrival]:
    """Yield the requests of a generated workload, in order of arrival. Equal seeds, equal requests."""
    rng = random.Random(f"load {seed}")
    names = count()
    sessions: deque[_Session] = deque(maxlen=workload.sessions_max)
    now = 0.0
    for number in range(workload.request_count):
        now += rng.expovariate(workload.rate_per_s)
        earlier, tokens = _taken_up(rng, workload, sessions)
        missing = -(-tokens // BLOCK_TOKENS) - len(earlier.blocks)
        blocks = earlier.blocks + tuple(block_name(next(names)) for _ in range(missing))
        output = min(_length(rng, workload.output_tokens), workload.prompt_tokens_max)
        yield Arrival(number, now, tokens, output, blocks)
        sessions.append(_Session(tokens + output, blocks[: tokens // BLOCK_TOKENS]))


def _taken_up(
    rng: random.Random, workload: Workload, sessions: deque[_Session]
) -> tuple[_Session, int]:
    """Draw what a prompt goes on with, which is an empty one for a new prompt, and its length."""
    if sessions and rng.random() < workload.reuse:
        index = rng.randrange(len(sessions))
        tokens = sessions[index].tokens + _length(rng, workload.turn_tokens)
        if tokens <= workload.prompt_tokens_max:
            earlier = sessions[index]
            del sessions[index]
            return earlier, tokens
    return _Session(0, ()), min(_length(rng, workload.prompt_tokens), workload.prompt_tokens_max)


def _length(rng: random.Random, mean: int) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)))
