"""Calls and timers for a thread that waits for something else: posted from any thread, run by one.

Owns the calls that wait. Never runs them: its owner's thread takes them between two waits. Who calls
it: the UCX engine.
"""

import heapq
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

Call = Callable[[], None]

# Longest wait of a thread with nothing to do.
_IDLE_S: Final = 60.0


def weakly(method: Call) -> Call:
    """Return a call of a bound method that keeps nothing alive, and does nothing once that is gone.

    For timers that seldom matter: a timeout of 5 s would keep each connection of the last 5 s.
    """
    target = weakref.WeakMethod(method)

    def call() -> None:
        if (living := target()) is not None:
            living()

    return call


class Calls:
    """Posted calls, and timers. Safe from any thread; ``due`` is for the thread that runs them.

    Args:
        wake: Ends the thread's wait. Called from any thread, with no lock held.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()  # guards what follows
        self._posted: deque[Call] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        self._order = itertools.count()
        self._stopped = False

    def post(self, call: Call) -> bool:
        """Have ``call`` run soon, in the order of posting. False if nothing is run any more."""
        with self._lock:
            if self._stopped:
                return False
            self._posted.append(call)
        self._wake()
        return True

    def call_later(self, seconds: float, call: Call) -> None:
        """Have ``call`` run once after ``seconds``; it is dropped if nothing is run any more."""
        at = time.monotonic() + seconds
        with self._lock:
            if self._stopped:
                return
            earliest = not self._timers or at < self._timers[0][0]
            heapq.heappush(self._timers, (at, next(self._order), call))
        if earliest:
            self._wake()

    def sleep_s(self) -> float:
        """Return for how long the thread may wait."""
        with self._lock:
            if self._posted:
                return 0.0
            if self._timers:
                return min(_IDLE_S, max(0.0, self._timers[0][0] - time.monotonic()))
            return _IDLE_S

    def due(self) -> list[Call]:
        """Take the calls whose turn it is: the posted ones, then the timers by their time."""
        now = time.monotonic()
        with self._lock:
            calls = list(self._posted)
            self._posted.clear()
            while self._timers and self._timers[0][0] <= now:
                calls.append(heapq.heappop(self._timers)[2])
        return calls

    def after_fork(self) -> None:
        """Run nothing in a child; see ``forked``."""
        self._lock = threading.Lock()
        self._stopped = True

    def stop(self) -> None:
        """Drop timers, and what comes; what was posted is for whoever ends the thread to run."""
        with self._lock:
            self._stopped = True
            self._timers.clear()
