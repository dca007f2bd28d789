"""``kvpool bench e2e``: a whole kvpool-serve on this machine, measured over HTTP.

Owns the cases; how they are measured is in ``kvpool.integration.bench``. Who calls it: ``kvpool
bench``.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from kvpool.cli.bench import Case
from kvpool.integration.bench import ServedModel

RUNNING: Final = 8
SHARED_TOKENS: Final = 2000
FRESH_TOKENS: Final = 64


class _Decode:
    """Tokens per second of eight requests that run together, against one alone."""

    def __init__(self, served: ServedModel, max_tokens: int) -> None:
        self._served = served
        self._max_tokens = max_tokens

    def value(self) -> float:
        return self._rate(RUNNING)

    def reference(self) -> float:
        return self._rate(1)

    def _rate(self, running: int) -> float:
        return self._served.tokens_per_second(
            running, prompt_tokens=32, max_tokens=self._max_tokens
        )


class _FirstToken:
    """Time to the first token of a long prompt whose beginning is in the pool, against one new."""

    def __init__(self, served: ServedModel, shared_tokens: int) -> None:
        self._served = served
        self._shared = served.prompt(shared_tokens)
        served.first_token_s([*self._shared, *served.prompt(FRESH_TOKENS)])

    def value(self) -> float:
        return self._served.first_token_s([*self._shared, *self._served.prompt(FRESH_TOKENS)])

    def reference(self) -> float:
        return self._served.first_token_s(self._served.prompt(len(self._shared) + FRESH_TOKENS))


def cases(quick: bool) -> list[Case]:
    """Return the cases; ``quick`` ones are shorter, and no evidence."""

    @contextmanager
    def decode() -> Generator[_Decode]:
        with ServedModel() as served:
            yield _Decode(served, 48 if quick else 128)

    @contextmanager
    def first_token() -> Generator[_FirstToken]:
        with ServedModel() as served:
            yield _FirstToken(served, SHARED_TOKENS // 4 if quick else SHARED_TOKENS)

    return [
        Case(
            name="e2e.decode.batch8",
            unit="tokens/s",
            reference="one request alone",
            open=decode,
        ),
        Case(
            name="e2e.ttft.warm",
            unit="s",
            reference="a prompt of which nothing is in the pool",
            open=first_token,
            lower_is_better=True,
        ),
    ]
