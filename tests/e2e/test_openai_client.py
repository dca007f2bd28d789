"""The official OpenAI client against kvpool-serve: what it asks for is what it gets.

The model is a real one, and what it says is held against the model alone in this process.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from tests.e2e.exactness import alone
from tests.serve_process import ServeProcess

pytestmark = pytest.mark.model

PARIS: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
FOX = "The quick brown fox"
# Two float32 sums of the same numbers in another order.
CLOSE = 2e-3


@pytest.fixture(scope="module")
def served() -> Iterator[ServeProcess]:
    with ServeProcess() as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def client(served: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as opened:
        yield opened


def own_logprobs(prompt: list[int], output: list[int]) -> torch.Tensor:
    """The model's own: [output tokens, vocabulary]."""
    with torch.inference_mode():
        logits = alone().model(input_ids=torch.tensor([prompt + output])).logits[0]
    rows: torch.Tensor = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return rows


def text(answer: ChatCompletion, index: int = 0) -> str:
    return answer.choices[index].message.content or ""


def test_chat(served: ServeProcess, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=served.name, messages=PARIS, max_completion_tokens=32, temperature=0
    )
    assert "Paris" in text(answer)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id == answer.id.removeprefix("chatcmpl-")


def test_chat_streamed(served: ServeProcess, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=served.name, messages=PARIS, max_tokens=32, temperature=0
    )
    with client.chat.completions.create(
        model=served.name,
        messages=PARIS,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks: list[ChatCompletionChunk] = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text(whole)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_streaming_helper_of_the_client(served: ServeProcess, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=served.name, messages=PARIS, max_tokens=32, temperature=0, logprobs=True
    ) as stream:
        for event in stream:
            assert event.type
        final = stream.get_final_completion()
    content = final.choices[0].message.content
    assert content is not None
    assert "Paris" in content
    told = final.choices[0].logprobs
    assert told is not None
    assert "".join(entry.token for entry in told.content or []) == content


def test_completions(served: ServeProcess, client: openai.OpenAI) -> None:
    tokenizer = alone().tokenizer
    one = client.completions.create(model=served.name, prompt=FOX, max_tokens=8, temperature=0)
    tokens = client.completions.create(
        model=served.name, prompt=tokenizer(FOX)["input_ids"], max_tokens=8, temperature=0
    )
    assert one.choices[0].text == tokens.choices[0].text
    both = client.completions.create(
        model=served.name, prompt=[FOX, "Cats are"], max_tokens=8, temperature=0, echo=True
    )
    assert both.choices[0].text == FOX + one.choices[0].text
    assert both.choices[1].text.startswith("Cats are")
    stream = client.completions.create(
        model=served.name, prompt=FOX, max_tokens=8, temperature=0, stream=True
    )
    parts = [chunk.choices[0].text for chunk in stream]
    assert "".join(parts) == one.choices[0].text


def test_logprobs_are_the_models_own(served: ServeProcess, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=served.name,
        messages=[
            {"role": "user", "content": "Write a line about the sea, with an emoji: \U0001f30a"}
        ],
        max_tokens=16,
        temperature=0.8,
        seed=3,
        logprobs=True,
        top_logprobs=4,
        extra_body={"return_token_ids": True},
    )
    choice, extra = answer.choices[0], answer.model_extra or {}
    prompt = extra["prompt_token_ids"]
    output = (choice.model_extra or {})["token_ids"]
    rows = own_logprobs(prompt, output)
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert len(entries) == len(output) > 4
    for row, token, entry in zip(rows, output, entries, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=CLOSE)
        best = row.topk(4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=CLOSE
        )
    raw = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert raw.decode() == choice.message.content, "the bytes of the tokens are the text's"


def test_logprobs_of_completions(served: ServeProcess, client: openai.OpenAI) -> None:
    tokenizer = alone().tokenizer
    answer = client.completions.create(
        model=served.name,
        prompt=FOX,
        max_tokens=8,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )
    told, shown = answer.choices[0].logprobs, answer.choices[0].text
    assert told is not None
    output = (answer.choices[0].model_extra or {})["token_ids"]
    rows = own_logprobs(tokenizer(FOX)["input_ids"], output)
    expected = [float(row[token]) for row, token in zip(rows, output, strict=True)]
    assert told.token_logprobs == pytest.approx(expected, abs=CLOSE)
    assert "".join(told.tokens or []) == shown
    assert told.text_offset == [
        0,
        *itertools.accumulate(len(token) for token in (told.tokens or [])[:-1]),
    ]
    for top, token in zip(told.top_logprobs or [], told.tokens or [], strict=True):
        assert len(top) == 2
        assert max(top, key=lambda name: top[name]) == token


def test_seeds_are_reproducible(served: ServeProcess, client: openai.OpenAI) -> None:
    def draw(seed: int, n: int = 1) -> list[str]:
        answer = client.chat.completions.create(
            model=served.name, messages=PARIS, max_tokens=12, temperature=1.5, seed=seed, n=n
        )
        return [choice.message.content or "" for choice in answer.choices]

    four = draw(7, 4)
    assert len(set(four)) == 4
    assert draw(7, 4) == four
    assert draw(7) == four[:1]
    assert draw(8) != four[:1]


def test_several_choices_streamed(served: ServeProcess, client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    stream = client.chat.completions.create(
        model=served.name,
        messages=PARIS,
        max_tokens=12,
        temperature=1.5,
        seed=7,
        n=3,
        stream=True,
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    whole = client.chat.completions.create(
        model=served.name, messages=PARIS, max_tokens=12, temperature=1.5, seed=7, n=3
    )
    assert texts == [text(whole, index) for index in range(3)]


def test_stop_strings(served: ServeProcess, client: openai.OpenAI) -> None:
    plain = client.completions.create(model=served.name, prompt=FOX, max_tokens=24, temperature=0)
    said = plain.choices[0].text
    # It begins and ends within tokens, and lies across a border of two.
    middle = said.index(" ", 8)
    stop = said[middle - 2 : middle + 3]
    for streams in (False, True):
        answer: Any = client.completions.create(
            model=served.name,
            prompt=FOX,
            max_tokens=24,
            temperature=0,
            stop=["never said", stop],
            stream=streams,
        )
        parts = list(answer) if streams else [answer]
        got = "".join(part.choices[0].text for part in parts)
        assert got == said[: said.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"
    served.wait_idle()


def test_penalties_and_bias(served: ServeProcess, client: openai.OpenAI) -> None:
    tokenizer = alone().tokenizer
    [token] = tokenizer(" cat", add_special_tokens=False)["input_ids"]

    def count(penalty: float) -> int:
        answer: Any = client.completions.create(
            model=served.name,
            prompt="The animal is a",
            max_tokens=8,
            temperature=0,
            logit_bias={str(token): 12},
            presence_penalty=penalty,
            frequency_penalty=penalty,
        )
        return len(answer.choices[0].text.split(" cat")) - 1

    often = count(0)
    assert often > 1
    assert count(2) < often


def test_cached_tokens_and_salts(served: ServeProcess, client: openai.OpenAI) -> None:
    question = "Tell me about lighthouses, their keepers and the sea around them. " * 6

    def cached(**salt: str) -> int:
        answer = client.chat.completions.create(
            model=served.name,
            messages=[{"role": "user", "content": question}],
            max_tokens=1,
            extra_body=salt,
        )
        served.wait_idle()
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt="a") > 48


def test_models(served: ServeProcess, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == served.name
    assert client.models.retrieve(served.name) == model
    assert (model.model_extra or {})["max_model_len"] == 8192


def test_errors_are_the_clients_own(served: ServeProcess, client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    fields: Any = {"model": served.name, "messages": PARIS}
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-5", messages=PARIS)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError, match="leave it out") as refused:
        create(**fields, tools=[{"type": "function", "function": {"name": "f"}}])
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="context") as long:
        create(model=served.name, messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        create(**fields, temperature=math.pi)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.APIStatusError) as huge:
        create(model=served.name, messages=[{"role": "user", "content": "a" * 50_000_000}])
    assert huge.value.status_code == 413
