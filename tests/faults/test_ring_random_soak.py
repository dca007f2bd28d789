"""Ten minutes of random operations on a ring: bytes are right, and nothing that it takes grows.

With ``--soak``. Clients store, load, cancel, run out of time, let leases run out, evict, close and
connect anew. Memory, descriptors and threads of servers and of this process are compared from the
end of the first round to the end of the last, leases and quarantine must be empty each time.
"""

import gc
import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvpool.client import protocol
from kvpool.client.cluster import ClusterPool
from kvpool.client.rpc import Caller
from kvpool.errors import KVPoolError
from kvpool.testing.blocks import view_of
from tests.faults.pool_client import LAYOUT, blocks_of, chain_of
from tests.ring import RingOfServers
from tests.server_process import WAIT_S
from tests.waiting import until

SERVERS = 4
CLIENTS = 6
CHAINS = 200
BLOCKS_MAX = 16
SLOTS = 512
ROUND_S = 30.0
ROUNDS = 20
# What the last round may have over the first: allocators and caches that fill late.
GROWTH_BYTES_MAX = 12 << 20
GROWTH_COUNT_MAX = 8


@dataclass(frozen=True)
class Taken:
    """What a process takes."""

    memory_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def by(cls, pid: int) -> "Taken":
        told = Path(f"/proc/{pid}/status").read_text()

        def number(name: str) -> int:
            found = re.search(rf"^{name}:\s+(\d+)", told, re.MULTILINE)
            assert found is not None
            return int(found[1])

        return cls(number("RssAnon") << 10, len(os.listdir(f"/proc/{pid}/fd")), number("Threads"))


class Client:
    """One client with its own dice."""

    def __init__(self, ring: RingOfServers, seed: int) -> None:
        self._ring = ring
        self._dice = random.Random(seed)
        self._pool = ring.connect(LAYOUT)
        self.done = self.whole = 0

    def work(self, until_s: float) -> None:
        """Do what the dice say until then."""
        jobs = [self._store, self._store, self._load, self._load, self._load, self._cancel]
        jobs += [self._late, self._run_out, self._evict, self._reconnect]
        while time.monotonic() < until_s:
            job = self._dice.choices(jobs, weights=[6, 6, 6, 6, 6, 2, 2, 1, 0.2, 0.2])[0]
            with suppress(KVPoolError):
                job()
            self.done += 1

    def close(self) -> None:
        self._pool.close()

    def _some(self) -> tuple[int, int]:
        return self._dice.randrange(CHAINS), self._dice.randint(1, BLOCKS_MAX)

    def _store(self, deadline_s: float = WAIT_S) -> None:
        number, blocks = self._some()
        first = self._dice.randrange(blocks) if self._dice.random() < 0.2 else 0
        source = view_of(LAYOUT, blocks_of(number, BLOCKS_MAX)).take(first, blocks)
        chain = chain_of(self._pool, number, BLOCKS_MAX)
        self._pool.store(
            chain, source, first=first, deadline_s=deadline_s, replicas=self._dice.randint(1, 2)
        ).wait(WAIT_S)

    def _load(self, deadline_s: float = WAIT_S) -> None:
        number, blocks = self._some()
        with self._pool.lease(self._pool.match(chain_of(self._pool, number, blocks)), 20) as lease:
            if not lease.blocks:
                return
            out = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
            done = self._pool.load(lease, view_of(LAYOUT, out), deadline_s=deadline_s)
            good = done.wait(WAIT_S)
        if not np.array_equal(out[:good], blocks_of(number, BLOCKS_MAX)[:good]):
            raise AssertionError(f"wrong bytes of chain {number}")
        self.whole += good == lease.blocks

    def _cancel(self) -> None:
        number, _ = self._some()
        source = view_of(LAYOUT, blocks_of(number, BLOCKS_MAX))
        chain = chain_of(self._pool, number, BLOCKS_MAX)
        done = self._pool.store(chain, source, deadline_s=WAIT_S)
        done.cancel()
        done.wait(WAIT_S)

    def _late(self) -> None:
        self._dice.choice([self._store, self._load])(self._dice.uniform(0.0, 0.005))

    def _run_out(self) -> None:
        number, blocks = self._some()
        self._pool.lease(self._pool.match(chain_of(self._pool, number, blocks)), 0.05)

    def _evict(self) -> None:
        node = self._dice.choice(self._ring.nodes)
        with closing(Caller(node.address)) as caller:
            caller.call(protocol.EVICT, protocol.EvictRequest(blocks=64), WAIT_S)

    def _reconnect(self) -> None:
        self._pool.close()
        self._pool = self._ring.connect(LAYOUT)


@pytest.fixture
def ring() -> Iterator[RingOfServers]:
    with RingOfServers(SERVERS, SLOTS * LAYOUT.block_bytes) as ring:
        yield ring


def at_rest(pool: ClusterPool) -> bool:
    stats = pool.stats()
    return (stats.leases, stats.reserved, stats.quarantined) == (0, 0, 0)


def test_what_a_ring_takes_stays_flat(
    ring: RingOfServers, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = [os.getpid(), *(node.pid for node in ring.nodes)]
    rounds: list[list[Taken]] = []
    clients = [Client(ring, number) for number in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as threads, closing(ring.connect(LAYOUT)) as looking:
        for _ in range(ROUNDS):
            end_s = time.monotonic() + ROUND_S
            for one in [threads.submit(client.work, end_s) for client in clients]:
                one.result()
            until(lambda: at_rest(looking), "leases, reservations and quarantine are empty")
            gc.collect()
            rounds.append([Taken.by(pid) for pid in pids])
        for client in clients:
            client.close()
    with capsys.disabled():
        done, whole = sum(one.done for one in clients), sum(one.whole for one in clients)
        print(f"\n{done} operations, {whole} whole loads; first and last round:")
        for first, last in zip(rounds[0], rounds[-1], strict=True):
            print(f"  {first}\n  {last}")
    for first, last in zip(rounds[0], rounds[-1], strict=True):
        assert last.memory_bytes <= first.memory_bytes + GROWTH_BYTES_MAX
        assert last.descriptors <= first.descriptors + GROWTH_COUNT_MAX
        assert last.threads <= first.threads + GROWTH_COUNT_MAX
