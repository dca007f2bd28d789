"""What an engine's KV cache looks like to the pool: groups, parts, and the names of their blocks.

Owns the binding of vLLM's block hashes to kvpool's namespace and parts, and which blocks of a group
a prefix needs. Pure. Who calls it: both sides of the connector.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvpool.base import Chain
from kvpool.block import BlockLayout, Namespace, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share one block table.

    Attributes:
        number: Its place among the engine's groups.
        layers: Names of its layers, in the order of the payload.
        window_tokens: Of sliding-window attention; None means that all of the prefix is needed.
        parts: What each tensor-parallel rank holds of a block. Ranks with the same part hold the
            same bytes.
    """

    number: int
    layers: tuple[str, ...]
    window_tokens: int | None
    parts: tuple[Part, ...]

    def first_needed(self, blocks: int, block_tokens: int) -> int:
        """Return the first block that a prefix of ``blocks`` blocks needs in this group."""
        if self.window_tokens is None:
            return 0
        # The next token's window begins here: vLLM's SlidingWindowManager.get_num_skipped_tokens.
        return max(0, blocks * block_tokens - self.window_tokens + 1) // block_tokens

    def own_parts(self) -> tuple[Part, ...]:
        """Return each part once: one match a part answers for every rank that holds it."""
        return tuple(dict.fromkeys(self.parts))

    def writes(self, rank: int) -> bool:
        """Say whether ``rank`` is the one of those with its part that stores it."""
        return self.parts.index(self.parts[rank]) == rank


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """All that the pool has to know of an engine.

    Attributes:
        layout: Of a payload: the block of the group with most layers, as opaque bytes.
        groups: The engine's groups, in its order.
        block_tokens: Tokens of a block.
        step_blocks: Most blocks that one step can complete, all groups together.
    """

    layout: BlockLayout
    groups: tuple[Group, ...]
    block_tokens: int
    step_blocks: int


def part_chain(namespace: Namespace, part: Part, hashes: Sequence[bytes]) -> Chain:
    """Name the part of each block whose hash the engine gave. One SHA-256 a block."""
    root = part.key(namespace.digest)
    return Chain(namespace, b"".join(hashlib.sha256(root + name).digest() for name in hashes))


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one group of one request.

    Attributes:
        group: Number of the group.
        hashes: The engine's hash of each block.
        block_ids: Where each lies in the engine's cache.
        parent: The engine's hash of the block before the first one; None for a prompt's first.
        begin: Which block of the prompt the first one is.
    """

    group: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    parent: bytes | None
    begin: int


# vLLM's null block: what a table has where a sliding window has passed.
NULL_BLOCK = 0


def block_runs(
    group: int, hashes: Sequence[bytes], table: Sequence[int], begin: int, end: int
) -> list[BlockRun]:
    """Cut blocks ``begin`` to ``end`` of a table into runs without null blocks."""
    there = [index for index in range(begin, end) if table[index] != NULL_BLOCK]
    cuts = [0, *(at + 1 for at, (one, two) in enumerate(pairwise(there)) if two != one + 1)]
    runs: list[BlockRun] = []
    for at, stop in zip(cuts, [*cuts[1:], len(there)], strict=True):
        span = there[at:stop]
        if span:
            runs.append(
                BlockRun(
                    group,
                    tuple(hashes[index] for index in span),
                    tuple(table[index] for index in span),
                    hashes[span[0] - 1] if span[0] else None,
                    span[0],
                )
            )
    return runs
