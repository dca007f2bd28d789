"""Which blocks the world was told are in the pool: the ledger behind the connector's KV events.

A router sends prompts to where it was told their blocks are, so a claim has to end when the block is
gone, and a pool does not say so. A block is claimed when every worker has stored its part. Claims are
looked at again in turn (``due``, ``missing``), and given up when the pool has lost one, when the
engine's cache is reset, and, the oldest first, when there are too many. Pure; one thread, the
scheduler's. Who calls it: the scheduler's side of the connector, if KV events are switched on.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpool.block import Part
from kvpool.integration.vllm.shape import BlockRun, EngineShape

# Claims at most, about 300 bytes each; what is stored beyond them is claimed, the oldest given up.
CLAIMS_MAX: Final = 1 << 18
# Blocks on their way into the pool that are remembered; of others nothing is claimed.
PENDING_MAX: Final = 1 << 16
# How often claims are looked at, and how many at once: all of them in about two minutes.
CHECK_EVERY_S: Final = 1.0
CHECK_CLAIMS: Final = 2048


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What a worker says when the pool took its part of a block."""

    group: int
    part: Part
    block: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """A block that the pool has.

    Attributes:
        group: The engine's group.
        block: The engine's hash of it.
        parent: The hash of the block before it; None for a prompt's first.
        tokens: Of the block.
        extra: What else its hash is made of, as vLLM's events have it.
        session: Whose request it was, as vLLM's events have it.
    """

    group: int
    block: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    extra: tuple[Any, ...] | None
    session: str | None


@dataclass(frozen=True, slots=True)
class Ended:
    """A claim that holds no longer."""

    group: int
    block: bytes


@dataclass(frozen=True, slots=True)
class Doubt:
    """A claim to be looked at. ``number`` tells it from a later one of the same block."""

    group: int
    block: bytes
    number: int


@dataclass(slots=True, eq=False)
class _Pending:
    claim: Claim
    missing: set[Part]


class Ledger:
    """See the module. Not safe from several threads.

    Args:
        shape: What the engine's blocks are.
        describe: Says what else a block's hash is made of: (request, first token, end).
    """

    def __init__(
        self, shape: EngineShape, describe: Callable[[Any, int, int], tuple[Any, ...] | None]
    ) -> None:
        self._shape = shape
        self._describe = describe
        self._pending: OrderedDict[tuple[int, bytes], _Pending] = OrderedDict()
        self._claims: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._number = 0
        self._news: list[Claim | Ended] = []
        self._checked_at = 0.0

    def __len__(self) -> int:
        return len(self._claims)

    def ordered(self, request: Any, run: BlockRun) -> None:
        """Note blocks that the workers were told to store."""
        size = self._shape.block_tokens
        parent = run.parent
        for index, block in enumerate(run.hashes, run.begin):
            claim = Claim(
                run.group,
                block,
                parent,
                tuple(request.all_token_ids[index * size : (index + 1) * size]),
                self._describe(request, index * size, (index + 1) * size),
                request.session_id,
            )
            parts = set(self._shape.groups[run.group].own_parts())
            self._pending[run.group, block] = _Pending(claim, parts)
            parent = block
        while len(self._pending) > PENDING_MAX:
            self._pending.popitem(last=False)

    def stored(self, parts: Iterable[StoredPart]) -> None:
        """Claim the blocks of which all parts are in the pool now."""
        for stored in parts:
            name = stored.group, stored.block
            pending = self._pending.get(name)
            if pending is None:
                continue
            pending.missing.discard(stored.part)
            if pending.missing:
                continue
            del self._pending[name]
            if name not in self._claims:
                self._news.append(pending.claim)
            self._number += 1
            self._claims[name] = self._number
        while len(self._claims) > CLAIMS_MAX:
            (group, block), _ = self._claims.popitem(last=False)
            self._news.append(Ended(group, block))

    def due(self, now_s: float) -> Sequence[Doubt]:
        """Return the claims to be looked at next; none if it is not time yet."""
        if not self._claims or now_s - self._checked_at < CHECK_EVERY_S:
            return ()
        return [Doubt(*name, number) for name, number in _first(self._claims, CHECK_CLAIMS)]

    def looked_at(self, doubts: Iterable[Doubt], now_s: float) -> None:
        """Put claims that are looked at to the end of the line."""
        self._checked_at = now_s
        for doubt in doubts:
            if (doubt.group, doubt.block) in self._claims:
                self._claims.move_to_end((doubt.group, doubt.block))

    def put_first(self, doubts: Sequence[Doubt]) -> None:
        """Put claims at the head of the line again: nobody got to them."""
        for doubt in reversed(doubts):
            if (doubt.group, doubt.block) in self._claims:
                self._claims.move_to_end((doubt.group, doubt.block), last=False)

    def missing(self, doubts: Iterable[Doubt]) -> None:
        """End claims that the pool has lost, unless the block was stored again since."""
        for doubt in doubts:
            name = doubt.group, doubt.block
            if self._claims.get(name) == doubt.number:
                del self._claims[name]
                self._news.append(Ended(*name))

    def clear(self) -> None:
        """End every claim."""
        self._pending.clear()
        self._news += [Ended(*name) for name in self._claims]
        self._claims.clear()

    def take(self) -> Sequence[Claim | Ended]:
        """Return what has changed since the last call, in order."""
        news, self._news = self._news, []
        return news


def _first(
    claims: OrderedDict[tuple[int, bytes], int], most: int
) -> Iterator[tuple[tuple[int, bytes], int]]:
    for _, entry in zip(range(most), claims.items(), strict=False):
        yield entry
