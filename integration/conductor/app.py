"""The Conductor's HTTP face: the OpenAI API over one prefill and one decode worker.

Owns routes, streaming and what a client sees of an error. Every request has a deadline, and a client
that goes away cancels its work in both workers. Who calls it: ``kvpool-serve``.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvpool.errors import InternalError, KVPoolError
from kvpool.integration.conductor.dispatch import Dispatcher, Job
from kvpool.integration.conductor.metrics import ConductorMetrics
from kvpool.integration.conductor.model import ModelText
from kvpool.integration.conductor.output import Fanout, Output
from kvpool.integration.conductor.schemas import (
    PROMPTS_MAX,
    Answer,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    HttpError,
    http_error,
    parse,
    usage,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A prompt of 128k tokens is about half a megabyte of text.
BODY_BYTES_MAX: Final = 8 << 20
# HTTP requests at work at a time; more are refused at once.
REQUESTS_MAX: Final = 256
# What nginx logs for a client that went away. Nobody reads it but the metrics.
_CLIENT_GONE: Final = 499


class Conductor:
    """Answers generation requests of the HTTP API.

    Args:
        dispatcher: Reaches the workers.
        model: The model's text side.
        supervised: Says what the launcher knows to be wrong, for ``/health``; empty if all is well.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ModelText,
        supervised: Callable[[], list[str]] = list,
    ) -> None:
        self.dispatcher = dispatcher
        self.model = model
        self.metrics = ConductorMetrics(dispatcher)
        self.created = int(time.time())
        self._supervised = supervised
        self._active = 0

    def health(self) -> tuple[int, dict[str, object]]:
        """Return status and body of ``/health``: 503 while a worker does not answer."""
        links = self.dispatcher.links
        wrong = self._supervised() + [
            f"worker {link.name} does not answer" for link in links if not link.alive
        ]
        workers = {link.name: "up" if link.alive else "down" for link in links}
        state = "degraded" if wrong else "ok"
        return 503 if wrong else 200, {"status": state, "workers": workers, "problems": wrong}

    async def answer(self, request: Request, kind: type[GenerationRequest]) -> Response:
        """Answer one generation request, streaming or not."""
        route = "chat" if kind is ChatRequest else "completions"
        if self._active >= REQUESTS_MAX:
            self.metrics.requests.labels(route, "503").inc()
            raise HttpError(
                503,
                f"{REQUESTS_MAX} requests are at work: try again later",
                kind="overloaded_error",
                code="overloaded",
            )
        turn = _Turn(self, request, route)
        self._active += 1
        handed_over = False
        try:
            body = parse(kind, await read_body(request))
            self.check_model(body.model)
            jobs = await asyncio.to_thread(self.jobs, body)
            turn.begin(body, jobs)
            response: Response
            if body.stream:
                first = await while_connected(request, turn.first_events())
                options = body.stream_options
                response = _TurnResponse(turn, first, bool(options and options.include_usage))
                handed_over = True
            else:
                response = JSONResponse(await while_connected(request, turn.whole()))
                turn.end("200")
            return response
        except KVPoolError as error:
            shown = http_error(error)
            turn.end(str(shown.status))
            raise shown from error
        except HttpError as error:
            turn.end(str(error.status))
            raise
        finally:
            if not handed_over:
                turn.end("500")

    def released(self, route: str, outcome: str) -> None:
        """Count one request that ended."""
        self._active -= 1
        self.metrics.requests.labels(route, outcome).inc()

    def check_model(self, name: str | None) -> None:
        """Raise HttpError 404 for a model that is not served here."""
        if name is not None and name != self.model.name:
            raise HttpError(
                404,
                f"the model {name!r} does not exist: {self.model.name!r} is served here",
                param="model",
                code="model_not_found",
            )

    def jobs(self, body: GenerationRequest) -> list[Job]:
        """Turn a request into jobs, one a prompt. Raises HttpError 400."""
        if isinstance(body, ChatRequest):
            return [self.model.job(body, self.model.chat_tokens(body.messages))]
        if not isinstance(body, CompletionRequest):
            raise InternalError(f"a request of kind {type(body).__name__}")
        prompts = body.prompts()
        if not 0 < len(prompts) <= PROMPTS_MAX:
            raise HttpError(400, f"{len(prompts)} prompts: give 1 to {PROMPTS_MAX}", param="prompt")
        return [self.model.job(body, self.model.prompt_tokens(prompt)) for prompt in prompts]


class _Turn:
    """One HTTP request from its body to its end. ``end`` is called exactly once in effect."""

    def __init__(self, conductor: Conductor, request: Request, route: str) -> None:
        self._conductor = conductor
        self._request = request
        self._route = route
        self._began = time.monotonic()
        self._fanout: Fanout | None = None
        self._outputs: list[Output] = []
        self._prompt_tokens = 0
        self._ended = False
        self._answer = Answer(
            chat=route == "chat", request_id=uuid.uuid4().hex, model=conductor.model.name
        )

    def begin(self, body: GenerationRequest, jobs: list[Job]) -> None:
        """Start to generate."""
        self._prompt_tokens = sum(len(job.tokens) for job in jobs)
        tokenizer = self._conductor.model.tokenizer
        self._outputs = [Output(tokenizer, body.stops()) for _ in jobs]
        restart = not body.stream
        self._fanout = Fanout(
            [self._conductor.dispatcher.stream(job, restart=restart) for job in jobs]
        )

    def end(self, outcome: str) -> None:
        """Cancel what still runs and count the request. Later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        if self._fanout is not None:
            self._fanout.close()
        tokens = self._conductor.metrics.tokens
        tokens.labels("prompt").inc(self._prompt_tokens)
        tokens.labels("cached").inc(sum(output.cached_tokens for output in self._outputs))
        tokens.labels("output").inc(sum(output.tokens for output in self._outputs))
        self._conductor.released(self._route, outcome)

    async def whole(self) -> dict[str, object]:
        """Generate to the end and return the answer."""
        while await self._advance() is not None:
            pass
        choices = [
            self._answer.choice(index, output.text, output.finish_reason or "stop")
            for index, output in enumerate(self._outputs)
        ]
        return self._answer.whole(choices, self._usage())

    async def first_events(self) -> list[dict[str, object]]:
        """Wait for the first step, so that an error before it is an HTTP error; return its choices."""
        return await self._advance() or []

    async def stream(
        self, first: list[dict[str, object]], include_usage: bool
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events: role, deltas, finish, usage if asked for, and DONE."""
        outcome = str(_CLIENT_GONE)
        try:
            if self._route == "chat":
                yield sse(self._chunk([self._answer.delta(0, None, None)], include_usage))
            choices: list[dict[str, object]] | None = first
            while choices is not None:
                for choice in choices:
                    yield sse(self._chunk([choice], include_usage))
                choices = await self._advance()
            if include_usage:
                yield sse(self._answer.chunk([], usage=self._usage()))
            yield b"data: [DONE]\n\n"
            outcome = "200"
        except KVPoolError as error:
            shown = http_error(error)
            outcome = str(shown.status)
            logger.warning("a stream ended early: %s", error)
            yield sse(shown.body())
            yield b"data: [DONE]\n\n"
        finally:
            self.end(outcome)

    def _chunk(self, choices: list[dict[str, object]], include_usage: bool) -> dict[str, object]:
        # With usage asked for, OpenAI puts a null usage in every chunk but the last one.
        return self._answer.chunk(choices, **({"usage": None} if include_usage else {}))

    async def _advance(self) -> list[dict[str, object]] | None:
        """Take one step and return what it adds, as choices; None at the end of all outputs."""
        assert self._fanout is not None
        try:
            index, step = await anext(self._fanout)
        except StopAsyncIteration:
            return None
        output = self._outputs[index]
        if not output.tokens and step.token is not None:
            self._conductor.metrics.first_token.observe(time.monotonic() - self._began)
        added = output.push(step)
        choices = []
        if added:
            choices.append(self._answer.delta(index, added, None))
        if output.finish_reason is not None:
            choices.append(self._answer.delta(index, "", output.finish_reason))
            self._fanout.drop(index)
        return choices

    def _usage(self) -> dict[str, object]:
        return usage(
            self._prompt_tokens,
            sum(output.tokens for output in self._outputs),
            sum(output.cached_tokens for output in self._outputs),
        )


class _TurnResponse(StreamingResponse):
    """A stream of events that ends its turn even if the client went away before the first one."""

    def __init__(self, turn: _Turn, first: list[dict[str, object]], include_usage: bool) -> None:
        super().__init__(
            turn.stream(first, include_usage),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.end(str(_CLIENT_GONE))


def sse(payload: dict[str, object]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


async def read_body(request: Request) -> bytes:
    """Return the body. Raises HttpError 413 past BODY_BYTES_MAX, before reading all of it."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise HttpError(413, f"the body is larger than {BODY_BYTES_MAX} bytes: send less")
        parts.append(part)
    return b"".join(parts)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``, but cancel it when the client goes away.

    Raises:
        HttpError: 499: the client went away.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HttpError(_CLIENT_GONE, "the client went away")
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def create_app(conductor: Conductor) -> FastAPI:
    """Make the HTTP application. The dispatcher is started and closed with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        conductor.dispatcher.start()
        yield
        await conductor.dispatcher.close()

    app = FastAPI(title="kvpool", lifespan=lifespan, openapi_url=None)
    _add_errors(app)
    _add_probes(app, conductor)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await conductor.answer(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await conductor.answer(request, CompletionRequest)

    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HttpError)
    async def shaped(_: Request, error: HttpError) -> JSONResponse:
        headers = {"retry-after": "1"} if error.status == 503 else None
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def routed(_: Request, error: HTTPException) -> JSONResponse:
        shown = HttpError(error.status_code, str(error.detail))
        return JSONResponse(shown.body(), error.status_code)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        shown = HttpError(500, f"a bug in kvpool: {type(error).__name__}", kind="internal_error")
        return JSONResponse(shown.body(), 500)


def _add_probes(app: FastAPI, conductor: Conductor) -> None:
    model = conductor.model
    card: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": conductor.created,
        "owned_by": "kvpool",
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_tokens,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        conductor.check_model(name)
        return card

    @app.get("/health")
    async def health() -> JSONResponse:
        status, body = conductor.health()
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(conductor.metrics.render(), media_type="text/plain; version=0.0.4")
