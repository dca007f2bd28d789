"""What the pool has of a request, asked for beside the scheduler, which must never wait.

Owns one thread, and the answers until they are used. A lookup that takes too long is a miss; after
the first such, every request is a miss at once, until the pool answers again. Time in line behind
others' lookups is no fault of the pool's. Who calls it: the scheduler's side of the connector, from the
scheduler's thread alone.
"""

import logging
import threading
from collections.abc import Callable, Sequence
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
# Blocks of one question whether claims still hold: no more than a ring asks one by one. Questions at a
# time, each of which ends at the first block that is gone: all claims that are due, of eight parts, if
# none is. And how many are asked though a request waits for the thread: some, so that it gets on.
_CHECK_BLOCKS: Final = 32
_CHECKS_MAX: Final = 512
_CHECKS_MIN: Final = 8
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


@dataclass(frozen=True, slots=True)
class Looked:
    """What came of a look at claims.

    Attributes:
        lost: Those of which a part is not in the pool.
        unseen: Those that nobody got to, or whose answer came late.
    """

    lost: Sequence[Doubt] = ()
    unseen: Sequence[Doubt] = ()


class Questions:
    """Whether blocks are there, as often as may be asked in a row. One thread.

    Args:
        pool: Whom to ask.
        clock, patience_s: What comes later than that is no answer: a pool says of a silent server
            that it has nothing.
        wanted: Says whether somebody else wants the thread.
    """

    def __init__(
        self, pool: BlockPool, clock: Clock, patience_s: float, wanted: Callable[[], bool]
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._patience_s = patience_s
        self._wanted = wanted
        self._asked = 0
        self._over = False

    def gone(self, chain: Chain) -> list[int] | None:
        """Return which blocks are not there; None if that could not be asked."""
        gone: list[int] = []
        begin = 0
        while begin < len(chain):
            here = self._match(Chain(chain.namespace, chain.hashes[begin * HASH_BYTES :]))
            if here is None:
                return None
            begin += here
            if begin < len(chain):
                gone.append(begin)
                begin += 1
        return gone

    def _match(self, chain: Chain) -> int | None:
        most = _CHECKS_MIN if self._wanted() else _CHECKS_MAX
        if self._over or self._asked >= most:
            self._over = True
            return None
        self._asked += 1
        asked_at = self._clock.now()
        here = self._pool.match(chain).blocks
        self._over = self._clock.now() - asked_at >= self._patience_s
        return None if self._over else here


def look_at(
    shape: EngineShape, namespace: Namespace, doubts: Sequence[Doubt], questions: Questions
) -> Looked:
    """Say which claims do not hold: the first ones in every part, before the next ones in any."""
    lost: list[Doubt] = []
    unseen: list[Doubt] = []
    for group in shape.groups:
        mine = [doubt for doubt in doubts if doubt.group == group.number]
        for at in range(0, len(mine), _CHECK_BLOCKS):
            left = mine[at : at + _CHECK_BLOCKS]
            for part in group.own_parts():
                gone = questions.gone(part_chain(namespace, part, [doubt.block for doubt in left]))
                if gone is None:
                    unseen += left
                    break
                lost += [left[index] for index in gone]
                left = [doubt for index, doubt in enumerate(left) if index not in gone]
    return Looked(lost, unseen)


@dataclass(slots=True, eq=False)
class _Lookup:
    since: float
    hashes: tuple[bytes, ...]
    namespace: Namespace
    blocks: int | None = None


class Lookups:
    """Answers by request. Nothing is called under ``_lock``.

    ``_lock`` guards ``_waiting``, ``_failing``, ``_begun`` (of the lookup that the thread is at) and
    ``_looked``.

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
        self._looked = Looked()
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

    def take_looked(self) -> Looked:
        """Return what came of looking at claims since the last call."""
        with self._lock:
            looked, self._looked = self._looked, Looked()
            return looked

    def close(self) -> None:
        """End the thread; a lookup under way ends first, within the pool's own deadline."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _check(self, namespace: Namespace, doubts: Sequence[Doubt]) -> None:
        looked = Looked(unseen=doubts)
        try:
            self._pool.stats()  # a server that is lost has nothing, and says so by an error
            questions = Questions(self._pool, self._clock, self._patience_s, self._is_wanted)
            looked = look_at(self._shape, namespace, doubts, questions)
        except KVPoolError as error:
            logger.debug("claims were not looked at: %s", error)
        except Exception:
            logger.exception("claims were not looked at")
        finally:
            with self._lock:
                self._waiting -= 1
                before = self._looked
                self._looked = Looked(
                    (*before.lost, *looked.lost), (*before.unseen, *looked.unseen)
                )

    def _is_wanted(self) -> bool:
        with self._lock:
            return self._waiting > 1

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
