"""Readers that keep loading stored chains while something happens to a server of their ring.

Every byte that comes is compared. Owns the threads and what each load was: whole, short, or late.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
        self.longest_s = 0.0
        self._threads = ThreadPoolExecutor(threads)
        self._running = [self._threads.submit(self._read, number) for number in range(threads)]

    def _read(self, first: int) -> None:
        turn = first
        while not self._end.is_set():
            number = self._numbers[turn % len(self._numbers)]
            turn += 1
            began = time.monotonic()
            came = load_checked(self._pool, number, self._blocks)
            took_s = time.monotonic() - began
            with self._lock:
                self.loads += 1
                self.whole += came == self._blocks
                self.longest_s = max(self.longest_s, took_s)

    def forget_longest(self) -> None:
        """Begin anew to look for the longest."""
        with self._lock:
            self.longest_s = 0.0

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


def load_checked(pool: ClusterPool, number: int, blocks: int) -> int:
    """Match, lease and load a chain; return how many blocks came. What came must be right."""
    try:
        with pool.lease(pool.match(chain_of(pool, number, blocks)), LEASE_S) as lease:
            if not lease.blocks:
                return 0
            out = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
            good = pool.load(lease, view_of(LAYOUT, out), deadline_s=WAIT_S).wait(WAIT_S)
    except UnavailableError:
        return 0
    np.testing.assert_array_equal(out[:good], blocks_of(number, blocks)[:good])
    return good
