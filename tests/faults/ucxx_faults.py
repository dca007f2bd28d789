"""Peers that die, stop or lie, over ucxx. Run where ucxx is installed: see ``ucxx_suite.py``."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.completion import Completion
from kvpool.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import WAIT_S, Collected, empty, named, publish
from kvpool.testing.transport_suite import TransportSuite
from kvpool.transfer.base import Endpoint, RemoteSlots
from kvpool.transfer.ucx import UcxTransport
from kvpool.transfer.ucxpy import UcxxTransport
from kvpool.transfer.ucxpy_endpoint import UcxxEndpoint
from kvpool.transfer.ucxpy_wire import ASKS_MAX, MESSAGE_BYTES_MAX, Ask, encode
from tests.conformance import ucxx_suite
from tests.stopped import stop
from tests.unit.transfer.test_forked import in_a_child
from tests.waiting import until

PEER = Path(__file__).with_name("ucxx_peer.py")


class Owner:
    """Another process, with four blocks."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        self.address: str = told["address"]
        self.source = RemoteSlots(0, (0, 1, 2, 3), tuple(told["generations"]))


@contextmanager
def owner() -> Iterator[Owner]:
    with subprocess.Popen(
        [sys.executable, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Owner(process)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def read(endpoint: Endpoint, source: RemoteSlots, deadline_s: float = WAIT_S) -> Completion[int]:
    return endpoint.read_blocks(
        view_of(SMALL_LAYOUT, empty(SMALL_LAYOUT, len(source.slots))),
        source,
        source_layout=SMALL_LAYOUT,
        dest_layer=None,
        deadline_s=deadline_s,
    )


def windows(endpoint: Endpoint) -> tuple[int, int]:
    assert isinstance(endpoint, UcxxEndpoint)
    return endpoint.windows()


def test_a_killed_owner_ends_every_read_with_a_typed_error() -> None:
    with UcxxTransport() as reader, owner() as other, owner() as living:
        endpoint = reader.connect(other.address, WAIT_S)
        beside = reader.connect(living.address, WAIT_S)
        lost = Collected()
        endpoint.on_lost(lost)
        assert read(endpoint, other.source).wait(WAIT_S) == 4
        stop(other.process.pid)
        reads = [read(endpoint, other.source) for _ in range(2 * ASKS_MAX)]
        until(lambda: windows(endpoint)[1] == ASKS_MAX)
        other.process.kill()
        for one in reads:
            with pytest.raises(PeerUnreachableError):
                one.wait(WAIT_S)
        assert lost.wait(1) == [endpoint]
        with pytest.raises(PeerUnreachableError):
            endpoint.notify(b"anybody")
        until(lambda: windows(endpoint)[1] == 0)
        assert read(beside, living.source).wait(WAIT_S) == 4
        other.process.wait(WAIT_S)
        with pytest.raises((PeerUnreachableError, TransferTimeoutError)):
            reader.connect(other.address, 5.0)


def test_a_stopped_owner_costs_each_read_its_deadline_and_its_window_waits() -> None:
    with UcxxTransport() as reader, owner() as other:
        endpoint = reader.connect(other.address, WAIT_S)
        assert read(endpoint, other.source).wait(WAIT_S) == 4
        stop(other.process.pid)
        with pytest.raises(TransferTimeoutError):
            read(endpoint, other.source, 0.2).wait(WAIT_S)
        # The peer may still send into it: nobody else has it.
        assert windows(endpoint)[1] == 1
        other.process.send_signal(signal.SIGCONT)
        until(lambda: windows(endpoint)[1] == 0)
        assert read(endpoint, other.source).wait(WAIT_S) == 4
        stop(other.process.pid)
        silent = read(endpoint, other.source)
        until(lambda: windows(endpoint)[1] == 1)
        endpoint.close()
        with pytest.raises(KVPoolError):
            silent.wait(WAIT_S)
        until(lambda: windows(endpoint)[1] == 0)


def test_a_peer_that_says_anything_achieves_nothing() -> None:
    suite = ucxx_suite.TestUcxxTransport()
    random = np.random.default_rng(7)
    with suite.open_pair() as pair:
        blocks = payload(pair.arena.layout, 2, seed=3)
        source = named(0, pair.publish(blocks))
        for turn in range(40):
            message = b"\1" + random.bytes(int(random.integers(1, 200)))
            if turn % 2:
                ask = bytearray(_ask_of(turn))
                for _ in range(1 + turn % 3):
                    ask[int(random.integers(len(ask)))] = int(random.integers(256))
                message = bytes(ask)
            _say(pair.address, message)
        assert pair.at_reader.alive()
        assert read(pair.at_reader, source).wait(WAIT_S) == 2


def _say(address: str, message: bytes) -> None:
    """Be a peer that says hello, then this."""
    with UcxxTransport() as hostile:
        endpoint = hostile.connect(address, WAIT_S)
        assert isinstance(endpoint, UcxxEndpoint)
        assert hostile.worker.loop.run(lambda: endpoint._send(message), WAIT_S)


def _ask_of(turn: int) -> bytes:
    lives = np.array([1, 2], dtype="<u8").tobytes()
    spans = ([0, 1], [5, 6]) if turn % 4 == 1 else ([], [])
    return encode(Ask(1, bytes(8), [0, 0], [0, 1], lives, *spans))


def test_ends_of_many_connections_leave_nothing() -> None:
    suite = ucxx_suite.TestUcxxTransport()
    with suite.open_pair() as pair, UcxxTransport() as third:
        third.connect(pair.address, WAIT_S).close()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            third.connect(pair.address, WAIT_S).close()
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert pair.at_reader.alive()


def test_nobody_listens_without_trust_and_a_block_has_to_fit() -> None:
    with UcxxTransport() as careful, pytest.raises(ConfigError, match="trusted_network"):
        careful.listen("ucxx://127.0.0.1:0", lambda endpoint: None)
    with UcxxTransport(window_bytes=1 << 16, trusted_network=True) as owner_side:
        large = replace(SMALL_LAYOUT, kv_heads=64, k_dim=64, v_dim=64)
        arena = Arena(large, 1, owner_side.incarnation)
        owner_side.register(arena)
        slots = publish(arena, payload(large, 1, seed=1))
        where = owner_side.listen("ucxx://127.0.0.1:0", lambda endpoint: None)
        with UcxxTransport(window_bytes=1 << 16) as reader:
            endpoint = reader.connect(where, WAIT_S)
            with pytest.raises(CapacityError, match="window_bytes"):
                endpoint.read_blocks(
                    view_of(large, empty(large, 1)),
                    named(0, slots),
                    source_layout=large,
                    dest_layer=None,
                    deadline_s=WAIT_S,
                )
        arena.close()


def test_both_transports_of_ucx_live_in_one_process() -> None:
    """ucxx's UCX is mapped already, and kvpool's own engine takes that one."""

    class Beside(TransportSuite):
        def open_transport(self) -> UcxTransport:
            return UcxTransport()

        def fresh_address(self) -> str:
            return "ucx://127.0.0.1:0"

    with ucxx_suite.TestUcxxTransport().open_pair() as theirs, Beside().open_pair() as ours:
        for pair in (theirs, ours, theirs):
            blocks, out = payload(pair.arena.layout, 2, seed=5), empty(pair.arena.layout, 2)
            assert pair.read(view_of(pair.arena.layout, out), pair.publish(blocks)) == 2
            np.testing.assert_array_equal(out, blocks)


def test_a_message_larger_than_any_ends_the_connection() -> None:
    with ucxx_suite.TestUcxxTransport().open_pair() as pair:
        lost = Collected()
        pair.at_owner.on_lost(lost)
        reader = pair.at_reader
        assert isinstance(reader, UcxxEndpoint)
        reader._worker.loop.post(lambda: reader._send(bytes(2 * MESSAGE_BYTES_MAX)))
        assert lost.wait(1) == [pair.at_owner]
        assert pair.reader.connect(pair.address, WAIT_S).alive()


def test_a_forked_child_gets_typed_errors() -> None:
    with ucxx_suite.TestUcxxTransport().open_pair() as pair:
        source = named(0, pair.publish(payload(pair.arena.layout, 2, seed=3)))

        def child() -> None:
            for call in (
                lambda: read(pair.at_reader, source),
                lambda: pair.at_reader.notify(b"from the child"),
                lambda: pair.reader.connect(pair.address, WAIT_S),
            ):
                with pytest.raises(ClosedError):
                    call()

        in_a_child(child)
        assert read(pair.at_reader, source).wait(WAIT_S) == 2
