"""What a server does now and then, and what becomes of it when a part of that fails.

Owns the rule: a task that fails is tried again at the next turn, and keeps no other from its turn; it
is logged with its reason, counted, and said at ``/readyz`` once it fails again and again. Nothing that
fails here ends the server: what it holds would be lost. Who calls it: the daemon, in its loop.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from kvpool.clock import Clock
from kvpool.metrics import Metrics
from kvpool.server.http import Health

logger = logging.getLogger(__name__)

# A task that answers False has work under way still, and says nothing yet of how that went.
Tasks = Mapping[str, Callable[[], bool | None]]

# Failures in a row until nobody should send clients here: one alone may be a moment's.
FAILURES_MAX: Final = 3
# A task that goes on failing is logged again after so long.
_SAY_AGAIN_S: Final = 600.0


class Upkeep:
    """Runs tasks by name; names are those of the metric's label. Used in the server's loop alone."""

    def __init__(self, metrics: Metrics, health: Health, clock: Clock) -> None:
        self._metrics = metrics
        self._health = health
        self._clock = clock
        self._failures: Counter[str] = Counter()  # in a row
        self._said_at: dict[str, float] = {}

    def run(self, tasks: Tasks) -> None:
        """Run each task once, whatever becomes of the others: the loop turns."""
        self._health.turn()
        for name, task in tasks.items():
            try:
                told = task()
            except Exception as error:  # noqa: BLE001 (whatever it is, the rest goes on)
                self._failed(name, error)
                continue
            if told is not False and self._failures.pop(name, 0) >= FAILURES_MAX:
                self._health.trouble(name, "")
                logger.warning("%s works again", name)

    def _failed(self, name: str, error: Exception) -> None:
        self._failures[name] += 1
        self._metrics.count("kvpool_server_failed_upkeep_passes_total", task=name)
        if self._failures[name] >= FAILURES_MAX:
            self._health.trouble(name, f"{type(error).__name__}: {error}")
        now = self._clock.now()
        if now - self._said_at.get(name, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said_at[name] = now
            logger.error(
                "%s failed (%s: %s): the server goes on and tries again. Please report this",
                *(name, type(error).__name__, error),
                exc_info=error,
            )
