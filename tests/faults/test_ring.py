"""A ring of real servers: killed, stopped, restarted, all at once or one by one, under a client."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvpool.base import Chain, Match, StoreResult
from kvpool.client.access import OPEN
from kvpool.client.cluster import ClusterPool
from kvpool.client.nodes import Nodes
from kvpool.client.parts import ClusterLease, ClusterMatch
from kvpool.client.ways import Ways
from kvpool.clock import ManualClock
from kvpool.config import TransferConfig
from kvpool.errors import UnavailableError
from kvpool.index.lookup import Piece
from kvpool.testing.blocks import view_of
from tests.faults.pool_client import LAYOUT, blocks_of, chain_of
from tests.faults.ring_load import Readers
from tests.ring import PATIENT, RingNode, RingOfServers
from tests.server_process import WAIT_S
from tests.waiting import until

BLOCKS = 8
DRAM_BYTES = 64 * LAYOUT.block_bytes
# What an operator gets, but for the pauses, which only make a test wait.
DEFAULT = TransferConfig(backoff_max_s=0.4, staging_bytes=4 << 20)


@pytest.fixture(scope="module")
def servers() -> Iterator[RingOfServers]:
    with RingOfServers(3, DRAM_BYTES) as ring:
        yield ring


@pytest.fixture
def ring(servers: RingOfServers) -> RingOfServers:
    """Three servers that run, and are empty, whatever the test before did to them."""
    servers.mend()
    servers.empty()
    return servers


def chain(pool: ClusterPool, number: int) -> Chain:
    return chain_of(pool, number, BLOCKS)


def store(pool: ClusterPool, number: int, **how: object) -> StoreResult:
    source = view_of(LAYOUT, blocks_of(number, BLOCKS))
    done = pool.store(chain(pool, number), source, deadline_s=WAIT_S, **how)  # type: ignore[arg-type]
    return done.wait(WAIT_S)


def load(pool: ClusterPool, number: int) -> int:
    """Load a chain, whose bytes must be right; return how many blocks came."""
    with pool.lease(pool.match(chain(pool, number)), WAIT_S) as lease:
        return pull(pool, lease, number)


def pull(pool: ClusterPool, lease: ClusterLease, number: int, deadline_s: float = WAIT_S) -> int:
    if not lease.blocks:
        return 0
    out = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
    good = pool.load(lease, view_of(LAYOUT, out), deadline_s=deadline_s).wait(WAIT_S)
    np.testing.assert_array_equal(out[:good], blocks_of(number, BLOCKS)[:good])
    return good


def holder(ring: RingOfServers, lease: ClusterLease) -> RingNode:
    return ring.named(str(lease.parts[0].node.node))


def test_a_killed_holders_blocks_come_from_its_replica(ring: RingOfServers) -> None:
    with ring.connect(LAYOUT) as pool:
        assert store(pool, 1, replicas=2) == StoreResult(BLOCKS, BLOCKS)
        with pool.lease(pool.match(chain(pool, 1)), WAIT_S) as lease:
            killed = holder(ring, lease)
            killed.kill()
            assert pull(pool, lease, 1) == BLOCKS
        with pool.lease(pool.match(chain(pool, 1)), WAIT_S) as lease:
            assert lease.blocks == BLOCKS
            assert holder(ring, lease) is not killed
            assert pull(pool, lease, 1) == BLOCKS


def test_readers_go_on_while_a_server_is_killed_and_comes_back(ring: RingOfServers) -> None:
    """The small form of ``test_ring_load_soak``: under load, every byte that comes compared."""
    chains = range(1, 5)
    with ring.connect(LAYOUT) as pool:
        for number in chains:
            assert store(pool, number, replicas=2) == StoreResult(BLOCKS, BLOCKS)
        with pool.lease(pool.match(chain(pool, 1)), WAIT_S) as lease:
            killed = holder(ring, lease)
        with Readers(pool, chains, BLOCKS) as readers:

            def whole_ones(more: int) -> None:
                before = readers.whole
                until(lambda: readers.whole >= before + more, "readers read whole chains")

            whole_ones(20)
            killed.kill()
            whole_ones(20)
            ring.start(killed)
            until(lambda: len(pool.nodes()) == 3, "the restarted server is connected")
            whole_ones(20)


def test_a_killed_holders_only_blocks_are_a_miss(ring: RingOfServers) -> None:
    with ring.connect(LAYOUT) as pool:
        assert store(pool, 1).stored == BLOCKS
        match = pool.match(chain(pool, 1))
        with pool.lease(match, WAIT_S) as lease:
            holder(ring, lease).kill()
            with pool.lease(match, WAIT_S) as late:
                assert late.blocks == 0, "nobody leases what a killed server held"
            assert pull(pool, lease, 1) == 0
        until(lambda: pool.match(chain(pool, 1)).blocks == 0, "the killed server's blocks go")
        assert store(pool, 2).stored == BLOCKS, "the others go on"
        assert load(pool, 2) == BLOCKS


def test_fewer_servers_than_replicas_are_said(ring: RingOfServers) -> None:
    with ring.connect(LAYOUT) as pool:
        result = store(pool, 1, replicas=4)
        assert result.stored == BLOCKS
        assert "3 of 4 replicas" in result.refused


def test_with_one_server_a_store_asks_nobody_where_to_go() -> None:
    config = replace(PATIENT, ways=("ucx",))
    with RingOfServers(1, DRAM_BYTES) as ring, ring.connect(LAYOUT, config) as pool:
        before = pool.stats().extra["lookups"]
        assert store(pool, 1) == StoreResult(BLOCKS, BLOCKS)
        assert pool.stats().extra["lookups"] == before
        until(lambda: pool.match(chain(pool, 1)).blocks == BLOCKS, "they are found")


def test_with_one_server_who_knows_the_names_asks_it_alone() -> None:
    with RingOfServers(1, DRAM_BYTES) as ring:
        for number, ways in enumerate((("host",), ("ucx",), ())):
            with ring.connect(LAYOUT, replace(PATIENT, ways=ways)) as pool:
                _lease_by_names(pool, 2 * number)


def _lease_by_names(pool: ClusterPool, number: int) -> None:
    assert store(pool, number) == StoreResult(BLOCKS, BLOCKS)
    before, missed = pool.stats().extra["lookups"], pool.stats().misses
    with pool.lease(Match(chain(pool, number), BLOCKS), WAIT_S) as lease:
        assert lease.blocks == BLOCKS
        assert pull(pool, lease, number) == BLOCKS
    with pool.lease(Match(chain(pool, number + 1), BLOCKS), WAIT_S) as lease:
        assert lease.blocks == 0
    longer = chain_of(pool, number, 2 * BLOCKS)
    with pool.lease(Match(longer, 2 * BLOCKS), WAIT_S) as lease:
        assert lease.blocks == BLOCKS
    stats = pool.stats()
    assert stats.extra["lookups"] == before
    assert (stats.extra["short_leases"], stats.misses - missed) == (0, 2 * BLOCKS)
    # What was not there is not remembered as missing: nobody had said that it was.
    assert store(pool, number + 1) == StoreResult(BLOCKS, BLOCKS)
    assert pool.match(chain(pool, number + 1)).blocks == BLOCKS


def test_a_stopped_server_wipes_nothing(ring: RingOfServers) -> None:
    with (
        ring.connect(LAYOUT) as patient,
        ring.connect(LAYOUT, DEFAULT) as pool,
    ):
        assert store(patient, 1).stored == BLOCKS
        with patient.lease(patient.match(chain(patient, 1)), WAIT_S) as lease:
            stopped = holder(ring, lease)
        with stopped.halted():
            match = pool.match(chain(pool, 1))
            try:
                with pool.lease(match, 5.0) as lease:
                    assert lease.blocks == 0, "nobody answered for them"
            except UnavailableError:
                pass
        until(lambda: load(patient, 1) == BLOCKS, "what it holds is served again")
        others = [node for node in ring.nodes if node is not stopped]
        assert all(node.process and node.process.process.poll() is None for node in others)


# Only what is said to bound a wait on a silent server is short: whoever waits for anything else waits
# for longer than the test does.
ENDLESS_S = 300.0
LONG_BLOCKS = 300


@pytest.mark.parametrize("ways", [("host",), ()], ids=["host", "streams"])
def test_a_read_waits_for_a_stopped_server_for_its_configured_bound_alone(
    ring: RingOfServers, ways: tuple[str, ...]
) -> None:
    config = replace(DEFAULT, request_timeout_s=ENDLESS_S, ways=ways)
    with ring.connect(LAYOUT) as patient, ring.connect(LAYOUT, config) as pool:
        assert store(patient, 1, replicas=2).stored == BLOCKS
        match = patient.match(chain(patient, 1))
        # Too long for a call over the connection: it goes another way, behind what was told there.
        piece = Piece(0, LONG_BLOCKS, match.pieces[0].stores)
        long = replace(
            match, chain=chain_of(pool, 1, LONG_BLOCKS), blocks=piece.end, pieces=(piece,)
        )
        with pool.lease(match, ENDLESS_S) as held, pool.lease(match, ENDLESS_S):
            stopped = holder(ring, held)
        with pool.lease(match, ENDLESS_S) as held, stopped.halted():
            # Bytes of a lease that was held before: mapped memory, or the next replica.
            assert pull(pool, held, 1, ENDLESS_S) == BLOCKS
            for asked in (long, match, match):
                with pool.lease(asked, ENDLESS_S) as lease:
                    assert lease.blocks in (0, BLOCKS)
                    assert all(part.node.node != stopped.name for part in lease.parts)
                    assert pull(pool, lease, 1, ENDLESS_S) == lease.blocks


def test_a_server_that_was_silent_in_a_look_up_is_not_waited_for_again(ring: RingOfServers) -> None:
    config = replace(DEFAULT, match_timeout_s=1.0, backoff_min_s=ENDLESS_S, backoff_max_s=ENDLESS_S)
    with ring.connect(LAYOUT) as patient, ring.connect(LAYOUT, config) as pool:
        assert store(patient, 1).stored == BLOCKS
        match = patient.match(chain(patient, 1))
        with patient.lease(match, WAIT_S) as lease:
            stopped = holder(ring, lease)
        numbers = itertools.count(2)

        def given_up() -> bool:
            assert not pool.match(chain(pool, next(numbers))).blocks
            return stopped.name not in pool.nodes()

        with stopped.halted():
            until(given_up, "a look-up that met its shard gives it up as a holder, too")
            with pool.lease(match, WAIT_S) as lease:
                assert lease.blocks == 0
        until(partial(_loads, patient, 1), "what it holds is served again")


@pytest.mark.parametrize("ways", [("host",), ()], ids=["host", "streams"])
def test_a_store_goes_on_elsewhere_when_its_server_stops(
    ring: RingOfServers, ways: tuple[str, ...]
) -> None:
    config = replace(DEFAULT, request_timeout_s=0.5, ways=ways)
    with ring.connect(LAYOUT) as patient, ring.connect(LAYOUT, config) as pool:
        assert store(pool, 1).stored == BLOCKS
        with patient.lease(patient.match(chain(patient, 1)), WAIT_S) as lease:
            stopped = holder(ring, lease)
        longer = chain_of(pool, 1, 2 * BLOCKS)
        source = view_of(LAYOUT, blocks_of(1, 2 * BLOCKS))
        with stopped.halted():
            done = pool.store(longer, source, deadline_s=500.0)
            assert done.wait(WAIT_S) == StoreResult(2 * BLOCKS, 2 * BLOCKS)
        # It wakes up with half a store of somebody who gave it up: nothing of that may be left.
        until(lambda: pool.stats().quarantined == pool.stats().reserved == 0, "it lets go")
        assert load(patient, 1) == BLOCKS


def test_what_was_acknowledged_as_durable_is_served_after_a_restart() -> None:
    with RingOfServers(3, DRAM_BYTES, ssd_bytes=16 << 20) as ring, ring.connect(LAYOUT) as pool:
        for number in range(3):
            assert store(pool, number, durability="ssd") == StoreResult(BLOCKS, BLOCKS)
        with pool.lease(pool.match(chain(pool, 0)), WAIT_S) as lease:
            killed = holder(ring, lease)
        killed.kill()
        ring.start(killed)
        for number in range(3):
            until(partial(_loads, pool, number), f"chain {number} is served again")


@pytest.mark.parametrize("servers", [1, 5])
def test_what_was_acknowledged_until_all_were_killed_is_served(
    servers: int, count: Callable[[int, int], int]
) -> None:
    """Every server is killed at once, in the middle of durable stores: until the last moment some are
    acknowledged."""
    numbers, acknowledged, ended = itertools.count(1), list[int](), threading.Event()
    with (
        RingOfServers(servers, DRAM_BYTES, ssd_bytes=64 << 20) as ring,
        ring.connect(LAYOUT) as pool,
    ):

        def write() -> None:
            while not ended.is_set():
                number = next(numbers)
                with suppress(UnavailableError):
                    if store(pool, number, durability="ssd").stored == BLOCKS:
                        acknowledged.append(number)

        with ThreadPoolExecutor(4) as threads:
            writing = [threads.submit(write) for _ in range(4)]
            try:
                until(lambda: len(acknowledged) >= count(20, 80), "stores are acknowledged")
                ring.kill()
            finally:
                ended.set()
            for one in writing:
                one.result(WAIT_S)
        ring.mend()
        for number in acknowledged:
            until(partial(_loads, pool, number), f"chain {number} is served again")


def _loads(pool: ClusterPool, number: int) -> bool:
    try:
        return load(pool, number) == BLOCKS
    except UnavailableError:
        return False


def test_a_server_that_ends_says_so(ring: RingOfServers) -> None:
    with ring.connect(LAYOUT) as pool:
        assert store(pool, 1, replicas=2).stored == BLOCKS
        with pool.lease(pool.match(chain(pool, 1)), WAIT_S) as lease:
            leaving = holder(ring, lease)
        assert leaving.stop() == 0
        assert load(pool, 1) == BLOCKS


def test_evicted_blocks_leave_the_directory(ring: RingOfServers) -> None:
    with ring.connect(LAYOUT) as pool:
        assert store(pool, 1).stored == BLOCKS
        # More than it can name at once: names of blocks that have left must give way.
        for number in range(2, 62):
            assert store(pool, number).stored == BLOCKS
        until(lambda: pool.match(chain(pool, 1)).blocks == 0, "its first blocks were evicted")


def test_a_block_that_a_server_lacked_is_not_looked_for_there_for_a_while(
    ring: RingOfServers,
) -> None:
    clock = ManualClock()
    with ring.connect(LAYOUT) as patient, ExitStack() as stack:
        assert store(patient, 1).stored == BLOCKS
        ways = Ways(LAYOUT, PATIENT)
        nodes = Nodes([ring.nodes[0].address], LAYOUT, ways, PATIENT, OPEN, clock)
        nodes.open(WAIT_S)
        pool = stack.enter_context(ClusterPool(nodes, LAYOUT, ways, PATIENT, clock))
        found: list[ClusterMatch] = []

        def is_found() -> bool:
            found.append(pool.match(chain(pool, 1)))
            return found[-1].blocks == BLOCKS

        until(is_found, "whoever is asked has been told")
        ring.empty()
        with pool.lease(found[-1], WAIT_S) as lease:
            assert lease.blocks == 0
        assert store(patient, 1).stored == BLOCKS
        until(lambda: patient.match(chain(patient, 1)).blocks == BLOCKS, "all others find them")
        assert pool.match(chain(pool, 1)).blocks == 0
        clock.advance(60.0)
        until(is_found, "they are found again")


def test_descriptors_and_threads_stay_flat_under_kills(ring: RingOfServers) -> None:
    with ring.connect(LAYOUT) as pool:
        store(pool, 0, replicas=3)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1, 4):
            victim = ring.nodes[number % 3]
            victim.kill()
            assert load(pool, 0) == BLOCKS
            ring.start(victim)
            until(lambda: len(pool.nodes()) == 3, "the restarted server is connected")
            store(pool, 0, replicas=3)
        until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4, "no descriptor is left")


def test_patience_is_no_default() -> None:
    assert replace(PATIENT).read_timeout_s > TransferConfig().read_timeout_s == 0.25
