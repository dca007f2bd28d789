"""What a UCX engine does when its peer process dies, stops, is another one, or behaves."""

import hashlib
import json
import mmap
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import Incarnation
from kvpool.errors import (
    CancelledTransferError,
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
)
from kvpool.memory import Span
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_engine import UcxEngine
from tests.conftest import Count
from tests.faults.ucx_peer import Peer, Server
from tests.waiting import until

pytestmark = pytest.mark.ucx

MIB = 1 << 20
WAIT_S = 20.0


@pytest.fixture
def transport() -> Iterator[UcxEngine]:
    with UcxEngine(heartbeat_interval_s=0) as transport:
        yield transport


def connect(transport: UcxEngine, peer: Server) -> UcxConnection:
    return transport.connect("127.0.0.1", peer.port, 10, peer.incarnation)


def noise(size: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(seed).bytes(size), dtype=np.uint8).copy()


def scattered(
    data: np.ndarray[tuple[int], np.dtype[np.uint8]], size: int
) -> list[tuple[Span, int]]:
    """Spans of ``size`` bytes that land in the reverse of their order."""
    whole = Span.of(data)
    count = len(data) // size
    return [(whole.part(i * size, size), (count - 1 - i) * size) for i in range(count)]


@pytest.mark.parametrize(("size", "count"), [(64 << 10, 256), (MIB, 16), (64 << 10, 1)])
def test_a_batch_arrives_whole_before_its_note(transport: UcxEngine, size: int, count: int) -> None:
    with Server(inbox_bytes=4 * size * count) as peer:
        endpoint = connect(transport, peer)
        for seed in range(3):
            data = noise(size * count, seed)
            note = json.dumps({"size": len(data), "seed": seed}).encode()
            assert endpoint.put(scattered(data, size), 20, note).wait(20) == len(data)
            said = peer.next("arrived")
            landed = data.reshape(count, size)[::-1].tobytes()
            assert json.loads(said["note"])["seed"] == seed
            assert said["digest"] == hashlib.sha256(landed).hexdigest()


def test_large_puts_are_zero_copy(transport: UcxEngine) -> None:
    with Server() as peer:
        endpoint = connect(transport, peer)
        data = noise(16 * MIB, 1)
        # A peer that does not read for a moment makes puts wait, and only those can be asked.
        peer.stop()
        done = endpoint.put(scattered(data, MIB), 20)
        until(lambda: transport.put_protocol() != "")
        peer.go_on()
        done.wait(20)
        assert "zero-copy" in transport.put_protocol()
        assert "tcp" in transport.put_protocol()


def test_a_killed_peer_ends_its_batches(transport: UcxEngine) -> None:
    with Server() as peer:
        endpoint = connect(transport, peer)
        data = noise(16 * MIB, 1)
        peer.stop()  # so that the kill surely comes in mid-transfer
        batches = [endpoint.put(scattered(data, MIB), 20) for _ in range(4)]
        until(lambda: transport.counts()["put_bytes"] >= MIB)
        peer.kill()
        for batch in batches:
            with pytest.raises(PeerUnreachableError) as caught:
                batch.wait(20)
            assert caught.value.__cause__ is not None  # the loss, not the deadline, ended it
        until(lambda: not endpoint.alive())
        with pytest.raises(PeerUnreachableError):
            endpoint.put(scattered(data, MIB), 1)
        until(lambda: transport.counts()["endpoints"] == 0)


def test_a_put_that_is_cancelled_ends_before_its_turn(transport: UcxEngine) -> None:
    """Though the peer takes nothing; what is on its way has to arrive, and the others do."""
    with Server() as peer:
        endpoint = connect(transport, peer)
        data = noise(16 * MIB, 1)
        peer.stop()
        say = [json.dumps({"size": 1, "put": at}).encode() for at in range(5)]
        puts = [endpoint.put(scattered(data, MIB), WAIT_S, note) for note in say]
        until(lambda: transport.counts()["put_bytes"] >= MIB)
        for put in (puts[4], puts[2]):
            put.cancel()
            put.cancel()
            with pytest.raises(CancelledTransferError):
                put.wait(WAIT_S)
        # Some of the first is posted; the cancel ends it when that has arrived.
        puts[0].cancel()
        peer.go_on()
        try:
            assert puts[0].wait(WAIT_S) == len(data)
            told = [0]
        except CancelledTransferError:
            told = []
        assert [puts[at].wait(WAIT_S) for at in (1, 3)] == [len(data)] * 2
        told += [1, 3]
        assert [json.loads(peer.next("arrived")["note"])["put"] for _ in told] == told
        # Notes that were never sent count for nothing: the window is as it was.
        for _ in range(200):
            until(lambda: endpoint.notify(say[0]))


def test_a_stopped_peer_costs_its_deadline_and_no_other(transport: UcxEngine) -> None:
    with Server() as stopped, Server() as lively:
        endpoint, other = connect(transport, stopped), connect(transport, lively)
        data = noise(32 * MIB, 1)
        stopped.stop()
        start = time.monotonic()
        late = endpoint.put(scattered(data[: 16 * MIB], MIB), 0.5)
        later = endpoint.put(scattered(data[: 16 * MIB], MIB), 30)
        small = data[: 4 * MIB]
        note = json.dumps({"size": len(small)}).encode()
        assert other.put(scattered(small, MIB), 20, note).wait(20) == len(small)
        lively.next("arrived")
        with pytest.raises(TransferTimeoutError):
            late.wait(20)
        assert late.done() and time.monotonic() - start >= 0.5
        # The connection is gone with it: a put cannot be called back in another way.
        with pytest.raises(PeerUnreachableError):
            later.wait(20)
        assert other.put(scattered(small, MIB), 20, note).wait(20) == len(small)
        # The stopped one finds out when it goes on.
        stopped.go_on()
        stopped.next("lost")


def test_a_silent_peer_is_lost_by_the_heartbeat() -> None:
    with (
        Server(heartbeat_s=0.1) as peer,
        UcxEngine(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.5) as transport,
    ):
        endpoint = connect(transport, peer)
        lost = threading.Event()
        endpoint.on_lost(lambda endpoint: lost.set())
        assert not lost.wait(1.5)  # three times the timeout, in which nothing was put
        peer.stop()
        assert lost.wait(5)


def test_silence_is_no_sign_without_a_heartbeat() -> None:
    with (
        Server(heartbeat_s=0) as peer,
        UcxEngine(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.3) as transport,
    ):
        endpoint = connect(transport, peer)
        lost = threading.Event()
        endpoint.on_lost(lambda endpoint: lost.set())
        assert not lost.wait(1)


def test_nothing_lands_after_the_receiver_closed() -> None:
    """What a stopped sender left in the kernel's buffers is dropped, not written."""
    inbox = Span.of(np.frombuffer(mmap.mmap(-1, 32 * MIB), dtype=np.uint8))
    accepted: queue.Queue[UcxConnection] = queue.Queue()
    with UcxEngine(inbox=inbox, endpoint_max=2, heartbeat_interval_s=0) as receiver:
        port = receiver.listen(accepted.put)
        for _ in range(4):
            with Peer("send", port, 16 * MIB) as sender:
                endpoint = accepted.get(timeout=20)
                assert endpoint.inbox is not None
                part = endpoint.inbox.view()
                part[:] = bytes(len(part))
                until(lambda: part[0] != 0)  # noqa: B023  # runs at once
                sender.stop()
                lost = threading.Event()
                closed: list[bytes] = []

                def on_lost(endpoint: UcxConnection) -> None:
                    closed.append(hashlib.sha256(part).digest())  # noqa: B023  # within the round
                    lost.set()  # noqa: B023

                endpoint.on_lost(on_lost)
                endpoint.close()
                assert lost.wait(20)
                sender.go_on()
                assert sender.next("ended")["error"] == "PeerUnreachableError"
                assert hashlib.sha256(part).digest() == closed[0]


def test_nobody_listens(transport: UcxEngine) -> None:
    with Server() as peer:
        port = peer.port
    with pytest.raises(PeerUnreachableError):
        transport.connect("127.0.0.1", port, 10)


def test_a_peer_that_does_not_greet_costs_the_timeout(transport: UcxEngine) -> None:
    with Server() as peer:
        peer.stop()
        with pytest.raises(TransferTimeoutError):
            transport.connect("127.0.0.1", peer.port, 0.3)


def test_another_run_is_refused(transport: UcxEngine) -> None:
    with Server() as peer:
        with pytest.raises(StaleIncarnationError):
            transport.connect("127.0.0.1", peer.port, 10, Incarnation(bytes(15) + b"\1"))
        connect(transport, peer).close()
        peer.next("lost")


def test_connections_and_kills_leak_nothing(transport: UcxEngine, count: Count) -> None:
    """Connect and lose a peer many times; descriptors return to where they were.

    The process is the same each time, and only its connection is cut: by its own close, by ours,
    and in mid-transfer. A real kill is part of each round that starts a process.
    """
    data = noise(4 * MIB, 1)
    spans = scattered(data, MIB)
    before = 0
    for cycle in range(count(4, 100)):
        with Server() as peer:
            for _ in range(3):
                connect(transport, peer).close()
                peer.next("lost")
            endpoint = connect(transport, peer)
            peer.next("connected")
            batch = endpoint.put(spans, 20)
            peer.kill()
            with pytest.raises(PeerUnreachableError):
                batch.wait(20)
                endpoint.put(spans, 20).wait(20)
        until(lambda: transport.counts()["endpoints"] == 0)
        if cycle == 2:
            before = descriptors()
    until(lambda: descriptors() <= before)
    assert transport.counts()["batches"] == 0


def descriptors() -> int:
    return len(os.listdir(Path("/proc/self/fd")))
