"""Peers of the host transport that die, stop or restart."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena, Slot
from kvpool.block import Incarnation, SlotIndex
from kvpool.errors import (
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
)
from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import Collected, empty, named
from kvpool.transfer.base import Endpoint, RemoteSlots
from kvpool.transfer.host import HostTransport
from tests.conftest import Count
from tests.faults.peer import LAYOUT, SEED, WAIT_S, Peer, peer
from tests.waiting import until


@pytest.fixture
def transport() -> Iterator[HostTransport]:
    with HostTransport() as transport:
        yield transport


def published(other: Peer, blocks: int) -> RemoteSlots:
    """Let the peer publish blocks, and name its slots."""
    pairs = json.loads(str(other.do("publish", blocks=blocks)))
    return named(0, [Slot(SlotIndex(index), generation) for index, generation in pairs])


def read(endpoint: Endpoint, source: RemoteSlots) -> "tuple[int, bool]":
    """Pull all blocks; say how many came and whether they are right."""
    count = len(source.slots)
    out = empty(LAYOUT, count)
    delivered = endpoint.read_blocks(
        view_of(LAYOUT, out), source, source_layout=LAYOUT, dest_layer=None, deadline_s=WAIT_S
    ).wait(WAIT_S)
    expected = payload(LAYOUT, count, SEED)
    return delivered, bool((out[:delivered] == expected[:delivered]).all())


def fd_count() -> int:
    """Of this process; what earlier tests had may still be on its way out, so it may fall."""
    return len(os.listdir("/proc/self/fd"))


def test_blocks_come_from_another_process(transport: HostTransport, tmp_path: Path) -> None:
    with peer() as other:
        path = str(tmp_path / "peer")
        incarnation = Incarnation(bytes.fromhex(str(other.do("listen", path=path))))
        endpoint = transport.connect(path, WAIT_S, incarnation)
        source = published(other, 20)
        endpoint.wait_region(0, WAIT_S)
        assert read(endpoint, source) == (20, True)


def test_a_killed_peer_is_lost_in_time(transport: HostTransport, tmp_path: Path) -> None:
    with peer() as other:
        path = str(tmp_path / "peer")
        other.do("listen", path=path)
        endpoint = transport.connect(path, WAIT_S)
        source = published(other, 4)
        endpoint.wait_region(0, WAIT_S)
        lost = Collected()
        endpoint.on_lost(lost)
        other.kill()
        assert lost.wait(1) == [endpoint]
        with pytest.raises(PeerUnreachableError):
            read(endpoint, source)
        with pytest.raises(PeerUnreachableError):
            endpoint.notify(b"to the dead")
        with pytest.raises(PeerUnreachableError):
            transport.connect(path, WAIT_S)


def test_reads_in_flight_end_when_their_peer_is_killed(
    transport: HostTransport, tmp_path: Path
) -> None:
    with peer() as other:
        path = str(tmp_path / "peer")
        other.do("listen", path=path)
        endpoint = transport.connect(path, WAIT_S)
        source = published(other, 400)
        endpoint.wait_region(0, WAIT_S)
        outs = [empty(LAYOUT, 400) for _ in range(40)]
        reads = [
            endpoint.read_blocks(
                view_of(LAYOUT, out), source, source_layout=LAYOUT, dest_layer=None,
                deadline_s=WAIT_S,
            )
            for out in outs
        ]  # fmt: skip
        other.kill()
        expected = payload(LAYOUT, 400, SEED)
        for completion, out in zip(reads, outs, strict=True):
            try:
                assert completion.wait(WAIT_S) == 400
                np.testing.assert_array_equal(out, expected)
            except PeerUnreachableError:
                pass
            out[:] = 7
        until(lambda: not endpoint.alive())
        assert all(bool((out == 7).all()) for out in outs)


def test_a_stopped_peer_can_be_read_and_hears_later(
    transport: HostTransport, tmp_path: Path
) -> None:
    with peer() as other:
        path = str(tmp_path / "peer")
        other.do("listen", path=path)
        endpoint = transport.connect(path, WAIT_S)
        source = published(other, 4)
        endpoint.wait_region(0, WAIT_S)
        other.stop()
        assert read(endpoint, source) == (4, True)
        while endpoint.notify(b"x" * 1024):
            pass  # until its ring is full: bounded, and nothing blocks
        assert endpoint.alive()
        with pytest.raises(TransferTimeoutError):
            transport.connect(path, 0.05)
        other.resume()
        # It closes the connection over messages that are none of a stream: it runs again.
        until(lambda: not endpoint.alive())


def test_a_restarted_peer_is_another_one(transport: HostTransport, tmp_path: Path) -> None:
    path = str(tmp_path / "peer")
    with peer() as first:
        incarnation = Incarnation(bytes.fromhex(str(first.do("listen", path=path))))
        transport.connect(path, WAIT_S, incarnation)
        first.kill()
        with peer() as second:
            second.do("listen", path=path)  # over the dead socket
            with pytest.raises(StaleIncarnationError):
                transport.connect(path, WAIT_S, incarnation)
            assert transport.connect(path, WAIT_S).alive()


def test_connecting_and_killing_leaves_nothing_open(
    transport: HostTransport, tmp_path: Path, count: Count
) -> None:
    """The peers connect to us; each is killed. A few processes, many connections."""
    connected = Collected()
    path = transport.listen(str(tmp_path / "us"), connected)
    arena = Arena(LAYOUT, 2, transport.incarnation)
    transport.register(arena)
    before = fd_count()
    total = 0
    for _ in range(count(4, 50)):
        with peer() as other:
            for _ in range(5):
                other.do("connect", path=path)
            other.do("publish", blocks=1)
            total += 5
            endpoints = connected.wait(total)[-5:]
            for endpoint in endpoints:
                assert isinstance(endpoint, Endpoint)
                endpoint.wait_region(0, WAIT_S)
            other.kill()
        for endpoint in endpoints:
            until(lambda endpoint=endpoint: not endpoint.alive())  # type: ignore[misc]
    until(lambda: fd_count() <= before)
    arena.close()


def test_closing_our_side_leaves_nothing_open(transport: HostTransport, tmp_path: Path) -> None:
    with peer() as other:
        path = str(tmp_path / "peer")
        other.do("listen", path=path)
        other.do("publish", blocks=2)
        before = fd_count()
        for _ in range(50):
            with transport.connect(path, WAIT_S) as endpoint:
                endpoint.wait_region(0, WAIT_S)
            assert fd_count() <= before
