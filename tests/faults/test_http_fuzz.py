"""The HTTP surface under requests that nobody would write: never a 5xx, never a hang, never a leak.

The app and both workers are real and in this process; ``test_http_process.py`` does a little of the
same to the processes. Hypothesis draws the requests, several of which are under way at a time.
"""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from kvpool.integration.conductor.app import create_app
from kvpool.integration.conductor.edge import HttpLimits
from kvpool.integration.conductor.schemas import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.faults.http_client import FOREVER, Asked
from tests.unit.integration.front import NAME, Front, front

ROUTES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
AT_ONCE = 4


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Front, ASGIApp]]:
    with front(HttpLimits(body_timeout_s=5.0)) as opened:
        yield opened, create_app(opened.conductor)


# What stands where something else is expected.
numbers = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([10**30, -(10**30), 2**63, 2**64, 1e308, -0.0, 0.5]),
    st.floats(),
)
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
# One in a few is not in the vocabulary.
ids = st.sampled_from([0, 1, 3, 5, 7, 8, 9, 33, 50, 60, 77, 95, 96, 10**9, 2**64])
tokens = st.lists(st.integers(0, 95), min_size=1, max_size=40)
words = st.text(min_size=1, max_size=60)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "boss"]),
            "content": st.one_of(
                words,
                st.none(),
                st.just("refuse me"),
                st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words})),
            ),
        },
        optional={"name": words, "tool_calls": junk},
    ),
    min_size=1,
    max_size=3,
)
# Fields and values that mean something, if not always together.
meant: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from([NAME, NAME, NAME, "gpt-5", None]),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.sampled_from([-1, 0, 1, 7, 99, 2**63, 10**30]),
    "seed": st.sampled_from([0, 7, -1, 2**63, 2**64, 10**30]),
    "n": st.integers(1, 3),
    "stop": st.one_of(words, st.lists(st.text("aeiou !", min_size=1, max_size=3), max_size=4)),
    "stop_token_ids": st.lists(ids, max_size=3),
    "ignore_eos": st.booleans(),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(ids.map(str), st.floats(-100, 100), max_size=4),
    "cache_salt": words,
    "echo": st.booleans(),
    "return_token_ids": st.booleans(),
    "add_special_tokens": st.booleans(),
    "user": words,
    "metadata": st.dictionaries(words, words, max_size=2),
    "prompt": st.one_of(words, tokens, st.lists(words, max_size=3), st.lists(tokens, max_size=3)),
    "logprobs": st.sampled_from([0, 2, 5, True, False]),
    "top_logprobs": st.integers(0, 5),
    "best_of": st.just(1),
    "messages": messages,
    "max_completion_tokens": st.integers(1, 9),
    "tools": st.just([]),
    "response_format": st.just({"type": "text"}),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.sampled_from([False, False, True]),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["who", "chat_template", "tokenize", "x"]), junk, max_size=2
    ),
    "return_token_strs": st.booleans(),
    "tokens": st.one_of(tokens, st.lists(ids, max_size=3)),
    "min_p": junk,
    "max_tokens": st.integers(1, 6),
    "store": st.booleans(),
    "service_tier": words,
    "priority": st.integers(),
}
KNOWN = sorted(meant)


@st.composite
def bodies(draw: st.DrawFn, route: str) -> dict[str, Any]:
    """What the route needs, some of what it knows, and perhaps one or two fields of junk."""
    needed = {
        "/v1/completions": ["prompt", "max_tokens"],
        "/v1/chat/completions": ["messages", "max_tokens"],
        "/tokenize": [draw(st.sampled_from(["prompt", "messages"]))],
        "/detokenize": ["tokens"],
    }[route]
    optional = sorted({*ROUTES[route].model_fields} - {"prompt", "messages", "tokens"})
    # A plain random number chooses: Hypothesis would take few fields, and the same ones.
    chosen = random.Random(draw(st.integers(0, 2**32)))
    names = [*needed, *chosen.sample(optional, chosen.randint(0, min(8, len(optional))))]
    body = {name: draw(meant[name]) for name in names}
    if "stream_options" in body:
        body["stream"] = draw(st.integers(0, 5)) > 0
    if "top_logprobs" in body:
        body["logprobs"] = True
    if draw(st.integers(0, 2)) == 0:
        for name in draw(st.lists(st.one_of(st.sampled_from(KNOWN), words), max_size=2)):
            body[name] = draw(junk)
    return body


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """One request, whose client may go away or whose bytes may be spoiled."""
    route = draw(st.sampled_from([*ROUTES] * 3 + ["/v1/models", "/health", "/v1/\x00", "/%ff?a=%"]))
    body = draw(bodies(route)) if route in ROUTES else draw(junk)
    raw = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=3)) + raw[at + draw(st.integers(0, 3)) :]
    cut = draw(st.integers(0, len(raw)))
    methods = ["POST"] * 40 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "X"]
    return Asked(
        route,
        body=[raw[:cut], raw[cut:]],
        method=draw(st.sampled_from(methods)),
        headers=draw(st.dictionaries(st.text("abc-", min_size=1), st.text("az 1\xe9"), max_size=2))
        | {"x-request-id": draw(st.text(max_size=4))},
        gone_after=draw(st.sampled_from([FOREVER] * 6 + [-1, 0, 1, 2, 3])),
    )


def check(asked: Asked) -> None:
    """An answer is whole, and an error is the API's."""
    if asked.gone_after != FOREVER:
        return
    assert asked.status is not None
    assert asked.status < 500, (asked.status, asked.answer)
    if asked.status >= 400:
        if asked.method != "HEAD":
            error = json.loads(asked.answer)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["message"]
            assert "kvpool" not in error["message"], "a fault of ours, told as the client's"
    elif asked.answer.startswith(b"data: "):
        *events, last = asked.answer.removesuffix(b"\n\n").split(b"\n\n")
        assert last == b"data: [DONE]"
        for event in events:
            assert "error" not in json.loads(event.removeprefix(b"data: ")), event
    elif asked.path in ROUTES:
        json.loads(asked.answer)


# Four times the profile's: a request costs milliseconds, and there are many kinds.
@settings(max_examples=4 * settings.get_profile("kvpool").max_examples)
@given(st.lists(requests(), min_size=AT_ONCE, max_size=AT_ONCE))
def test_no_request_breaks_anything(served: tuple[Front, ASGIApp], drawn: Sequence[Asked]) -> None:
    opened, app = served

    async def story() -> None:
        await asyncio.gather(*(asked.of(app) for asked in drawn))
        await opened.wait_idle()

    opened.run(story())
    for asked in drawn:
        check(asked)


@given(st.sampled_from([*ROUTES]), junk)
def test_any_json_is_answered(served: tuple[Front, ASGIApp], route: str, body: object) -> None:
    opened, app = served
    asked = Asked(route, body=[json.dumps(body).encode()])
    opened.run(asked.of(app))
    assert asked.status in {200, 400}, asked.answer
    check(asked)


def test_the_fuzzer_knows_every_field() -> None:
    """A field that is added is fuzzed, too."""
    fields = {name for kind in ROUTES.values() for name in kind.model_fields}
    assert fields <= {*meant}
