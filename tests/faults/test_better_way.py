"""A client whose better way was not there when it connected: it says so, and goes that way later."""

import logging
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.client.connect import connect
from kvpool.client.link import STREAMS, Place, open_link
from kvpool.client.remote import RemotePool
from kvpool.client.ways import Ways
from kvpool.errors import KVPoolError, UnavailableError
from kvpool.testing.blocks import view_of
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, PATIENT, WAIT_S, blocks_of, chain_of
from tests.faults.pool_client import store as store_chain
from tests.faults.test_pool_server import load_all
from tests.faults.test_pool_service import Running, running
from tests.waiting import until

# Tries for a better way often enough for a test.
EAGER = replace(PATIENT, backoff_min_s=0.05, backoff_max_s=0.1)
# Of a connection whose first way takes all that it is given.
SLOW_S = 6.0
# A lease that runs out by itself is longer than a test waits.
LEASE_S = 10 * WAIT_S


@contextmanager
def deaf(service: Running, *, listens: bool) -> Iterator[None]:
    """Have the server offer a socket that nobody answers at, or nobody listens at."""
    good = service.pool.addresses["host"]
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one,
    ):
        one.bind(f"{folder}/transport.sock")
        if listens:
            one.listen()
        service.pool.addresses["host"] = f"{folder}/transport.sock"
        try:
            yield
        finally:
            service.pool.addresses["host"] = good


def by(pool: RemotePool) -> str:
    """Return the way of the pool's bytes as its counts tell it."""
    extra = pool.stats().extra
    (way,) = (name for name, is_it in extra.items() if name.startswith("client_by_") and is_it)
    return way.removeprefix("client_by_")


def is_by(pool: RemotePool, way: str) -> bool:
    try:
        return by(pool) == way
    except KVPoolError:
        return False


def test_a_pool_goes_the_better_way_as_soon_as_it_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING, "kvpool.client"),
        running(slots=64, lease_seconds_max=LEASE_S) as service,
    ):
        with deaf(service, listens=False):
            pool = connect(service.run_dir, LAYOUT, WAIT_S, config=EAGER)
            assert by(pool) == STREAMS
            assert pool.stats().extra["clients_by_streams"] == 1
        with pool:
            (warning,) = (line for line in caplog.messages if "which is slower" in line)
            assert "go by streams" in warning and "host did not answer" in warning
            until(lambda: is_by(pool, "host"), "the better way is taken")
            assert pool.stats().extra["client_bettered"] == 1
            assert pool.stats().extra["client_losses"] == 0
            assert pool.is_near()
            assert store_chain(pool, 1) == CHAIN_BLOCKS
            assert load_all(pool, 1) == CHAIN_BLOCKS


def test_what_was_leased_on_the_worse_way_is_loaded_and_given_back() -> None:
    with running(slots=64, lease_seconds_max=LEASE_S) as service, service.connect() as watcher:
        with deaf(service, listens=False):
            pool = connect(service.run_dir, LAYOUT, WAIT_S, config=EAGER)
            assert store_chain(pool, 1) == CHAIN_BLOCKS
            lease = pool.lease(pool.match(chain_of(pool, 1)), LEASE_S)
        with pool:
            until(lambda: is_by(pool, "host"), "the better way is taken")
            for _ in range(2):  # the link that it was leased on is there for as long as it is used
                dest = blocks_of(0)
                done = pool.load(lease, view_of(LAYOUT, dest), deadline_s=WAIT_S)
                assert done.wait(WAIT_S) == CHAIN_BLOCKS
                assert (dest == blocks_of(1)).all()
            lease.close()
            until(lambda: watcher.stats().leases == 0, "the lease is given back")
            pool.lease(pool.match(chain_of(pool, 1)), LEASE_S)
        until(lambda: watcher.stats().leases == 0, "the end of the pool gives back what is left")
        until(lambda: watcher.stats().extra["clients"] == 1, "both of its connections have ended")


def test_a_lease_of_the_worse_way_ends_with_the_pool() -> None:
    with running(slots=64, lease_seconds_max=LEASE_S) as service, service.connect() as watcher:
        with deaf(service, listens=False):
            pool = connect(service.run_dir, LAYOUT, WAIT_S, config=EAGER)
            assert store_chain(pool, 1) == CHAIN_BLOCKS
            pool.lease(pool.match(chain_of(pool, 1)), LEASE_S)
        until(lambda: is_by(pool, "host"), "the better way is taken")
        assert watcher.stats().leases == 1
        pool.close()
        until(lambda: watcher.stats().leases == 0, "it is given back")


def test_a_way_that_takes_all_its_time_leaves_enough_for_streams() -> None:
    with running() as service, service.connect(), closing(Ways(LAYOUT, PATIENT)) as ways:
        place = Place.of_run_dir(service.run_dir)
        with (
            deaf(service, listens=True),
            closing(open_link(place, LAYOUT, ways, SLOW_S)) as link,
        ):
            assert (link.way, link.late) == (STREAMS, ("host",))
        with closing(open_link(place, LAYOUT, ways, WAIT_S, link.late)) as better:
            assert (better.way, better.late, better.stayed) == ("host", (), None)


def test_a_better_way_that_is_not_there_is_no_link() -> None:
    with running() as service, closing(Ways(LAYOUT, PATIENT)) as ways:
        place = Place.of_run_dir(service.run_dir)
        with pytest.raises(UnavailableError, match="no way of ucx"):
            open_link(place, LAYOUT, ways, WAIT_S, ("ucx",))
        with deaf(service, listens=False), pytest.raises(UnavailableError):
            open_link(place, LAYOUT, ways, WAIT_S, ("host",))


def test_ways_that_were_left_out_are_not_missed(tmp_path: Path) -> None:
    ways = Ways(LAYOUT, replace(PATIENT, ways=()))
    with running() as service, closing(ways):
        place = Place.of_run_dir(service.run_dir)
        with closing(open_link(place, LAYOUT, ways, WAIT_S)) as link:
            assert (link.way, link.late) == (STREAMS, ())
