"""The outputs of one HTTP request: several token streams side by side, each turned into text.

Owns the tasks that follow the streams, so that an HTTP request that ends early, in whatever way,
cancels them without having to wait. Who calls it: the Conductor's app.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Self

from kvpool.errors import InternalError, KVPoolError
from kvpool.integration.conductor.dispatch import Produced
from kvpool.integration.conductor.text import Decoder, Detokenizer, StopStrings
from kvpool.integration.runtime.handoff import TopLogprobs

logger = logging.getLogger(__name__)

# Steps that wait for a slow client before the stream is held back.
_QUEUED_STEPS: Final = 64

# Tasks of cancelled requests, until they have told the workers. asyncio keeps no strong reference.
_ending: set[asyncio.Task[None]] = set()


@dataclass(frozen=True, slots=True)
class Told:
    """A token of the text, with its logprobs.

    Attributes:
        token, logprob, top: As the workers say.
        offset: Where its text begins in the output's text.
    """

    token: int
    logprob: float
    top: TopLogprobs
    offset: int


class Output:
    """One output: its text so far, its counts and how it ended.

    A token is told when all of its text is certain, so those of a stop string never are; one that
    only begins before a stop string is. Streamed or whole, the same tokens are told.

    Args:
        decoder: The model's tokenizer.
        stops: Stop strings.

    Attributes:
        text: All text that was returned by ``push``.
        tokens: Tokens produced.
        cached_tokens: Prompt tokens whose KV came from the pool.
        finish_reason: None until it ended.
        stop_reason: The stop string that ended it, if one did.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._filter = StopStrings(stops)
        self.text = ""
        self.tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self._decoded = 0  # characters of text, held ones included
        self._textless: list[Produced] = []  # tokens since the last one that made text
        self._held: deque[tuple[int, list[Told]]] = deque()  # where their text ends, and who
        self._told: list[Told] = []
        self._token_ids: list[int] = []

    def push(self, step: Produced) -> str:
        """Take one step and return the text that it adds, perhaps ``""``."""
        self.cached_tokens = step.cached_tokens or self.cached_tokens
        added = ""
        if step.token is not None:
            self.tokens += 1
            self._token_ids.append(step.token)
            self._textless.append(step)
            added = self._take(self._detokenizer.push(step.token))
        if step.finish_reason is not None:
            added += self._take(self._detokenizer.finish()) + self._filter.finish()
            self.finish_reason = step.finish_reason
        if self._filter.hit is not None:
            self.finish_reason, self.stop_reason = "stop", self._filter.hit
        self.text += added
        self._tell()
        return added

    def take_token_ids(self) -> list[int]:
        """Return the tokens since the last call, those of a stop string too."""
        taken, self._token_ids = self._token_ids, []
        return taken

    def take_told(self) -> list[Told]:
        """Return the tokens that were told since the last call."""
        taken, self._told = self._told, []
        return taken

    def _take(self, text: str) -> str:
        """Take decoded text and return what is certain of it."""
        if text:
            told = [
                Told(one.token or 0, one.logprob, one.top, self._decoded) for one in self._textless
            ]
            self._textless = []
            self._decoded += len(text)
            self._held.append((self._decoded, told))
        return self._filter.push(text)

    def _tell(self) -> None:
        """Tell the tokens whose text is certain."""
        certain = len(self.text)
        while self._held and self._held[0][0] <= certain:
            self._told += self._held.popleft()[1]
        if self._filter.hit is not None:
            if self._held and self._held[0][1] and self._held[0][1][0].offset < certain:
                self._told += self._held[0][1]
            self._held.clear()
        elif self.finish_reason is not None:
            # Tokens without any text, at the end.
            self._told += [
                Told(one.token or 0, one.logprob, one.top, certain) for one in self._textless
            ]
            self._textless = []


class Fanout:
    """Follows several token streams at once. An async iterator of (index, step).

    The first error of any stream ends all. Call ``close`` in any case; it does not block.

    Args:
        streams: Closed when their turn ends, by the tasks made here.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[Produced]]) -> None:
        self._queue: asyncio.Queue[tuple[int, Produced | KVPoolError | None]] = asyncio.Queue(
            _QUEUED_STEPS
        )
        self._tasks = [
            asyncio.create_task(self._follow(index, stream)) for index, stream in enumerate(streams)
        ]
        self._open = set(range(len(streams)))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Produced]:
        """Return the next step. Raises the typed error of a stream that failed."""
        while self._open:
            index, step = await self._queue.get()
            if isinstance(step, KVPoolError):
                raise step
            if step is None:
                self._open.discard(index)
            elif index in self._open:
                return index, step
        raise StopAsyncIteration

    def drop(self, index: int) -> None:
        """End one stream early."""
        self._open.discard(index)
        self._cancel(self._tasks[index])

    def close(self) -> None:
        """End all streams. Idempotent; the workers are told in the background."""
        for task in self._tasks:
            self._cancel(task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            _ending.add(task)
            task.add_done_callback(_ending.discard)
            task.cancel()

    async def _follow(self, index: int, stream: AsyncGenerator[Produced]) -> None:
        last: KVPoolError | None = None
        try:
            async with aclosing(stream):
                async for step in stream:
                    await self._queue.put((index, step))
        except KVPoolError as error:
            last = error
        except Exception as error:
            logger.exception("a stream failed")
            last = InternalError(f"{type(error).__name__}: {error}")
            last.__cause__ = error
        await self._queue.put((index, last))
