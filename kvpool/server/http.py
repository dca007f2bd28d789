"""The HTTP port of a server: ``/metrics``, ``/healthz`` and ``/readyz``.

Owns one listening thread and a few that answer; knows nothing of blocks, reads no body, changes
nothing. Healthy: the event loop turns. Ready: clients are served, and the node is in its ring.
Who calls it: the server's main.
"""

import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from kvpool.clock import Clock
from kvpool.errors import ConfigError
from kvpool.metrics import Metrics

logger = logging.getLogger(__name__)

# Who sends or takes nothing for so long is let go.
_SILENCE_S: Final = 5.0
# Requests at once; one more is closed unanswered.
_REQUESTS_MAX: Final = 32
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

    def turn(self) -> None:
        """Say that the loop turns. To be called from it, every second or so."""
        self._turned = self._clock.now()

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
            "/readyz": lambda: _said(health.hangs() or health.not_ready),
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
        self._thread.join(_SILENCE_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Prometheus comes again; nobody waits for those that are slow.
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(_REQUESTS_MAX)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def process_request(self, request: object, client_address: object) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a request over HTTP ended early")


def _said(trouble: str) -> tuple[HTTPStatus, str, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
    return status, "text/plain; charset=utf-8", f"{trouble or 'ok'}\n".encode()


def _handler(
    answers: dict[str, Callable[[], tuple[HTTPStatus, str, bytes]]],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            super().setup()
            self.connection.settimeout(_SILENCE_S)

        def do_GET(self) -> None:
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
