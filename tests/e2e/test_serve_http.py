"""kvpool-serve over HTTP: what clients see, and that it is what the model alone would have said."""

import concurrent.futures
import http.client
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.e2e.exactness import Answer, Prompt, alone
from tests.serve_process import ServeProcess, chunks

pytestmark = pytest.mark.model

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
SIZE = 16  # tokens of a block
NEW = 24  # tokens of an output, unless a test says otherwise


@pytest.fixture(scope="module")
def served() -> Iterator[ServeProcess]:
    # 100 does not divide the prompts, nor is it a multiple of a block.
    with ServeProcess("--chunk-tokens", "100", "--block-tokens", str(SIZE)) as server:
        yield server


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def raw(server: ServeProcess, body: dict[str, object]) -> tuple[int, bytes]:
    """POST as curl does: no client library in between."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class OverHttp:
    """Asks a server, all prompts of a wave at the same time."""

    def __init__(self, server: ServeProcess) -> None:
        self._server = server

    def ask(self, wave: Sequence[Prompt], max_tokens: int) -> list[Answer]:
        with concurrent.futures.ThreadPoolExecutor(len(wave)) as pool:
            answers = list(pool.map(lambda prompt: self._one(prompt, max_tokens), wave))
        self._server.wait_idle()
        return answers

    def _one(self, prompt: Prompt, max_tokens: int) -> Answer:
        if prompt.messages is None:
            answer = self._server.complete(prompt.text, max_tokens=max_tokens)
            text = answer["choices"][0]["text"]
        else:
            answer = self._server.chat(prompt.messages, max_tokens=max_tokens)
            text = answer["choices"][0]["message"]["content"]
        assert answer["usage"]["prompt_tokens"] == len(prompt.tokens)
        return Answer(text, None, cached(answer))


def test_paris(served: ServeProcess) -> None:
    status, body = raw(served, {"messages": PARIS, "max_tokens": NEW})
    assert status == 200
    answer = json.loads(body)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"
    used = answer["usage"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]


def test_paris_streamed(served: ServeProcess) -> None:
    body = {
        "messages": PARIS,
        "max_tokens": NEW,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, payload = raw(served, body)
    assert status == 200
    events = list(chunks(iter(payload.decode().splitlines())))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(
        event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]
    )
    assert "Paris" in text
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] > 0
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_streamed_is_the_same_text(served: ServeProcess) -> None:
    prompt = "The largest planets of the solar system are"
    whole = served.complete(prompt, max_tokens=NEW)["choices"][0]["text"]
    with served.stream(prompt, max_tokens=NEW) as events:
        parts = [event["choices"][0]["text"] for event in events]
    assert "".join(parts) == whole == alone().text(prompt, NEW)
    assert len(parts) > NEW // 2, "it did not arrive token by token"


def test_the_same_request_again_is_cached(served: ServeProcess) -> None:
    prompt = "Once upon a time there was a river that ran through a valley. " * 6
    first = served.complete(prompt, max_tokens=NEW)
    served.wait_idle()
    second = served.complete(prompt, max_tokens=NEW)
    tokens = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    assert cached(second) == (tokens - 1) // SIZE * SIZE
    assert first["choices"] == second["choices"]


def test_a_conversation_reuses_what_decode_made(served: ServeProcess) -> None:
    tokenizer = alone().tokenizer
    messages = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper."}]
    first = served.chat(messages, max_tokens=64)
    served.wait_idle()
    reply = first["choices"][0]["message"]["content"]
    longer = [
        *messages,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And then?"},
    ]
    second = served.chat(longer, max_tokens=NEW)
    # The prefix that both turns have in common, as far as KV was computed: all but the last token.
    told = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    made = first["usage"]["completion_tokens"]
    computed = len(told) + made - 1
    assert computed // SIZE > len(told) // SIZE, "decode made no full block: ask for more tokens"
    assert cached(second) == computed // SIZE * SIZE
    again = tokenizer.apply_chat_template(longer, add_generation_prompt=True)["input_ids"]
    assert second["choices"][0]["message"]["content"] == alone().text(again, NEW)


def test_eight_at_once_share_one_forward(served: ServeProcess) -> None:
    prompts = [
        f"Write about the number {number} and what it means to people:" for number in range(8)
    ]
    alone = [served.complete(prompt, max_tokens=8)["choices"][0]["text"] for prompt in prompts]
    served.wait_idle()
    before, seen = served.status("decode"), len(served.events("decode"))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: served.complete(prompt, max_tokens=48), prompts))
    after = served.status("decode")
    for text, answer in zip(alone, together, strict=True):
        assert answer["choices"][0]["text"].startswith(text)
    # The first token of each is the prefill worker's.
    steps = [answer["usage"]["completion_tokens"] - 1 for answer in together]
    forwards = [
        event["requests"]
        for event in served.events("decode")[seen:]
        if event["event"] == "ForwardRan"
    ]
    assert after.forwards - before.forwards == len(forwards)
    # An output that ended with a stop token took one step more than it has tokens.
    ended = sum(answer["choices"][0]["finish_reason"] == "stop" for answer in together)
    assert sum(forwards) == sum(steps) + ended
    assert max(forwards) == 8
    assert len(forwards) < sum(forwards) / 3, "most steps ran few of the eight requests"


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": "hello"}, 400, "messages"),
        ("chat/completions", {"messages": PARIS, "max_tokens": "many"}, 400, "max_tokens"),
        ("chat/completions", {"messages": PARIS, "max_tokens": 0}, 400, "max_tokens"),
        (
            "chat/completions",
            {"messages": PARIS, "max_completion_tokens": 10**6},
            400,
            "max_completion_tokens",
        ),
        ("chat/completions", {"messages": PARIS, "temperature": -1}, 400, "temperature"),
        ("chat/completions", {"messages": PARIS, "top_p": 0}, 400, "top_p"),
        ("chat/completions", {"messages": PARIS, "n": 0}, 400, "n"),
        ("chat/completions", {"messages": PARIS, "model": "gpt-5"}, 404, "model"),
        ("chat/completions", {"messages": PARIS, "stream_options": {}}, 400, "stream_options"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [10**9]}, 400, "prompt"),
        ("completions", {"prompt": "word " * 9000}, 400, "prompt"),
        ("completions", {}, 400, "prompt"),
    ],
)
def test_errors_have_openai_shape(
    served: ServeProcess, route: str, body: dict[str, object], status: int, param: str | None
) -> None:
    answer = served.http.post(f"/v1/{route}", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_broken_json_and_unknown_routes(served: ServeProcess) -> None:
    answer = served.http.post("/v1/completions", content=b"{not json")
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = served.http.get("/v1/nothing")
    assert (answer.status_code, "error" in answer.json()) == (404, True)


def test_stop_strings_and_limits(served: ServeProcess) -> None:
    prompt = "The quick brown fox"
    whole = served.complete(prompt, max_tokens=NEW)
    text = whole["choices"][0]["text"]
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == NEW
    stop = text.split()[3]
    cut = served.complete(prompt, max_tokens=NEW, stop=[stop])
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    one = served.complete(prompt, max_tokens=1)
    assert one["usage"]["completion_tokens"] == 1
    served.wait_idle()


def test_several_prompts_in_one_request(served: ServeProcess) -> None:
    prompts = ["Cats are", "Dogs are", "Birds are"]
    answer = served.complete(prompts, max_tokens=8)  # type: ignore[arg-type]  # a list of texts
    assert [choice["text"] for choice in answer["choices"]] == [
        alone().text(prompt, 8) for prompt in prompts
    ]


def test_a_seed_repeats_a_draw(served: ServeProcess) -> None:
    def draw(seed: int) -> str:
        answer = served.complete("I think that", max_tokens=8, temperature=1.5, seed=seed)
        text: str = answer["choices"][0]["text"]
        return text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_a_salt_keeps_caches_apart(served: ServeProcess) -> None:
    prompt = "A secret that nobody else may learn of, not even by how long it takes. " * 4
    served.complete(prompt, max_tokens=2, cache_salt="tenant-a")
    served.wait_idle()
    assert cached(served.complete(prompt, max_tokens=2, cache_salt="tenant-b")) == 0
    assert cached(served.complete(prompt, max_tokens=2, cache_salt="tenant-a")) > 0


def test_models_health_metrics(served: ServeProcess) -> None:
    models = served.http.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == [served.name]
    assert served.http.get("/health").json()["status"] == "ok"
    served.complete("Count me", max_tokens=1)
    text = served.http.get("/metrics").text
    assert 'kvpool_conductor_worker_up_count{worker="d0"} 1.0' in text
    assert 'kvpool_conductor_requests_total{outcome="200",route="completions"}' in text
