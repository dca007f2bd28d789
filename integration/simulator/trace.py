"""Requests of a trace: the public format read strictly, and its quantised timestamps spread.

Owns what a simulated request is and what a trace may say; a trace that breaks a rule is refused with
the line and the field. Who calls it: ``kvpool simulate``, the figures, the generated loads.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvpool.block import BlockHash
from kvpool.errors import UsageError

BLOCK_TOKENS: Final = 512  # of the public traces: one id a block, the last one partial
NAME_BYTES: Final = 8  # of a block's name, enough for any id that a trace may have
_FIELDS: Final = "timestamp, input_length, output_length, hash_ids"
_TOKENS_MAX: Final = 10_000_000
_ID_MAX: Final = (1 << 63) - 1
_TIMESTAMP_MAX_MS: Final = 10**12
# This quantile of the gaps between distinct timestamps is the step of the trace's clock.
_STEP_QUANTILE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load.

    Attributes:
        number: Its place in the load, from 0.
        arrival_s: Seconds since the load began.
        input_tokens: Length of the prompt.
        output_tokens: Tokens that it will produce, at least 1; the planner is never told.
        blocks: Names of the prompt's blocks, the partial last one included: equal names are equal
            prefixes, so a name has one parent.
    """

    number: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[BlockHash, ...]


_Count = Annotated[int, msgspec.Meta(ge=1, le=_TOKENS_MAX)]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=_TIMESTAMP_MAX_MS)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=_ID_MAX)]]


def block_name(number: int) -> BlockHash:
    """Return the name of a trace's block: its number, big-endian."""
    return BlockHash(number.to_bytes(NAME_BYTES, "big"))


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace in the public format: one JSON object a line.

    Raises:
        UsageError: The file cannot be read, is empty, or a line breaks a rule. The message names the
            line and the field.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"trace {path} cannot be read: {error.strerror}", path=path) from error
    requests = parse_trace(lines, str(path))
    if not requests:
        raise UsageError(f"trace {path} is empty: it needs one JSON object a line ({_FIELDS})")
    return requests


def parse_trace(lines: Iterable[bytes], source: str) -> list[Arrival]:
    """Turn lines into requests; ``source`` names them in errors. Blank lines are passed over."""
    decoder = msgspec.json.Decoder(_Row)
    names: dict[int, BlockHash] = {}
    parents: dict[int, int | None] = {}
    requests: list[Arrival] = []
    last_ms = 0
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{source}, line {line_number}"
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{where}: {error}. A line holds {_FIELDS}") from error
        if row.timestamp < last_ms:
            raise UsageError(
                f"{where}: timestamp {row.timestamp} is before {last_ms} of the line above: sort "
                "the trace by timestamp"
            )
        last_ms = row.timestamp
        _check_blocks(row, parents, where)
        blocks = tuple(names.setdefault(number, block_name(number)) for number in row.hash_ids)
        requests.append(
            Arrival(
                number=len(requests),
                arrival_s=row.timestamp / 1e3,
                input_tokens=row.input_length,
                output_tokens=row.output_length,
                blocks=blocks,
            )
        )
    return requests


def _check_blocks(row: _Row, parents: dict[int, int | None], where: str) -> None:
    wanted = -(-row.input_length // BLOCK_TOKENS)
    if len(row.hash_ids) != wanted:
        raise UsageError(
            f"{where}: hash_ids has {len(row.hash_ids)} ids, but an input_length of "
            f"{row.input_length} makes {wanted} blocks of {BLOCK_TOKENS} tokens"
        )
    parent: int | None = None
    for number in row.hash_ids:
        known = parents.setdefault(number, parent)
        if known != parent:
            raise UsageError(
                f"{where}: hash_ids has {number} after {parent}, an earlier line after {known}: an "
                "id names a whole prefix, so what is before it is always the same"
            )
        parent = number
    if len(set(row.hash_ids)) != len(row.hash_ids):
        raise UsageError(f"{where}: hash_ids names a block twice")


def clock_step_s(requests: Sequence[Arrival]) -> float:
    """Return the step of the clock that stamped a trace; about 0 if it is fine enough.

    It is a low quantile of the gaps between distinct timestamps: nearly 3 s in the public
    conversation trace, some milliseconds in the synthetic one.
    """
    stamps = [stamp for stamp, _ in groupby(request.arrival_s for request in requests)]
    gaps = sorted(after - before for before, after in pairwise(stamps))
    return gaps[int(_STEP_QUANTILE * len(gaps))] if gaps else 0.0


def spread(requests: Sequence[Arrival], seed: int) -> list[Arrival]:
    """Spread requests of one timestamp evenly at random over the clock's step; order is kept.

    Without it, a step's worth of requests would arrive at one instant, which they never did.
    """
    rng = random.Random(f"spread {seed}")
    step = clock_step_s(requests)
    groups = [list(group) for _, group in groupby(requests, key=lambda request: request.arrival_s)]
    starts = [group[0].arrival_s for group in groups]
    ends = [*starts[1:], starts[-1] + step] if starts else []
    spreaded: list[Arrival] = []
    for group, start, end in zip(groups, starts, ends, strict=True):
        width = min(step, end - start)
        offsets = sorted(rng.random() for _ in group)
        for request, offset in zip(group, offsets, strict=True):
            spreaded.append(replace(request, arrival_s=start + width * offset))
    return spreaded


def at_speed(requests: Iterable[Arrival], speed: float) -> list[Arrival]:
    """Replay a load ``speed`` times as fast."""
    if not 0 < speed < float("inf"):
        raise UsageError(f"speed is {speed}: it must be above 0", key="speed")
    return [replace(request, arrival_s=request.arrival_s / speed) for request in requests]
