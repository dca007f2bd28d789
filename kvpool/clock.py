"""Time as an argument, so that pure code can be driven by a test's own clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock, comparable between processes of one host."""

    def now(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is told to move. For tests and simulation."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the time that was last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (>= 0)."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._now += seconds
