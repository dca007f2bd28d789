"""The flusher: one thread that writes the new blocks of a fast tier to the one below it.

Owns the backlog (names of blocks that are not below yet; no bytes, no pins), the budget, and the
background eviction between the watermarks. A put only adds names: it never waits here. Who calls it:
the stack.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvpool.arena import Slot, Slots
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout
from kvpool.errors import ClosedError, CorruptionError, KVPoolError, UnavailableError
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.base import TierStats
from kvpool.tiers.dram import DramTier
from kvpool.tiers.tokens import TokenRows

logger = logging.getLogger(__name__)

# Longest sleep of the thread when there is nothing to do: a bound, not a period.
_IDLE_S: Final = 60.0
# First and longest pause after the tier below failed.
_BACKOFF_MIN_S: Final = 0.1
_BACKOFF_MAX_S: Final = 5.0
# Rest after a write during which others loaded, in times of that write: so it takes a third of the
# time, and of what loads get at most a quarter (kvpool bench tiers --only 'tiers.stack.*').
_YIELD: Final = 2.0


class SlowStore(Protocol):
    """What a stack asks of the tier below; ``SsdTier`` says what each method means."""

    name: str
    layout: BlockLayout

    def write(
        self,
        keys: bytes,
        parent: BlockHash | None,
        source: BlockView,
        *,
        crcs: Crcs | None = None,
        tokens: TokenRows | None = None,
        deadline_s: float,
    ) -> int:
        """Write a run durably; how many leading blocks are there now."""
        ...

    def read(
        self,
        slots: Sequence[Slot],
        dest: BlockView,
        *,
        tokens: TokenRows | None = None,
        deadline_s: float,
    ) -> tuple[int, Crcs]:
        """Read pinned blocks, verified; how many leading ones, and their checksums."""
        ...

    def durable(self, keys: bytes) -> int:
        """Count the leading keys that are there with all their ancestors."""
        ...

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are there."""
        ...

    def pin(self, keys: bytes) -> Slots:
        """Pin the leading blocks that are there."""
        ...

    def hold(self, keys: bytes) -> Slots:
        """Pin the leading blocks that are there: not a use, and not counted."""
        ...

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Give pins back."""
        ...

    def blocks(self) -> tuple[bytes, bytes]:
        """Return the keys of all blocks that are there, and their parents."""
        ...

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Remove a block."""
        ...

    def stats(self) -> TierStats:
        """Return a snapshot."""
        ...

    def close(self) -> None:
        """Close it, within a time of its own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushLimits:
    """The budget of a flusher.

    Attributes:
        bytes_s: Bytes a second that are written in the background, on average; 0 means no limit.
        batch_bytes: Bytes of one write, at least one block.
        timeout_s: Longest time of one write.
        backlog_bytes_max: Blocks that wait to be written; when more come, the oldest are let go.
        high_bytes, low_bytes: Watermarks of the fast tier: above ``high_bytes`` blocks are evicted
            in the background until ``low_bytes`` are left, once all of them are below.
    """

    bytes_s: int
    batch_bytes: int
    timeout_s: float
    backlog_bytes_max: int
    high_bytes: int
    low_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCounts:
    """Blocks that a flusher dealt with, since it began.

    Attributes:
        backlog: Wait to be written.
        flushed: Are below now.
        lost: Were evicted before their turn came: they are in no tier.
        skipped: Were let go because the backlog was full; written if they are stored again.
        failed: Could not be written; tried again after a pause, and counted each time.
    """

    backlog: int = 0
    flushed: int = 0
    lost: int = 0
    skipped: int = 0
    failed: int = 0


class Flusher:
    """Writes blocks down in the order they came. Safe from any thread; ``close`` ends its thread.

    One lock, ``_changed``, guards the backlog and the counts; no tier is called under it.
    """

    def __init__(self, fast: DramTier, slow: SlowStore, limits: FlushLimits) -> None:
        self._fast = fast
        self._slow = slow
        self._limits = limits
        self._block_bytes = fast.layout.block_bytes
        self._batch_blocks = max(1, limits.batch_bytes // self._block_bytes)
        self._backlog_max = max(1, limits.backlog_bytes_max // self._block_bytes)
        self._changed = threading.Condition()
        self._runs: deque[tuple[bytes, BlockHash | None]] = deque()
        self._counts = FlushCounts()
        self._busy = self._looked = self._hurries = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvpool-flush", daemon=True)
        self._thread.start()

    def offer(self, keys: bytes, parent: BlockHash | None) -> None:
        """Take note of new blocks, each the parent of the next. Never waits."""
        step = self._batch_blocks * HASH_BYTES
        with self._changed:
            for at in range(0, len(keys), step):
                self._runs.append((keys[at : at + step], parent))
                parent = BlockHash(keys[at : at + step][-HASH_BYTES:])
            self._add(backlog=len(keys) // HASH_BYTES)
            while self._counts.backlog > self._backlog_max:
                gone = len(self._runs.popleft()[0]) // HASH_BYTES
                self._add(backlog=-gone, skipped=gone)
            self._looked = False
            self._changed.notify_all()

    def counts(self) -> FlushCounts:
        """Return a consistent snapshot."""
        with self._changed:
            return self._counts

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be written and the watermarks were looked at; False if not."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (not self._runs and not self._busy and self._looked) or self._closed,
                timeout_s,
            )

    def hurry(self) -> None:
        """Write what waits without rests, from now on: nobody loads any more, and the end is near."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """End the thread after the write under way; False if it has not ended in time. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _add(self, **more: int) -> None:
        sums = {name: getattr(self._counts, name) + count for name, count in more.items()}
        self._counts = replace(self._counts, **sums)

    def _run(self) -> None:
        earliest = 0.0
        backoff_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._runs or not self._looked, _IDLE_S
                )
                if self._runs:
                    self._pause(earliest, lambda: self._closed or self._hurries)
                    if backoff_s and self._hurries:
                        self._pause(time.monotonic() + _BACKOFF_MIN_S, lambda: self._closed)
                if self._closed:
                    return
                run = self._runs.popleft() if self._runs else None
                self._busy = True
            began, loads = time.monotonic(), self._loads()
            left = b""
            try:
                if run is None:
                    self._keep_between_watermarks()
                else:
                    left = self._flush(*run)
            except ClosedError:
                return
            except Exception:
                logger.exception("the flusher met an error that it does not know; it goes on")
            finally:
                self._settle(run, left)
            if run is None:
                continue  # the rest after the last write goes on
            backoff_s = min(max(2 * backoff_s, _BACKOFF_MIN_S), _BACKOFF_MAX_S) if left else 0.0
            took_s = time.monotonic() - began
            written = (len(run[0]) - len(left)) // HASH_BYTES * self._block_bytes
            loaded = self._loads() != loads
            rest = rest_s(took_s, written, self._limits.bytes_s, loaded=loaded)
            earliest = began + took_s + max(backoff_s, rest)

    def _pause(self, until: float, early: Callable[[], bool]) -> None:
        """Wait until a time, or until it is of no use. Under the lock."""
        pause_s = until - time.monotonic()
        if pause_s > 0:
            self._changed.wait_for(early, pause_s)

    def _settle(self, run: tuple[bytes, BlockHash | None] | None, left: bytes) -> None:
        """Put back what could not be written, and count the rest as done."""
        with self._changed:
            self._busy = False
            if run is None:
                self._looked = True
            else:
                keys, parent = run
                done = len(keys) - len(left)
                if left:
                    above = BlockHash(keys[:done][-HASH_BYTES:]) if done else parent
                    self._runs.appendleft((left, above))
                self._add(backlog=-(done // HASH_BYTES))
            self._changed.notify_all()

    def _flush(self, keys: bytes, parent: BlockHash | None) -> bytes:
        """Write a run; return the keys that are to be tried again after a pause."""
        while keys:
            slots = self._fast.hold(keys)
            try:
                if not slots:  # evicted, or dropped
                    there = self._slow.match(keys[:HASH_BYTES])
                    self._tell(lost=1 - there, flushed=there)
                    done = 1
                else:
                    done = self._write(keys[: len(slots) * HASH_BYTES], parent, slots)
                    self._tell(flushed=done)
            except CorruptionError:  # of the first block, in the fast tier
                self._fast.drop(BlockHash(keys[:HASH_BYTES]), "corrupt")
                self._tell(lost=1)
                done = 1
            except UnavailableError as error:
                logger.debug("%s takes no blocks now: %s", self._slow.name, error)
                done = 0
            finally:
                self._fast.unpin(slots)
            if done == 0:
                self._tell(failed=len(keys) // HASH_BYTES)
                return keys
            parent = BlockHash(keys[(done - 1) * HASH_BYTES : done * HASH_BYTES])
            keys = keys[done * HASH_BYTES :]
        return b""

    def _write(self, keys: bytes, parent: BlockHash | None, slots: Slots) -> int:
        return self._slow.write(
            keys,
            parent,
            self._fast.view(slots, writable=False),
            crcs=self._fast.crcs(slots),
            tokens=self._fast.tokens(slots),
            deadline_s=self._limits.timeout_s,
        )

    def _tell(self, **more: int) -> None:
        with self._changed:
            self._add(**more)

    def _loads(self) -> int:
        """Return how many blocks were loaded from the fast tier so far."""
        try:
            return self._fast.stats().hits
        except ClosedError:
            return 0

    def _keep_between_watermarks(self) -> None:
        """Evict down to the low watermark if the fast tier is above the high one."""
        try:
            stats = self._fast.stats()
            used = (stats.slots - stats.free) * self._block_bytes
            if used > self._limits.high_bytes:
                self._fast.evict(-(-(used - self._limits.low_bytes) // self._block_bytes))
        except ClosedError:
            raise
        except KVPoolError as error:
            logger.warning("blocks could not be evicted in the background: %s", error)


def rest_s(took_s: float, written_bytes: int, bytes_s: int, *, loaded: bool) -> float:
    """Return how long the flusher rests after a write.

    Args:
        took_s: Of the write.
        written_bytes: By it.
        bytes_s: The budget; 0 means none.
        loaded: Somebody loaded meanwhile, who shares memory and CPUs with it.
    """
    budget_s = written_bytes / bytes_s - took_s if bytes_s else 0.0
    return max(budget_s, _YIELD * took_s if loaded else 0.0, 0.0)
