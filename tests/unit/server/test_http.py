"""The HTTP port says how the server is, and nothing that is sent to it ends it."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from kvpool.clock import ManualClock
from kvpool.errors import ConfigError
from kvpool.metrics import Metrics
from kvpool.server import http
from kvpool.server.http import (
    CONNECTIONS_MAX,
    REQUEST_BYTES_MAX,
    STUCK_S,
    Health,
    HttpServer,
)
from tests.waiting import until

WAIT_S = 30.0


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


def test_what_fails_of_the_upkeep_is_not_ready_and_alive(scene: Scene) -> None:
    scene.health.not_ready = ""
    scene.health.trouble("leases", "ZeroDivisionError: x")
    assert scene.get("/readyz") == (503, "leases fails: ZeroDivisionError: x\n")
    assert scene.get("/healthz") == (200, "ok\n")
    scene.health.trouble("leases", "")
    assert scene.get("/readyz") == (200, "ok\n")


def keep_busy(scene: Scene, sent: bytes, count: int) -> list[socket.socket]:
    """Open connections that begin a request and do not end it."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection(("127.0.0.1", scene.server.port), WAIT_S))
        made[-1].sendall(sent)
    return made


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /healthz HTTP/1.1\r\nA: b\r\n"])
def test_who_keeps_a_place_without_asking_gives_way(
    scene: Scene, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections than there are places, all of them too slow: who asks is answered at once."""
    monkeypatch.setattr(http, "REQUEST_S", 2 * WAIT_S)
    before = threading.active_count()
    busy = keep_busy(scene, sent, 3 * CONNECTIONS_MAX)
    try:
        for _ in range(3):
            assert scene.get("/healthz") == (200, "ok\n")
        assert busy[0].recv(1) == b"", "the oldest went"
        newest = busy[-1]
        newest.setblocking(False)
        with pytest.raises(BlockingIOError):
            newest.recv(1)
        until(lambda: threading.active_count() <= before + CONNECTIONS_MAX + 1, "no more threads")
    finally:
        for connection in busy:
            connection.close()


def test_a_request_has_a_time_for_all_of_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not make it longer."""
    monkeypatch.setattr(http, "REQUEST_S", 1.0)
    [slow] = keep_busy(scene, b"GET /healthz HTTP/1.1\r\nA: ", 1)
    give_up = time.monotonic() + WAIT_S
    with slow:
        slow.settimeout(0.05)
        while True:
            assert time.monotonic() < give_up, "it is listened to without end"
            try:
                slow.sendall(b"b")
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break


def test_a_request_has_a_size(scene: Scene) -> None:
    """Less than Python's own server takes."""
    for size, answered in ((REQUEST_BYTES_MAX // 2, True), (REQUEST_BYTES_MAX + 1000, False)):
        [large] = keep_busy(scene, b"GET /healthz HTTP/1.1\r\nA: " + b"b" * size, 1)
        answer = b""
        with large, contextlib.suppress(OSError):
            large.sendall(b"\r\n\r\n")
            while piece := large.recv(65536):
                answer += piece
        assert (b" 200 " in answer.split(b"\r\n")[0]) is answered


def test_a_place_is_given_back_if_no_thread_can_be_had(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        for _ in range(2 * CONNECTIONS_MAX):
            refused = socket.create_connection(("127.0.0.1", scene.server.port), WAIT_S)
            with refused, contextlib.suppress(ConnectionResetError):
                assert refused.recv(1) == b""
    for _ in range(3 * CONNECTIONS_MAX):  # each might take the place of one that was not given back
        [asking] = keep_busy(scene, b"GET /healthz HTTP/1.1\r\n\r\n", 1)
        with asking:
            assert b" 200 " in asking.recv(100)


def test_an_address_that_is_taken_is_named(scene: Scene) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="cannot be had for HTTP"):
        HttpServer("127.0.0.1", scene.server.port, Metrics(), scene.health)
    assert threading.active_count() <= before
