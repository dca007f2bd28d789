"""What the HTTP surface answers: shapes, choices, logprobs, stop strings and the text they belong to."""

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import torch

from kvpool.completion import Deadline
from kvpool.errors import TransferTimeoutError
from kvpool.integration.conductor.dispatch import Produced
from kvpool.integration.conductor.logprobs import TokenTexts
from kvpool.integration.conductor.turn import in_turn
from tests.unit.integration.front import CHARACTERS, NAME, Front, front
from tests.unit.integration.pair import WAIT_S, expected
from tests.unit.integration.tiny import CONTEXT, tiny_model

FIRST = 6  # the token of the first character


@pytest.fixture(scope="module")
def served() -> Iterator[Front]:
    with front() as opened:
        yield opened


def ids(text: str) -> list[int]:
    return [FIRST + CHARACTERS.index(character) for character in text]


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token - FIRST] for token in tokens if token >= FIRST)


def own_logprobs(prompt: list[int], output: list[int]) -> torch.Tensor:
    """The model's own: [output tokens, vocabulary]."""
    with torch.inference_mode():
        logits = tiny_model()(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
    rows: torch.Tensor = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return rows


def close(one: object, other: object) -> bool:
    """Equal but for the last digits of floats: other requests in a forward change these."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and close(list(one.values()), list(other.values()))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == other


# Without the special tokens, which a random model would like as much as any.
VISIBLE = {str(token): -100 for token in range(FIRST)}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is it?"}]}
PROMPT = "Once upon a time"


def test_every_form_of_a_prompt(served: Front) -> None:
    async def story() -> None:
        one = await served.complete(PROMPT, max_tokens=6, ignore_eos=True)
        text = one["choices"][0]["text"]
        assert text == text_of(expected(ids(PROMPT), 6))
        assert one["usage"]["prompt_tokens"] == len(PROMPT)
        for form in (ids(PROMPT), [PROMPT], [ids(PROMPT)]):
            again = await served.complete(form, max_tokens=6, ignore_eos=True)
            assert [choice["text"] for choice in again["choices"]] == [text]
        both = await served.complete([PROMPT, ids("Or not")], max_tokens=6, ignore_eos=True)
        assert [choice["index"] for choice in both["choices"]] == [0, 1]
        assert both["choices"][0]["text"] == text
        assert both["choices"][1]["text"] == text_of(expected(ids("Or not"), 6))
        assert both["usage"]["prompt_tokens"] == len(PROMPT) + len("Or not")

    served.run(story())


def test_logprobs_are_the_models_own(served: Front) -> None:
    async def story() -> tuple[dict[str, Any], dict[str, Any]]:
        fields = {"max_tokens": 8, "logit_bias": VISIBLE, "return_token_ids": True}
        return (
            await served.complete(PROMPT, logprobs=3, **fields),
            await served.chat("Who?", logprobs=True, top_logprobs=3, **fields),
        )

    completion, chat = served.run(story())
    choice = completion["choices"][0]
    assert choice["prompt_token_ids"] == ids(PROMPT)
    told, rows = choice["logprobs"], own_logprobs(ids(PROMPT), choice["token_ids"])
    for place, token in enumerate(choice["token_ids"]):
        assert told["token_logprobs"][place] == pytest.approx(float(rows[place, token]), abs=1e-4)
        values, _ = rows[place].topk(3)
        # The chosen one comes last if it is not among them.
        likeliest = list(told["top_logprobs"][place].values())[:3]
        assert likeliest == pytest.approx(values.tolist(), abs=1e-4)
    shown = zip(told["tokens"], told["text_offset"], strict=True)
    assert all(choice["text"][at : at + len(token)] == token for token, at in shown)
    choice, prompt = chat["choices"][0], chat["prompt_token_ids"]
    rows = own_logprobs(prompt, choice["token_ids"])
    for place, entry in enumerate(choice["logprobs"]["content"]):
        token = choice["token_ids"][place]
        assert entry["logprob"] == pytest.approx(float(rows[place, token]), abs=1e-4)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert values == pytest.approx(rows[place].topk(3).values.tolist(), abs=1e-4)
    assert len(choice["logprobs"]["content"]) == 8


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1.2, "seed": 5},
        {"n": 2, "temperature": 1.2, "seed": 6, "stop": ["a", "e", "#", "]?"]},
        {"echo": True, "seed": 1, "temperature": 1},
    ],
)
def test_a_stream_tells_what_the_whole_answer_tells(
    served: Front, chat: bool, fields: dict[str, object]
) -> None:
    route = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, object] = CHAT if chat else {"prompt": [PROMPT, "x"]}
    body = {**body, "max_tokens": 12, "return_token_ids": True, **fields}
    if not fields.get("echo"):
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    body |= {"temperature": fields.get("temperature", 0)}

    async def story() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        whole = await served.good(route, body)
        options = {"stream_options": {"include_usage": True}}
        return whole, await served.events(route, {**body, **options})

    whole, events = served.run(story())
    *chunks, last = events
    assert last["choices"] == []
    details = (
        last["usage"].pop("prompt_tokens_details"),
        whole["usage"].pop("prompt_tokens_details"),
    )
    assert all(set(detail) == {"cached_tokens"} for detail in details)
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        mine = [
            part
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        if chat:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(part["delta"].get("content", "") for part in mine)
            assert text == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        told = [token for part in mine for token in part.get("token_ids") or []]
        assert told == choice["token_ids"]
        shown = [part["logprobs"] for part in mine if part["logprobs"]]
        if not fields.get("echo"):
            for name in ("content",) if chat else tuple(choice["logprobs"]):
                streamed = [one for part in shown for one in part[name]]
                assert close(streamed, choice["logprobs"][name]), name


def test_a_stop_string_ends_the_text_before_it(served: Front) -> None:
    async def story() -> None:
        whole = await served.complete(PROMPT, max_tokens=10, logit_bias=VISIBLE)
        text = whole["choices"][0]["text"]
        stop = text[4:7]
        cut = await served.complete(
            PROMPT, max_tokens=10, stop=["zzz", stop], logprobs=0, logit_bias=VISIBLE
        )
        choice = cut["choices"][0]
        before = text[: text.index(stop)]
        assert (choice["text"], choice["finish_reason"]) == (before, "stop")
        assert choice["stop_reason"] == stop
        assert "".join(choice["logprobs"]["tokens"]) == before
        assert cut["usage"]["completion_tokens"] == text.index(stop) + len(stop)
        events = await served.events(
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 10, "stop": stop, "logit_bias": VISIBLE},
        )
        parts = [event["choices"][0]["text"] for event in events]
        assert "".join(parts) == before
        # The begin of a stop string that does not come is text after all.
        end = text[-2:] + "zzz"
        held = await served.complete(PROMPT, max_tokens=10, stop=end, logit_bias=VISIBLE)
        assert (held["choices"][0]["text"], held["choices"][0]["finish_reason"]) == (text, "length")
        await served.wait_idle()

    served.run(story())


def test_choices_have_seeds_of_their_own(served: Front) -> None:
    async def story() -> None:
        fields = {"max_tokens": 10, "temperature": 1.5, "ignore_eos": True}
        four = await served.complete(PROMPT, n=4, seed=11, **fields)
        texts = [choice["text"] for choice in four["choices"]]
        assert len(set(texts)) == 4
        again = await served.complete(PROMPT, n=4, seed=11, **fields)
        assert [choice["text"] for choice in again["choices"]] == texts
        alone = await served.complete(PROMPT, seed=11, **fields)
        assert alone["choices"][0]["text"] == texts[0]
        other = await served.complete(PROMPT, n=4, seed=12, **fields)
        assert not {choice["text"] for choice in other["choices"]} & set(texts)
        unseeded = {
            (await served.complete(PROMPT, **fields))["choices"][0]["text"] for _ in range(3)
        }
        assert len(unseeded) == 3
        assert four["usage"]["prompt_tokens"] == len(PROMPT), "one prompt, however many choices"
        assert four["usage"]["completion_tokens"] == 40
        nested = await served.complete(["a", "b"], n=2, seed=3, **fields)
        assert [choice["index"] for choice in nested["choices"]] == [0, 1, 2, 3]
        for place, prompt in ((0, "a"), (2, "b")):
            one = await served.complete(prompt, seed=3, **fields)
            assert nested["choices"][place]["text"] == one["choices"][0]["text"]

    served.run(story())


def test_the_prompt_of_several_choices_is_computed_once(served: Front) -> None:
    async def story() -> None:
        prompt, before = "many chunks " * 18, served.workers.prefill.status().tokens
        await served.complete(prompt, n=4, max_tokens=1)
        computed = served.workers.prefill.status().tokens - before
        # What its last chunks made may be on its way into the pool when the second choice looks.
        assert computed < 2 * len(prompt)
        await served.wait_idle()

    served.run(story())


def test_more_choices_than_the_workers_queues_hold(served: Front) -> None:
    async def story() -> None:
        fields = {"max_tokens": 2, "ignore_eos": True, "logit_bias": VISIBLE}
        asked = [served.complete("a", n=100, **fields) for _ in range(3)]
        asked.append(served.complete(["a", "b"] * 60, **fields))
        for answer in await asyncio.gather(*asked):
            assert all(len(choice["text"]) == 2 for choice in answer["choices"])
        await served.wait_idle()

    served.run(story())


def test_all_choices_of_a_request_share_its_deadline() -> None:
    """A further choice begins when the first one has; its time began with the request's."""

    async def story() -> None:
        began, room = asyncio.Event(), asyncio.Semaphore(1)

        async def steps() -> AsyncGenerator[Produced]:
            yield Produced(finish_reason="length")

        for passed in (began, room):
            follow = in_turn(began, Deadline(0.01), room, steps())
            with pytest.raises(TransferTimeoutError):
                await anext(follow)
            began.set()
            if passed is began:
                await room.acquire()
        room.release()
        follow = in_turn(began, Deadline(WAIT_S), room, steps())
        assert [step async for step in follow] == [Produced(finish_reason="length")]
        assert not room.locked()

    asyncio.run(story())


def test_what_shapes_the_distribution_reaches_the_workers(served: Front) -> None:
    async def text(**fields: object) -> str:
        answer = await served.complete(PROMPT, **{"max_tokens": 8, "ignore_eos": True, **fields})
        found: str = answer["choices"][0]["text"]
        return found

    async def story() -> None:
        plain = await text()
        assert await text(logit_bias={str(ids("q")[0]): 100}) == "q" * 8
        assert await text(logit_bias={str(token): -100 for token in ids(plain)}) != plain
        loud = {str(token): 50 for token in ids("uvwxyz")}
        flat = await text(logit_bias=loud, presence_penalty=2, frequency_penalty=2)
        assert set(flat) <= set("uvwxyz")
        assert len(set(flat)) == 6, "the penalties spread what the bias gathers"
        for fields in ({"top_k": 1}, {"top_p": 1e-9}):
            assert await text(temperature=2, seed=1, **fields) == plain
        assert await text(temperature=2, seed=1, top_k=-1) == await text(temperature=2, seed=1)
        stops = await text(stop_token_ids=[ids(plain)[3]])
        assert plain.startswith(stops)
        assert len(stops) <= 3

    served.run(story())


def test_an_output_ends_with_an_end_token_unless_told_otherwise(served: Front) -> None:
    async def story() -> None:
        ended = await served.complete(PROMPT, max_tokens=5, logit_bias={"5": 100})
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert ended["usage"]["completion_tokens"] == 0
        on = await served.complete(PROMPT, max_tokens=5, logit_bias={"5": 100}, ignore_eos=True)
        assert (on["choices"][0]["finish_reason"], on["choices"][0]["text"]) == ("length", "")
        assert on["usage"]["completion_tokens"] == 5

    served.run(story())


def test_echo_and_the_end_of_a_conversation(served: Front) -> None:
    async def story() -> None:
        echoed = await served.complete(PROMPT, max_tokens=3, echo=True, ignore_eos=True)
        plain = await served.complete(PROMPT, max_tokens=3, ignore_eos=True)
        assert echoed["choices"][0]["text"] == PROMPT + plain["choices"][0]["text"]
        tokens = await served.complete(ids("ab"), max_tokens=1, echo=True)
        assert tokens["choices"][0]["text"].startswith("ab")
        begun = [*CHAT["messages"], {"role": "assistant", "content": "It is"}]
        body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
        goes_on = {**body, "echo": True, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = await served.good("/v1/chat/completions", goes_on)
        assert answer["choices"][0]["message"]["content"].startswith("It is")
        told = await served.good("/tokenize", body)
        shown = await served.good("/detokenize", {"tokens": told["tokens"]})
        assert shown["prompt"] == "user: What is it?; assistant: It is"
        assert answer["usage"]["prompt_tokens"] == told["count"]

    served.run(story())


def test_tokenize_and_detokenize(served: Front) -> None:
    async def story() -> None:
        told = await served.good(
            "/tokenize", {"model": NAME, "prompt": "ab", "return_token_strs": True}
        )
        assert told == {
            "count": 2,
            "max_model_len": CONTEXT,
            "tokens": ids("ab"),
            "token_strs": ["a", "b"],
        }
        options = {"chat_template_kwargs": {"who": "clerk"}}
        rendered = await served.good("/tokenize", {**CHAT, **options})
        text = (await served.good("/detokenize", {"tokens": rendered["tokens"]}))["prompt"]
        assert text == "user: What is it?; clerk:"
        assert rendered["token_strs"] is None
        chat = await served.good("/v1/chat/completions", {**CHAT, **options, "max_tokens": 1})
        assert chat["usage"]["prompt_tokens"] == rendered["count"]
        parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
        as_parts = {"messages": [{"role": "user", "content": parts}]}
        assert (await served.good("/tokenize", {**as_parts, **options})) == rendered
        assert (await served.good("/detokenize", {"tokens": []}))["prompt"] == ""

    served.run(story())


def test_what_a_router_probes(served: Front) -> None:
    async def story() -> None:
        client = served.client
        [card] = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["root"], card["max_model_len"]) == (NAME, NAME, CONTEXT)
        assert card["permission"][0]["allow_logprobs"] is True
        assert (await client.get(f"/v1/models/{NAME}")).json() == card
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/ping")).status_code == 200
        assert (await client.post("/ping")).status_code == 200
        assert (await client.get("/version")).json()["version"]
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert "kvpool_conductor_requests_total" in (await client.get("/metrics")).text

    served.run(story())


def test_request_ids(served: Front) -> None:
    async def story() -> None:
        body = {"prompt": "a", "max_tokens": 1}
        mine = await served.post("/v1/completions", body, {"x-request-id": "my-id.7"})
        assert mine.headers["x-request-id"] == "my-id.7"
        assert mine.json()["id"] == "cmpl-my-id.7"
        for bad in ("", "a b", "x" * 129, "<script>"):
            other = await served.post("/v1/completions", body, {"x-request-id": bad})
            given = other.headers["x-request-id"]
            assert len(given) == 32, "what is no id is not repeated"
            assert other.json()["id"] == f"cmpl-{given}"
        for route in ("/v1/nothing", "/v1/completions", "/health"):
            assert (await served.post(route, {})).headers["x-request-id"]

    served.run(story())


def test_limits_and_salts(served: Front) -> None:
    async def story() -> None:
        both = await served.chat("a", max_tokens=7, max_completion_tokens=2, ignore_eos=True)
        assert both["usage"]["completion_tokens"] == 2, "the newer name decides"
        prompt = "A secret of sixty-four characters, whose blocks nobody may share"
        await served.complete(prompt, max_tokens=1, cache_salt="a")
        cached = []
        for salt in ("a", "b"):
            answer = await served.complete(prompt, max_tokens=1, cache_salt=salt)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [48, 0]
        full = await served.complete("x" * (CONTEXT - 4), ignore_eos=True)
        assert full["usage"]["completion_tokens"] == 4, "as much as there is room for"

    served.run(story())


def test_a_chosen_token_is_always_told(served: Front) -> None:
    async def story() -> None:
        unlikely = str(ids("q")[0])
        answer = await served.complete("a", max_tokens=1, logprobs=0, logit_bias={unlikely: 100})
        told = answer["choices"][0]["logprobs"]
        assert list(told["top_logprobs"][0]) == ["q"]
        assert math.isfinite(told["token_logprobs"][0])

    served.run(story())


def test_many_logprobs_are_put_together_beside_the_loop(
    served: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the bulk of a long answer: other requests must not wait for them."""
    threads: list[int] = []
    shown = TokenTexts.text

    def text(texts: TokenTexts, token: int) -> str:
        threads.append(threading.get_ident())
        return shown(texts, token)

    monkeypatch.setattr(TokenTexts, "text", text)
    for story in (
        served.complete(PROMPT, max_tokens=4, logprobs=3),
        served.chat(PROMPT, max_tokens=4, logprobs=True, top_logprobs=3),
    ):
        served.run(story)
        assert threads and threading.get_ident() not in threads
        threads.clear()
