"""What the pool has of a request, asked for beside the scheduler, which must never wait.

Owns one thread, and the answers until they are used. A lookup that takes too long is a miss; after
the first such, every request is a miss at once, until the pool answers again. Time in line behind
others' lookups is no fault of the pool's. Who calls it: the scheduler's side of the connector, from the
scheduler's thread alone.
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
from kvpool.integration.vllm.publishing import Doubt
from kvpool.integration.vllm.shape import EngineShape, part_chain

logger = logging.getLogger(__name__)

# Lookups that may wait for the thread; one more is a miss at once.
LOOKUPS_MAX: Final = 1024
# A request waits so many times as long in line, behind lookups that are answered, as for its own.
_LINE_PATIENCES: Final = 10
# Blocks of one question whether claims still hold: no more than a ring asks one by one. And questions
# at a time, each of which ends at the first block that is gone; a thread that looks is not for long.
_CHECK_BLOCKS: Final = 32
_CHECKS_MAX: Final = 128
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


def lost_claims(
    pool: BlockPool,
    shape: EngineShape,
    namespace: Namespace,
    doubts: Sequence[Doubt],
    clock: Clock,
    patience_s: float,
) -> list[Doubt]:
    """Return the claims whose blocks are not whole in the pool, as far as ``_CHECKS_MAX`` tells.

    It ends at the first question that takes longer than patience: a pool says of a silent server that
    it has nothing.
    """
    lost: list[Doubt] = []
    checks = 0
    for group in shape.groups:
        for part in group.own_parts():
            mine = [doubt for doubt in doubts if doubt.group == group.number]
            names = part_chain(namespace, part, [doubt.block for doubt in mine]).hashes
            begin = 0
            while begin < len(mine) and checks < _CHECKS_MAX:
                end = min(begin + _CHECK_BLOCKS, len(mine))
                asked = Chain(namespace, names[begin * HASH_BYTES : end * HASH_BYTES])
                asked_at = clock.now()
                begin += pool.match(asked).blocks
                checks += 1
                if clock.now() - asked_at >= patience_s:
                    return lost
                if begin < end:
                    lost.append(mine[begin])
                    begin += 1
    return lost


@dataclass(slots=True, eq=False)
class _Lookup:
    since: float
    hashes: tuple[bytes, ...]
    namespace: Namespace
    blocks: int | None = None


class Lookups:
    """Answers by request. Nothing is called under ``_lock``.

    ``_lock`` guards ``_waiting``, ``_failing``, ``_begun`` (of the lookup that the thread is at) and
    ``_lost``.

    Args:
        pool: Whom to ask; the caller closes it after ``close``.
        shape: What the engine's blocks are.
        clock: Of patience.
        patience_s: How long a lookup may take.
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
        self._begun: float | None = None
        self._asked: dict[str, _Lookup] = {}
        self._lost: list[Doubt] = []
        self._thread = ThreadPoolExecutor(1, "kvpool-lookup")

    def ask(self, request: str, namespace: Namespace, hashes: Sequence[bytes]) -> int | None:
        """Return the leading blocks that can be loaded; None means ask again. Never waits.

        The answer stays the same until ``forget``. While the pool is failing it is 0, at once: one
        request after the other asks on the thread whether the pool answers again.
        """
        lookup = self._asked.get(request)
        if lookup is None:
            lookup = self._asked[request] = _Lookup(self._clock.now(), tuple(hashes), namespace)
            if self._failing:
                lookup.blocks = 0
                self._probe()
            else:
                self._submit(lookup)
        if lookup.blocks is None and self._is_over(lookup):
            lookup.blocks = 0  # what the thread may still find is not looked at
        return lookup.blocks

    def _is_over(self, lookup: _Lookup) -> bool:
        """Say whether a request has waited long enough: for a pool that is silent, or in line."""
        now = self._clock.now()
        with self._lock:
            if self._begun is not None and now - self._begun >= self._patience_s:
                self._failing = True
            failing = self._failing
        return failing or now - lookup.since >= _LINE_PATIENCES * self._patience_s

    def answer(self, request: str) -> int | None:
        """Return what ``ask`` answered, None if it has not, or was not called since ``forget``."""
        lookup = self._asked.get(request)
        return None if lookup is None else lookup.blocks

    def forget(self, request: str) -> None:
        """Drop an answer: the next ``ask`` looks anew. What was not begun is not looked for."""
        lookup = self._asked.pop(request, None)
        if lookup is not None and lookup.blocks is None:
            lookup.blocks = 0

    def check(self, namespace: Namespace, doubts: Sequence[Doubt]) -> bool:
        """Have the thread look whether claims still hold; False if it is busy or the pool failing."""
        with self._lock:
            if self._failing or self._waiting:
                return False
            self._waiting += 1
        self._thread.submit(self._check, namespace, doubts)
        return True

    def take_lost(self) -> Sequence[Doubt]:
        """Return the claims that were found not to hold since the last call."""
        with self._lock:
            lost, self._lost = self._lost, []
            return lost

    def close(self) -> None:
        """End the thread; a lookup under way ends first, within the pool's own deadline."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _check(self, namespace: Namespace, doubts: Sequence[Doubt]) -> None:
        lost: list[Doubt] = []
        try:
            self._pool.stats()  # a server that is lost has nothing, and says so by an error
            lost = lost_claims(
                self._pool, self._shape, namespace, doubts, self._clock, self._patience_s
            )
        except KVPoolError as error:
            logger.debug("claims were not looked at: %s", error)
        except Exception:
            logger.exception("claims were not looked at")
        finally:
            with self._lock:
                self._waiting -= 1
                self._lost += lost

    def _probe(self) -> None:
        """Have the thread ask the pool for its statistics, unless it has something to do."""
        with self._lock:
            busy = self._waiting > 0
            self._waiting += not busy
        if not busy:
            self._thread.submit(self._ask_for_life)

    def _ask_for_life(self) -> None:
        try:
            self._pool.stats()  # raises while there is no server that answers
        except KVPoolError as error:
            logger.debug("the pool does not answer yet: %s", error)
        except Exception:
            logger.exception("the pool does not answer yet")
        else:
            with self._lock:
                self._failing = False
        finally:
            with self._lock:
                self._waiting -= 1

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
        begin = self._clock.now()
        try:
            if lookup.blocks is None:  # nobody gave it up
                with self._lock:
                    self._begun = begin
                found = longest_prefix(self._pool, self._shape, lookup.namespace, lookup.hashes)
                slow = self._clock.now() - begin >= self._patience_s
                with self._lock:
                    self._failing |= slow  # a pool says of a silent server that it has nothing
        except KVPoolError as error:
            logger.debug("a lookup failed, the request is computed: %s", error)
            with self._lock:
                self._failing = True
        except Exception:
            logger.exception("a lookup failed, the request is computed")
        finally:
            with self._lock:
                self._waiting -= 1
                self._begun = None
            if lookup.blocks is None:
                lookup.blocks = found
