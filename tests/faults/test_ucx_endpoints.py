"""Reads over UCX whose peer process dies or stops: typed errors in time, and never a wrong byte."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.errors import KVPoolError, PeerUnreachableError, TransferTimeoutError
from kvpool.testing.blocks import payload
from kvpool.testing.pair import Collected, empty, publish
from kvpool.transfer.ucx import UcxTransport
from kvpool.transfer.ucx_endpoint import UcxEndpoint
from kvpool.transfer.ucx_wire import ASKS_MAX
from tests.conftest import Count
from tests.faults.owner import Owner
from tests.faults.peer import LAYOUT, SEED, WAIT_S, peer
from tests.waiting import until

pytestmark = pytest.mark.ucx

BLOCKS = 400
# The deadline of what is expected to time out.
SHORT_S = 0.5


@pytest.fixture
def transport() -> Iterator[UcxTransport]:
    with UcxTransport("reader", heartbeat_timeout_s=30.0) as transport:
        yield transport


@pytest.fixture
def owner(transport: UcxTransport) -> Iterator[Owner]:
    with peer("ucx") as other:
        yield Owner(transport, other, blocks=BLOCKS)


def windows(owner: Owner) -> tuple[int, int]:
    """Return the windows of the inbox that are free, and those that the owner still owes."""
    assert isinstance(owner.endpoint, UcxEndpoint)
    return owner.endpoint.windows()


def test_blocks_come_from_another_process(owner: Owner) -> None:
    owner.require_exact()
    assert windows(owner) == (ASKS_MAX, 0)


def test_an_owner_that_stops_in_mid_read_writes_nowhere_later(owner: Owner) -> None:
    outs = [empty(LAYOUT, BLOCKS) for _ in range(40)]
    reads = [owner.read(out, SHORT_S) for out in outs]
    reads[0].wait(WAIT_S)  # it is in the middle of the others
    owner.peer.stop()
    late = 0
    for read, out in zip(reads, outs, strict=True):
        try:
            assert read.wait(WAIT_S) == BLOCKS
            np.testing.assert_array_equal(out, owner.blocks)
        except TransferTimeoutError:
            late += 1
        assert read.done()
        out[:] = 7
    assert late > 0
    # The peer may still write into every window that it was asked to fill: none is used again.
    assert windows(owner) == (0, ASKS_MAX)
    with pytest.raises(TransferTimeoutError):
        owner.read(empty(LAYOUT, 1), 0.1).wait(WAIT_S)
    assert windows(owner) == (0, ASKS_MAX)
    owner.peer.resume()
    until(lambda: windows(owner) == (ASKS_MAX, 0))
    owner.require_exact()
    assert all(bool((out == 7).all()) for out in outs)


def test_an_owner_that_is_killed_ends_reads_in_time(
    transport: UcxTransport, owner: Owner, count: Count
) -> None:
    outs = [empty(LAYOUT, BLOCKS) for _ in range(count(20, 100))]
    reads = [owner.read(out) for out in outs]
    reads[0].wait(WAIT_S)
    lost = Collected()
    owner.endpoint.on_lost(lost)
    owner.peer.kill()
    ended = 0
    for read, out in zip(reads, outs, strict=True):
        try:
            assert read.wait(WAIT_S) == BLOCKS
            np.testing.assert_array_equal(out, owner.blocks)
        except PeerUnreachableError:
            ended += 1
        out[:] = 7
    assert ended > 0
    assert lost.wait(1) == [owner.endpoint]
    until(lambda: transport.counts()["endpoints"] == 0)
    assert all(bool((out == 7).all()) for out in outs)
    with pytest.raises(PeerUnreachableError):
        owner.read(outs[0])
    with pytest.raises(PeerUnreachableError):
        owner.endpoint.notify(b"to the dead")
    with pytest.raises(PeerUnreachableError):
        transport.connect(owner.address, WAIT_S)


def test_another_owner_is_read_while_one_stands_still(
    transport: UcxTransport, owner: Owner
) -> None:
    with peer("ucx") as lively:
        other = Owner(transport, lively, blocks=BLOCKS)
        owner.peer.stop()
        stuck = owner.read(empty(LAYOUT, BLOCKS))
        for _ in range(3):
            other.require_exact()
        assert not stuck.done()
        owner.peer.resume()
        assert stuck.wait(WAIT_S) == BLOCKS


def test_a_stopped_owner_is_lost_by_its_silence() -> None:
    with peer("ucx") as other, UcxTransport("reader", heartbeat_timeout_s=3.0) as transport:
        owner = Owner(transport, other, blocks=BLOCKS)
        other.stop()
        with pytest.raises(PeerUnreachableError):
            owner.read(empty(LAYOUT, BLOCKS)).wait(WAIT_S)
        assert not owner.endpoint.alive()


def test_a_close_does_not_wait_for_a_stopped_peer(transport: UcxTransport, owner: Owner) -> None:
    read = owner.read(empty(LAYOUT, BLOCKS))
    owner.peer.stop()
    owner.endpoint.close()
    assert read.done()
    until(lambda: transport.counts()["endpoints"] == 0)


def test_garbage_on_the_ports(transport: UcxTransport, owner: Owner) -> None:
    """Whatever is said to the library's sockets: the process lives and serves."""
    random = np.random.default_rng(7)
    idle = []
    for port in listening_ports(owner.peer.pid):
        for size in (0, 1, 8, 16, 300, 5000):
            garbage = socket.create_connection(("127.0.0.1", port), WAIT_S)
            garbage.sendall(random.bytes(size))
            if size % 16:
                garbage.close()
            else:
                idle.append(garbage)
    owner.require_exact()
    other = transport.connect(owner.address, WAIT_S)
    assert other.wait_region(0, WAIT_S).slot_count == BLOCKS
    for garbage in idle:
        garbage.close()
    owner.require_exact()


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports that a process listens at."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.mark.parametrize("end", ["killed", "silent"])
def test_slots_come_back_from_a_reader_that_stopped(end: str) -> None:
    """The owner's side: what is on its way to a reader that does not read is held, then free."""
    with peer("ucx") as other, UcxTransport("owner", heartbeat_timeout_s=3.0) as transport:
        arena = Arena(LAYOUT, BLOCKS, transport.incarnation)
        transport.register(arena)
        slots = publish(arena, payload(LAYOUT, BLOCKS, SEED))
        connected = Collected()
        other.do("connect", path=transport.listen("ucx://127.0.0.1:0", connected))
        connected.wait(1)
        pairs = json.dumps([[int(slot.index), slot.generation] for slot in slots])
        other.start("read_on", slots=pairs)
        until(lambda: arena.counts().grants > 0)
        other.stop()
        for slot in slots:
            arena.release(slot)
        assert arena.counts().ready == 0
        if end == "killed":
            other.kill()
        until(lambda: arena.counts().free == BLOCKS)
        assert (arena.counts().grants, arena.counts().quarantined) == (0, 0)
        until(lambda: transport.counts()["endpoints"] == 0)
        arena.close()


def test_random_ends_of_random_reads(transport: UcxTransport, owner: Owner, count: Count) -> None:
    """Poison under cancels, deadlines and stops: complete is exact, ended is untouched afterwards."""
    rng = np.random.default_rng(9)
    outs = [empty(LAYOUT, BLOCKS) for _ in range(8)]
    pause = threading.Event()
    for _ in range(count(40, 1000)):
        began = []
        for out in outs:
            out[:] = 7
            blocks = int(rng.integers(1, BLOCKS + 1))
            began.append(owner.read(out[:blocks], float(rng.choice([0.001, 0.01, WAIT_S]))))
        stop = rng.random() < 0.2
        if stop:
            owner.peer.stop()
        for read in began:
            if rng.random() < 0.5:
                read.cancel()
        if stop:
            pause.wait(0.01)
            owner.peer.resume()
        for read, out in zip(began, outs, strict=True):
            try:
                good = read.wait(WAIT_S)
                np.testing.assert_array_equal(out[:good], owner.blocks[:good])
                assert bool((out[good:] == 7).all())
            except KVPoolError:
                pass
            out[:] = 9
        assert all(bool((out == 9).all()) for out in outs)
    until(lambda: windows(owner) == (ASKS_MAX, 0))
    owner.require_exact()
