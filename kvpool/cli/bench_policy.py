"""Rows of the eviction policies: hit rates on a trace of requests, and how quickly they are found.

A trace has one JSON object a line: ``timestamp`` in ms, ``input_length`` in tokens, and ``hash_ids``,
one number for each block of 512 tokens, the last one perhaps shorter; equal numbers are equal
prefixes. That is the form of Mooncake's public traces, ``NAME_trace.jsonl``. A hit rate is exact: it
is found once, and every pair has it.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvpool.block import BlockHash
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.errors import UsageError
from kvpool.tiers.eviction import LRUPolicy
from kvpool.tiers.replay import TraceRequest, number_key, replay
from kvpool.tiers.reuse import ReusePolicy

_BLOCK_TOKENS: Final = 512
CAPACITIES: Final = (1000, 5859, 10000, 30000, 50000, 100000)
# What was found before for the public traces, to four digits, by capacity.
PUBLISHED: Final = {
    "conversation": (0.0445, 0.1355, 0.2112, 0.3257, 0.3546, 0.3637),
    "synthetic": (0.0825, 0.3094, 0.4235, 0.6242, 0.6396, 0.6396),
}
# Requests of the traces that those figures are of.
_REQUESTS: Final = {"conversation": 12031, "synthetic": 3993}
_SPEED_BLOCKS: Final = 5859


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int]


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace. Raises UsageError, naming the line, if it is none."""
    keys: dict[int, BlockHash] = {}
    requests: list[TraceRequest] = []
    decoder = msgspec.json.Decoder(_Line)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error}") from error
    for number, text in enumerate(lines, start=1):
        try:
            line = decoder.decode(text)
            names = [keys.setdefault(each, number_key(each)) for each in line.hash_ids]
        except (msgspec.MsgspecError, OverflowError) as error:
            raise UsageError(f"{path}, line {number} is no request of a trace: {error}") from error
        rest = line.input_length % _BLOCK_TOKENS or _BLOCK_TOKENS
        share = rest / _BLOCK_TOKENS
        requests.append(TraceRequest(at_s=line.timestamp / 1e3, keys=names, last_share=share))
    if not requests:
        raise UsageError(f"the trace {path} has no request")
    return requests


def cases(quick: bool, *traces: Path) -> list[Case]:
    """Return the rows of this subject for the traces that were given."""
    if not traces:
        raise UsageError("a policy is measured on a trace: give one with --trace FILE")
    found: list[Case] = []
    for path in traces:
        name = path.stem.removesuffix("_trace")
        requests = read_trace(path)
        for capacity in CAPACITIES[1:2] if quick else CAPACITIES:
            found += [
                _case(f"policy.lru.{name}.{capacity}", *_exact(name, requests, capacity)),
                _case(f"policy.own.{name}.{capacity}", *_own(requests, capacity)),
            ]
        found.append(
            Case(
                name=f"policy.speed.{name}",
                unit="req/s",
                reference="the same LRU as an ordered dictionary, without parents or pins",
                open=partial(_open_speed, requests),
            )
        )
    return found


def plain_lru(requests: Sequence[TraceRequest], capacity: int, count_from: int = 0) -> float:
    """Return the hit rate of least recently used, written as plainly as can be."""
    here: OrderedDict[BlockHash, None] = OrderedDict()
    found = asked = 0
    for index, request in enumerate(requests):
        leading = next((i for i, key in enumerate(request.keys) if key not in here), None)
        if index >= count_from:
            found += len(request.keys) if leading is None else leading
            asked += len(request.keys)
        for key in request.keys:
            here[key] = None
            here.move_to_end(key)
            if len(here) > capacity:
                here.popitem(last=False)
    return found / asked if asked else 0.0


Rate = Callable[[], float]


def _exact(name: str, requests: Sequence[TraceRequest], capacity: int) -> tuple[str, Rate, Rate]:
    def value() -> float:
        return round(replay(LRUPolicy(), requests, capacity, parents=False).hit_rate, 4)

    if _REQUESTS.get(name) == len(requests):
        published = PUBLISHED[name][CAPACITIES.index(capacity)]
        return "what was found before, all requests", value, lambda: published
    return "a plain LRU, all requests", value, lambda: round(plain_lru(requests, capacity), 4)


def _own(requests: Sequence[TraceRequest], capacity: int) -> tuple[str, Rate, Rate]:
    half = len(requests) // 2

    def value() -> float:
        return replay(ReusePolicy(capacity), requests, capacity, count_from=half).hit_rate

    return "LRU, second half", value, lambda: plain_lru(requests, capacity, half)


def _case(name: str, reference: str, value: Rate, other: Rate) -> Case:
    return Case(
        name=name, unit="share", reference=reference, open=partial(_open_rates, value, other)
    )


class _Rates:
    ceiling: float | None = None

    def __init__(self, value: float, reference: float) -> None:
        self._value, self._reference = value, reference

    def value(self) -> float:
        return self._value

    def reference(self) -> float:
        return self._reference


@contextmanager
def _open_rates(value: Rate, reference: Rate, timer: Timer) -> Generator[Sides, None, None]:
    yield _Rates(value(), reference())


class _Speed:
    ceiling: float | None = None

    def __init__(self, requests: Sequence[TraceRequest], timer: Timer) -> None:
        self._requests = requests
        self._timer = timer

    def value(self) -> float:
        began = self._timer()
        replay(LRUPolicy(), self._requests, _SPEED_BLOCKS, parents=False)
        return len(self._requests) / (self._timer() - began)

    def reference(self) -> float:
        began = self._timer()
        plain_lru(self._requests, _SPEED_BLOCKS)
        return len(self._requests) / (self._timer() - began)


@contextmanager
def _open_speed(requests: Sequence[TraceRequest], timer: Timer) -> Generator[Sides, None, None]:
    yield _Speed(requests, timer)
