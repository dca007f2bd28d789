"""What an SSD tier counts.

Owns the numbers and their lock. Who calls it: the parts of the tier, and whoever looks.
"""

import threading
from collections import Counter
from dataclasses import dataclass

from kvpool.tiers.ssd_recovery import Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdStats:
    """What only an SSD tier counts.

    Attributes:
        stale: Slots whose header on the disk is of a block that has left.
        late_threads: Threads that the kernel holds for calls that gave up at their deadline.
        read_errors, write_errors: Blocks that the disk did not give or take.
        read_timeouts, write_timeouts: Blocks that were not through by their deadline.
        recovery: What opening found.
    """

    stale: int
    late_threads: int
    read_errors: int
    write_errors: int
    read_timeouts: int
    write_timeouts: int
    recovery: Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdNumbers:
    """Counts since the tier was opened. ``SsdStats`` and ``TierStats`` say what they mean."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    corruptions: int = 0
    mismatches: int = 0
    read_errors: int = 0
    write_errors: int = 0
    read_timeouts: int = 0
    write_timeouts: int = 0


class SsdCounts:
    """The counts while they change. Safe from any thread; ``_lock`` is a leaf."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, **more: int) -> None:
        """Add to the counts that are named."""
        with self._lock:
            self._sums.update(more)

    def numbers(self) -> SsdNumbers:
        """Return a consistent snapshot."""
        with self._lock:
            return SsdNumbers(**self._sums)
