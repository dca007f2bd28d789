"""What a server does with requests that do not fit, and with a copy that does not end.

The service runs in this process: its event loop in a thread, over real sockets.
"""

import asyncio
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena, Slot
from kvpool.base import PoolStats
from kvpool.block import HASH_BYTES, BlockLayout
from kvpool.client import protocol
from kvpool.client.connect import connect
from kvpool.client.link import Link, Place, open_link
from kvpool.client.remote import RemotePool
from kvpool.client.rpc_service import Service
from kvpool.client.ways import Ways
from kvpool.clock import SystemClock
from kvpool.config import PoolConfig, ServerConfig, TransferConfig
from kvpool.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    KVPoolError,
    LayoutMismatchError,
    LeaseExpiredError,
    StaleIncarnationError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.events import ListSink, PeerLost
from kvpool.memory import Crcs, copy_blocks
from kvpool.metrics import Metrics
from kvpool.server.holdings import Holdings
from kvpool.server.service import PoolService
from kvpool.server.tenancy import Tenancy
from kvpool.testing.blocks import view_of
from kvpool.testing.pair import empty, flip
from kvpool.transfer.host import HostTransport
from tests.faults.pool_client import LAYOUT, PATIENT, WAIT_S, blocks_of, chain_of
from tests.waiting import until

SLOTS = 16
BLOCKS = 4


@dataclass
class Running:
    """A service in a thread."""

    run_dir: Path
    pool: PoolService
    metrics: Metrics
    events: ListSink
    loop: asyncio.AbstractEventLoop

    def tick(self) -> None:
        """Have it tick in its loop."""

        async def tick() -> None:
            for task in self.pool.upkeep().values():
                task()

        asyncio.run_coroutine_threadsafe(tick(), self.loop).result(WAIT_S)

    def connect(self) -> RemotePool:
        return connect(self.run_dir, LAYOUT, WAIT_S, config=PATIENT)


@contextmanager
def running(
    *,
    copy_threads: int = 2,
    clients_max: int = 8,
    holdings: Holdings | None = None,
    lease_seconds_max: float = 60.0,
    slots: int = SLOTS,
    tenancy: Tenancy | None = None,
) -> Iterator[Running]:
    """Run a service; with no copy threads, what it starts to copy does not end by itself."""
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-")))
        executor = stack.enter_context(ThreadPoolExecutor(2))
        config = ServerConfig(
            run_dir=run_dir,
            pool=PoolConfig(
                dram_bytes=slots * LAYOUT.block_bytes, lease_seconds_max=lease_seconds_max
            ),
            clients_max=clients_max,
        )
        transport = HostTransport("test-server", copy_threads=copy_threads)
        metrics, events = Metrics(), ListSink()
        started: list[PoolService] = []
        ready, stop = threading.Event(), asyncio.Event()

        async def main() -> None:
            control = Service()
            pool = PoolService(
                config,
                {"host": transport},
                executor,
                metrics=metrics,
                events=events,
                clock=SystemClock(),
                holdings=holdings,
                tenancy=tenancy,
            )
            pool.serve(control)
            pool.addresses["host"] = transport.listen(
                str(run_dir / protocol.TRANSPORT_SOCKET), pool.sessions.on_connect
            )
            await control.start(f"unix:{run_dir / protocol.CONTROL_SOCKET}")
            started.append(pool)
            ready.set()
            await stop.wait()
            await control.stop(0)
            await asyncio.to_thread(transport.close)
            pool.close()

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
        thread.start()
        assert ready.wait(WAIT_S)
        try:
            yield Running(run_dir, started[0], metrics, events, loop)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(WAIT_S)
            assert not thread.is_alive()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


@pytest.fixture
def service() -> Iterator[Running]:
    with running() as service:
        yield service


class Storer:
    """A client that says what it likes: blocks staged in order, and a request to change."""

    def __init__(self, service: Running) -> None:
        self.transport = HostTransport("test-client")
        self.arena = Arena(LAYOUT, BLOCKS, self.transport.incarnation)
        self.region = self.transport.register(self.arena).region
        self.ways = Ways(LAYOUT, TransferConfig(), self.transport)
        place = Place.of_run_dir(service.run_dir)
        self.link: Link = open_link(place, LAYOUT, self.ways, WAIT_S)
        self.slots: list[Slot] = [self.arena.reserve() for _ in range(BLOCKS)]
        source = view_of(LAYOUT, blocks_of(1, BLOCKS))
        self.crcs: Crcs = copy_blocks(self.arena.view(self.slots), source)
        for slot, crcs in zip(self.slots, self.crcs, strict=True):
            self.arena.commit(slot, crcs)

    def request(self, hashes: bytes, /, **changes: object) -> protocol.StoreRequest:
        fields: dict[str, object] = {
            "client": self.link.client,
            "hashes": hashes,
            "ancestors": b"",
            "region": self.region,
            "slots": [slot.index for slot in self.slots],
            "generations": [slot.generation for slot in self.slots],
            "crcs": self.crcs.astype("<u4").tobytes(),
            "timeout_s": WAIT_S,
        }
        return protocol.StoreRequest(**{**fields, **changes})  # type: ignore[arg-type]

    def store(self, request: protocol.StoreRequest, timeout_s: float = WAIT_S) -> object:
        """Return the reply, or the error."""
        try:
            return self.link.caller.call(protocol.STORE, request, timeout_s)
        except KVPoolError as error:
            return error

    def close(self) -> None:
        self.link.close()
        self.ways.close()
        self.transport.close()
        self.arena.close()


@pytest.fixture
def storer(service: Running) -> Iterator[Storer]:
    storer = Storer(service)
    yield storer
    storer.close()


@pytest.fixture
def watcher(service: Running) -> Iterator[RemotePool]:
    with service.connect() as pool:
        yield pool


def test_a_store_that_fits_is_kept(storer: Storer, watcher: RemotePool) -> None:
    chain = chain_of(watcher, 1, BLOCKS)
    reply = storer.store(storer.request(chain.hashes))
    assert reply == protocol.StoreReply(stored=BLOCKS, new=BLOCKS, refused="")
    assert watcher.match(chain).blocks == BLOCKS


@pytest.mark.parametrize(
    "changes",
    [
        {"hashes": b""},
        {"hashes": b"x" * (BLOCKS * HASH_BYTES - 1)},
        {"hashes": b"x" * (BLOCKS + 1) * HASH_BYTES},
        {"ancestors": b"short"},
        {"crcs": b"xyz"},
        {"crcs": bytes(4)},
        {"crcs": bytes(4 * BLOCKS * LAYOUT.crc_count + 4)},
        {"slots": [0, 1]},
        {"slots": [0, 1, 2, BLOCKS]},
        {"generations": [1, 2]},
        {"region": 7},
        {"region": 1 << 31},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"timeout_s": 1e9},
    ],
)
def test_a_store_that_does_not_fit_is_refused(
    storer: Storer, watcher: RemotePool, changes: dict[str, object]
) -> None:
    request = storer.request(chain_of(watcher, 1, BLOCKS).hashes, **changes)
    assert isinstance(storer.store(request), UsageError)
    stats = watcher.stats()
    assert (stats.free, stats.reserved, stats.quarantined) == (SLOTS, 0, 0)


def test_blocks_that_do_not_sum_to_what_was_told_are_not_kept(
    storer: Storer, watcher: RemotePool
) -> None:
    chain = chain_of(watcher, 1, BLOCKS)
    storer.crcs[2, -1, -1] ^= 1
    reply = storer.store(storer.request(chain.hashes))
    assert isinstance(reply, protocol.StoreReply)
    assert (reply.stored, reply.new) == (2, 2)
    assert reply.refused
    assert watcher.match(chain).blocks == 2
    assert watcher.stats().free == SLOTS - 2


def test_blocks_that_do_not_sum_to_what_their_slots_say_are_not_kept(
    storer: Storer, watcher: RemotePool
) -> None:
    chain = chain_of(watcher, 1, BLOCKS)
    flip(storer.arena, storer.slots[2], LAYOUT.block_bytes // 2)
    reply = storer.store(storer.request(chain.hashes, crcs=b""))
    assert isinstance(reply, protocol.StoreReply)
    assert (reply.stored, reply.new) == (2, 2)
    assert watcher.match(chain).blocks == 2


def test_a_store_is_kept_with_the_checksums_that_its_slots_say(
    storer: Storer, watcher: RemotePool
) -> None:
    chain = chain_of(watcher, 1, BLOCKS)
    reply = storer.store(storer.request(chain.hashes, crcs=b""))
    assert reply == protocol.StoreReply(stored=BLOCKS, new=BLOCKS, refused="")
    out = empty(LAYOUT, BLOCKS)
    with watcher.lease(watcher.match(chain), WAIT_S) as lease:
        # The reader looks whether the bytes sum to what the server keeps.
        loaded = watcher.load(lease, view_of(LAYOUT, out), deadline_s=WAIT_S).wait(WAIT_S)
    assert loaded == BLOCKS
    np.testing.assert_array_equal(out, blocks_of(1, BLOCKS))


def test_slots_of_another_life_are_not_kept(storer: Storer, watcher: RemotePool) -> None:
    chain = chain_of(watcher, 1, BLOCKS)
    storer.arena.release(storer.slots[1])
    reply = storer.store(storer.request(chain.hashes))
    assert isinstance(reply, protocol.StoreReply)
    assert (reply.stored, reply.new) == (1, 1)
    assert watcher.stats().free == SLOTS - 1


def test_a_client_that_is_not_connected_is_told_so(storer: Storer, watcher: RemotePool) -> None:
    hashes = chain_of(watcher, 1, BLOCKS).hashes
    assert isinstance(storer.store(storer.request(hashes, client=b"x" * 16)), StaleIncarnationError)
    ask = storer.link.caller.call
    lease = protocol.LeaseRequest(client=b"", hashes=hashes, seconds=1)
    with pytest.raises(StaleIncarnationError):
        ask(protocol.LEASE, lease, WAIT_S)
    with pytest.raises(TransferTimeoutError, match="connect it first"):
        hello = protocol.HelloRequest(version=protocol.PROTOCOL_VERSION, client=b"y" * 16)
        ask(protocol.HELLO, hello, WAIT_S)


def test_another_clients_lease_is_left_alone(storer: Storer, watcher: RemotePool) -> None:
    chain = chain_of(watcher, 1, BLOCKS)
    storer.store(storer.request(chain.hashes))
    with watcher.lease(watcher.match(chain), 30) as lease:
        mine = storer.link.client
        call = storer.link.caller.call
        call(protocol.RELEASE, protocol.ReleaseRequest(client=mine, lease=lease.number), WAIT_S)
        assert watcher.stats().leases == 1
        with pytest.raises(UsageError):
            report = protocol.ReportRequest(client=mine, lease=lease.number, block=0)
            call(protocol.REPORT, report, WAIT_S)
        with pytest.raises(LeaseExpiredError):
            report = protocol.ReportRequest(client=mine, lease=999, block=0)
            call(protocol.REPORT, report, WAIT_S)
    assert watcher.match(chain).blocks == BLOCKS


def test_another_version_is_refused(storer: Storer) -> None:
    call = storer.link.caller.call
    old, new = protocol.PROTOCOL_VERSION_MIN - 1, protocol.PROTOCOL_VERSION + 1
    with pytest.raises(UsageError, match=f"version {old}"):
        call(protocol.HELLO, protocol.HelloRequest(version=old, client=storer.link.client), WAIT_S)
    layout = protocol.encode_layout(LAYOUT)
    with pytest.raises(UsageError, match=f"version {old}"):
        call(protocol.CONFIGURE, protocol.ConfigureRequest(version=old, layout=layout), WAIT_S)
    later = protocol.ConfigureRequest(version=new, layout=layout)
    assert call(protocol.CONFIGURE, later, WAIT_S).version == protocol.PROTOCOL_VERSION
    wrong = protocol.encode_layout(LAYOUT)
    wrong.dtype = "float99"
    for layout in (protocol.Layout(), wrong):
        with pytest.raises(UsageError):
            configure = protocol.ConfigureRequest(version=new, layout=layout)
            call(protocol.CONFIGURE, configure, WAIT_S)


def test_another_layout_is_refused_with_what_to_do(service: Running, watcher: RemotePool) -> None:
    other = BlockLayout(num_layers=1, kv_heads=1, block_tokens=16, k_dim=8, v_dim=8)
    with pytest.raises(LayoutMismatchError, match=r"num_layers.*start a kvpool-server of its own"):
        connect(service.run_dir, other, WAIT_S)


def test_too_many_clients_are_refused() -> None:
    with running(clients_max=1) as service, service.connect() as pool:
        with pytest.raises(CapacityError, match="end one first"):
            service.connect()
        pool.close()
        until(lambda: len(service.pool.sessions) == 0, "the client's end is noticed")
        with service.connect() as pool:
            assert pool.stats().extra["clients"] == 1


def test_a_layout_that_does_not_fit_the_arena_can_be_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running() as service:
        wide = BlockLayout(num_layers=64, kv_heads=64, block_tokens=16, k_dim=128, v_dim=128)
        with pytest.raises(UsageError, match="dram_bytes"):
            connect(service.run_dir, wide, WAIT_S, config=TransferConfig(staging_bytes=1 << 30))
        assert "the pool cannot be opened: " in caplog.text, "its operator is told, too"
        with service.connect() as pool:
            assert pool.stats().slots == SLOTS


def test_a_copy_that_does_not_end_keeps_its_slots_in_quarantine() -> None:
    with running(copy_threads=0) as service, service.connect() as watcher:
        storer = Storer(service)
        request = storer.request(chain_of(watcher, 1, BLOCKS).hashes)

        def counts() -> tuple[int, int, int]:
            stats: PoolStats = watcher.stats()
            return stats.free, stats.reserved, stats.quarantined

        # The client gives up while the copy is under way: its call is cancelled at the server.
        assert isinstance(storer.store(request, 0.2), TransferTimeoutError)
        until(lambda: counts() == (SLOTS - BLOCKS, 0, BLOCKS), "the slots are in quarantine")
        assert watcher.stats().extra["stores_aborted"] == 1
        # They are not handed out: the rest of the arena is all there is.
        assert isinstance(storer.store(request, 0.2), TransferTimeoutError)
        until(lambda: counts() == (SLOTS - 2 * BLOCKS, 0, 2 * BLOCKS), "other slots were taken")
        # The connection ends, and with it every copy out of that client.
        storer.close()
        until(lambda: counts() == (SLOTS, 0, 0), "the slots are free again")


def test_a_lost_client_is_counted(service: Running, watcher: RemotePool) -> None:
    with service.connect() as other:
        other.lease(other.match(chain_of(other, 1)), 30)
    until(lambda: watcher.stats().extra["clients_lost"] == 1, "the loss is counted")
    assert [event.peer for event in service.events.events if isinstance(event, PeerLost)] == [
        "client"
    ]
    service.tick()
    shown = service.metrics.expose().decode()
    assert "kvpool_server_client_count 1.0" in shown
    assert f'kvpool_tiers_slot_count{{state="free",tier="dram"}} {SLOTS}.0' in shown
    assert 'kvpool_server_request_seconds_count{method="lease",outcome="ok"} 1.0' in shown


def test_pools_share_a_transport_and_end_apart(service: Running, watcher: RemotePool) -> None:
    with HostTransport("test-worker") as transport:
        pools = [
            connect(service.run_dir, LAYOUT, WAIT_S, transport=transport, config=PATIENT)
            for _ in range(2)
        ]
        source = view_of(LAYOUT, blocks_of(1, BLOCKS))
        chain = chain_of(watcher, 1, BLOCKS)
        assert pools[0].store(chain, source, deadline_s=WAIT_S).wait(WAIT_S).stored == BLOCKS
        leases = [pool.lease(pool.match(chain), 30) for pool in pools]
        assert [lease.blocks for lease in leases] == [BLOCKS, BLOCKS]
        pools[0].close()
        until(lambda: watcher.stats().leases == 1, "only the closed pool's lease is given back")
        out = np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
        done = pools[1].load(leases[1], view_of(LAYOUT, out), deadline_s=WAIT_S)
        assert done.wait(WAIT_S) == BLOCKS
        np.testing.assert_array_equal(out, blocks_of(1, BLOCKS))
        pools[1].close()
        until(lambda: watcher.stats().extra["clients"] == 1, "both have ended")
        with connect(service.run_dir, LAYOUT, WAIT_S, transport=transport, config=PATIENT) as pool:
            assert pool.match(chain).blocks == BLOCKS, "the transport outlives the pools"


def test_stores_beyond_the_limit_are_refused_at_once() -> None:
    few = replace(PATIENT, stores_max=2, request_timeout_s=0.5, backoff_max_s=0.5)
    with (
        running(copy_threads=0) as service,
        connect(service.run_dir, LAYOUT, WAIT_S, config=few) as pool,
    ):
        chain, source = chain_of(pool, 1, BLOCKS), view_of(LAYOUT, blocks_of(1, BLOCKS))
        stuck = [pool.store(chain, source, deadline_s=WAIT_S) for _ in range(2)]
        refused = pool.store(chain, source, deadline_s=WAIT_S).wait(0)
        assert (refused.stored, refused.refused[:1]) == (0, "2")
        assert not any(done.done() for done in stuck)
        pool.close()
        assert all(done.done() for done in stuck), "close ends what is under way"
        for done in stuck:
            with pytest.raises(ClosedError):
                done.result()


def test_a_pool_is_bound_to_its_process(
    watcher: RemotePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of(watcher, 1)
    match = watcher.match(chain)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (lambda: watcher.match(chain), lambda: watcher.lease(match, 1), watcher.stats):
        with pytest.raises(UsageError, match="after the fork"):
            call()
    monkeypatch.undo()


def test_staging_that_holds_no_block_is_refused(service: Running) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(service.run_dir, LAYOUT, WAIT_S, config=TransferConfig(staging_bytes=4096))
    assert caught.value.key == "transfer.staging_bytes"
