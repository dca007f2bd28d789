"""The HTTP port says how the server is, and nothing that is sent to it ends it."""

import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from kvpool.clock import ManualClock
from kvpool.errors import ConfigError
from kvpool.metrics import Metrics
from kvpool.server.http import STUCK_S, Health, HttpServer


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.health = Health(self.clock)
        self.server = HttpServer("127.0.0.1", 0, Metrics(), self.health)

    def get(self, path: str) -> tuple[int, str]:
        with httpx.Client(trust_env=False, timeout=30) as client:
            answer = client.get(f"http://127.0.0.1:{self.server.port}{path}")
            return answer.status_code, answer.text


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.server.close()
    made.server.close()


def test_it_says_when_it_is_ready(scene: Scene) -> None:
    assert scene.get("/healthz") == (200, "ok\n")
    assert scene.get("/readyz") == (503, "it is starting\n")
    scene.health.not_ready = ""
    assert scene.get("/readyz?verbose") == (200, "ok\n")


def test_a_loop_that_hangs_is_neither_healthy_nor_ready(scene: Scene) -> None:
    scene.health.not_ready = ""
    scene.clock.advance(STUCK_S + 1)
    for path in ("/healthz", "/readyz"):
        assert scene.get(path) == (503, "the event loop hangs for 11 s\n")
    scene.health.turn()
    assert scene.get("/healthz") == (200, "ok\n")


def test_metrics_are_prometheus_text(scene: Scene) -> None:
    status, text = scene.get("/metrics")
    assert status == 200
    assert "# TYPE kvpool_server_client_count gauge" in text


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0" * 1000,
        b"GET\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx",
        b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
    ],
)
def test_garbage_is_refused_and_changes_nothing(scene: Scene, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", scene.server.port), 30) as connection:
        answer = b""
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                answer += piece
        except OSError:
            pass  # it hung up before it had read all of it
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert scene.get("/healthz") == (200, "ok\n")


def test_connections_that_say_nothing_do_not_take_it_from_others(scene: Scene) -> None:
    silent = [socket.create_connection(("127.0.0.1", scene.server.port), 30) for _ in range(8)]
    try:
        assert scene.get("/healthz") == (200, "ok\n")
    finally:
        for connection in silent:
            connection.close()


def test_an_address_that_is_taken_is_named(scene: Scene) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="cannot be had for HTTP"):
        HttpServer("127.0.0.1", scene.server.port, Metrics(), scene.health)
    assert threading.active_count() <= before
