"""Every frame that a server reads, damaged at random: refused, nothing granted, nothing lost.

One server with TLS, tenants, shared memory and UCX. Somebody's blocks are in it all the time; whatever
is sent, they read as they were stored, and no slot is missing afterwards. All tests together send frames
for a minute; with ``--soak`` each kind is sent for one.
"""

import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import count as numbers
from typing import Final

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

from kvpool.block import BlockLayout
from kvpool.client import protocol
from kvpool.client.remote import RemotePool
from kvpool.client.rpc import Method
from kvpool.errors import KVPoolError
from kvpool.testing.blocks import view_of
from kvpool.transfer import handshake
from kvpool.transfer.descriptor import Hello, encode
from kvpool.transfer.host import HostTransport
from kvpool.transfer.mailbox import Mailbox
from kvpool.transfer.ucx import UcxTransport
from kvpool.transfer.ucx_endpoint import UcxEndpoint
from tests.conftest import Count
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, WAIT_S, blocks_of, chain_of, store
from tests.faults.test_access import METHODS, NAMES, Secure, greet, start, token_of
from tests.faults.test_host_hostile import Hostile
from tests.faults.test_ucx_endpoints import listening_ports
from tests.frames import Known, frame
from tests.waiting import until

# Longest wait for calls that need not end soon: two last, the other waits for a connection.
LASTING_S: Final = {
    protocol.WATCH.name: 0.02,
    protocol.STAY.name: 0.02,
    protocol.HELLO.name: 0.1,
}


class Scene:
    """A server, what is in it, and who means harm."""

    def __init__(self, secure: Secure, blue: RemotePool) -> None:
        self.secure = secure
        self.blue = blue
        assert store(blue, 1) == CHAIN_BLOCKS
        self.names = chain_of(blue, 1).hashes
        with closing(secure.caller(secure.tenant("red"))) as caller:
            request = protocol.ConfigureRequest(
                version=protocol.PROTOCOL_VERSION, layout=protocol.encode_layout(LAYOUT)
            )
            welcome = caller.call(protocol.CONFIGURE, request, WAIT_S)
        self.ways = {way.kind: way.address for way in welcome.ways}
        self.held = blue.lease(blue.match(chain_of(blue, 1)), 1)
        self.hold()
        until(lambda: self.counts()["leases"] == 1, "the first lease is given back")
        self.before = self.counts()

    def known(self, client: bytes, rng: random.Random) -> Known:
        """Return what comes near to a request that is granted: all but what is another's."""
        return {
            "client": [client],
            "hashes": [self.names, self.names[:32], rng.randbytes(32), rng.randbytes(64)],
            "ancestors": [b"", self.names[:32]],
            "lease": [self.held.number],
            "seconds": [0.1],
            "hold_s": [0.1, 0.0],
            "timeout_s": [1.0],
            "slots": [0, 1],
            "generations": [1, 2],
            "version": [protocol.PROTOCOL_VERSION],
            "block": [0],
            "offset": [0, LAYOUT.block_bytes - 1],
            "count": [1, 2],
            "first": [0],
            "crcs": [bytes(4 * LAYOUT.crc_count)],
            "node": ["a", "b"],
            "incarnation": [bytes(16)],
            **{name: [getattr(LAYOUT, name)] for name in BlockLayout.__slots__},
        }

    def hold(self) -> None:
        """Have the blocks leased anew: the lease is what others are after."""
        self.held.close()
        self.held = self.blue.lease(self.blue.match(chain_of(self.blue, 1)), 280)
        assert self.held.blocks == CHAIN_BLOCKS

    def counts(self) -> dict[str, int]:
        stats = self.secure.stats()
        return {
            name: stats[name] for name in ("free", "ready", "reserved", "quarantined", "leases")
        }

    def require_unharmed(self) -> None:
        assert self.secure.process.process.poll() is None
        until(lambda: self.counts() == self.before, "every slot and lease is back")
        found = np.zeros_like(blocks_of(1))
        view = view_of(LAYOUT, found)
        load = self.blue.load(self.held, view, deadline_s=WAIT_S)
        assert load.wait(WAIT_S) == CHAIN_BLOCKS
        np.testing.assert_array_equal(found, blocks_of(1))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    # Some frames are good greetings of nobody, who stays for minutes.
    secure = start(tmp_path_factory.mktemp("fuzzed"), ucx=True, clients_max=1 << 16)
    with secure.process, closing(secure.pool("blue")) as blue:
        yield Scene(secure, blue)


@pytest.fixture
def scene(server: Scene) -> Iterator[Scene]:
    server.hold()
    yield server
    server.require_unharmed()


# A minute is shared by the methods and the six kinds of frames below them.
KINDS: Final = len(METHODS) + 6
# Sent of each kind however slow the machine is.
FRAMES_MIN: Final = 20
# So often it is a new client that means harm.
RENEW: Final = 16
Turns = Callable[[], Iterator[int]]


@pytest.fixture
def turns(count: Count) -> Turns:
    """Count for a kind's share of the minute, and up to ``FRAMES_MIN`` at least."""

    def counted() -> Iterator[int]:
        end_s = time.monotonic() + count(60_000 // KINDS, 60_000) / 1000
        for number in numbers():
            if number >= FRAMES_MIN and time.monotonic() >= end_s:
                return
            yield number

    return counted


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_method_takes_nothing_that_is_no_request(
    scene: Scene, method: Method[Message, Message], turns: Turns
) -> None:
    rng = random.Random(f"frames of {method.name}")
    with ExitStack() as stack:
        caller = stack.enter_context(closing(scene.secure.caller(scene.secure.tenant("red"))))
        client = b""
        credentials = scene.secure.authority.access()
        channel = stack.enter_context(
            grpc.secure_channel(scene.secure.address, grpc.ssl_channel_credentials(credentials.ca))
        )
        tokens = (token_of("red"), token_of("red"), token_of("red"), "x" * 64, "")
        for number in turns():
            if number % RENEW == 0:  # what was sent may have ended it
                with suppress(KVPoolError):
                    goodbye = protocol.ReleaseRequest(client=client, lease=protocol.EVERY_LEASE)
                    caller.call(protocol.RELEASE, goodbye, WAIT_S)
                client = greet(caller)
            token = rng.choice(tokens)
            known = scene.known(client, rng)
            frames = [frame(method.request, known, rng) for _ in range(rng.randrange(1, 4))]
            send(channel, method, frames, token)


def send(
    channel: grpc.Channel, method: Method[Message, Message], frames: list[bytes], token: str
) -> None:
    """Send frames of one call. What comes back is an answer or a typed refusal, never a bug."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    wait_s = LASTING_S.get(method.name, WAIT_S)
    try:
        if method.takes:
            stream = channel.stream_unary(method.path)
            stream(iter(frames), timeout=wait_s, metadata=metadata)
        elif method.streams:
            for _ in channel.unary_stream(method.path)(frames[0], wait_s, metadata):
                pass
        else:
            channel.unary_unary(method.path)(frames[0], timeout=wait_s, metadata=metadata)
    except grpc.RpcError as error:
        said = dict(error.trailing_metadata() or ()).get("kvpool-error", "")
        sent = f"{method.name} {[each.hex() for each in frames]}"
        assert said != "InternalError", f"{sent}: {error.details()}"
        assert error.code() != grpc.StatusCode.UNKNOWN, sent
        return
    assert token == token_of("red"), f"{method.name} let somebody in"


# ---- below gRPC ----------------------------------------------------------------------------------

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def http2(rng: random.Random) -> bytes:
    """Return HTTP/2 frames of random kinds, flags and lengths, behind a right or wrong preface."""
    said = rng.choice([PREFACE, PREFACE, b"", rng.randbytes(24)])
    for _ in range(rng.randrange(6)):
        body = rng.randbytes(rng.choice([0, 4, 6, 8, 100, 5000]))
        length = len(body) if rng.random() < 0.8 else rng.randrange(1 << 24)
        kind, flags, stream = rng.randrange(11), rng.randrange(256), rng.choice([0, 1, 3, 1 << 30])
        said += length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
    return said


def test_what_is_no_grpc_is_hung_up_on(scene: Scene, turns: Turns) -> None:
    rng = random.Random("http2")
    host, port = scene.secure.address.split(":")
    context = ssl.create_default_context(cafile=str(scene.secure.authority.ca))
    context.set_alpn_protocols(["h2"])
    control = str(scene.secure.process.run_dir / protocol.CONTROL_SOCKET)
    for number in turns():
        with suppress(OSError), ExitStack() as stack:
            if number % 3 == 0:
                raw = stack.enter_context(socket.socket(socket.AF_UNIX))
                raw.settimeout(WAIT_S)
                raw.connect(control)
            else:
                raw = stack.enter_context(socket.create_connection((host, int(port)), WAIT_S))
            if number % 3 == 1:
                raw = stack.enter_context(context.wrap_socket(raw, server_hostname="localhost"))
            raw.sendall(http2(rng))


# ---- shared memory -------------------------------------------------------------------------------


def test_a_hello_of_shared_memory_is_right_or_refused(scene: Scene, turns: Turns) -> None:
    rng = random.Random("hello")
    path = str(scene.secure.process.run_dir / protocol.TRANSPORT_SOCKET)
    for _ in turns():
        hostile = Hostile(path)
        with closing(Mailbox(hostile.incarnation)) as mailbox:
            changed = bytearray(encode(hostile.hello()))
            for _ in range(rng.randrange(1, 6)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            noise = rng.randbytes(rng.randrange(1, 400))
            hostile.send(rng.choice([bytes(changed), noise]), [mailbox.fd] * rng.randrange(4))
            hostile.close()


def test_what_follows_a_hello_is_right_or_the_end(scene: Scene, turns: Turns) -> None:
    rng = random.Random("packets")
    path = str(scene.secure.process.run_dir / protocol.TRANSPORT_SOCKET)
    for _ in turns():
        hostile = Hostile(path)
        with closing(Mailbox(hostile.incarnation)) as mailbox:
            hello = hostile.hello()
            hostile.send(encode(hello), [mailbox.fd])
            message, fds = hostile.answer()
            handshake.close_all(fds)
            assert isinstance(message, Hello)
            for _ in range(rng.randrange(1, 4)):
                changed = bytearray(encode(hello))
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
                packets = [bytes(changed), rng.randbytes(rng.randrange(1, 200)), b"\0", b""]
                hostile.send(rng.choice(packets), [mailbox.fd] * rng.randrange(3))
            hostile.close()


def notification(rng: random.Random, largest: int) -> bytes:
    """Return what may be a client's name, in length alone."""
    return rng.randbytes(rng.choice([0, 1, 15, 16, 17, rng.randrange(1, largest)]))


def test_a_notification_names_a_client_and_no_more(scene: Scene, turns: Turns) -> None:
    rng = random.Random("notifications")
    path = str(scene.secure.process.run_dir / protocol.TRANSPORT_SOCKET)
    for _ in turns():
        with HostTransport("fuzz") as transport:
            endpoint = transport.connect(path, WAIT_S)
            for _ in range(rng.randrange(1, 30)):
                with suppress(KVPoolError):
                    endpoint.notify(notification(rng, 900))


# ---- UCX -----------------------------------------------------------------------------------------


@pytest.mark.ucx
def test_a_note_of_ucx_is_right_or_the_end(scene: Scene, turns: Turns) -> None:
    rng = random.Random("notes")
    with UcxTransport("fuzz") as transport:
        for _ in turns():
            with closing(transport.connect(scene.ways["ucx"], WAIT_S)) as endpoint:
                assert isinstance(endpoint, UcxEndpoint)
                for _ in range(rng.randrange(1, 8)):
                    noise = notification(rng, 400)
                    note = rng.choice([b"\0" + noise, b"\1" + noise, noise, b""])
                    with suppress(KVPoolError):
                        endpoint.connection.put((), WAIT_S, note)


@pytest.mark.ucx
def test_noise_on_the_ports_of_ucx_is_no_peer(scene: Scene, turns: Turns) -> None:
    rng = random.Random("ports")
    ports = listening_ports(scene.secure.process.pid)
    grpc_port = int(scene.secure.address.split(":")[1])
    ports = [port for port in ports if port not in (grpc_port, scene.secure.http)]
    assert ports
    for _ in turns():
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", rng.choice(ports)), WAIT_S) as raw,
        ):
            raw.sendall(rng.randbytes(rng.choice([0, 1, 8, 16, 300, 5000])))
