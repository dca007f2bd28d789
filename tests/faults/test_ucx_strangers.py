"""Whoever connects to the port of a UCX transport and is no peer: dropped in time, and peers stay."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.errors import KVPoolError
from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import Collected, empty, named, publish
from kvpool.transfer import ucx_native
from kvpool.transfer.base import Endpoint
from kvpool.transfer.ucx import UcxTransport, parse_address
from kvpool.transfer.ucx_engine import UcxEngine
from tests.faults.peer import LAYOUT, WAIT_S
from tests.waiting import until

pytestmark = pytest.mark.ucx

BLOCKS = 8
# Longer than a busy machine needs from a connection to its endpoint.
LOOK_S = 2.0


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[UcxTransport]:
    monkeypatch.setattr(ucx_native, "LOOK_S", LOOK_S)
    with UcxTransport("owner") as owner:
        yield owner


def hello() -> bytes:
    """Return what the library says first when it connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener, UcxEngine(endpoint_max=1) as engine:
        listener.settimeout(WAIT_S)

        def connect() -> None:
            with contextlib.suppress(KVPoolError):
                engine.connect("127.0.0.1", listener.getsockname()[1], 1.0)

        thread = threading.Thread(target=connect)
        thread.start()
        with listener.accept()[0] as heard:
            heard.settimeout(WAIT_S)
            said = heard.recv(4096)
        thread.join(WAIT_S)
    assert len(said) > 16
    return said


def is_dropped(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def require_exact(endpoint: Endpoint, arena: Arena) -> None:
    out = empty(LAYOUT, BLOCKS)
    slots = publish(arena, payload(LAYOUT, BLOCKS, seed=60))
    read = endpoint.read_blocks(
        view_of(LAYOUT, out),
        named(0, slots),
        source_layout=LAYOUT,
        dest_layer=None,
        deadline_s=WAIT_S,
    )
    assert read.wait(WAIT_S) == BLOCKS
    np.testing.assert_array_equal(out, payload(LAYOUT, BLOCKS, seed=60))
    arena.release(slots)


def test_strangers_that_stay_are_dropped_and_peers_are_not(owner: UcxTransport) -> None:
    """Silence, a few bytes, the begin of a hello, more than a buffer holds; and many at once."""
    arena = Arena(LAYOUT, BLOCKS, owner.incarnation)
    owner.register(arena)
    connected = Collected()
    address = owner.listen("ucx://127.0.0.1:0", connected)
    right = hello()
    random = np.random.default_rng(60)
    said = [b"", b"\0", b"GET / HTTP/1.0\r\n\r\n", random.bytes(300), random.bytes(5000)]
    said += [right[:8], right[: len(right) // 2], right[:-1]]
    said += [b""] * 100
    with UcxTransport("reader") as reader:
        endpoint = reader.connect(address, WAIT_S)
        endpoint.wait_region(0, WAIT_S)
        require_exact(endpoint, arena)
        strangers = []
        for each in said:
            stranger = socket.create_connection(parse_address(address), WAIT_S)
            stranger.sendall(each)
            stranger.setblocking(False)
            strangers.append(stranger)
        until(lambda: all(is_dropped(stranger) for stranger in strangers))
        for stranger in strangers:
            stranger.close()
        assert owner.counts()["strangers_reset"] >= len(strangers) - 2
        # Whoever is a peer was looked at as often, and stays; so does who comes later.
        assert endpoint.alive()
        require_exact(endpoint, arena)
        with reader.connect(address, WAIT_S) as late:
            late.wait_region(0, WAIT_S)
            require_exact(late, arena)
        assert len(connected.items) == 2
        assert owner.counts()["endpoints"] <= 2
    arena.close()
