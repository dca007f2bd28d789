"""Text from tokens as they come: whole characters only, and stop strings.

Owns the incremental detokenisation of one output. Pure but for the tokenizer's own tables. Never
decides when to stop generating beyond its stop strings. Who calls it: the Conductor's app.
"""

from collections.abc import Sequence
from typing import Final, Protocol

# What a tokenizer puts where bytes do not form a character, yet or at all.
_REPLACEMENT: Final = "\ufffd"
# A character has at most 4 bytes, so at most 4 tokens: bytes held longer than that are no character.
_HELD_TOKENS_MAX: Final = 4


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        ...


class Detokenizer:
    """Turns the tokens of one output into text, never half a character.

    Tokens are decoded together with those before them, since a tokenizer may render a token
    differently at the start of a text.

    Args:
        decoder: The model's tokenizer.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._tokens: list[int] = []
        self._context = 0  # tokens before this one no longer matter
        self._emitted = 0  # tokens before this one have been turned into text

    def push(self, token: int) -> str:
        """Take one token and return the text that it completes, perhaps ``""``."""
        self._tokens.append(token)
        held = len(self._tokens) - self._emitted
        text = self._pending()
        if (not text or text.endswith(_REPLACEMENT)) and held <= _HELD_TOKENS_MAX:
            return ""
        self._context, self._emitted = self._emitted, len(self._tokens)
        return text

    def finish(self) -> str:
        """Return what is left: bytes that never became a character."""
        text = self._pending()
        self._context = self._emitted = len(self._tokens)
        return text

    def _pending(self) -> str:
        before = self._decode(self._tokens[self._context : self._emitted])
        whole = self._decode(self._tokens[self._context :])
        return whole[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=True) if tokens else ""


class StopStrings:
    """Cuts a text at the first stop string, holding back what may be the beginning of one.

    Attributes:
        hit: The stop string that was met, if any. It and what follows are dropped. It is the one
            that was complete first, and the longest of those, however the text was split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Take more text and return what is certainly before any stop string."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda place: (place[0] + len(place[1]), place[0]))
            return self._held[:at]
        keep = self._unsure()
        certain, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return certain

    def finish(self) -> str:
        """Return what was held back: no stop string followed."""
        rest, self._held = (self._held if self.hit is None else ""), ""
        return rest

    def _unsure(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
