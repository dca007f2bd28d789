"""What the pool has of a request, asked for beside the scheduler, which must never wait.

Owns one thread, and the answers until they are used. A lookup that takes too long is a miss; after
the first such, patience is a few milliseconds until the pool answers again. Who calls it: the
scheduler's side of the connector, from the scheduler's thread alone.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvpool.base import BlockPool, Chain
from kvpool.block import HASH_BYTES, Namespace
from kvpool.clock import Clock
from kvpool.errors import KVPoolError
from kvpool.integration.vllm.shape import EngineShape, part_chain

logger = logging.getLogger(__name__)

# How long a request waits for a pool that was too slow the last time.
FAILING_PATIENCE_S: Final = 0.005
# Lookups that may wait for the thread; one more is a miss at once.
LOOKUPS_MAX: Final = 1024
# A prefix is shortened so often before it is given up: only sliding windows with holes take several.
_ROUNDS_MAX: Final = 64


def longest_prefix(
    pool: BlockPool, shape: EngineShape, namespace: Namespace, hashes: Sequence[bytes]
) -> int:
    """Return how many leading blocks a request can load: all groups, all parts. A hint, as ``match``.

    A full-attention group needs every block of the prefix, a sliding window only those that the
    next token still sees; the prefix is shortened until it is valid in every group.
    """
    blocks = len(hashes)
    chains = {
        (group.number, part): part_chain(namespace, part, hashes)
        for group in shape.groups
        for part in group.own_parts()
    }
    for _ in range(_ROUNDS_MAX):
        before = blocks
        for group in shape.groups:
            for part in group.own_parts():
                chain = chains[group.number, part]
                first = group.first_needed(blocks, shape.block_tokens)
                names = chain.hashes[first * HASH_BYTES : blocks * HASH_BYTES]
                if names:
                    blocks = first + pool.match(Chain(namespace, names)).blocks
        if blocks == before:
            return blocks
    return 0


@dataclass(slots=True, eq=False)
class _Lookup:
    since: float
    hashes: tuple[bytes, ...]
    namespace: Namespace
    blocks: int | None = None


class Lookups:
    """Answers by request. ``_lock`` guards ``_waiting`` and ``_failing``; nothing is called under it.

    Args:
        pool: Whom to ask; the caller closes it after ``close``.
        shape: What the engine's blocks are.
        clock: Of patience.
        patience_s: How long a request waits.
    """

    def __init__(
        self, pool: BlockPool, shape: EngineShape, clock: Clock, patience_s: float
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._clock = clock
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._waiting = 0
        self._failing = False
        self._asked: dict[str, _Lookup] = {}
        self._thread = ThreadPoolExecutor(1, "kvpool-lookup")

    def ask(self, request: str, namespace: Namespace, hashes: Sequence[bytes]) -> int | None:
        """Return the leading blocks that can be loaded; None means ask again. Never waits.

        The answer stays the same until ``forget``.
        """
        lookup = self._asked.get(request)
        if lookup is None:
            lookup = self._asked[request] = _Lookup(self._clock.now(), tuple(hashes), namespace)
            self._submit(lookup)
        if lookup.blocks is None:
            patience_s = FAILING_PATIENCE_S if self._failing else self._patience_s
            if self._clock.now() - lookup.since >= patience_s:
                with self._lock:
                    self._failing = True
                lookup.blocks = 0  # what the thread may still find is not looked at
        return lookup.blocks

    def answer(self, request: str) -> int | None:
        """Return what ``ask`` answered, None if it has not, or was not called since ``forget``."""
        lookup = self._asked.get(request)
        return None if lookup is None else lookup.blocks

    def forget(self, request: str) -> None:
        """Drop an answer: the next ``ask`` looks anew. What was not begun is not looked for."""
        lookup = self._asked.pop(request, None)
        if lookup is not None and lookup.blocks is None:
            lookup.blocks = 0

    def close(self) -> None:
        """End the thread; a lookup under way ends first, within the pool's own deadline."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self, lookup: _Lookup) -> None:
        with self._lock:
            full = self._waiting >= LOOKUPS_MAX
            self._waiting += not full
        if full:
            lookup.blocks = 0
            return
        self._thread.submit(self._look, lookup)

    def _look(self, lookup: _Lookup) -> None:
        found = 0
        try:
            if lookup.blocks is None:  # nobody gave it up
                if self._failing:
                    self._pool.stats()  # raises while there is no server that answers
                    self._note_answer()
                found = longest_prefix(self._pool, self._shape, lookup.namespace, lookup.hashes)
        except KVPoolError as error:
            logger.debug("a lookup failed, the request is computed: %s", error)
        except Exception:
            logger.exception("a lookup failed, the request is computed")
        finally:
            with self._lock:
                self._waiting -= 1
            if lookup.blocks is None:
                lookup.blocks = found

    def _note_answer(self) -> None:
        with self._lock:
            self._failing = False
