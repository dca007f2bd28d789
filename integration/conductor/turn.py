"""One HTTP request for generation, from its jobs to its end: whole or as a stream of events.

Owns the choices of one request, and that their work ends when the request does, in whatever way.
Who calls it: the Conductor's app.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from kvpool.completion import Deadline
from kvpool.errors import InternalError, KVPoolError, TransferTimeoutError
from kvpool.integration.conductor.answer import Answer, Part, usage
from kvpool.integration.conductor.dispatch import Dispatcher, Job, Produced
from kvpool.integration.conductor.edge import sse
from kvpool.integration.conductor.http_error import CLIENT_GONE, http_error
from kvpool.integration.conductor.logprobs import (
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
)
from kvpool.integration.conductor.metrics import ConductorMetrics
from kvpool.integration.conductor.output import Fanout, Output
from kvpool.integration.conductor.schemas import ChatRequest, GenerationRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request.

    Attributes:
        jobs: One for each choice.
        echo: Text that each choice begins with.
    """

    jobs: list[Job]
    echo: str = ""


@dataclass(frozen=True, slots=True)
class _Choice:
    """One output of a prompt, which ``began`` when the pool has its blocks, or will very soon."""

    job: Job
    echo: str
    output: Output
    began: asyncio.Event


class Turn:
    """One request at work. ``end`` is called at least once; it counts once.

    Args:
        body: What the client asks for.
        prompts: At least one.
        answer: The envelope.
        dispatcher: Generates.
        texts: Tokens alone, for logprobs.
        metrics: Counts tokens and the time to the first one.
        room: For the choices of all requests that are not the first of their request.
        on_end: Called once, with the outcome: an HTTP status.
    """

    def __init__(
        self,
        body: GenerationRequest,
        prompts: list[Prompt],
        *,
        answer: Answer,
        dispatcher: Dispatcher,
        texts: TokenTexts,
        metrics: ConductorMetrics,
        room: asyncio.Semaphore,
        on_end: Callable[[str], None],
    ) -> None:
        self._body = body
        self._chat = isinstance(body, ChatRequest)
        self._answer = answer
        self._texts = texts
        self._metrics = metrics
        self._on_end = on_end
        self._began = time.monotonic()
        self._ended = False
        options = body.stream_options
        self._usage_wanted = bool(options and options.include_usage)
        self._prompt_tokens = sum(len(prompt.jobs[0].tokens) for prompt in prompts)
        stops, tokenizer = body.stop, texts.tokenizer
        deadline = dispatcher.deadline()
        self._choices: list[_Choice] = []
        streams: list[AsyncGenerator[Produced]] = []
        for prompt in prompts:
            begun, began = asyncio.Event(), asyncio.Event()
            begun.set()
            for number, job in enumerate(prompt.jobs):
                self._choices.append(_Choice(job, prompt.echo, Output(tokenizer, stops), began))
                steps = dispatcher.stream(job, deadline)
                if streams:
                    steps = in_turn(began if number else begun, deadline, room, steps)
                streams.append(steps)
        self._fanout = Fanout(streams)

    def end(self, outcome: str) -> None:
        """Cancel what still runs and count the request. Later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        self._fanout.close()
        outputs = [choice.output for choice in self._choices]
        self._metrics.tokens(
            prompt=self._prompt_tokens,
            cached=self._cached_tokens(),
            output=sum(output.tokens for output in outputs),
        )
        self._on_end(outcome)

    async def whole(self) -> bytes:
        """Generate to the end and return the answer, as JSON."""
        while await self._advance() is not None:
            pass
        # Logprobs of a long answer are some 100,000 objects: other requests go on meanwhile.
        return await asyncio.to_thread(self._rendered)

    def _rendered(self) -> bytes:
        parts = [
            self._part(choice, choice.echo + choice.output.text, first=True)
            for choice in self._choices
        ]
        return msgspec.json.encode(self._answer.whole(parts, self._usage()))

    async def first_parts(self) -> list[tuple[int, Part]]:
        """Wait for the first step, so that an error before it is an HTTP error; return its parts."""
        return await self._advance() or []

    async def stream(self, first: list[tuple[int, Part]]) -> AsyncIterator[bytes]:
        """Yield server-sent events: roles, deltas, ends, usage if asked for, and DONE."""
        outcome = str(CLIENT_GONE)
        try:
            for index, choice in enumerate(self._choices):
                for part in self._opening(choice):
                    yield self._event(index, part)
            parts: list[tuple[int, Part]] | None = first
            while parts is not None:
                for index, part in parts:
                    yield self._event(index, part)
                parts = await self._advance()
            if self._usage_wanted:
                yield sse(self._answer.last(self._usage()))
            yield b"data: [DONE]\n\n"
            outcome = "200"
        except KVPoolError as error:
            shown = http_error(error)
            outcome = str(shown.status)
            logger.warning("a stream ended early: %s", error)
            yield sse(shown.body())
            yield b"data: [DONE]\n\n"
        except Exception as error:
            logger.exception("a stream failed")
            outcome = "500"
            yield sse(http_error(InternalError(f"{type(error).__name__}: {error}")).body())
            yield b"data: [DONE]\n\n"
        finally:
            self.end(outcome)

    def _event(self, index: int, part: Part) -> bytes:
        return sse(self._answer.chunk(index, part, usage=self._usage_wanted))

    def _opening(self, choice: _Choice) -> list[Part]:
        """Return what comes before the first token: the role, the echo, the prompt's tokens."""
        prompt = choice.job.tokens if self._body.return_token_ids else None
        if not self._chat:
            return (
                [Part(text=choice.echo, prompt_token_ids=prompt)] if choice.echo or prompt else []
            )
        role = Part(text=None, prompt_token_ids=prompt)
        return [role, Part(text=choice.echo)] if choice.echo else [role]

    async def _advance(self) -> list[tuple[int, Part]] | None:
        """Take one step and return what it adds, for a stream; None at the end of all outputs."""
        try:
            index, step = await anext(self._fanout)
        except StopAsyncIteration:
            return None
        choice = self._choices[index]
        choice.began.set()
        output = choice.output
        if not output.tokens and step.token is not None:
            self._metrics.first_token(time.monotonic() - self._began)
        added = output.push(step)
        ended = output.finish_reason is not None
        if ended:
            self._fanout.drop(index)
        if not self._body.stream or not (added or ended):
            return []
        parts = [(index, self._part(choice, added))]
        if ended and added:
            # Text and end apart: some clients look at one of them only.
            end = Part(finish_reason=output.finish_reason, stop_reason=output.stop_reason)
            parts.append((index, end))
        return parts

    def _part(self, choice: _Choice, text: str, *, first: bool = False) -> Part:
        """Return a part with all that its output has to tell by now."""
        output = choice.output
        told, ids = output.take_told(), output.take_token_ids()
        logprobs = None
        if self._body.alternatives() is not None and (told or first):
            shape = chat_logprobs if self._chat else completion_logprobs
            logprobs = shape(self._texts, told)
        wanted = self._body.return_token_ids
        apart = not first and bool(text)
        return Part(
            text=text,
            finish_reason=None if apart else output.finish_reason,
            stop_reason=None if apart else output.stop_reason,
            logprobs=logprobs,
            token_ids=ids if wanted else None,
            prompt_token_ids=choice.job.tokens if wanted and first else None,
        )

    def _cached_tokens(self) -> int:
        """Add up the first choice of each prompt: a prompt counts once, whatever ``n`` is."""
        return sum(choice.output.cached_tokens for choice in self._choices[:: self._body.choices])

    def _usage(self) -> dict[str, object]:
        completion_tokens = sum(choice.output.tokens for choice in self._choices)
        return usage(self._prompt_tokens, completion_tokens, self._cached_tokens())


async def in_turn(
    began: asyncio.Event,
    deadline: Deadline,
    room: asyncio.Semaphore,
    steps: AsyncGenerator[Produced],
) -> AsyncGenerator[Produced]:
    """Follow a stream when its prompt is computed, by another one, and there is room for it.

    Raises:
        TransferTimeoutError: Its turn did not come in time.
    """
    async with aclosing(steps):
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await began.wait()
                await room.acquire()
        except TimeoutError as late:
            raise TransferTimeoutError("the request's time is up") from late
        try:
            async for step in steps:
                yield step
        finally:
            room.release()


class TurnResponse(StreamingResponse):
    """A stream of events that ends its turn even if the client went away before the first one.

    Args:
        turn: Whose events.
        first: What its ``first_parts`` returned.
        send_timeout_s: A client that takes nothing for so long is gone.
    """

    def __init__(self, turn: Turn, first: list[tuple[int, Part]], send_timeout_s: float) -> None:
        super().__init__(
            turn.stream(first),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )
        self._turn = turn
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except (TimeoutError, ClientDisconnect):
            logger.info("a client took nothing for %g s: it is gone", self._send_timeout_s)
        finally:
            self._turn.end(str(CLIENT_GONE))
