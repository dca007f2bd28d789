"""What a read waits for servers that give no sign of life: one budget for all of its steps.

Pure: who waits says how long. Knows nothing of servers. Who calls it: the pool over many servers, and
whatever asks servers for it.
"""

import threading
from enum import IntEnum
from typing import Final

# Part of what is left that a step may wait for one silent server. So the shares of any number of them
# add up to less than the whole, and there is always something left for the next one.
_SHARE: Final = 0.5


class Step(IntEnum):
    """The steps of a read, in their order."""

    MATCH = 0
    LEASE = 1
    LOAD = 2


class Patience:
    """The budget of one read: a match, a lease of it, the first load of that, and their retries.

    Only silence is paid for. What a server that lives takes has deadlines of its own, and a server
    whose connection has ended costs what it took to see that. Safe from any thread: ``_lock`` guards
    what is left and the step.

    Args:
        budget_s: Longest that the read waits for silent servers, all of them together.
        step: The step that it begins with.
    """

    def __init__(self, budget_s: float, step: Step = Step.MATCH) -> None:
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self._left_s = budget_s
        self._step = step

    def begin(self, step: Step) -> "Patience":
        """Return what is there for a step: of this read, or the whole if the step was done before.

        Who leases a match twice, or loads twice under one lease, reads twice.
        """
        with self._lock:
            if step > self._step:
                self._step = step
                return self
        return Patience(self._budget_s, step)

    def share_s(self) -> float:
        """Return the longest that the next server may be silent. Takes nothing."""
        with self._lock:
            return self._left_s * _SHARE

    def spend(self, waited_s: float, share_s: float) -> None:
        """Take a wait that was in vain: at most the share that it had, for what a machine adds is no wait.

        Of several waits at once, for servers that were asked side by side, the longest is taken.
        """
        with self._lock:
            self._left_s -= max(0.0, min(waited_s, share_s, self._left_s))
