"""Readers that keep loading stored chains while something happens to a server of their ring.

Every byte that comes is compared. Owns the threads and what each load was: whole, short, or late.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import TracebackType
from typing import Final, Self

import numpy as np

from kvpool.client.cluster import ClusterPool
from kvpool.errors import UnavailableError
from kvpool.testing.blocks import view_of
from tests.faults.pool_client import LAYOUT, blocks_of, chain_of
from tests.server_process import WAIT_S

LEASE_S: Final = 20.0


class Readers:
    """Threads that load chains in turn, from construction to the end of the ``with``.

    Args:
        pool: What they read from.
        numbers: The chains, stored before, of ``blocks`` blocks each.

    Attributes:
        loads: Loads that ended, with whatever came.
        whole: Those in which all blocks came.
        longest_s: The longest of match, lease and load together.
        longest: What it was made of, for a person.
        starved_s: The longest that a thread here had to wait beyond a millisecond of sleep meanwhile:
            what the machine, not a pool, makes everybody wait.
    """

    def __init__(
        self, pool: ClusterPool, numbers: Sequence[int], blocks: int, threads: int = 2
    ) -> None:
        self._pool = pool
        self._numbers = numbers
        self._blocks = blocks
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.loads = self.whole = 0
        self.longest_s = self.starved_s = 0.0
        self.longest = ""
        self._threads = ThreadPoolExecutor(threads + 1)
        self._running = [self._threads.submit(self._read, number) for number in range(threads)]
        self._running.append(self._threads.submit(self._nap))

    def _read(self, first: int) -> None:
        turn = first
        while not self._end.is_set():
            number = self._numbers[turn % len(self._numbers)]
            turn += 1
            steps = [time.monotonic()]
            came = load_checked(self._pool, number, self._blocks, steps)
            steps.append(time.monotonic())
            took_s = steps[-1] - steps[0]
            with self._lock:
                self.loads += 1
                self.whole += came == self._blocks
                if took_s > self.longest_s:
                    self.longest_s = took_s
                    parts = (end - begin for begin, end in pairwise(steps))
                    self.longest = " + ".join(f"{part * 1e3:.0f}" for part in parts) + " ms"

    def _nap(self) -> None:
        while not self._end.is_set():
            began = time.monotonic()
            time.sleep(0.001)
            late_s = time.monotonic() - began - 0.001
            with self._lock:
                self.starved_s = max(self.starved_s, late_s)

    def forget_longest(self) -> None:
        """Begin anew to look for the longest."""
        with self._lock:
            self.longest_s = self.starved_s = 0.0

    def told(self) -> str:
        """Say what the longest was, and what it was made of: match, lease, load."""
        with self._lock:
            return (
                f"{self.longest_s * 1e3:.0f} ms ({self.longest}; "
                f"a sleeper was late by {self.starved_s * 1e3:.0f} ms)"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._threads.shutdown(wait=True)
        if error is None:
            for one in self._running:
                one.result()  # bytes that differed are raised here


def load_checked(
    pool: ClusterPool, number: int, blocks: int, steps: list[float] | None = None
) -> int:
    """Match, lease and load a chain; return how many blocks came. What came must be right.

    When the match and the lease were there is added to ``steps``.
    """
    noted = [] if steps is None else steps
    try:
        match = pool.match(chain_of(pool, number, blocks))
        noted.append(time.monotonic())
        with pool.lease(match, LEASE_S) as lease:
            noted.append(time.monotonic())
            if not lease.blocks:
                return 0
            out = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
            good = pool.load(lease, view_of(LAYOUT, out), deadline_s=WAIT_S).wait(WAIT_S)
    except UnavailableError:
        return 0
    np.testing.assert_array_equal(out[:good], blocks_of(number, blocks)[:good])
    return good
