"""The OpenAI HTTP surface as data: requests, checked strictly, and the objects that answer them.

Owns names and shapes only. A field that would change the output and is not supported is refused,
never ignored. Who calls it: the Conductor's app.
"""

import time
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvpool.errors import (
    CapacityError,
    ClosedError,
    KVPoolError,
    TransferTimeoutError,
    UnavailableError,
    UsageError,
)

# The OpenAI API's own limits.
STOP_STRINGS_MAX: Final = 4
STOP_CHARACTERS_MAX: Final = 256
# Prompts of one completion request, each of which is a request of its own to the workers.
PROMPTS_MAX: Final = 16

Unsupported = Any


class HttpError(Exception):
    """An answer that is an error object of the OpenAI API.

    Args:
        status: HTTP status, 4xx or 5xx.
        message: For a person: what is wrong and what to do.
        kind: ``type`` of the error object.
        param: The request's field it is about, if any.
        code: Short word for a program, if any.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """Return the error object."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def http_error(error: KVPoolError) -> HttpError:
    """Say over HTTP what an error of the workers means for the client."""
    if isinstance(error, UsageError):
        return HttpError(400, str(error))
    if isinstance(error, CapacityError):
        return HttpError(503, str(error), kind="overloaded_error", code="overloaded")
    if isinstance(error, TransferTimeoutError):
        return HttpError(504, str(error), kind="timeout_error", code="timeout")
    if isinstance(error, UnavailableError | ClosedError):
        return HttpError(503, str(error), kind="unavailable_error", code="worker_unavailable")
    return HttpError(500, str(error), kind="internal_error", code="internal")


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1)
    content: str | list[TextPart] | None = None


class StreamOptions(BaseModel):
    """``include_usage`` asks for one more chunk, with the usage and no choices."""

    include_usage: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS_MAX)]


class GenerationRequest(BaseModel):
    """What chat and plain completions have in common. Unknown fields are ignored, as OpenAI does."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=STOP_STRINGS_MAX)] | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=128)
    n: int | None = None
    logprobs: Unsupported = None
    logit_bias: Unsupported = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0}
        for name in self.unsupported():
            value = getattr(self, name)
            if value and value != neutral.get(name):
                raise ValueError(f"{name} is not supported here: leave it out")
        return self

    def unsupported(self) -> tuple[str, ...]:
        """Names of fields that would change the output and are not supported."""
        return ("n", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty")

    def stops(self) -> list[str]:
        """Return the stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: Unsupported = None
    functions: Unsupported = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _only_text(self) -> "ChatRequest":
        if self.response_format and self.response_format.get("type") != "text":
            raise ValueError("response_format other than text is not supported here: leave it out")
        return self

    def unsupported(self) -> tuple[str, ...]:
        """As in the base class, and tools."""
        return (*super().unsupported(), "tools", "functions")


Prompt = str | list[int] | list[str] | list[list[int]]


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def unsupported(self) -> tuple[str, ...]:
        """As in the base class, and what only this route has."""
        return (*super().unsupported(), "best_of", "echo", "suffix")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [[item for item in self.prompt if isinstance(item, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


def parse(kind: type[GenerationRequest], body: bytes) -> GenerationRequest:
    """Check a body. Raises HttpError 400 that names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = [str(step) for step in first["loc"]]
        where = ".".join(path)
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        raise HttpError(400, message, param=path[0] if path else None) from error


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, object]:
    """Return a ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Answer:
    """The envelope that every object of one answer shares.

    Args:
        chat: True for chat completions.
        request_id: Ends the ``id``.
        model: Name of the model.
    """

    def __init__(self, *, chat: bool, request_id: str, model: str) -> None:
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        self._created = int(time.time())
        self._model = model

    def whole(self, choices: list[dict[str, object]], used: dict[str, object]) -> dict[str, object]:
        """Return the answer of a request that does not stream."""
        kind = "chat.completion" if self._chat else "text_completion"
        return self._envelope(kind, choices) | {"usage": used}

    def chunk(self, choices: list[dict[str, object]], **more: object) -> dict[str, object]:
        """Return one object of a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._envelope(kind, choices) | more

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, object]:
        """Return a whole choice."""
        body: dict[str, object] = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        if self._chat:
            return body | {"message": {"role": "assistant", "content": text}}
        return body | {"text": text}

    def delta(self, index: int, text: str | None, finish_reason: str | None) -> dict[str, object]:
        """Return a part of a choice. ``text`` None is the role that begins a chat's choice."""
        body: dict[str, object] = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        if not self._chat:
            return body | {"text": text or ""}
        if text is None:
            return body | {"delta": {"role": "assistant", "content": ""}}
        return body | {"delta": {"content": text} if text or not finish_reason else {}}

    def _envelope(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
