"""Waiting for what must come: the one way of all tests."""

import time
from collections.abc import Callable

# Bounds a failing test alone; nothing that is waited for takes near as long.
WAIT_S = 60.0


def until(
    condition: Callable[[], bool],
    what: str = "the condition",
    why_not: Callable[[], str] = lambda: "",
    *,
    wait_s: float = WAIT_S,
) -> None:
    """Wait for a condition.

    Args:
        condition: Looked at every few milliseconds.
        what: What it means that it holds, for the message.
        why_not: Called if it did not come true, for the message.
        wait_s: The longest wait.

    Raises:
        AssertionError: It did not come true in time.
    """
    give_up = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {wait_s:.0f} s: {what} {why_not()}"
        time.sleep(0.002)
