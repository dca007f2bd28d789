"""Servers of a ring killed, stopped and started again under load, at every delay that matters.

With ``--soak``: they take minutes, and say what the longest wait of a reader was. The quicker ones of
their kind are in ``test_ring.py``.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from kvpool.base import StoreResult
from kvpool.client.cluster import ClusterPool
from kvpool.client.connect import connect
from kvpool.client.remote import RemotePool
from kvpool.config import TransferConfig
from kvpool.testing.blocks import view_of
from tests.faults.pool_client import LAYOUT, blocks_of, chain_of
from tests.faults.ring_load import BESIDE, Readers, load_checked
from tests.ring import RingNode, RingOfServers
from tests.server_process import WAIT_S
from tests.waiting import until

BLOCKS = 8
CHAINS = range(12)
SLOTS = 256
STOPPED_S = 15.0
# What an operator gets, but for the pauses, which only make a test wait; by each way for bytes.
DEFAULT = TransferConfig(backoff_max_s=0.4, staging_bytes=4 << 20)
CONFIGS = {
    "host": replace(DEFAULT, ways=("host",)),
    "ucx": replace(DEFAULT, ways=("ucx",)),
    "streams": replace(DEFAULT, ways=()),
}
# Seconds away, replicas, and the way.
KILLS = [
    *((away_s, replicas, "host") for away_s in (0, 2, 15, 60) for replicas in (1, 2)),
    *((2, replicas, way) for replicas in (1, 2) for way in ("ucx", "streams")),
]


def started(way: str = "host") -> RingOfServers:
    flags = ("--transport", "ucx") if way == "ucx" else ()
    return RingOfServers(3, SLOTS * LAYOUT.block_bytes, *flags, ssd_bytes=64 << 20)


def store_all(pool: ClusterPool, replicas: int) -> None:
    for number in CHAINS:
        source = view_of(LAYOUT, blocks_of(number, BLOCKS))
        chain = chain_of(pool, number, BLOCKS)
        done = pool.store(
            chain, source, durability="ssd", deadline_s=WAIT_S, replicas=replicas
        ).wait(WAIT_S)
        assert done == StoreResult(BLOCKS, BLOCKS)


def holder(ring: RingOfServers, pool: ClusterPool) -> RingNode:
    """Return the server that holds chain 0 first."""
    with pool.lease(pool.match(chain_of(pool, 0, BLOCKS)), WAIT_S) as lease:
        return ring.named(str(lease.parts[0].node.node))


@contextlib.contextmanager
def read_by(ring: RingOfServers, pool: ClusterPool, hit: RingNode) -> Iterator[Readers]:
    """Have readers read, one of them from a server to which nothing happens, for a second to begin."""
    well = next(node for node in ring.nodes if node is not hit)
    with connect(well.folder / "run", LAYOUT, WAIT_S) as beside:
        assert isinstance(beside, RemotePool)
        source = view_of(LAYOUT, blocks_of(BESIDE, BLOCKS))
        chain = chain_of(beside, BESIDE, BLOCKS)
        assert beside.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S).stored == BLOCKS
        with Readers(pool, CHAINS, BLOCKS, beside=beside) as readers:
            rest(1.0, readers)
            yield readers


def rest(seconds: float, readers: Readers) -> None:
    """Let the readers read for a time, whose length is what is tested."""
    before = readers.loads
    time.sleep(seconds)
    until(lambda: readers.loads > before + 10, "readers read")


def all_loaded(pool: ClusterPool) -> bool:
    return all(load_checked(pool, number, BLOCKS) == BLOCKS for number in CHAINS)


@pytest.mark.parametrize(("away_s", "replicas", "way"), KILLS)
def test_a_killed_server_comes_back_with_what_is_durable(
    away_s: float, replicas: int, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        started(way) as ring,
        ring.connect(LAYOUT) as patient,
        ring.connect(LAYOUT, CONFIGS[way]) as pool,
    ):
        store_all(patient, replicas)
        killed = holder(ring, patient)
        others = {node.name: node.pid for node in ring.nodes if node is not killed}
        with read_by(ring, pool, killed) as readers:
            before_s = readers.longest_s
            readers.forget_longest()
            killed.kill()
            rest(away_s, readers)
            away_longest = readers.told()
            readers.forget_longest()
            if replicas > 1:
                until(partial(all_loaded, pool), "the replicas serve meanwhile")
            ring.start(killed)
            until(partial(all_loaded, pool), "every durable block is served again")
            back_longest = readers.told()
        assert {node.name: node.pid for node in ring.nodes if node is not killed} == others
    with capsys.disabled():
        print(
            f"\naway {away_s} s, {replicas} replicas, {way}: {readers.loads} loads, {readers.whole} whole;"
            f" longest {before_s * 1e3:.0f} ms before\n after the kill {away_longest}"
            f"\n while it comes back {back_longest}"
        )


@pytest.mark.parametrize("way", CONFIGS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stopped_server_wipes_nothing_and_gives_no_wrong_byte(
    replicas: int, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        started(way) as ring,
        ring.connect(LAYOUT) as patient,
        ring.connect(LAYOUT, CONFIGS[way]) as pool,
    ):
        store_all(patient, replicas)
        stopped = holder(ring, patient)
        pids = [node.pid for node in ring.nodes]
        with read_by(ring, pool, stopped) as readers:
            ready = patient.stats().ready
            readers.forget_longest()
            with stopped.halted():
                rest(STOPPED_S, readers)
            longest = readers.told()
            until(partial(all_loaded, pool), "what it holds is served again")
        assert patient.stats().ready == ready
        assert [node.pid for node in ring.nodes] == pids
    with capsys.disabled():
        print(
            f"\nstopped for {STOPPED_S:.0f} s, {replicas} replicas, {way}: {readers.loads} loads, {readers.whole} whole;"
            f" longest meanwhile {longest}"
        )


def test_all_killed_and_started_again_serve_what_is_durable() -> None:
    with started() as ring, ring.connect(LAYOUT, DEFAULT) as pool:
        with ring.connect(LAYOUT) as patient:
            store_all(patient, 1)
        with Readers(pool, CHAINS, BLOCKS) as readers:
            rest(1.0, readers)
            for node in ring.nodes:
                node.kill()
            rest(2.0, readers)
            for node in ring.nodes:
                ring.start(node)
            until(partial(all_loaded, pool), "every durable block is served again")
