"""A circuit breaker: how often to ask someone who does not answer. Pure: time comes from a Clock.

Owns the pause after each failure. Never calls anyone. Who calls it: the client of a server.
"""

import threading

from kvpool.clock import Clock


class Breaker:
    """Counts failures in a row. Safe from any thread.

    While it pauses, nobody may ask. When a pause is over, one caller may, and the next pause starts
    at once: a silent peer costs one wait a pause, whoever many threads ask.

    Args:
        clock: Where time comes from.
        min_s, max_s: The first pause and the longest; each failure in a row doubles it.
    """

    def __init__(self, clock: Clock, *, min_s: float, max_s: float) -> None:
        self._clock = clock
        self._min_s = min_s
        self._max_s = max_s
        self._lock = threading.Lock()
        self._pause_s = 0.0  # 0: closed, everyone may ask
        self._ask_at = 0.0
        self._trying = False  # somebody has this pause's one try

    def allows(self) -> bool:
        """Say whether the caller may ask now. While failing, True claims this pause's one try."""
        with self._lock:
            if not self._pause_s:
                return True
            now = self._clock.now()
            if now < self._ask_at:
                return False
            self._ask_at = now + self._pause_s
            self._trying = True
            return True

    def open(self) -> bool:
        """Say whether a pause is under way. Claims nothing."""
        with self._lock:
            return bool(self._pause_s) and self._clock.now() < self._ask_at

    def succeeded(self) -> None:
        """Note an answer: everyone may ask again."""
        with self._lock:
            self._pause_s = 0.0
            self._trying = False

    def failed(self) -> float:
        """Note a failure; return the seconds until somebody may ask again.

        Many who asked before one of them failed are one failure: only that of a later try lengthens
        the pause.
        """
        with self._lock:
            now = self._clock.now()
            if self._pause_s and now < self._ask_at and not self._trying:
                return self._ask_at - now
            self._trying = False
            self._pause_s = min(self._max_s, self._pause_s * 2 or self._min_s)
            self._ask_at = now + self._pause_s
            return self._pause_s
