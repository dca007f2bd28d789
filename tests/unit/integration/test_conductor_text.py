"""Text from tokens: never half a character, and cut at stop strings, however the text arrives."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.integration.conductor.dispatch import Produced
from kvpool.integration.conductor.output import Output
from kvpool.integration.conductor.text import Detokenizer, StopStrings


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is a special token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")


@given(st.text())
def test_any_text_comes_out_whole_and_in_characters(text: str) -> None:
    tokens = list(text.encode("utf-8", "replace"))
    detokenizer = Detokenizer(Bytes())
    parts = [detokenizer.push(token) for token in tokens]
    parts.append(detokenizer.finish())
    assert "".join(parts) == bytes(tokens).decode()
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_characters_come_out_too_and_are_not_held_for_long(raw: bytes) -> None:
    detokenizer = Detokenizer(Bytes())
    held = 0
    out = ""
    for token in raw:
        part = detokenizer.push(token)
        out += part
        held = 0 if part else held + 1
        assert held <= 4
    out += detokenizer.finish()
    if raw:
        assert out


def test_a_special_token_adds_nothing() -> None:
    detokenizer = Detokenizer(Bytes())
    assert [detokenizer.push(token) for token in (104, 256, 105)] == ["h", "", "i"]


class Counting(Bytes):
    """Counts the tokens that it was given."""

    def __init__(self) -> None:
        self.tokens = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.tokens += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@given(st.lists(st.sampled_from([104, 256, 0xC3, 0xA4, 0xFF]), min_size=100, max_size=400))
def test_no_token_is_decoded_more_often_than_a_few_times(tokens: list[int]) -> None:
    """However many of them have no text: special ones, and bytes of no character."""
    decoder = Counting()
    detokenizer = Detokenizer(decoder)
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
    assert text.count("h") == tokens.count(104)
    assert decoder.tokens <= 25 * len(tokens)


def test_tokens_without_text_are_not_decoded_again_and_again() -> None:
    decoder = Counting()
    detokenizer = Detokenizer(decoder)
    for _ in range(4000):
        assert detokenizer.push(256) == ""
    assert decoder.tokens <= 25 * 4000


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_stop_strings_cut_the_same_however_the_text_is_split(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    filtered = StopStrings(stops)
    out, at = "", 0
    for size in [*sizes, len(text)]:
        out += filtered.push(text[at : at + size])
        at += size
    hit = filtered.hit
    out += filtered.finish()
    # The stop string that is complete first; of those that end there, the one that begins first.
    places = [
        (text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text
    ]
    if places:
        _, begin, stop = min(places)
        assert (out, hit) == (text[:begin], stop)
    else:
        assert (out, hit) == (text, None)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    filtered = StopStrings(["END"])
    assert [filtered.push(part) for part in ("aE", "N", "x", "EN", "D", "more")] == [
        "a",
        "",
        "ENx",
        "",
        "",
        "",
    ]
    assert filtered.hit == "END"


def test_an_output_counts() -> None:
    output = Output(Bytes(), ["!"])
    assert output.push(Produced(token=104, cached_tokens=32)) == "h"
    assert (output.tokens, output.cached_tokens) == (1, 32)
    assert output.push(Produced(token=105)) == "i"
    assert output.push(Produced(token=33)) == ""
    assert (output.tokens, output.cached_tokens) == (3, 32)
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "!", "hi")
    other = Output(Bytes(), [])
    other.push(Produced(token=0xE2))
    assert other.push(Produced(finish_reason="length")) == "\ufffd"


def told(output: Output) -> list[tuple[int, int]]:
    return [(one.token, one.offset) for one in output.take_told()]


def test_a_token_is_told_when_its_text_is_certain() -> None:
    output = Output(Bytes(), ["no!"])
    seen = []
    for token in b"\xc3\xa4nono":
        output.push(Produced(token=token, logprob=-0.5))
        seen.append(told(output))
    # Half of a character has no text; "n" and "no" may begin the stop string.
    half, character = (0xC3, 0), (0xA4, 0)
    assert seen == [[], [half, character], [], [], [(110, 1), (111, 2)], []]
    assert output.take_token_ids() == list(b"\xc3\xa4nono")
    output.push(Produced(token=33))
    assert (output.finish_reason, output.text, told(output)) == ("stop", "\xe4no", [])
    assert output.take_token_ids() == [33]


class Words:
    """A tokenizer whose tokens are words."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(["ab", "cd", "ef"][token] for token in token_ids)


def test_a_token_that_only_begins_before_a_stop_string_is_told() -> None:
    output = Output(Words(), ["dx", "de"])
    for token in (0, 1, 2):
        output.push(Produced(token=token))
    assert (output.text, output.stop_reason, told(output)) == ("abc", "de", [(0, 0), (1, 2)])


def test_held_tokens_are_told_at_the_end() -> None:
    output = Output(Bytes(), ["xyz"])
    for token in (120, 121, 256):
        output.push(Produced(token=token))
    assert told(output) == []
    assert output.push(Produced(finish_reason="length")) == "xy"
    assert told(output) == [(120, 0), (121, 1), (256, 2)]


@given(st.binary(max_size=24), st.lists(st.text("ab\xe4", min_size=1, max_size=3), max_size=2))
def test_streamed_or_whole_the_same_tokens_are_told(raw: bytes, stops: list[str]) -> None:
    whole, streamed = Output(Bytes(), stops), Output(Bytes(), stops)
    parts: list[tuple[int, int]] = []
    for step in [*(Produced(token=token) for token in raw), Produced(finish_reason="length")]:
        for output in (whole, streamed):
            if output.finish_reason is None:
                output.push(step)
        parts += told(streamed)
    assert parts == told(whole)
    assert [token for token, _ in parts] == list(raw[: len(parts)])
    if whole.stop_reason is None:
        assert len(parts) == len(raw)
