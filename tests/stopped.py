"""Processes that stand still: SIGSTOP, waited for.

``kill`` returns before the threads of another process have stood still: one that runs on another
CPU may answer a message that was sent after it. A test that needs silence waits for it here.
"""

import os
import signal
import time
from pathlib import Path

WAIT_S = 30.0


def stop(pid: int) -> None:
    """Stop a process (SIGSTOP), and return when each of its threads stands still or has ended.

    Raises:
        AssertionError: one still runs after ``WAIT_S``.
    """
    os.kill(pid, signal.SIGSTOP)
    give_up = time.monotonic() + WAIT_S
    while moving := [state for state in _states(pid) if state not in "TtZX"]:
        assert time.monotonic() < give_up, f"process {pid} does not stop: {moving}"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """The state of each thread, one letter each, as proc(5) has them."""
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (thread / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        states.append(stat.rpartition(")")[2].split()[0])
    return states
