"""kvpool-serve loses a worker, or a client, in the middle of a request: what stays and what returns."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvpool.integration.runtime.handoff import WorkerStatus
from tests.serve_process import Holdings, ServeProcess, stopped
from tests.waiting import until

pytestmark = pytest.mark.model

PROMPT = "A long tale of a ship that sailed around the world and of all that its crew saw. " * 8
LONG = 400  # tokens: enough that a fault comes in the middle
SHORT = 60  # tokens: of answers that are compared


@pytest.fixture(scope="module")
def served() -> Iterator[ServeProcess]:
    # Small chunks and a small outbox: there is time between the first slice and the last.
    with ServeProcess(
        *("--request-timeout-s", "120", "--chunk-tokens", "64", "--outbox-bytes", "1MiB")
    ) as server:
        server.complete(PROMPT, max_tokens=2)
        yield server


@pytest.fixture
def start(served: ServeProcess) -> Iterator[Holdings]:
    """What is free before the fault; the same must be free after it, in the same processes."""
    served.wait_healthy()
    start = served.wait_idle()
    yield start
    served.wait_healthy()
    assert served.wait_idle() == start


class Asked:
    """A completion asked for in a thread, so that the test can act meanwhile."""

    def __init__(self, server: ServeProcess, prompt: str, max_tokens: int) -> None:
        self._answers: list[dict[str, Any]] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(server.complete(prompt, max_tokens=max_tokens))
        )
        self._thread.start()

    def choices(self) -> object:
        self._thread.join(120)
        assert self._answers, "no answer"
        return self._answers[0]["choices"]


def prompt(name: str) -> str:
    """A prompt of its own: nothing of it is in the pool."""
    return f"[{name}] {PROMPT}"


def test_kill_decode_in_mid_stream(served: ServeProcess, start: Holdings) -> None:
    before = served.pids()
    expected = served.complete(prompt("kill decode"), max_tokens=SHORT)["choices"]
    served.wait_idle()
    with served.stream(prompt("kill decode"), max_tokens=SHORT) as events:
        seen = [next(events) for _ in range(5)]
        os.kill(before["d0"], signal.SIGKILL)
        seen += list(events)
    choices = [event["choices"][0] for event in seen]
    assert "".join(choice["text"] for choice in choices) == expected[0]["text"]
    assert choices[-1]["finish_reason"] == "length"
    # A request that comes meanwhile waits for the worker to come back.
    answer = served.complete(prompt("after the kill"), max_tokens=4)
    assert answer["usage"]["completion_tokens"] == 4
    after = served.pids()
    assert (after["p0"], after["pool"]) == (before["p0"], before["pool"])
    assert after["d0"] != before["d0"]


def test_health_says_that_a_worker_is_gone(served: ServeProcess, start: Holdings) -> None:
    os.kill(served.pids()["d0"], signal.SIGKILL)
    until(lambda: served.http.get("/health").status_code == 503, "/health is degraded")
    body = served.http.get("/health").json()
    if body["status"] != "ok":  # it may be back already
        assert body["workers"]["p0"] == "up"
        assert body["problems"]


def test_a_whole_answer_survives_a_killed_decode_worker(
    served: ServeProcess, start: Holdings
) -> None:
    expected = served.complete(prompt("survive"), max_tokens=SHORT)["choices"]
    served.wait_idle()
    forwards = served.status("decode").forwards
    asked = Asked(served, prompt("survive"), SHORT)
    until(lambda: served.status("decode").forwards > forwards + 3, "the request is decoded")
    os.kill(served.pids()["d0"], signal.SIGKILL)
    assert asked.choices() == expected


def test_kill_prefill_in_mid_prompt(served: ServeProcess, start: Holdings) -> None:
    before, tokens = served.pids(), served.status("prefill").tokens
    asked = Asked(served, prompt("kill prefill") * 4, 3)
    until(lambda: served.status("prefill").tokens > tokens, "a chunk is computed")
    assert served.status("prefill").running == 1
    os.kill(before["p0"], signal.SIGKILL)
    # Nothing was answered yet: it is tried again with the worker that comes back.
    choices = asked.choices()
    after = served.pids()
    assert (after["d0"], after["pool"]) == (before["d0"], before["pool"])
    assert after["p0"] != before["p0"]
    served.wait_idle()
    assert served.complete(prompt("kill prefill") * 4, max_tokens=3)["choices"] == choices


def test_kill_the_pool(served: ServeProcess, start: Holdings) -> None:
    before = served.pids()
    with served.stream(prompt("kill pool"), max_tokens=60) as events:
        next(events)
        os.kill(before["pool"], signal.SIGKILL)
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
    # Without a pool everything is computed; with the new one, cached again in the end.
    assert served.complete(prompt("no pool"), max_tokens=2)["usage"]["completion_tokens"] == 2

    def cached_again() -> bool:
        used = served.complete(prompt("no pool"), max_tokens=2)["usage"]
        return bool(used["prompt_tokens_details"]["cached_tokens"])

    until(cached_again, "the workers use the new pool")
    after = served.pids()
    assert (after["d0"], after["p0"]) == (before["d0"], before["p0"])


def share_used_up(prefill: WorkerStatus) -> bool:
    """Say whether one decode worker has all slots that it may have: a fifth is for others."""
    return prefill.outbox_free <= prefill.outbox_slots // 5 + 1


def test_decode_stopped_in_mid_transfer_goes_on(served: ServeProcess, start: Holdings) -> None:
    tokens = served.status("prefill").tokens
    text = prompt("stop decode") * 4
    asked = Asked(served, text, 40)
    until(lambda: served.status("prefill").tokens > tokens, "a chunk is computed")
    with stopped(served.pids()["d0"]):
        # The prompt is computed to its end, but what found no room in the outbox has to wait.
        until(lambda: share_used_up(served.status("prefill")), "its share of the outbox is full")
        before = served.status("prefill")
        until(lambda: served.status("prefill").tokens >= tokens + 500, "it computes on")
        assert before.running == served.status("prefill").running == 1
    choices = asked.choices()
    served.wait_idle()
    assert served.complete(text, max_tokens=40)["choices"] == choices


def test_a_client_that_hangs_up_in_mid_stream(served: ServeProcess, start: Holdings) -> None:
    with served.stream(prompt("hang up"), max_tokens=LONG) as events:
        for _ in range(3):
            next(events)
        assert served.status("decode").running == 1
    until(lambda: served.status("decode").running == 0, "the decode worker let go")
    forwards = served.status("decode").forwards
    assert forwards < LONG, "it was decoded to the end for nobody"


def test_a_client_that_hangs_up_before_the_first_token(
    served: ServeProcess, start: Holdings
) -> None:
    body = {"prompt": prompt("impatient") * 8, "max_tokens": 4, "stream": True}
    forwards = served.status("decode").forwards
    with pytest.raises(httpx.ReadTimeout):
        served.http.post("/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.05))
    assert served.wait_idle() == start
    assert served.status("decode").forwards == forwards, "it was served to nobody"
