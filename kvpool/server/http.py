"""The HTTP port of a server: ``/metrics``, ``/healthz`` and ``/readyz``.

Owns one listening thread and a few that answer; knows nothing of blocks, reads no body, changes
nothing. Healthy: the event loop turns. Ready: clients are served, the node is in its ring, and its
upkeep works. Threads, so that it answers while the loop hangs; Python's own server, with the limits
that it has not: a connection has a time and a size for all that it asks, and if there are too many,
the one that has kept a place for longest without having asked goes. Who calls it: the server's main.
"""

import contextlib
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

from kvpool.clock import Clock
from kvpool.errors import ConfigError, UsageError
from kvpool.metrics import Metrics

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

# For all that a connection asks, and then for what it is answered: however slowly it does.
REQUEST_S: Final = 5.0
# Bytes that it may send for that: a request of Prometheus has some 300.
REQUEST_BYTES_MAX: Final = 16 << 10
# Connections at once.
CONNECTIONS_MAX: Final = 32
# Connections that wait to be taken.
_BACKLOG: Final = 128
# After a connection could not be taken, say for want of descriptors: it is tried again, not spun on.
_PAUSE_S: Final = 0.1
# A loop that did not turn for so long hangs.
STUCK_S: Final = 10.0


class Health:
    """What the event loop says of itself, and the HTTP threads read. Safe from any thread.

    Attributes:
        not_ready: Why nobody should send clients here; empty: all is well.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turned = clock.now()
        self.not_ready = "it is starting"
        self._troubles: Mapping[str, str] = {}

    def turn(self) -> None:
        """Say that the loop turns. To be called from it, every second or so."""
        self._turned = self._clock.now()

    def trouble(self, task: str, why: str) -> None:
        """Say that a task of the upkeep does not work; with an empty ``why``: it does. In the loop."""
        others = {name: said for name, said in self._troubles.items() if name != task}
        self._troubles = {**others, task: why} if why else others

    def troubles(self) -> str:
        """Return what of the upkeep does not work; empty: all of it does."""
        return "; ".join(f"{task} fails: {why}" for task, why in self._troubles.items())

    def hangs(self) -> str:
        """Return why the process is sick; empty: it is well."""
        silent_s = self._clock.now() - self._turned
        return f"the event loop hangs for {silent_s:.0f} s" if silent_s > STUCK_S else ""


class HttpServer:
    """Answers at an address from construction to ``close``.

    Args:
        host, port: Port 0 picks a free one.
        metrics: Rendered for each request.
        health: Looked at for each request.

    Attributes:
        port: The one it listens at.

    Raises:
        ConfigError: The address cannot be had.
    """

    def __init__(self, host: str, port: int, metrics: Metrics, health: Health) -> None:
        answers: dict[str, Callable[[], tuple[HTTPStatus, str, bytes]]] = {
            "/metrics": lambda: (
                HTTPStatus.OK,
                "text/plain; version=0.0.4; charset=utf-8",
                metrics.expose(),
            ),
            "/healthz": lambda: _said(health.hangs()),
            "/readyz": lambda: _said(health.hangs() or health.not_ready or health.troubles()),
        }
        try:
            self._server = _Server((host, port), _handler(answers))
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} cannot be had for HTTP, choose another listen.http: {error.strerror}",
                key="listen.http",
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvpool-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop to listen. Idempotent; bounded: answers under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(REQUEST_S)


class _Server(ThreadingHTTPServer):
    """Takes connections, so many at once. ``_lock`` guards ``_asking`` and ``_count``."""

    daemon_threads = True
    # Prometheus comes again; nobody waits for those that are slow.
    block_on_close = False
    request_queue_size = _BACKLOG

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        # Connections that have not asked yet, the oldest first, and how many there are of all.
        self._asking: dict[socket.socket, None] = {}
        self._count = 0
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_S)
            raise

    def process_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        with self._lock:
            full = self._count >= CONNECTIONS_MAX
            oldest = next(iter(self._asking), None) if full else None
            if oldest is not None:
                del self._asking[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends, and closes it
            if not full or oldest is not None:
                self._asking[request] = None
                self._count += 1
        if full and oldest is None:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._leave(request)
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def asked(self, request: socket.socket) -> None:
        """Take note that a connection has asked, and is to be answered."""
        with self._lock:
            self._asking.pop(request, None)

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._asking.pop(request, None)
            self._count -= 1

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a request over HTTP ended early")


class _Request(io.RawIOBase):
    """What a connection sends: until a time, and up to a size."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + REQUEST_S
        self._left = REQUEST_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, room: "WriteableBuffer", /) -> int:
        """Wait for bytes. Raises TimeoutError: the time is over; UsageError: it is too much."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        view = memoryview(room).cast("B")[: self._left]
        if not view:
            raise UsageError(f"a request of more than {REQUEST_BYTES_MAX} bytes: send less")
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(view)
        self._left -= count
        return count


def _said(trouble: str) -> tuple[HTTPStatus, str, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
    return status, "text/plain; charset=utf-8", f"{trouble or 'ok'}\n".encode()


def _handler(
    answers: dict[str, Callable[[], tuple[HTTPStatus, str, bytes]]],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            super().setup()
            self.rfile = io.BufferedReader(_Request(self.connection))

        def do_GET(self) -> None:
            assert isinstance(self.server, _Server)
            self.server.asked(self.connection)
            self.connection.settimeout(REQUEST_S)
            answer = answers.get(self.path.split("?", 1)[0])
            if answer is None:
                self.send_error(HTTPStatus.NOT_FOUND, f"here are {', '.join(answers)}")
                return
            status, kind, body = answer()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            logger.debug("%s", format % arguments)

    return Handler
