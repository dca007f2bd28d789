"""Peers of the host transport that mean harm."""

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import platform
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.block import new_incarnation
from kvpool.completion import Deadline
from kvpool.errors import PeerUnreachableError, UsageError
from kvpool.testing.pair import Collected
from kvpool.transfer import handshake
from kvpool.transfer.base import Endpoint
from kvpool.transfer.descriptor import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Refusal,
    RegionOffer,
    decode,
    encode,
)
from kvpool.transfer.host import HostTransport
from kvpool.transfer.mailbox import RECORD_COUNT, Mailbox
from tests.conftest import Count
from tests.faults.peer import LAYOUT, WAIT_S
from tests.waiting import until


@pytest.fixture
def transport() -> Iterator[HostTransport]:
    with HostTransport() as transport:
        yield transport


def fd_count() -> int:
    """Of this process; what earlier tests had may still be on its way out, so it may fall."""
    return len(os.listdir("/proc/self/fd"))


class Hostile:
    """Speaks to a transport's socket by hand."""

    def __init__(self, path: str) -> None:
        self.socket = handshake.connect(path, Deadline(WAIT_S))
        self.socket.settimeout(WAIT_S)
        self.incarnation = new_incarnation()

    def send(self, payload: bytes, fds: list[int]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.socket, [payload], fds, socket.MSG_NOSIGNAL)

    def hello(self, **changes: object) -> Hello:
        fields: dict[str, object] = {
            "magic": "kvpool-host",
            "version": PROTOCOL_VERSION,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "record_count": RECORD_COUNT,
            "record_bytes": 1024,
            "regions": [],
        }
        return Hello(**(fields | changes))  # type: ignore[arg-type]

    def answer(self) -> tuple[Message | None, list[int]]:
        """Return the transport's next message; None at the end."""
        with contextlib.suppress(ConnectionResetError):
            payload, fds = handshake.receive(self.socket)
            if payload:
                return decode(payload), fds
        return None, []

    def refused(self) -> bool:
        """Say whether the transport closed the connection, perhaps after a refusal."""
        message, fds = self.answer()
        handshake.close_all(fds)
        if isinstance(message, Refusal):
            message, fds = self.answer()
            handshake.close_all(fds)
        return message is None

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def target(transport: HostTransport, tmp_path: Path) -> Iterator["Target"]:
    yield Target(transport, str(tmp_path / "target"))


class Target:
    """A listening transport with one arena, and a check that it is unharmed."""

    def __init__(self, transport: HostTransport, path: str) -> None:
        self.transport = transport
        self.connected = Collected()
        self.path = transport.listen(path, self.connected)
        self.arena = Arena(LAYOUT, 2, transport.incarnation)
        transport.register(self.arena)

    def require_healthy(self) -> None:
        """A well-behaved peer can still connect and read."""
        with HostTransport() as friend:
            endpoint = friend.connect(self.path, WAIT_S, self.transport.incarnation)
            assert len(endpoint.regions()) == 1
            before = len(self.connected.items)
            assert endpoint.notify(b"hello")
            assert len(self.connected.wait(max(before, 1))) >= 1


def test_a_region_cannot_be_written_or_cut_by_a_peer(target: Target) -> None:
    hostile = Hostile(target.path)
    mailbox = Mailbox(hostile.incarnation)
    hostile.send(encode(hostile.hello()), [mailbox.fd])
    message, fds = hostile.answer()
    assert isinstance(message, Hello)
    assert len(fds) == 2  # the ring and the arena
    for fd in fds:
        size = os.fstat(fd).st_size
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size + 4096)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"harm", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        # The same memory by another name: a writable descriptor is no writable mapping.
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(again, size, mmap.MAP_SHARED, mmap.PROT_WRITE | mmap.PROT_READ)
        os.close(again)
        readable = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        with pytest.raises(OSError, match="mprotect"):
            make_writable(readable)
        readable.close()
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    handshake.close_all(fds)
    hostile.close()
    target.require_healthy()


def make_writable(mapping: mmap.mmap) -> None:
    """Ask the kernel to let us write to a read-only mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    read_write = 3
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), read_write) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def test_hellos_that_lie_are_refused(target: Target, tmp_path: Path) -> None:
    before = fd_count()
    plain = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 1 << 20)
    null = os.open("/dev/zero", os.O_RDWR)
    offer = RegionOffer(region=0, slot_count=2, slot_bytes=LAYOUT.block_bytes)
    cases: list[tuple[dict[str, object], list[str]]] = [
        ({"version": PROTOCOL_VERSION + 1}, ["ring"]),
        ({"magic": "other"}, ["ring"]),
        ({"incarnation": b"short"}, ["ring"]),
        ({"incarnation": bytes(16)}, ["ring"]),
        ({"pid": 1}, ["ring"]),
        ({"record_count": 2048}, []),
        ({}, []),
        ({}, ["ring", "ring"]),
        ({}, ["plain"]),
        ({}, ["null"]),
        ({"regions": [offer]}, ["ring"]),
        ({"regions": [offer]}, ["ring", "plain"]),
        ({"regions": [offer]}, ["ring", "null"]),
        ({"regions": [offer]}, ["ring", "ring"]),
        ({"regions": [RegionOffer(region=1, slot_count=2, slot_bytes=8)]}, ["ring", "arena"]),
        ({"regions": [RegionOffer(region=0, slot_count=3, slot_bytes=8)]}, ["ring", "arena"]),
    ]
    for changes, names in cases:
        hostile = Hostile(target.path)
        mailbox, arena = Mailbox(hostile.incarnation), Arena(LAYOUT, 2, hostile.incarnation)
        known = {"ring": mailbox.fd, "plain": plain, "null": null, "arena": arena.fd}
        hostile.send(encode(hostile.hello(**changes)), [known[name] for name in names])
        assert hostile.refused(), (changes, names)
        hostile.close()
        mailbox.close()
        arena.close()
        del mailbox, arena
    os.close(plain)
    os.close(null)
    assert target.connected.items == []
    target.require_healthy()
    until(lambda: fd_count() <= before)


def test_a_handshake_that_fails_keeps_nothing_of_the_peer(
    transport: HostTransport, tmp_path: Path
) -> None:
    """Not even for whoever keeps its error, and without a garbage collection."""
    path = str(tmp_path / "liar")
    incarnation = new_incarnation()
    mailbox, arena = Mailbox(incarnation), Arena(LAYOUT, 2, incarnation)
    lie = RegionOffer(region=0, slot_count=3, slot_bytes=LAYOUT.block_bytes)

    def answer(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        handshake.close_all(handshake.receive(sock)[1])
        hello = Hello(
            magic="kvpool-host",
            version=PROTOCOL_VERSION,
            incarnation=incarnation,
            pid=os.getpid(),
            record_count=RECORD_COUNT,
            record_bytes=1024,
            regions=[lie],
        )
        handshake.send(sock, hello, [mailbox.fd, arena.fd])
        sock.close()

    before = (mapped(), fd_count())
    gc.disable()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(1)
            thread = threading.Thread(target=answer, args=(listener,))
            thread.start()
            with pytest.raises(PeerUnreachableError, match="descriptor") as caught:
                transport.connect(path, WAIT_S)
            thread.join(WAIT_S)
        until(lambda: mapped() <= before[0] and fd_count() <= before[1])
        assert caught.value.__cause__ is not None
    finally:
        gc.enable()
    mailbox.close()
    arena.close()


def mapped() -> int:
    """Return how many shared mappings there are."""
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_garbage_hellos_harm_nothing(target: Target, count: Count) -> None:
    random_ = random.Random(5)
    before = fd_count()
    first = Hostile(target.path)
    valid = encode(first.hello())
    first.close()
    for _ in range(count(500, 20000)):
        hostile = Hostile(target.path)
        mailbox = Mailbox(hostile.incarnation)
        if random_.random() < 0.5:
            garbage = random_.randbytes(random_.randrange(1, 400))
        else:
            damaged = bytearray(valid)
            for _ in range(random_.randrange(1, 6)):
                damaged[random_.randrange(len(damaged))] = random_.randrange(256)
            garbage = bytes(damaged)
        hostile.send(garbage, [mailbox.fd] * random_.randrange(4))
        hostile.close()
        del mailbox
    target.require_healthy()
    until(lambda: fd_count() <= before)


def test_oversized_packets_and_silence(target: Target) -> None:
    before = fd_count()
    silent = [Hostile(target.path) for _ in range(8)]
    large = Hostile(target.path)
    large.send(bytes(100_000), [])
    assert large.refused()
    many = Hostile(target.path)
    many.send(b"x", [0] * 200)
    assert many.refused()
    target.require_healthy()
    for hostile in (*silent, large, many):
        hostile.close()
    until(lambda: fd_count() <= before)


def test_harm_after_the_handshake_ends_that_connection_only(target: Target) -> None:
    arena_fd = target.arena.fd
    attacks: list[Callable[[Hostile], None]] = [
        lambda hostile: hostile.send(b"garbage", []),
        lambda hostile: hostile.send(encode(hostile.hello()), []),
        lambda hostile: hostile.send(
            encode(RegionOffer(region=0, slot_count=2, slot_bytes=LAYOUT.block_bytes)), [arena_fd]
        ),
        lambda hostile: hostile.send(encode(RegionOffer(region=0, slot_count=2, slot_bytes=8)), []),
        lambda hostile: hostile.send(b"\0" * 20000, []),
        lambda hostile: hostile.send(b"\0", [0, 1, 2]),
    ]
    before = fd_count()
    for attack in attacks:
        hostile = Hostile(target.path)
        mailbox = Mailbox(hostile.incarnation)
        hostile.send(encode(hostile.hello()), [mailbox.fd])
        message, fds = hostile.answer()
        assert isinstance(message, Hello)
        handshake.close_all(fds)
        endpoint = target.connected.wait(1)[-1]
        assert isinstance(endpoint, Endpoint)
        attack(hostile)
        until(lambda endpoint=endpoint: not endpoint.alive())  # type: ignore[misc]
        hostile.close()
        mailbox.close()
        del mailbox
    target.require_healthy()
    until(lambda: fd_count() <= before)


def test_a_flood_of_wakes_does_not_stop_the_others(target: Target) -> None:
    hostile = Hostile(target.path)
    mailbox = Mailbox(hostile.incarnation)
    hostile.send(encode(hostile.hello()), [mailbox.fd])
    hostile.answer()
    stop = threading.Event()

    def flood() -> None:
        hostile.socket.setblocking(False)
        while not stop.is_set():
            with contextlib.suppress(OSError):
                hostile.socket.send(b"\0")

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        target.require_healthy()
    finally:
        stop.set()
        thread.join(WAIT_S)
    hostile.close()


# setresuid of the calling thread alone: libc's function changes every thread of the process.
SETRESUID = {"x86_64": 117, "aarch64": 147}.get(platform.machine(), 0)


@pytest.mark.skipif(
    os.geteuid() != 0 or not SETRESUID, reason="needs root, to connect as another user"
)
def test_another_users_process_is_refused(target: Target) -> None:
    os.chmod(target.path, 0o666)  # otherwise the file's mode refuses it before we do
    for folder in Path(target.path).parents:
        folder.chmod(folder.stat().st_mode | 0o055)
    refused: list[bool] = []

    def connect() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.syscall(SETRESUID, 65534, 65534, 65534) == 0
        hostile = Hostile(target.path)
        mailbox = Mailbox(hostile.incarnation)
        hostile.send(encode(hostile.hello()), [mailbox.fd])
        refused.append(hostile.answer() == (None, []))
        hostile.close()

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join(WAIT_S)
    assert refused == [True]
    assert target.connected.items == []
    target.require_healthy()


def test_a_callback_cannot_wait_for_a_connection(target: Target) -> None:
    raised = Collected()

    def connect(endpoint: Endpoint) -> None:
        try:
            target.transport.connect(target.path, WAIT_S)
        except UsageError as error:
            raised(error)

    with HostTransport() as friend:
        endpoint = friend.connect(target.path, WAIT_S)
        at_target = target.connected.wait(1)[0]
        assert isinstance(at_target, Endpoint)
        at_target.on_lost(connect)
        endpoint.close()
        raised.wait(1)
