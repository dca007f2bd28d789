"""kvpool-serve under bytes that are no HTTP, bodies without measure and clients that hang up.

The same questions as in ``test_http_fuzz.py``, for what is below the app: the socket, the HTTP
parser and the memory of the process.
"""

import contextlib
import http.client
import json
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.serve_process import WAIT_S, ServeProcess
from tests.tiny_model import tiny_model

MIB = 1 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"))
    with ServeProcess("--kv-bytes", "8MiB", model=model) as server:
        server.complete("warm", max_tokens=2)
        server.wait_idle()
        yield server


def address(served: ServeProcess) -> tuple[str, int]:
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


def peak_bytes(served: ServeProcess) -> int:
    """The most memory that the process with the HTTP server has had."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_50_megabytes_get_a_413_and_no_memory(served: ServeProcess) -> None:
    before = peak_bytes(served)
    body = b'{"prompt": "' + b"a" * (50 * MIB) + b'"}'
    for _ in range(3):
        connection = http.client.HTTPConnection(*address(served), timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", body)
            answer = connection.getresponse()
            assert answer.status == 413
            assert json.loads(answer.read())["error"]["code"] == "body_too_large"
    assert peak_bytes(served) - before < 32 * MIB


def test_the_connection_is_good_for_more_after_an_error(served: ServeProcess) -> None:
    connection = http.client.HTTPConnection(*address(served), timeout=WAIT_S)
    with contextlib.closing(connection):
        for body, status in ((b"{", 400), (b'{"prompt": "a", "max_tokens": 1}', 200)) * 2:
            connection.request("POST", "/v1/completions", body)
            answer = connection.getresponse()
            assert answer.status == status
            answer.read()


def spoiled(draw: random.Random) -> tuple[bytes, bool]:
    """One thing that a client might send, and whether the server can tell that it has all of it."""
    fields: dict[str, object] = {
        "prompt": draw.choice(["Hello", "\xe9" * 9, [5, 6]] * 3 + ["", [10**9], 7, None]),
        "max_tokens": draw.choice([1, 3, 40] * 4 + [0, -1, 10**30, "x"]),
        "stream": draw.choice([True, False]),
        "n": draw.choice([1, 2, 3, 1, 2, 3, 200]),
        "stop": draw.choice([None, "e", ["a", "b"], [""]]),
        draw.choice(["temperature", "top_p", "seed", "logprobs"]): draw.choice([0, 1, -1, 1e300]),
    }
    keys = draw.sample([*fields], draw.randint(1, 3))
    body = json.dumps({key: fields[key] for key in {"prompt", "max_tokens", *keys}}).encode()
    if draw.random() < 0.2:
        at = draw.randrange(len(body))
        body = body[:at] + draw.randbytes(3) + body[at + 1 :]
    length = draw.choice([len(body)] * 20 + [0, len(body) + 5, -1, 10**12])
    route = draw.choice(["/v1/completions"] * 16 + ["/v1/chat/completions", "/tokenize", "/x", "*"])
    method = draw.choice(["POST"] * 30 + ["GET", "BREW", ""])
    lines = [f"{method} {route} HTTP/1.1", "host: a", "connection: close"]
    head = "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()
    whole = head + body
    kind = draw.random()
    if kind < 0.1:
        return draw.randbytes(draw.randrange(200)), False
    if kind < 0.2:
        at = draw.randrange(len(head))
        return head[:at] + draw.randbytes(2) + head[at:] + body, False
    if kind < 0.3:
        return whole[: draw.randrange(len(whole))], False
    return whole, length <= len(body)


def ask(served: ServeProcess, sent: bytes, whole: bool, patient: bool) -> bytes:
    """Send bytes and no more; return what came back, or hang up at once if not ``patient``."""
    with socket.create_connection(address(served), timeout=WAIT_S) as connection:
        got = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            if patient:
                if not whole:
                    connection.shutdown(socket.SHUT_WR)
                while more := connection.recv(65536):
                    got += more
        return got


def test_nothing_that_is_sent_breaks_the_server(served: ServeProcess, count: Count) -> None:
    answered = 0
    for seed in range(count(400, 20_000)):
        draw = random.Random(seed)
        sent, whole = spoiled(draw)
        got = ask(served, sent, whole, patient=draw.random() < 0.85)
        statuses = [int(code) for code in re.findall(rb"^HTTP/1\.1 (\d{3})", got, re.MULTILINE)]
        assert all(status < 500 for status in statuses), (seed, sent, got)
        answered += 200 in statuses
    assert answered > count(20, 1000), "the others were spoiled, not all of them"
    served.wait_idle()
    served.wait_healthy()
    assert served.complete("still here", max_tokens=2)["usage"]["completion_tokens"] == 2
    log = served.log.read_text()
    assert "Traceback" not in log, log[-4000:]
