"""What the HTTP surface refuses, and that it says why: status, field and a message for a person."""

import json
from collections.abc import Iterator

import pytest

from kvpool.integration.conductor.http_error import MESSAGE_CHARACTERS_MAX, HttpError
from tests.unit.integration.front import Front, front
from tests.unit.integration.tiny import CONTEXT, VOCABULARY


@pytest.fixture(scope="module")
def served() -> Iterator[Front]:
    with front() as opened:
        yield opened
        opened.run(opened.wait_idle())


CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, dict[str, object]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    PLAIN: {"prompt": "Hello", "max_tokens": 1},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [7]},
}
HUGE = 10**30

# Route, fields on top of a good body, the field that the error names, words of its message.
WRONG = [
    (PLAIN, {"prompt": ""}, "prompt", "empty"),
    (PLAIN, {"prompt": []}, "prompt", "choices"),
    (PLAIN, {"prompt": [[]]}, "prompt", "give a string"),
    (PLAIN, {"prompt": None}, "prompt", "give a string"),
    (PLAIN, {"prompt": 7}, "prompt", "give a string"),
    (PLAIN, {"prompt": [1, "a"]}, "prompt", "give a string"),
    (PLAIN, {"prompt": [True]}, "prompt", "give a string"),
    (PLAIN, {"prompt": [1.5]}, "prompt", "give a string"),
    (PLAIN, {"prompt": {"a": "b"}}, "prompt", "give a string"),
    (PLAIN, {"prompt": [-1]}, "prompt", "within 0.."),
    (PLAIN, {"prompt": [VOCABULARY]}, "prompt", "within 0.."),
    (PLAIN, {"prompt": [HUGE]}, "prompt", "within 0.."),
    (PLAIN, {"prompt": "a" * CONTEXT}, "prompt", "no room"),
    (PLAIN, {"prompt": [7] * (CONTEXT + 9)}, "prompt", "no room"),
    (PLAIN, {"prompt": "a" * 100_000}, "prompt", "shorten"),
    (PLAIN, {"prompt": ["a"] * 129}, "prompt", "129 choices"),
    (PLAIN, {"prompt": ["a"] * 65, "n": 2}, "prompt", "130 choices"),
    (PLAIN, {"max_tokens": CONTEXT}, "max_tokens", "shorten"),
    (PLAIN, {"max_tokens": HUGE}, "max_tokens", "shorten"),
    (PLAIN, {"logprobs": 21}, "logprobs", "20"),
    (PLAIN, {"logprobs": -1}, "logprobs", "0"),
    (PLAIN, {"logprobs": True}, "logprobs", "integer"),
    (PLAIN, {"echo": True, "logprobs": 1}, "logprobs", "echo"),
    (PLAIN, {"best_of": 3}, "best_of", "leave it out"),
    (PLAIN, {"suffix": "end"}, "suffix", "leave it out"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": None}, "messages", "array"),
    (CHAT, {"messages": "Hello"}, "messages", "array"),
    (CHAT, {"messages": ["Hello"]}, "messages", "messages.0"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages", "role"),
    (CHAT, {"messages": [{"role": "boss", "content": "a"}]}, "messages", "'user'"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "no content"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages", "string"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "text",
    ),
    (CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, "messages", "text"),
    (CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "a rude word"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * CONTEXT}]}, "messages", "no room"),
    (CHAT, {"max_completion_tokens": HUGE}, "max_completion_tokens", "shorten"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "1"),
    (CHAT, {"logprobs": 3}, "logprobs", "boolean"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs", "logprobs to be true"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools", "leave it out"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "leave it out"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "leave it out"),
    (CHAT, {"modalities": ["audio"]}, "modalities", "leave it out"),
    (CHAT, {"chat_template": "{{ 7 }}"}, "chat_template", "leave it out"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "option"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "option"),
    (CHAT, {"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
    ("/tokenize", {"messages": HELLO}, "prompt", "either"),
    ("/tokenize", {"prompt": None}, "prompt", "either"),
    ("/tokenize", {"prompt": [1]}, "prompt", "string"),
    ("/tokenize", {"prompt": "a" * 100_000}, "prompt", "shorten"),
    ("/detokenize", {"tokens": "a"}, "tokens", "array"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "within 0.."),
    ("/detokenize", {"tokens": [HUGE]}, "tokens", "within 0.."),
]
# The same on both routes.
BOTH = [
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_tokens": -HUGE}, "max_tokens", "1"),
    ({"max_tokens": "many"}, "max_tokens", "integer"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"temperature": -0.1}, "temperature", "0"),
    ({"temperature": 2.1}, "temperature", "2"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "1"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"seed": "a"}, "seed", "integer"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"n": 0}, "n", "1"),
    ({"n": 129}, "n", "128"),
    ({"n": -HUGE}, "n", "1"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream to be true"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "boolean"),
    ({"stop": ""}, "stop", "1 to 256"),
    ({"stop": [""]}, "stop", "1 to 256"),
    ({"stop": "a" * 257}, "stop", "1 to 256"),
    ({"stop": ["a"] * 5}, "stop", "at most 4"),
    ({"stop": 7}, "stop", "string"),
    ({"stop": [7]}, "stop", "string"),
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids", "within 0.."),
    ({"stop_token_ids": [HUGE]}, "stop_token_ids", "within 0.."),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "64"),
    ({"presence_penalty": 3}, "presence_penalty", "2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias", "within 0.."),
    ({"logit_bias": {"7": 101}}, "logit_bias", "100"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias", "at most 300"),
    ({"cache_salt": ""}, "cache_salt", "1 character"),
    ({"cache_salt": "a" * 129}, "cache_salt", "128"),
    ({"cache_salt": 7}, "cache_salt", "string"),
    ({"model": 7}, "model", "string"),
    ({"model": "a" * 257}, "model", "256"),
    ({"user": 7}, "user", "string"),
    ({"metadata": {"a": 1}}, "metadata", "string"),
    ({"min_p": 0.5}, "min_p", "leave it out"),
    ({"repetition_penalty": 1.5}, "repetition_penalty", "leave it out"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs", "leave it out"),
    ({"guided_regex": "a+"}, "guided_regex", "leave it out"),
]
ALL = WRONG + [(route, *case) for route in (CHAT, PLAIN) for case in BOTH]


@pytest.mark.parametrize(
    ("route", "fields", "param", "words"),
    ALL,
    ids=[f"{route.rsplit('/', 1)[1]}-{str(fields)[:40]}" for route, fields, _, _ in ALL],
)
def test_a_wrong_field_is_named(
    served: Front, route: str, fields: dict[str, object], param: str, words: str
) -> None:
    answer = served.run(served.post(route, {**GOOD[route], **fields}))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert len(error["message"]) <= MESSAGE_CHARACTERS_MAX


@pytest.mark.parametrize("route", GOOD)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "EOF"),
        (b"{not json", "Invalid JSON"),
        (b"[]", "object"),
        (b'"text"', "object"),
        (b"null", "object"),
        (b'{"model": "\xff\xfe"}', "unicode"),
        (b'{"model": "\\ud800"}', "Invalid JSON"),
        (b'{"model": NaN}', "string"),
        (b"[" * 100_000, "recursion"),
        (b'{"x": ' * 100_000, "recursion"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "Invalid JSON"),
    ],
)
def test_what_is_no_json_object(served: Front, route: str, body: bytes, words: str) -> None:
    answer = served.run(served.post(route, body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "frequency_penalty"])
def test_what_is_no_finite_number(served: Front, name: str, value: bytes) -> None:
    body = b'{"prompt": "a", "%s": %s}' % (name.encode(), value)
    answer = served.run(served.post(PLAIN, body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    "fields",
    [
        {"unheard_of": {"a": [1, 2]}},
        {"min_p": 0, "repetition_penalty": 1.0, "best_of": None, "skip_special_tokens": True},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "priority": 3},
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"seed": -HUGE, "top_k": HUGE, "temperature": 1},
        {"stop": None, "logit_bias": None, "n": None, "stream_options": None, "max_tokens": None},
    ],
)
def test_what_asks_for_nothing_is_no_error(served: Front, fields: dict[str, object]) -> None:
    for route in (CHAT, PLAIN):
        served.run(served.good(route, {**GOOD[route], **fields}))


def test_an_unknown_model_route_or_method(served: Front) -> None:
    async def story() -> None:
        for route, body in GOOD.items():
            answer = await served.post(route, {**body, "model": "gpt-5"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "model_not_found")
            assert "'tiny'" in error["message"]
            answer = await served.client.get(route)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (405, "method_not_allowed")
            assert answer.headers["allow"] == "POST"
            assert "use POST" in error["message"]
        for route in ("/", "/v1", "/v1/nothing", "/v1/completions/", "/docs", "/openapi.json"):
            answer = await served.post(route, {})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")

    served.run(story())


def test_a_long_message_is_cut() -> None:
    error = HttpError(400, "x" * 5000)
    assert len(json.dumps(error.body())) < MESSAGE_CHARACTERS_MAX + 200
