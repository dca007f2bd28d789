"""Two prefill and two decode workers: requests are spread, outputs are exact, memory may be short."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve_clients import Client, Question, Questions
from tests.serve_process import Holdings, ServeProcess
from tests.stopped import stop
from tests.tiny_model import tiny_model
from tests.waiting import until

# What the requests of a test need is several times this.
BLOCKS = 24
BLOCK_BYTES = 3 * 2 * 2 * 16 * 8 * 4
LONG = 160
JOIN_S = 120.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def questions(tiny: Path) -> list[Question]:
    maker = Questions(tiny, seed=3)
    return [maker.make(20 + 5 * number, LONG) for number in range(8)]


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[ServeProcess]:
    flags = ("--kv-bytes", str(BLOCKS * BLOCK_BYTES), "--chunk-tokens", "32")
    with ServeProcess(*flags, model=tiny, prefill=2, decode=2) as server:
        assert server.status("decode").blocks == BLOCKS
        yield server


@pytest.fixture
def start(served: ServeProcess) -> Iterator[Holdings]:
    served.wait_healthy()
    start = served.wait_idle()
    yield start
    served.wait_healthy()
    assert served.wait_idle() == start


def parks(server: ServeProcess) -> int:
    return sum(server.status(name).parks for name in server.decode)


def parked(server: ServeProcess) -> int:
    return sum(server.status(name).parked for name in server.decode)


def test_eight_long_outputs_over_little_memory_are_exact(
    served: ServeProcess, start: Holdings, questions: list[Question]
) -> None:
    before = parks(served)
    tokens = {name: served.status(name).tokens for name in served.prefill + served.decode}
    clients = [
        Client(served.url, question, stream=number % 2 == 0)
        for number, question in enumerate(questions)
    ]
    for client in clients:
        client.join(JOIN_S)
        assert client.error is None
        assert client.text == client.question.answer
    assert parks(served) > before
    assert parked(served) == 0
    idle = [name for name, count in tokens.items() if served.status(name).tokens == count]
    assert not idle, "workers that had nothing to do"


def test_clients_that_leave_while_requests_are_parked(
    served: ServeProcess, start: Holdings, questions: list[Question]
) -> None:
    clients = [Client(served.url, question, stream=True) for question in questions]
    until(lambda: parked(served) > 0, "a request is parked")
    for client in clients[1:]:
        client.hang_up()
    for client in clients:
        client.join(JOIN_S)
    assert clients[0].text == questions[0].answer, "who stays is not disturbed"
    assert served.wait_idle() == start
    assert parked(served) == 0


def test_health_and_metrics_speak_of_each_worker(served: ServeProcess, start: Holdings) -> None:
    names = served.prefill + served.decode
    assert served.http.get("/health").json()["workers"] == dict.fromkeys(names, "up")
    metrics = served.http.get("/metrics").text
    for name in names:
        assert f'kvpool_conductor_worker_up_count{{worker="{name}"}} 1.0' in metrics
        assert f'worker_block_count{{state="all",worker="{name}"}} {BLOCKS}.0' in metrics
        assert f'kvpool_conductor_worker_park_count{{worker="{name}"}}' in metrics


def test_a_worker_that_stays_stopped_is_killed_and_another_serves_meanwhile(
    served: ServeProcess, start: Holdings, questions: list[Question]
) -> None:
    before = served.pids()
    stop(before["d0"])
    client = Client(served.url, questions[0], stream=True)
    client.join(JOIN_S)
    assert client.error is None, "nothing had been sent: it was tried again"
    assert client.text == questions[0].answer
    until(lambda: served.pids().get("d0", before["d0"]) != before["d0"], "d0 is a new process")
    served.wait_healthy()
    after = served.pids()
    assert {name for name in before if before[name] != after[name]} == {"d0"}
