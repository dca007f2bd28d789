"""The UCX transport: addresses, limits, and peers that speak another language or lie."""

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.completion import Deadline
from kvpool.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import Span
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import Collected, empty, named, publish, send
from kvpool.transfer.base import Endpoint
from kvpool.transfer.remote_endpoint import NOTIFICATIONS_MAX
from kvpool.transfer.ucx import UcxTransport, format_address, parse_address
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_endpoint import UcxEndpoint
from kvpool.transfer.ucx_engine import UcxEngine
from kvpool.transfer.ucx_reads import block_job
from kvpool.transfer.ucx_wire import (
    ASKS_MAX,
    PROTOCOL_VERSION,
    Offer,
    Taken,
    Welcome,
    encode,
    frame,
)
from tests.waiting import until

pytestmark = pytest.mark.ucx

WAIT_S = 20.0
LAYOUT = SMALL_LAYOUT
ANYWHERE = "ucx://127.0.0.1:0"
INBOX = 1 << 20


@pytest.fixture
def owner() -> Iterator[UcxTransport]:
    with UcxTransport("owner", inbox_bytes=INBOX) as owner:
        yield owner


@pytest.mark.parametrize("address", ["ucx://127.0.0.1:80", "ucx://[::1]:65535", "ucx://0.0.0.0:0"])
def test_addresses_survive_the_round_trip(address: str) -> None:
    assert format_address(*parse_address(address)) == address


@pytest.mark.parametrize(
    "address",
    ["", "/tmp/a.sock", "ucx://", "ucx://127.0.0.1", "ucx://localhost:1", "ucx://127.0.0.1:65536"]
    + ["ucx://127.0.0.1:-1", "ucx://127.0.0.1:x", "tcp://127.0.0.1:1", "ucx://:1"],
)  # fmt: skip
def test_what_is_no_address_is_refused(owner: UcxTransport, address: str) -> None:
    with pytest.raises(UsageError):
        owner.connect(address, WAIT_S)
    with pytest.raises(UsageError):
        owner.listen(address, lambda endpoint: None)


def test_a_host_that_is_not_the_transports_is_refused(owner: UcxTransport) -> None:
    with pytest.raises(UsageError):
        owner.listen("ucx://127.0.0.2:0", lambda endpoint: None)


@pytest.mark.parametrize(
    "sizes", [{"inbox_bytes": 4096}, {"endpoint_max": 0}, {"inbox_bytes": 1 << 60}]
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        UcxTransport(**sizes)  # type: ignore[arg-type]


def test_beyond_loopback_only_if_trusted() -> None:
    with pytest.raises(ConfigError, match="trusted_network"):
        UcxTransport(host="0.0.0.0")


def test_a_small_inbox_serves_blocks_that_are_larger(owner: UcxTransport) -> None:
    """A window holds one layer of a block: a block comes layer by layer."""
    layout = replace(LAYOUT, k_dim=64, v_dim=64)
    arena = Arena(layout, 40, owner.incarnation)
    owner.register(arena)
    blocks = payload(layout, 40, seed=1)
    slots = publish(arena, blocks)
    address = owner.listen(ANYWHERE, lambda endpoint: None)
    window = layout.layer_bytes + 64
    assert window * ASKS_MAX > 32768
    with UcxTransport("reader", inbox_bytes=window * ASKS_MAX + 4096) as reader:
        endpoint = reader.connect(address, WAIT_S)
        out = empty(layout, 40)
        read = endpoint.read_blocks(
            view_of(layout, out), named(0, slots), source_layout=layout, dest_layer=None,
            deadline_s=WAIT_S,
        )  # fmt: skip
        assert read.wait(WAIT_S) == 40
        np.testing.assert_array_equal(out, blocks)
        assert owner.counts()["puts"] >= 40 * layout.num_layers
        spans = [(Span.of(out[0]), named(0, slots[7:8]), 0)]
        assert endpoint.read_spans(spans, WAIT_S).wait(WAIT_S) == layout.block_bytes
        np.testing.assert_array_equal(out[0], blocks[7])
    arena.close()


def test_a_slot_that_is_released_while_it_is_read_waits_for_the_read(owner: UcxTransport) -> None:
    """Many reads of a slot that is given up at once: whole, or a miss; and no grant is left."""
    arena = Arena(LAYOUT, 8, owner.incarnation)
    owner.register(arena)
    address = owner.listen(ANYWHERE, lambda endpoint: None)
    with UcxTransport("reader", inbox_bytes=INBOX) as reader:
        endpoint = reader.connect(address, WAIT_S)
        for seed in range(100):
            blocks, out = payload(LAYOUT, 4, seed), empty(LAYOUT, 4)
            slots = publish(arena, blocks)
            read = endpoint.read_blocks(
                view_of(LAYOUT, out), named(0, slots), source_layout=LAYOUT, dest_layer=None,
                deadline_s=WAIT_S,
            )  # fmt: skip
            for slot in slots:
                arena.release(slot)
            good = read.wait(WAIT_S)
            np.testing.assert_array_equal(out[:good], blocks[:good])
        until(lambda: (arena.counts().free, arena.counts().grants) == (8, 0))
    arena.close()


def test_an_arena_that_is_closed_is_read_until_its_transport_is(owner: UcxTransport) -> None:
    """As on one host, where the peer has it mapped."""
    arena = Arena(LAYOUT, 2, owner.incarnation)
    owner.register(arena)
    blocks, out = payload(LAYOUT, 2, seed=1), empty(LAYOUT, 2)
    slots = publish(arena, blocks)
    address = owner.listen(ANYWHERE, lambda endpoint: None)
    with UcxTransport("reader", inbox_bytes=INBOX) as reader:
        endpoint = reader.connect(address, WAIT_S)
        arena.close()
        read = endpoint.read_blocks(
            view_of(LAYOUT, out), named(0, slots), source_layout=LAYOUT,
            dest_layer=None, deadline_s=WAIT_S,
        )  # fmt: skip
        assert read.wait(WAIT_S) == 2
        np.testing.assert_array_equal(out, blocks)


def test_a_destination_that_goes_wrong_ends_its_own_read_only(owner: UcxTransport) -> None:
    """Block ids are the caller's array: what it writes there later is not the peer's doing."""
    arena = Arena(LAYOUT, 8, owner.incarnation)
    owner.register(arena)
    slots = publish(arena, payload(LAYOUT, 8, seed=1))
    address = owner.listen(ANYWHERE, lambda endpoint: None)
    with UcxTransport("reader") as reader:
        endpoint = reader.connect(address, WAIT_S)
        assert isinstance(endpoint, UcxEndpoint)
        endpoint.wait_region(0, WAIT_S)
        region = endpoint._region(0)

        views = [view_of(LAYOUT, empty(LAYOUT, 8)) for _ in range(4)]
        jobs = [block_job(region, view, named(0, slots), LAYOUT, None, None) for view in views]
        views[1].block_ids[3] = 2**63
        reads = [endpoint._reads.submit(each, WAIT_S) for each in jobs]
        with pytest.raises(InternalError):
            reads.pop(1).wait(WAIT_S)
        assert [read.wait(WAIT_S) for read in reads] == [8, 8, 8]
        assert endpoint.alive()
    arena.close()


def test_the_trace_names_what_carried_the_bytes(owner: UcxTransport) -> None:
    """Blocks of 64 KiB that lie beside each other go in fewer puts, without a copy in between."""
    layout = replace(LAYOUT, num_layers=1, kv_heads=4, k_dim=128, v_dim=128)
    arena = Arena(layout, 64, owner.incarnation)
    owner.register(arena)
    blocks, out = payload(layout, 64, seed=1), empty(layout, 64)
    slots = publish(arena, blocks)
    address = owner.listen(ANYWHERE, lambda endpoint: None)
    with UcxTransport("reader") as reader:
        endpoint = reader.connect(address, WAIT_S)
        # Both know it when they are connected, before anything was put.
        assert owner.trace().zero_copy() is True
        assert reader.trace().zero_copy() is True
        assert owner.trace().puts == reader.trace().puts == 0
        turns = 3
        for _ in range(turns):
            read = endpoint.read_blocks(
                view_of(layout, out), named(0, slots), source_layout=layout, dest_layer=None,
                deadline_s=WAIT_S,
            )  # fmt: skip
            assert read.wait(WAIT_S) == 64
        trace = owner.trace()
        assert trace.lanes == ("tcp/lo",)
        assert trace.put_bytes == turns * blocks.size
        assert trace.puts + trace.coalesced == turns * 64
        assert trace.coalesced > 0
        np.testing.assert_array_equal(out, blocks)
    arena.close()


def test_a_library_that_copies_what_it_puts_is_named_at_the_first_connection() -> None:
    """In a process of its own: libucp reads its settings once. Nothing but they is different."""
    script = """
import logging
from kvpool.transfer.ucx import UcxTransport

warnings = []

class Watch(logging.Handler):
    def emit(self, record):
        if "UCX copies every put" in record.getMessage():
            warnings.append(record)

logging.getLogger("kvpool.transfer.ucx").addHandler(Watch())
with UcxTransport() as owner, UcxTransport() as reader:
    address = owner.listen("ucx://127.0.0.1:0", lambda endpoint: None)
    for _ in range(2):
        reader.connect(address, 20)
    print(reader.put_protocol(), len(warnings))
"""
    said = {}
    for setting in ("n", "y"):
        done = subprocess.run(
            [sys.executable, "-c", script, setting],
            env={**os.environ, "UCX_TCP_PUT_ENABLE": setting},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        said[setting] = done.stdout
    assert said["n"].endswith(" 2\n")  # each of the two, once
    assert "zero-copy" not in said["n"]
    assert "zero-copy" in said["y"]
    assert said["y"].endswith(" 0\n")


def test_too_many_connections_are_refused() -> None:
    with UcxTransport("owner", inbox_bytes=INBOX, endpoint_max=1) as owner:
        address = owner.listen(ANYWHERE, lambda endpoint: None)
        with UcxTransport("reader", inbox_bytes=INBOX, endpoint_max=2) as reader:
            first = reader.connect(address, WAIT_S)
            with pytest.raises(PeerUnreachableError):
                reader.connect(address, WAIT_S)
            first.close()
            reader.connect(address, WAIT_S)
        with UcxTransport("full", inbox_bytes=INBOX, endpoint_max=1) as full:
            there = full.listen(ANYWHERE, lambda endpoint: None)
            with UcxTransport("third", inbox_bytes=INBOX) as third:
                third.connect(there, WAIT_S)
                with pytest.raises(CapacityError):
                    full.connect(address, WAIT_S)


def test_an_end_that_nobody_was_told_of_yet_is_the_peers(owner: UcxTransport) -> None:
    """The engine in C knows it first; until then a read is refused for that reason, too."""
    arena = Arena(LAYOUT, 1, owner.incarnation)
    owner.register(arena)
    slots = publish(arena, payload(LAYOUT, 1, seed=2))
    address = owner.listen(ANYWHERE, lambda endpoint: None)
    out = empty(LAYOUT, 1)
    told: list[type[Exception]] = []
    asked = threading.Event()
    with UcxTransport("reader", inbox_bytes=INBOX) as reader:
        endpoint = reader.connect(address, WAIT_S)
        assert isinstance(endpoint, UcxEndpoint)
        engine = reader._engine

        def ask() -> None:  # on the thread that would be told
            engine.disconnect(endpoint.connection.id)
            deadline = Deadline(WAIT_S)
            while not told and deadline.remaining_s() > 0:
                try:
                    endpoint.read_spans([(Span.of(out[0]), named(0, slots), 0)], WAIT_S)
                except CapacityError:
                    continue
                except KVPoolError as error:
                    told.append(type(error))
            asked.set()

        assert engine.post(ask)
        assert asked.wait(2 * WAIT_S)
        assert told == [PeerUnreachableError]
    arena.close()


def test_an_endpoint_can_be_closed_from_its_own_callback(owner: UcxTransport) -> None:
    lost = Collected()

    def accept(endpoint: Endpoint) -> None:
        endpoint.on_lost(lost)
        endpoint.on_notification(lambda message: endpoint.close())

    address = owner.listen(ANYWHERE, accept)
    with UcxTransport("reader", inbox_bytes=INBOX) as reader:
        endpoint = reader.connect(address, WAIT_S)
        gone = Collected()
        endpoint.on_lost(gone)
        send(endpoint, b"go away")
        assert gone.wait(1) == [endpoint]
        lost.wait(1)


def test_a_transport_cannot_be_closed_or_wait_on_its_own_thread(owner: UcxTransport) -> None:
    errors = Collected()

    def misuse(endpoint: Endpoint) -> None:
        for call in (owner.close, lambda: owner.connect(address, WAIT_S)):
            try:
                call()
            except UsageError as error:
                errors(error)

    address = owner.listen(ANYWHERE, misuse)
    with UcxTransport("reader", inbox_bytes=INBOX) as reader:
        reader.connect(address, WAIT_S)
        errors.wait(2)


def test_connections_leave_nothing_behind(owner: UcxTransport) -> None:
    arena = Arena(LAYOUT, 64, owner.incarnation)
    owner.register(arena)
    slots = publish(arena, payload(LAYOUT, 64, seed=1))
    address = owner.listen(ANYWHERE, lambda endpoint: None)
    before = (0, 0)
    with UcxTransport("reader", inbox_bytes=INBOX) as reader:
        for number in range(60):
            endpoint = reader.connect(address, WAIT_S)
            endpoint.read_blocks(
                view_of(LAYOUT, empty(LAYOUT, 64)), named(0, slots), source_layout=LAYOUT,
                dest_layer=None, deadline_s=WAIT_S,
            ).wait(WAIT_S)  # fmt: skip
            endpoint.close()
            if number == 10:
                until(lambda: owner.counts()["endpoints"] == 0 == reader.counts()["endpoints"])
                before = (len(os.listdir("/proc/self/fd")), threading.active_count())
        until(lambda: owner.counts()["endpoints"] == 0 == reader.counts()["endpoints"])
        # The library closes a socket a moment after its endpoint.
        until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before)
        assert reader.counts()["batches"] == 0
    arena.close()


def test_connections_that_come_and_go_take_no_memory() -> None:
    """Neither timers, which would keep endpoints, nor a ring that always goes on to fresh pages."""

    def resident_pages() -> int:
        gc.collect()  # seldom by itself in a process with much in it
        return int(Path("/proc/self/statm").read_text().split()[1])

    with UcxTransport("owner") as owner, UcxTransport("reader") as reader:
        address = owner.listen(ANYWHERE, lambda endpoint: None)
        for _ in range(40):
            reader.connect(address, WAIT_S).close()
        before = resident_pages()
        for _ in range(100):
            reader.connect(address, WAIT_S).close()
        # 12 to 28 KiB each while either was wrong: 300 pages and more.
        assert resident_pages() - before < 200


# ---- peers that mean harm -------------------------------------------------------------------------


class Stranger:
    """A peer that speaks the engine's language, and says to the owner whatever a test wants."""

    def __init__(self, owner: UcxTransport) -> None:
        self.connected = Collected()
        self.address = owner.listen(ANYWHERE, self.connected)

    @contextlib.contextmanager
    def connect(self, welcome: bool = True) -> Iterator[UcxConnection]:
        memory = np.zeros((1 << 20) + 4096, dtype=np.uint8)
        whole = Span.of(memory)
        begin = -whole.address % 4096
        with UcxEngine(inbox=whole.part(begin, 1 << 20), endpoint_max=1) as engine:
            connection = engine.connect("127.0.0.1", parse_address(self.address)[1], WAIT_S)
            if welcome:
                say(connection, encode(Welcome(PROTOCOL_VERSION)))
            yield connection


def say(connection: UcxConnection, note: bytes) -> bool:
    """Send a note; False if the connection has ended."""
    for _ in range(int(WAIT_S * 1000)):
        try:
            connection.put((), WAIT_S, note)
            return True
        except CapacityError:
            threading.Event().wait(0.001)
        except (PeerUnreachableError, ClosedError):
            return False
    pytest.fail("there was never room")


BAD: dict[str, bytes] = {
    "empty kind": b"\0",
    "unknown kind": b"\2abc",
    "no message": b"\1garbage",
    "unknown tag": b"\1" + msgspec.msgpack.encode(["what", 1]),
    "nothing": b"\1",
    "second welcome": encode(Welcome(PROTOCOL_VERSION)),
    "other version": b"\1" + msgspec.msgpack.encode(["welcome", PROTOCOL_VERSION + 1]),
    "taken too many": encode(Taken(1)),
    "region out of order": encode(Offer(3, 1, 64, 0)),
    "region of nothing": b"\1" + msgspec.msgpack.encode(["region", 0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_peer_that_lies_is_cut_off(owner: UcxTransport, name: str) -> None:
    arena = Arena(LAYOUT, 8, owner.incarnation)
    owner.register(arena)
    stranger = Stranger(owner)
    with stranger.connect() as connection:
        endpoint = stranger.connected.wait(1)[0]
        assert isinstance(endpoint, Endpoint)
        say(connection, BAD[name])
        until(lambda: not connection.alive())
        assert not endpoint.alive()
        with pytest.raises(PeerUnreachableError):
            endpoint.notify(b"x")
    assert arena.counts().grants == 0
    arena.close()


def test_too_many_notifications_cut_a_peer_off(owner: UcxTransport) -> None:
    stranger = Stranger(owner)
    with stranger.connect() as connection:
        stranger.connected.wait(1)  # nobody takes its notifications
        for _ in range(NOTIFICATIONS_MAX + 1):
            assert say(connection, frame(b"x"))
        until(lambda: not connection.alive())


def test_a_notification_before_the_welcome_is_refused(owner: UcxTransport) -> None:
    stranger = Stranger(owner)
    with stranger.connect(welcome=False) as connection:
        say(connection, frame(b"x"))
        until(lambda: not connection.alive())
    assert stranger.connected.items == []


def test_random_notes_do_no_harm(owner: UcxTransport) -> None:
    """Whatever is said, the owner serves the next one who asks."""
    rng = random.Random(5)
    arena = Arena(LAYOUT, 8, owner.incarnation)
    owner.register(arena)
    slots = publish(arena, payload(LAYOUT, 2, seed=1))
    stranger = Stranger(owner)
    good = [encode(Taken(0)), encode(Offer(0, 1, 64, 1))]
    for _ in range(20):
        with stranger.connect() as connection:
            for _ in range(50):
                note = bytearray(rng.choice(good))
                for _ in range(rng.randrange(3)):
                    note[rng.randrange(len(note))] = rng.randrange(256)
                if not say(connection, bytes(note)):
                    break
    with UcxTransport("reader", inbox_bytes=INBOX) as reader:
        endpoint = reader.connect(stranger.address, WAIT_S)
        out = empty(LAYOUT, 2)
        read = endpoint.read_blocks(
            view_of(LAYOUT, out), named(0, slots), source_layout=LAYOUT, dest_layer=None,
            deadline_s=WAIT_S,
        )  # fmt: skip
        assert read.wait(WAIT_S) == 2
        np.testing.assert_array_equal(out, payload(LAYOUT, 2, seed=1))
    until(lambda: arena.counts().grants == 0)
    arena.close()


def test_an_engine_that_says_no_welcome_is_not_waited_for(owner: UcxTransport) -> None:
    with UcxEngine(endpoint_max=1) as engine:
        port = engine.listen(lambda connection: None)
        with pytest.raises(TransferTimeoutError):
            owner.connect(f"ucx://127.0.0.1:{port}", 0.2)
