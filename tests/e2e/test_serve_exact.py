"""Two prefill and two decode workers on the real model, over each transport: every answer is exact.

The official OpenAI client asks too, sync and async, streamed and whole, eight at once.
"""

import asyncio
import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.exactness import PROMPTS, Answer, Prompt, alone, ask_all, max_tokens
from tests.e2e.test_serve_http import SIZE, OverHttp
from tests.serve_process import ServeProcess

pytestmark = pytest.mark.model

NAMES = [entry["name"] for entry in json.loads(PROMPTS.read_text())["prompts"]]
NEW = 8  # tokens of an output of the official client
COUNTS = [f"Count from {number} to ten:" for number in range(8)]


@pytest.fixture(
    scope="module", params=["host", pytest.param("ucx", marks=pytest.mark.ucx)], ids=str
)
def served(request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    # 100 does not divide the prompts, nor is it a multiple of a block.
    flags = ("--transport", request.param, "--chunk-tokens", "100", "--block-tokens", str(SIZE))
    with ServeProcess(*flags, "--threads", "1", prefill=2, decode=2) as server:
        yield server


@pytest.fixture(scope="module")
def asked(served: ServeProcess) -> tuple[list[Prompt], dict[str, Answer]]:
    before = served.wait_idle()
    result = ask_all(OverHttp(served), alone().tokenizer)
    assert served.wait_idle() == before
    return result


@pytest.mark.parametrize("name", NAMES)
def test_exact(asked: tuple[list[Prompt], dict[str, Answer]], name: str) -> None:
    """Every committed prompt is answered as the model alone would."""
    prompts, answers = asked
    [prompt] = [prompt for prompt in prompts if prompt.name == name]
    assert answers[name].text == alone().generate(prompt.tokens, max_tokens()).text


def test_prompts_that_begin_alike_are_loaded(
    asked: tuple[list[Prompt], dict[str, Answer]],
) -> None:
    prompts, answers = asked
    for prompt in prompts:
        if {"warm", "prefix extended", "prefix shared"} & set(prompt.kinds):
            assert answers[prompt.name].cached > SIZE, prompt.name


def test_every_worker_has_worked(
    served: ServeProcess, asked: tuple[list[Prompt], dict[str, Answer]]
) -> None:
    assert all(served.status(name).tokens for name in served.prefill + served.decode)


def test_no_bytes_take_another_way(served: ServeProcess, request: pytest.FixtureRequest) -> None:
    """With UCX there is no socket over which arenas could be handed."""
    sockets = [path.name for path in served.run_dir.iterdir() if "transport" in path.name]
    assert bool(sockets) == ("host" in request.node.callspec.id)


def fields(served: ServeProcess, prompt: str) -> dict[str, Any]:
    return {"model": served.name, "prompt": prompt, "max_tokens": NEW, "temperature": 0}


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def said(prompt: str, *, chat: bool = False) -> str:
    if not chat:
        return alone().text(prompt, NEW)
    tokens = alone().tokenizer.apply_chat_template(messages(prompt), add_generation_prompt=True)
    return alone().text(tokens["input_ids"], NEW)


def test_the_openai_client_eight_at_once(served: ServeProcess) -> None:
    with openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:

        def completion(prompt: str) -> str:
            return str(client.completions.create(**fields(served, prompt)).choices[0].text)

        def streamed(prompt: str) -> str:
            chunks: Any = client.completions.create(**fields(served, prompt), stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)

        def chat(prompt: str) -> str:
            asked: Any = {**fields(served, prompt), "messages": messages(prompt)}
            del asked["prompt"]
            return client.chat.completions.create(**asked).choices[0].message.content or ""

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for ask in (completion, streamed):
                assert list(pool.map(ask, COUNTS)) == [said(prompt) for prompt in COUNTS]
            assert list(pool.map(chat, COUNTS)) == [said(prompt, chat=True) for prompt in COUNTS]


def test_the_async_openai_client_eight_at_once(served: ServeProcess) -> None:
    async def whole(client: openai.AsyncOpenAI, prompt: str) -> str:
        return str((await client.completions.create(**fields(served, prompt))).choices[0].text)

    async def streamed(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks: Any = await client.completions.create(**fields(served, prompt), stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def chat(client: openai.AsyncOpenAI, prompt: str) -> str:
        asked: Any = {**fields(served, prompt), "messages": messages(prompt), "stream": True}
        del asked["prompt"]
        chunks: Any = await client.chat.completions.create(**asked)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_of_it() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client:
            for ask in (whole, streamed):
                answers = await asyncio.gather(*(ask(client, prompt) for prompt in COUNTS))
                assert answers == [said(prompt) for prompt in COUNTS]
            answers = await asyncio.gather(*(chat(client, prompt) for prompt in COUNTS))
            assert answers == [said(prompt, chat=True) for prompt in COUNTS]

    asyncio.run(all_of_it())
