"""The Conductor's HTTP face: the OpenAI API over its workers.

Owns routes, admission and what a client sees of an error. Every request has a deadline, and a client
that goes away cancels its work in all workers. Who calls it: ``kvpool-serve``.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from kvpool.errors import InternalError, KVPoolError
from kvpool.integration.conductor.answer import VERSION, Answer
from kvpool.integration.conductor.dispatch import Dispatcher
from kvpool.integration.conductor.edge import (
    HttpLimits,
    RequestIds,
    read_body,
    request_id,
    while_connected,
)
from kvpool.integration.conductor.http_error import HttpError, http_error
from kvpool.integration.conductor.logprobs import TokenTexts
from kvpool.integration.conductor.metrics import ConductorMetrics
from kvpool.integration.conductor.model import ModelText
from kvpool.integration.conductor.schemas import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from kvpool.integration.conductor.turn import Prompt, Turn, TurnResponse
from kvpool.metrics import Metrics

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)


class Conductor:
    """Answers the requests of the HTTP API.

    Args:
        dispatcher: Reaches the workers.
        model: The model's text side.
        supervised: Says what the launcher knows to be wrong, for ``/health``; empty if all is well.
        limits: What one client may ask.
        metrics: Where it counts; the dispatcher's sink, if it has one, is the same.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ModelText,
        supervised: Callable[[], list[str]] = list,
        limits: HttpLimits | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.model = model
        self.metrics = ConductorMetrics(metrics or Metrics(wings=("conductor",)))
        self.created = int(time.time())
        self.active = 0
        self._limits = limits or HttpLimits()
        self._reading = 0
        self._room = asyncio.Semaphore(self._limits.further_choices)
        self._supervised = supervised
        self._texts = TokenTexts(model.tokenizer)

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
        try:
            body = await self._read(request, kind)
            self._admit()
        except HttpError as error:
            self.metrics.ended(route, str(error.status))
            raise
        outcome: str | None = "500"
        turn: Turn | None = None
        try:
            prompts = await asyncio.to_thread(self._prompts, body)
            turn = self._turn(request, route, body, prompts)
            if body.stream:
                first = await while_connected(request, turn.first_parts())
                outcome = None  # the response ends the turn
                return TurnResponse(turn, first, self._limits.send_timeout_s)
            told = await while_connected(request, turn.whole())
            response = Response(told, media_type="application/json")
            outcome = "200"
            return response
        except KVPoolError as error:
            shown = http_error(error)
            outcome = str(shown.status)
            raise shown from error
        except HttpError as error:
            outcome = str(error.status)
            raise
        finally:
            if outcome is not None and turn is not None:
                turn.end(outcome)
            elif outcome is not None:
                self._released(route, outcome)

    async def tokenize(self, request: Request) -> dict[str, object]:
        """Answer ``/tokenize``."""
        body = await self._read(request, TokenizeRequest)
        self._admit()
        try:
            return await asyncio.to_thread(self._tokenized, body)
        finally:
            self.active -= 1

    async def detokenize(self, request: Request) -> dict[str, object]:
        """Answer ``/detokenize``."""
        body = await self._read(request, DetokenizeRequest)
        self._admit()
        try:
            tokens = self.model.known(body.tokens, param="tokens")
            return {"prompt": await asyncio.to_thread(self.model.text, tokens)}
        finally:
            self.active -= 1

    def check_model(self, name: str | None) -> None:
        """Raise HttpError 404 for a model that is not served here."""
        if name is not None and name != self.model.name:
            raise HttpError(
                404,
                f"the model {name!r} does not exist: {self.model.name!r} is served here",
                param="model",
                code="model_not_found",
            )

    def _admit(self) -> None:
        """Count one more request at work. Raises HttpError 503 if there are too many."""
        if self.active >= self._limits.requests:
            raise _overloaded(f"{self._limits.requests} requests are at work: try again later")
        self.active += 1

    async def _read(self, request: Request, kind: type[B]) -> B:
        """Read and check a body. Raises HttpError 503 if too many are being read."""
        if self._reading >= self._limits.bodies:
            raise _overloaded(f"{self._limits.bodies} bodies are being read: try again later")
        self._reading += 1
        try:
            raw = await read_body(request, self._limits)
        finally:
            self._reading -= 1
        body = await asyncio.to_thread(parse, kind, raw)
        self.check_model(body.model)
        return body

    def _prompts(self, body: GenerationRequest) -> list[Prompt]:
        """Turn a request into the jobs of its prompts. Raises HttpError 400."""
        model = self.model
        if isinstance(body, ChatRequest):
            special = bool(body.add_special_tokens)
            tokens = model.chat_tokens(body, body.messages, special=special)
            last = body.messages[-1]
            echo = (last.content or "") if body.echo and last.role == "assistant" else ""
            return [Prompt(model.jobs(body, tokens), echo)]
        if not isinstance(body, CompletionRequest):
            raise InternalError(f"a request of kind {type(body).__name__}")
        special = body.add_special_tokens is not False
        prompts = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                text, tokens = prompt, model.tokens(prompt, special=special)
            else:
                tokens = model.known(prompt)
                text = model.text(tokens) if body.echo else ""
            prompts.append(Prompt(model.jobs(body, tokens), text if body.echo else ""))
        return prompts

    def _tokenized(self, body: TokenizeRequest) -> dict[str, object]:
        if body.messages is not None:
            special = bool(body.add_special_tokens)
            tokens = self.model.chat_tokens(body, body.messages, special=special)
        else:
            special = body.add_special_tokens is not False
            tokens = self.model.tokens(body.prompt or "", special=special)
        shown = [self._texts.text(token) for token in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": self.model.context_tokens,
            "tokens": tokens,
            "token_strs": shown,
        }

    def _turn(
        self, request: Request, route: str, body: GenerationRequest, prompts: list[Prompt]
    ) -> Turn:
        answer = Answer(
            chat=route == "chat", request_id=request_id(request.scope), model=self.model.name
        )
        return Turn(
            body,
            prompts,
            answer=answer,
            dispatcher=self.dispatcher,
            texts=self._texts,
            metrics=self.metrics,
            room=self._room,
            on_end=lambda outcome: self._released(route, outcome),
        )

    def _released(self, route: str, outcome: str) -> None:
        """Count one request that ended."""
        self.active -= 1
        self.metrics.ended(route, outcome)


def _overloaded(message: str) -> HttpError:
    return HttpError(503, message, kind="overloaded_error", code="overloaded")


def create_app(conductor: Conductor) -> FastAPI:
    """Make the HTTP application. The dispatcher is started and closed with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        conductor.dispatcher.start()
        yield
        await conductor.dispatcher.close()

    app = FastAPI(title="kvpool", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestIds)
    _add_errors(app)
    _add_probes(app, conductor)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await conductor.answer(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await conductor.answer(request, CompletionRequest)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, object]:
        return await conductor.tokenize(request)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, object]:
        return await conductor.detokenize(request)

    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HttpError)
    async def shaped(_: Request, error: HttpError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def routed(request: Request, error: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path[:128]}"
        allowed = MutableHeaders(error.headers or {}).get("allow", "another method")
        message = {
            404: f"there is no route {what}: docs/http.md lists them",
            405: f"{what} is not allowed: use {allowed}",
        }.get(error.status_code, str(error.detail))
        code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
        shown = HttpError(error.status_code, message, code=code, headers=error.headers)
        return JSONResponse(shown.body(), shown.status, shown.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        shown = HttpError(
            500,
            f"a bug in kvpool: {type(error).__name__}",
            kind="internal_error",
            # This one is sent from outside of the middleware.
            headers={"x-request-id": request_id(request.scope)},
        )
        return JSONResponse(shown.body(), shown.status, shown.headers)


def _add_probes(app: FastAPI, conductor: Conductor) -> None:
    model = conductor.model
    permission: dict[str, Any] = {
        "id": f"modelperm-{model.name}",
        "object": "model_permission",
        "created": conductor.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": conductor.created,
        "owned_by": "kvpool",
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_tokens,
        "permission": [permission],
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

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": conductor.active}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(
            conductor.metrics.render(conductor.dispatcher.links),
            media_type="text/plain; version=0.0.4",
        )
