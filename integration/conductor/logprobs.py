"""Log probabilities in the shapes of the OpenAI API, and single tokens as text.

Owns how a token is shown alone: its text as it reads in the middle of a text, and its bytes. Who
calls it: a turn.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from kvpool.integration.conductor.output import Told

# JSON has no infinity. The same stand-in as vLLM's.
LOGPROB_MIN: Final = -9999.0

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_characters() -> dict[str, int]:
    """Return the characters by which byte-level tokenizers write the 256 bytes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shown = [*plain, *(256 + number for number in range(len(others)))]
    return {chr(code): byte for code, byte in zip(shown, plain + others, strict=True)}


_BYTES: Final = _byte_characters()


class TokenTexts:
    """Tokens of one tokenizer, each shown alone. Safe from any thread.

    Args:
        tokenizer: Of Transformers, with fast tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # at most the vocabulary

    def text(self, token: int) -> str:
        """Return a token's text as it reads after another one; special tokens by their names."""
        if token not in self._texts:
            # Some tokenizers drop a space at the begin of a text: so it is read after itself.
            once, twice = self._decode([token]), self._decode([token, token])
            self._texts[token] = twice[len(once) :]
        return self._texts[token]

    def raw(self, token: int) -> list[int]:
        """Return a token's bytes, which alone may be no character."""
        text = self.text(token)
        if "\ufffd" in text:
            piece = str(self.tokenizer.convert_ids_to_tokens(token))
            if found := _BYTE_TOKEN.fullmatch(piece):
                return [int(found[1], 16)]
            if all(character in _BYTES for character in piece):
                return [_BYTES[character] for character in piece]
        return list(text.encode("utf-8", "replace"))

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


def chat_logprobs(texts: TokenTexts, told: Sequence[Told]) -> dict[str, object]:
    """Return the ``logprobs`` of a chat's choice."""

    def shown(token: int, logprob: float) -> dict[str, object]:
        return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": texts.raw(token)}

    content = [
        shown(one.token, one.logprob)
        | {"top_logprobs": [shown(token, logprob) for token, logprob in one.top]}
        for one in told
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(texts: TokenTexts, told: Sequence[Told]) -> dict[str, object]:
    """Return the ``logprobs`` of a completion's choice. The chosen token is always among the top."""
    tops: list[dict[str, float]] = []
    for one in told:
        top: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            top.setdefault(texts.text(token), _finite(logprob))
        tops.append(top)
    return {
        "tokens": [texts.text(one.token) for one in told],
        "token_logprobs": [_finite(one.logprob) for one in told],
        "top_logprobs": tops,
        "text_offset": [one.offset for one in told],
    }


def _finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)  # in this order also for what is no number
