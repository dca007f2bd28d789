"""``kvpool bench e2e``: a whole kvpool-serve on this machine, measured over HTTP.

Owns the cases, with the demo's model; how they are measured is in ``kvpool.integration.bench``. Who
calls it: ``kvpool bench``.
"""

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from kvpool.cli.bench import Case, Sides, Timer
from kvpool.errors import InternalError
from kvpool.integration.bench import ModelAlone, ServedModel
from kvpool.integration.runtime.demo_model import demo_model

RUNNING: Final = 8
SHARED_TOKENS: Final = 2000
FRESH_TOKENS: Final = 64
BLOCK_TOKENS: Final = 16
# Of the full blocks of what is shared, at least this share must come from the pool.
CACHED_SHARE_MIN: Final = 0.95
# kvpool-serve runs two workers, of which one computes at a time in these rows: each gets what
# Transformers alone gets, half of the processors and at least one.
THREADS: Final = max(1, (os.cpu_count() or 1) // 2)
_CACHE_DIR: Final = Path.home() / ".cache" / "kvpool"
T = TypeVar("T")


class _Rates:
    """Tokens per second of eight requests that run together, against one alone."""

    ceiling: float | None = None

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


class _Batches:
    """Eight requests from the first sent to the last ended, against ``generate_batch``."""

    ceiling: float | None = None

    def __init__(self, served: ServedModel, alone: ModelAlone, max_tokens: int) -> None:
        self._served = served
        self._alone = alone
        self._max_tokens = max_tokens
        self._prompts = [served.prompt(32) for _ in range(RUNNING)]

    def value(self) -> float:
        return self._served.whole_tokens_per_second(self._prompts, self._max_tokens)

    def reference(self) -> float:
        return self._alone.tokens_per_second(self._prompts, self._max_tokens)


class _Warm:
    """Time to the first token of a long prompt whose beginning is in the pool, against one new."""

    ceiling: float | None = None

    def __init__(self, served: ServedModel, shared_tokens: int) -> None:
        self._served = served
        self._shared_tokens = shared_tokens

    def value(self) -> float:
        shared = self._served.prompt(self._shared_tokens)
        self._served.first_token([*shared, *self._served.prompt(FRESH_TOKENS)])
        took_s, cached = self._served.first_token([*shared, *self._served.prompt(FRESH_TOKENS)])
        full = self._shared_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        if cached < CACHED_SHARE_MIN * full:
            raise InternalError(f"{cached} of {full} shared tokens came from the pool")
        return took_s

    def reference(self) -> float:
        return self._served.first_token(self._served.prompt(self._shared_tokens + FRESH_TOKENS))[0]


class _Cold:
    """Time to the first token of a new prompt, against Transformers' forward of as many tokens."""

    ceiling: float | None = None

    def __init__(self, served: ServedModel, alone: ModelAlone, tokens: int) -> None:
        self._served = served
        self._alone = alone
        self._tokens = tokens

    def value(self) -> float:
        return self._served.first_token(self._served.prompt(self._tokens))[0]

    def reference(self) -> float:
        return self._alone.forward_s(self._served.prompt(self._tokens))


@contextmanager
def _served(make: Callable[[ServedModel], T], timer: Timer) -> Generator[T, None, None]:
    with ServedModel(demo_model(_CACHE_DIR), THREADS) as served:
        yield make(served)


@contextmanager
def _both(make: Callable[[ServedModel, ModelAlone], T], timer: Timer) -> Generator[T, None, None]:
    model = demo_model(_CACHE_DIR)
    with ServedModel(model, THREADS) as served, ModelAlone(model, THREADS) as alone:
        yield make(served, alone)


def cases(quick: bool) -> list[Case]:
    """Return the cases; ``quick`` ones are shorter, and no evidence."""
    max_tokens = 48 if quick else 128
    shared = SHARED_TOKENS // 4 if quick else SHARED_TOKENS

    def rates(timer: Timer) -> AbstractContextManager[Sides]:
        return _served(lambda served: _Rates(served, max_tokens), timer)

    def batches(timer: Timer) -> AbstractContextManager[Sides]:
        return _both(lambda served, alone: _Batches(served, alone, max_tokens), timer)

    def warm(timer: Timer) -> AbstractContextManager[Sides]:
        return _served(lambda served: _Warm(served, shared), timer)

    def cold(timer: Timer) -> AbstractContextManager[Sides]:
        return _both(lambda served, alone: _Cold(served, alone, shared + FRESH_TOKENS), timer)

    rows: list[tuple[str, str, str, Callable[[Timer], AbstractContextManager[Sides]]]] = [
        ("ttft.warm", "s", "a prompt of which nothing is in the pool", warm),
        ("ttft.cold", "s", "Transformers' forward of as many tokens", cold),
        ("decode.batch8", "tokens/s", "one request alone", rates),
        ("decode.generate_batch", "tokens/s", "Transformers' generate_batch", batches),
    ]
    return [
        Case(
            name=f"e2e.{name}",
            unit=unit,
            reference=reference,
            open=opened,
            lower_is_better=unit == "s",
            one_process=False,
        )
        for name, unit, reference, opened in rows
    ]
