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
from kvpool.client.remote import RemotePool
from kvpool.config import TransferConfig
from kvpool.errors import UnavailableError
from kvpool.testing.blocks import view_of
from tests.faults.pool_client import LAYOUT, blocks_of, chain_of
from tests.server_process import WAIT_S

LEASE_S: Final = 20.0
# What a read may wait for servers that are silent.
BOUND_S: Final = TransferConfig().read_timeout_s
# The chain at a server to which nothing happens.
BESIDE: Final = 1000


class Readers:
    """Threads that load chains in turn, from construction to the end of the ``with``.

    Args:
        pool: What they read from.
        numbers: The chains, stored before, of ``blocks`` blocks each.
        beside: A server to which nothing happens, and that holds chain ``BESIDE``: one more thread
            reads that, so that what the machine makes everybody wait can be told from what a fault
            does.

    Attributes:
        loads: Loads that ended, with whatever came.
        whole: Those in which all blocks came.
        longest_s: The longest of match, lease and load together.
        longest: What it was made of, for a person.
    """

    def __init__(
        self,
        pool: ClusterPool,
        numbers: Sequence[int],
        blocks: int,
        threads: int = 2,
        beside: RemotePool | None = None,
    ) -> None:
        self._pool = pool
        self._beside = beside
        self._numbers = numbers
        self._blocks = blocks
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.loads = self.whole = 0
        self.longest_s = 0.0
        self.longest = ""
        self._longest_at = (0.0, 0.0)
        self._over = 0
        self._well: list[tuple[float, float]] = []  # when reads beside began and ended
        self._threads = ThreadPoolExecutor(threads + 1)
        self._running = [self._threads.submit(self._read, number) for number in range(threads)]
        if beside is not None:
            self._running.append(self._threads.submit(self._read_beside, beside))

    def _read(self, first: int) -> None:
        turn = first
        while not self._end.is_set():
            number = self._numbers[turn % len(self._numbers)]
            turn += 1
            steps = [time.monotonic()]
            came = load_checked(self._pool, number, self._blocks, steps)
            took_s = steps[-1] - steps[0]
            with self._lock:
                self.loads += 1
                self.whole += came == self._blocks
                self._over += took_s > BOUND_S
                if took_s > self.longest_s:
                    self.longest_s = took_s
                    self._longest_at = steps[0], steps[-1]
                    parts = (end - begin for begin, end in pairwise(steps))
                    self.longest = " + ".join(f"{part * 1e3:.0f}" for part in parts) + " ms"

    def _read_beside(self, well: RemotePool) -> None:
        while not self._end.is_set():
            steps = [time.monotonic()]
            assert load_checked(well, BESIDE, self._blocks, steps) in (0, self._blocks)
            with self._lock:
                self._well.append((steps[0], steps[-1]))

    def forget_longest(self) -> None:
        """Begin anew to look for the longest."""
        with self._lock:
            self.longest_s, self.longest = 0.0, ""
            self._over = 0
            self._well.clear()

    def told(self) -> str:
        """Say what the longest was and what it was made of: match, lease, load and release.

        Beside it the longest read of the well server: of those at the same time, and of all.
        """
        with self._lock:
            begin, end = self._longest_at
            meanwhile = [
                ended - began for began, ended in self._well if ended > begin and began < end
            ]
            well = [ended - began for began, ended in self._well]
            return (
                f"{self.longest_s * 1e3:.0f} ms ({self.longest}); {self._over} of more than "
                f"{BOUND_S * 1e3:.0f} ms; at a well server meanwhile "
                f"{max(meanwhile, default=0) * 1e3:.0f} ms, at any time "
                f"{max(well, default=0) * 1e3:.0f} ms"
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
    pool: ClusterPool | RemotePool, number: int, blocks: int, steps: list[float] | None = None
) -> int:
    """Match, lease and load a chain; return how many blocks came. What came must be right.

    When the match, the lease and the end were there is added to ``steps``.
    """
    noted = [] if steps is None else steps
    good = 0
    out = np.zeros((blocks, LAYOUT.block_bytes), dtype=np.uint8)
    try:
        match = pool.match(chain_of(pool, number, blocks))
        noted.append(time.monotonic())
        with pool.lease(match, LEASE_S) as lease:
            noted.append(time.monotonic())
            if lease.blocks:
                dest = view_of(LAYOUT, out[: lease.blocks])
                good = pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S)
    except UnavailableError:
        good = 0
    noted.append(time.monotonic())
    np.testing.assert_array_equal(out[:good], blocks_of(number, blocks)[:good])
    return good
