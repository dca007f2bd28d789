"""Clients without a transport: what they hold is given back as soon as their connection ends."""

import asyncio
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvpool.base import BlockPool, Match
from kvpool.block import HASH_BYTES
from kvpool.client import protocol
from kvpool.client.connect import connect
from kvpool.client.link import Place
from kvpool.client.rpc import Caller
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    KVPoolError,
    StaleIncarnationError,
    UsageError,
)
from kvpool.memory import Span
from kvpool.testing.blocks import view_of
from kvpool.tiers.base import Tier
from tests.faults.pool_client import (
    CHAIN_BLOCKS,
    LAYOUT,
    PATIENT,
    blocks_of,
    chain_of,
    store,
)
from tests.faults.relay import Relay
from tests.faults.test_access import greet
from tests.faults.test_pool_server import end, load_all, read_line, start_client
from tests.faults.test_pool_service import BLOCKS, Storer, running
from tests.server_process import WAIT_S, ServerProcess
from tests.stopped import stop
from tests.waiting import until

STREAMS = replace(PATIENT, ways=())
# A lease that runs out by itself is longer than a test waits.
LEASE_S = 10 * WAIT_S


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-") as folder,
        ServerProcess(Path(folder), 4 * CHAIN_BLOCKS * LAYOUT.block_bytes) as server,
    ):
        yield server


@pytest.fixture
def watcher(server: ServerProcess) -> Iterator[BlockPool]:
    """A client that is well, to look at the server with; nothing is held before and after."""
    with connect(server.run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
        yield pool
        until(lambda: nothing_held(pool), "nothing is held")


@pytest.fixture
def caller(server: ServerProcess, watcher: BlockPool) -> Iterator[Caller]:
    with closing(Caller(Place.of_run_dir(server.run_dir).target)) as caller:
        yield caller


def nothing_held(pool: BlockPool) -> bool:
    stats = pool.stats()
    return (stats.leases, stats.extra["pins"], stats.extra["clients"]) == (0, 0, 1)


def test_a_killed_client_gives_its_leases_back(server: ServerProcess, watcher: BlockPool) -> None:
    client = start_client(server.run_dir, "hold", "streams")
    try:
        assert read_line(client) == f"holds {CHAIN_BLOCKS}\n"
        assert watcher.stats().leases == 1
    finally:
        end(client)
    until(lambda: nothing_held(watcher), "its leases are given back")


def test_a_stopped_client_keeps_its_leases(server: ServerProcess, watcher: BlockPool) -> None:
    client = start_client(server.run_dir, "hold", "streams")
    try:
        assert read_line(client) == f"holds {CHAIN_BLOCKS}\n"
        stop(client.pid)
        with connect(server.run_dir, LAYOUT, WAIT_S, config=STREAMS) as other:
            assert store(other, 2) == CHAIN_BLOCKS
            assert load_all(other, 1) == CHAIN_BLOCKS
        until(lambda: watcher.stats().extra["clients"] == 2, "the other one has gone")
        assert watcher.stats().leases == 1
        client.send_signal(signal.SIGCONT)
    finally:
        end(client)


def test_a_load_that_is_cancelled_does_not_wait_for_a_stopped_server(
    server: ServerProcess,
) -> None:
    """Its memory is the caller's again at once, not when its deadline comes."""
    with connect(server.run_dir, LAYOUT, WAIT_S, config=STREAMS) as pool:
        store(pool, 5)
        chain = chain_of(pool, 5)
        dest = blocks_of(0)
        with pool.lease(pool.match(chain), 60) as lease:
            server.halt()
            try:
                done = pool.load(lease, view_of(LAYOUT, dest), deadline_s=LEASE_S)
                done.cancel()
                with pytest.raises(CancelledTransferError):
                    done.wait(WAIT_S)
            finally:
                server.signal(signal.SIGCONT)


def test_a_link_lost_in_mid_call_gives_its_leases_back(
    server: ServerProcess, watcher: BlockPool
) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-")))
        control = protocol.CONTROL_SOCKET
        relay = stack.enter_context(Relay(folder / control, server.run_dir / control))
        pool = stack.enter_context(connect(folder, LAYOUT, WAIT_S, config=STREAMS))
        assert store(pool, 1) == CHAIN_BLOCKS
        stop = threading.Event()

        def ask() -> None:  # so that the link is lost in the middle of a call
            while not stop.is_set():
                try:
                    load_all(pool, 1)
                except KVPoolError:
                    continue

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for _ in range(5):
                lease = pool.lease(pool.match(chain_of(pool, 1)), LEASE_S)
                assert lease.blocks == CHAIN_BLOCKS
                lost = pool.stats().extra["client_losses"]
                relay.cut()
                until(partial(lost_again, pool, lost), "the loss is seen, and there is a new link")
        finally:
            stop.set()
            asking.join(WAIT_S)
        until(lambda: watcher.stats().leases == 0, "what was leased on lost links is given back")
        assert watcher.stats().extra["clients"] == 2
        assert load_all(pool, 1) == CHAIN_BLOCKS


def lost_again(pool: BlockPool, before: int) -> bool:
    try:
        return pool.stats().extra["client_losses"] > before
    except KVPoolError:
        return False


def test_who_stays_is_known_and_stays_once(caller: Caller) -> None:
    with pytest.raises(StaleIncarnationError):
        next(caller.stream(protocol.STAY, protocol.StayRequest(client=b"x" * 16), WAIT_S))
    client = greet(caller)
    request = protocol.StayRequest(client=client)
    with closing(caller.stream(protocol.STAY, request, WAIT_S)) as kept:
        assert next(kept) == protocol.Done()
        with pytest.raises(UsageError, match="stays already"):
            next(caller.stream(protocol.STAY, request, WAIT_S))


def test_a_client_that_goes_is_no_longer_known(caller: Caller) -> None:
    client = greet(caller)
    with closing(caller.stream(protocol.STAY, protocol.StayRequest(client=client), WAIT_S)) as kept:
        next(kept)

    def forgotten() -> bool:
        try:
            caller.call(protocol.RELEASE, protocol.ReleaseRequest(client=client, lease=7), WAIT_S)
        except StaleIncarnationError:
            return True
        return False

    until(forgotten, "its name ended with its call")


def test_too_many_clients_of_streams_are_refused() -> None:
    with running(clients_max=2) as service, service.connect():
        target = Place.of_run_dir(service.run_dir).target
        with closing(Caller(target)) as caller:

            def hello(client: bytes) -> None:
                request = protocol.HelloRequest(
                    version=protocol.PROTOCOL_VERSION, client=client, streams=True
                )
                caller.call(protocol.HELLO, request, WAIT_S)

            hello(b"a" * 16)
            hello(b"a" * 16)  # it is known
            with pytest.raises(CapacityError, match="2 clients are connected"):
                hello(b"b" * 16)
            for name in (b"", b"a" * 15, b"a" * 17, bytes(1000)):
                with pytest.raises(UsageError, match="no new name"):
                    hello(name)


class Waiting:
    """Is told of what a service holds, and lets it wait until ``go``."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.go = threading.Event()
        self.lacked: list[bytes] = []

    async def opened(self, tier: Tier) -> None:
        self.tier = tier

    async def stored(self, chain: bytes, first: int, count: int) -> None:
        self.told.set()
        while not self.go.is_set():
            await asyncio.sleep(0.005)

    def missed(self, names: bytes) -> None:
        self.lacked.append(names)


def test_what_is_stored_for_a_client_that_has_gone_is_not_held_for_it() -> None:
    waiting = Waiting()
    with running(holdings=waiting) as service, service.connect() as watcher:
        target = Place.of_run_dir(service.run_dir).target
        with closing(Storer(service)) as storer, closing(Caller(target)) as caller:
            hashes = chain_of(watcher, 1, BLOCKS).hashes
            asked = caller.ask(protocol.STORE, storer.request(hashes, hold_s=50.0), WAIT_S)
            assert waiting.told.wait(WAIT_S)
            assert storer.link.endpoint is not None
            storer.link.endpoint.close()  # the call goes on: its channel is another one
            until(lambda: watcher.stats().extra["clients"] == 1, "its connection has ended")
            waiting.go.set()
            reply = asked.reply()
        assert (reply.stored, reply.lease) == (BLOCKS, 0)
        assert watcher.stats().leases == 0


@pytest.mark.parametrize("ways", [(), ("host",)], ids=["streams", "host"])
@pytest.mark.parametrize("bad", [0, 2, BLOCKS - 1])
def test_a_byte_that_flips_in_the_server_is_a_miss_by_every_way(
    ways: tuple[str, ...], bad: int
) -> None:
    """Its checksum is the one that its producer took: nobody takes another over what there is now."""
    waiting = Waiting()
    waiting.go.set()
    config = replace(PATIENT, ways=ways)
    with (
        running(holdings=waiting) as service,
        connect(service.run_dir, LAYOUT, WAIT_S, config=config) as pool,
    ):
        chain = chain_of(pool, 1, BLOCKS)
        source = blocks_of(1, BLOCKS)
        done = pool.store(chain, view_of(LAYOUT, source), deadline_s=WAIT_S)
        assert done.wait(WAIT_S).stored == BLOCKS
        (slot,) = waiting.tier.pin(chain[bad])
        view = waiting.tier.view([slot], writable=False)
        at = view.base + int(view.block_ids[0]) * view.block_stride
        Span(at, LAYOUT.block_bytes, view.owner).view()[LAYOUT.block_bytes // 2] ^= 1
        waiting.tier.unpin([slot])
        found = np.zeros_like(source)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            assert lease.blocks == BLOCKS
            loaded = pool.load(lease, view_of(LAYOUT, found), deadline_s=WAIT_S)
            assert loaded.wait(WAIT_S) == bad
        assert np.array_equal(found[:bad], source[:bad])
        until(lambda: pool.match(chain).blocks == bad, "it has left the pool")


def test_a_lease_that_falls_short_says_what_is_not_here() -> None:
    """Whoever said that it was is told otherwise."""
    waiting = Waiting()
    waiting.go.set()
    with running(holdings=waiting) as service, service.connect() as pool:
        chain = chain_of(pool, 1, BLOCKS)
        source = view_of(LAYOUT, blocks_of(1, BLOCKS))
        done = pool.store(chain, source.take(0, 2), deadline_s=WAIT_S)
        assert done.wait(WAIT_S).stored == 2
        for blocks in (2, BLOCKS):
            with pool.lease(Match(chain, blocks), WAIT_S) as lease:
                assert lease.blocks == 2
        assert waiting.lacked == [chain.hashes[2 * HASH_BYTES :]]
