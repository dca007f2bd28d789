"""Which congestion control the connections of UCX have: none that paces where both ends are one host's."""

import os
import socket
from collections.abc import Iterator

import pytest

from kvpool.transfer.ucx import UcxTransport

pytestmark = pytest.mark.ucx

UNPACED = b"reno"


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """A connection over loopback that is nobody's but the test's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            yield client


def control_of(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def connections() -> dict[int, bytes]:
    """Return the congestion control of each TCP connection of this process, by descriptor."""
    found: dict[int, bytes] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as held:
                held.getpeername()
                if held.type == socket.SOCK_STREAM and held.family == socket.AF_INET:
                    found[int(name)] = control_of(held)
        except OSError:  # closed meanwhile, no socket, or not connected
            continue
    return found


def test_connections_within_a_host_are_not_paced(stranger: socket.socket) -> None:
    usual = control_of(stranger)
    before = connections()
    with UcxTransport("test-owner") as owner, UcxTransport("test-reader") as reader:
        address = owner.listen("ucx://127.0.0.1:0", lambda endpoint: None)
        reader.connect(address, 20.0)
        new = [control for fd, control in connections().items() if fd not in before]
        # Both ends of the one that carries bytes; libucp has another, which only makes it.
        assert new.count(UNPACED) >= 2
        assert control_of(stranger) == usual
        assert {fd: now for fd, now in connections().items() if fd in before} == before
