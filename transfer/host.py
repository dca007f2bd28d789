"""The transport between processes of one host: arenas mapped read-only, bytes pulled, no server.

Owns a unix socket at a path, the handshake, and the connections. Access is decided by the folder's
mode, the socket's mode 0600 and the peer's uid. Who calls it: the pool's server and client, and the
workers.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Final

from kvpool.arena import Arena
from kvpool.block import Incarnation, new_incarnation
from kvpool.completion import Deadline
from kvpool.errors import (
    ClosedError,
    CorruptionError,
    KVPoolError,
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.transfer import handshake
from kvpool.transfer.base import (
    NOTIFICATION_BYTES_MAX,
    Endpoint,
    RegionDescriptor,
    Transport,
)
from kvpool.transfer.descriptor import (
    PROTOCOL_MAGIC,
    PROTOCOL_VERSION,
    Hello,
    Refusal,
    RegionOffer,
    decode,
)
from kvpool.transfer.endpoint import REGIONS_MAX
from kvpool.transfer.engine import CopyEngine
from kvpool.transfer.forked import close_in_children
from kvpool.transfer.host_endpoint import HostEndpoint
from kvpool.transfer.mailbox import RECORD_COUNT, Mailbox
from kvpool.transfer.progress import ProgressLoop
from kvpool.transfer.registered import Registered

logger = logging.getLogger(__name__)

# Connections of one process, and those of them whose hello has not come yet.
ENDPOINTS_MAX: Final = 1024
_HANDSHAKES_MAX: Final = 64
_HANDSHAKE_TIMEOUT_S: Final = 5.0
# Pause when no descriptor is left for another connection.
_ACCEPT_PAUSE_S: Final = 0.1


class HostTransport(Transport):
    """See ``Transport``. Addresses are paths of unix sockets.

    Args:
        name: Names the threads.
        copy_threads: Threads that copy; bytes are copied without the GIL.

    One lock guards regions, endpoints and the listener; handshakes belong to the progress thread.
    """

    def __init__(
        self,
        name: str = "kvpool-host",
        *,
        copy_threads: int = 2,
        incarnation: Incarnation | None = None,
    ) -> None:
        self.incarnation = incarnation or new_incarnation()
        self._lock = threading.Lock()
        self._regions: list[tuple[RegionOffer, int]] = []
        self._registered = Registered()
        self._endpoints: set[HostEndpoint] = set()
        self._listener: socket.socket | None = None
        self._address: tuple[str, int] | None = None
        self._closed = False
        self._handshakes: dict[int, socket.socket] = {}
        self._on_connect: Callable[[Endpoint], None] | None = None
        self._engine = CopyEngine(f"{name}-copy", threads=copy_threads)
        self._loop = ProgressLoop(f"{name}-progress")
        close_in_children(self)

    def register(self, arena: Arena, *, writable: bool = False) -> RegionDescriptor:
        """Let peers map an arena, those that come and those that are connected."""
        if arena.incarnation != self.incarnation:
            raise UsageError("open the arena with the transport's incarnation")
        with self._lock:
            self._require_open()
            number = len(self._regions)
            if number >= REGIONS_MAX:
                raise UsageError(f"{REGIONS_MAX} regions are registered: share one arena")
            # Our own descriptor: the arena may be closed before the transport.
            self._regions.append((RegionOffer.of(number, arena), os.dup(arena.fd)))
            self._registered.add(arena, writable)
        self._loop.post(self._tell_regions)
        return RegionDescriptor(
            self.incarnation, number, arena.slot_count, arena.layout.block_bytes
        )

    def listen(self, address: str, on_connect: Callable[[Endpoint], None]) -> str:
        """Listen at a path whose folder is ours alone. The socket file goes with ``close``."""
        with self._lock:
            self._require_open()
            if self._listener is not None:
                raise UsageError("this transport listens already")
            listener = self._listener = handshake.listen(address)
            self._address = (address, os.stat(address).st_ino)
        self._on_connect = on_connect
        self._loop.post(lambda: self._watch_listener(listener))
        return address

    def connect(
        self, address: str, timeout_s: float, expected: Incarnation | None = None
    ) -> Endpoint:
        """Connect to the process that listens at a path. Blocks: not from a callback."""
        if self._loop.on_thread():
            raise UsageError("a callback cannot wait for a connection: use a thread")
        if "://" in address:
            raise UsageError(f"{address} is no path: both sides need the same --transport")
        with self._lock:
            self._require_open()
        deadline = Deadline(timeout_s)
        sock = handshake.connect(address, deadline)
        try:
            endpoint = self._greet(sock, address, deadline, expected)
        except BaseException:
            sock.close()
            raise
        self._loop.post(endpoint.start)
        self._loop.post(self._tell_regions)
        return endpoint

    def close(self) -> None:
        """Close the listener, all endpoints, and the threads."""
        if self._loop.on_thread():
            raise UsageError("a callback cannot close the transport that calls it")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            endpoints = list(self._endpoints)
        self._loop.run(self._stop_listening, _HANDSHAKE_TIMEOUT_S)
        for endpoint in endpoints:
            endpoint.close()
        self._loop.close()
        self._engine.close()
        with self._lock:
            for _, fd in self._regions:
                os.close(fd)
            self._regions = []

    def after_fork(self) -> None:
        """Be closed in a child; see ``forked``. The peers stay the parent's."""
        self._lock = threading.Lock()
        self._closed = True
        self._registered.after_fork()
        for endpoint in list(self._endpoints):
            endpoint.after_fork()
        self._engine.after_fork()
        self._loop.after_fork()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the transport is closed")

    # ---- handshake ------------------------------------------------------------------------------

    def _hello(self, mailbox: Mailbox) -> tuple[Hello, list[int]]:
        """Our hello, and the descriptors that go with it."""
        with self._lock:
            regions = list(self._regions)
        hello = Hello(
            magic=PROTOCOL_MAGIC,
            version=PROTOCOL_VERSION,
            incarnation=self.incarnation,
            pid=os.getpid(),
            record_count=RECORD_COUNT,
            record_bytes=NOTIFICATION_BYTES_MAX,
            regions=[offer for offer, _ in regions],
        )
        return hello, [mailbox.fd, *(fd for _, fd in regions)]

    def _greet(
        self,
        sock: socket.socket,
        address: str,
        deadline: Deadline,
        expected: Incarnation | None,
    ) -> HostEndpoint:
        """Run the connecting side's handshake, blocking."""
        pid = handshake.peer_pid(sock)
        mailbox = Mailbox(self.incarnation)
        hello, ours = self._hello(mailbox)
        fds: list[int] = []
        adopted = False
        try:
            handshake.send(sock, hello, ours)
            sock.settimeout(max(deadline.remaining_s(), 0.001))
            payload, fds = handshake.receive(sock)
            if not payload:
                raise PeerUnreachableError(f"{address} closed the connection")
            message = decode(payload)
            if isinstance(message, Refusal):
                raise PeerUnreachableError(f"{address} refused: {message.reason}")
            if not isinstance(message, Hello):
                raise CorruptionError("the peer did not answer with a hello")
            if expected is not None and message.incarnation != expected:
                raise StaleIncarnationError(f"{address} is another run than the one expected")
            endpoint = self._adopt(sock, pid, message, fds, mailbox, len(ours) - 1)
            adopted = True
            return endpoint
        except (TimeoutError, BlockingIOError) as error:
            raise TransferTimeoutError(f"no hello from {address} in time") from error
        except (OSError, CorruptionError) as error:
            # Without its frames: whoever keeps the error would keep what the peer sent mapped.
            raise PeerUnreachableError(f"{address}: {error}") from error.with_traceback(None)
        finally:
            handshake.close_all(fds)
            if not adopted:
                mailbox.close()

    def _adopt(
        self,
        sock: socket.socket,
        pid: int,
        hello: Hello,
        fds: list[int],
        mailbox: Mailbox,
        told: int,
    ) -> HostEndpoint:
        """Make an endpoint of a valid hello. The descriptors stay the caller's to close."""
        if hello.pid != pid or len(fds) != 1 + len(hello.regions):
            raise CorruptionError("the peer's hello does not fit what came with it")
        peer = Incarnation(hello.incarnation)
        mailbox.attach(fds[0], peer)
        endpoint = HostEndpoint(
            peer,
            pid,
            self._engine,
            self._loop,
            sock,
            mailbox,
            told,
            self._registered,
            self._forget,
        )
        try:
            for offer, fd in zip(hello.regions, fds[1:], strict=True):
                region = RegionDescriptor(peer, offer.region, offer.slot_count, offer.slot_bytes)
                endpoint.add_region(region, fd)
            with self._lock:
                self._require_open()
                if len(self._endpoints) >= ENDPOINTS_MAX:
                    raise PeerUnreachableError(f"{ENDPOINTS_MAX} peers are connected")
                self._endpoints.add(endpoint)
        except KVPoolError:
            endpoint.close()
            raise
        return endpoint

    def _forget(self, endpoint: HostEndpoint) -> None:
        with self._lock:
            self._endpoints.discard(endpoint)

    # ---- the progress thread ---------------------------------------------------------------------

    def _tell_regions(self) -> None:
        with self._lock:
            endpoints, regions = list(self._endpoints), list(self._regions)
        for endpoint in endpoints:
            endpoint.tell_regions(regions)

    def _watch_listener(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.watch(
                listener.fileno(), selectors.EVENT_READ, lambda: self._accept(listener)
            )

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.error("cannot accept a connection: %s", error)
            self._loop.unwatch(listener.fileno())
            self._loop.call_later(_ACCEPT_PAUSE_S, lambda: self._watch_listener(listener))
            return
        sock.setblocking(False)
        try:
            pid = handshake.peer_pid(sock)
        except (KVPoolError, OSError) as error:
            logger.warning("refused a connection: %s", error)
            sock.close()
            return
        if len(self._handshakes) >= _HANDSHAKES_MAX:
            logger.warning("refused process %d: too many connections without a hello", pid)
            sock.close()
            return
        number = sock.fileno()
        self._handshakes[number] = sock
        self._loop.watch(number, selectors.EVENT_READ, lambda: self._answer(sock, pid))
        self._loop.call_later(_HANDSHAKE_TIMEOUT_S, lambda: self._drop(sock))

    def _drop(self, sock: socket.socket) -> None:
        """End a handshake that has not become an endpoint."""
        number = sock.fileno()
        if number >= 0 and self._handshakes.get(number) is sock:
            del self._handshakes[number]
            self._loop.unwatch(number)
            sock.close()

    def _answer(self, sock: socket.socket, pid: int) -> None:
        """Run the listening side's handshake: a hello has come, or garbage, or the end."""
        number = sock.fileno()
        fds: list[int] = []
        try:
            payload, fds = handshake.receive(sock)
            hello = decode(payload)
            if not isinstance(hello, Hello):
                raise CorruptionError("the first message is no hello")
            mailbox = Mailbox(self.incarnation)
            ours, our_fds = self._hello(mailbox)
            endpoint = self._adopt(sock, pid, hello, fds, mailbox, len(our_fds) - 1)
        except BlockingIOError:
            return
        except (KVPoolError, OSError) as error:
            # As text: whoever keeps the record would keep what the peer sent mapped.
            logger.warning("refused process %d: %s", pid, str(error))
            with contextlib.suppress(OSError, ValueError):
                handshake.send(sock, Refusal(reason=str(error)[:256]))
            self._handshakes.pop(number, None)
            self._loop.unwatch(number)
            sock.close()
            return
        finally:
            handshake.close_all(fds)
        del self._handshakes[number]
        self._loop.unwatch(number)
        try:
            handshake.send(sock, ours, our_fds)
        except OSError as error:
            endpoint.lose(PeerUnreachableError(f"process {pid} is gone: {error}"))
            return
        try:
            if self._on_connect is not None:
                self._on_connect(endpoint)
        finally:  # it is watched, whatever the callback did
            endpoint.start()
            self._tell_regions()

    def _stop_listening(self) -> None:
        for sock in list(self._handshakes.values()):
            self._drop(sock)
        listener, self._listener = self._listener, None
        if listener is None or self._address is None:
            return
        self._loop.unwatch(listener.fileno())
        listener.close()
        path, inode = self._address
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)
