"""The requests of the OpenAI HTTP surface as data, checked strictly.

Owns names, shapes and limits of request bodies. A field that would change the output and is not
supported is refused, never ignored; other unknown fields are ignored. Who calls it: the Conductor's
app and its model.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvpool.integration.conductor.http_error import HttpError
from kvpool.integration.runtime.sampling import TOP_LOGPROBS_MAX

# The OpenAI API's own limits.
STOP_STRINGS_MAX: Final = 4
STOP_CHARACTERS_MAX: Final = 256
LOGIT_BIAS_MAX: Final = 300
# Choices of one request: prompts times ``n``. Each is a request of its own to the workers.
CHOICES_MAX: Final = 128
STOP_TOKENS_MAX: Final = 64
NAME_CHARACTERS_MAX: Final = 256


def _wrong(message: str, param: str | None = None) -> PydanticCustomError:
    """Make the error for a field; ``param`` names it where pydantic cannot know."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


def _as_stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("give a string or a list of strings")
    if len(stops) > STOP_STRINGS_MAX:
        raise _wrong(f"{len(stops)} stop strings: give at most {STOP_STRINGS_MAX}")
    if not all(0 < len(stop) <= STOP_CHARACTERS_MAX for stop in stops):
        raise _wrong(f"a stop string has 1 to {STOP_CHARACTERS_MAX} characters")
    return stops


def _as_prompts(value: object) -> object:
    one = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not isinstance(one, list) or not all(
        isinstance(prompt, str) or _are_tokens(prompt) for prompt in one
    ):
        raise _wrong("give a string, a list of strings, a list of tokens or a list of such lists")
    return one


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _as_text(value: object) -> object:
    """Join the parts of a message's content."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
            raise _wrong(f"a part of type {str(kind)[:32]!r} is not supported: send text parts")
        texts.append(part["text"])
    return "".join(texts)


def _as_biases(value: object) -> object:
    biases = {} if value is None else value
    # A sign or an underscore would pass int(), so would other scripts' digits.
    if not isinstance(biases, dict) or not all(
        len(key) <= 10 and key.isascii() and key.isdigit() for key in biases
    ):
        raise _wrong('give an object whose keys are token ids, as in {"42": -100}')
    if len(biases) > LOGIT_BIAS_MAX:
        raise _wrong(f"{len(biases)} tokens: give at most {LOGIT_BIAS_MAX}")
    return [(int(key), bias) for key, bias in biases.items()]


class Message(BaseModel):
    """One message of a conversation; other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | None, BeforeValidator(_as_text)] = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise _wrong(f"a message of role {self.role} has no content: give a string")
        return self

    def fields(self) -> dict[str, Any]:
        """Return what a chat template sees. Templates know no developer: it is a system's message."""
        role = "system" if self.role == "developer" else self.role
        return self.model_dump(exclude_none=True) | {"role": role, "content": self.content or ""}


class StreamOptions(BaseModel):
    """``include_usage`` asks for one more chunk, with the usage and no choices."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class Body(BaseModel):
    """What all bodies have in common. Unknown fields are kept, and nobody looks at them.

    Attributes:
        refused: Names of fields that are not supported, each with values that ask for nothing.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    model: str | None = Field(default=None, max_length=NAME_CHARACTERS_MAX)

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        unknown = self.model_extra or {}
        for name, harmless in self.refused.items():
            if unknown.get(name) is not None and unknown[name] not in harmless:
                raise _wrong(f"{name} is not supported here: leave it out", name)
        return self


class ChatInput(BaseModel):
    """How a conversation becomes a prompt: fields that chat completions and ``/tokenize`` share."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise _wrong(
                "continue_final_message needs add_generation_prompt to be false",
                "continue_final_message",
            )
        return self


Bias = Annotated[float, Field(ge=-100, le=100)]


class GenerationRequest(Body):
    """What chat and plain completions have in common."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "min_p": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "min_tokens": (0,),
        "bad_words": ([],),
        "use_beam_search": (False,),
        "prompt_logprobs": (),
        "prompt_embeds": (),
        "allowed_token_ids": ([],),
        "logits_processors": ([],),
        "truncate_prompt_tokens": (),
        "skip_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "return_tokens_as_token_ids": (False,),
        "structured_outputs": ({},),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "response_format": ({"type": "text"},),
        "kv_transfer_params": ({},),
    }

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    n: int | None = Field(default=None, ge=1, le=CHOICES_MAX)
    stop: Annotated[list[str], BeforeValidator(_as_stops)] = []
    stop_token_ids: list[int] | None = Field(default=None, max_length=STOP_TOKENS_MAX)
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[list[tuple[int, Bias]], BeforeValidator(_as_biases)] = []
    cache_salt: str | None = Field(default=None, min_length=1, max_length=128)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # Accepted for their sake who send them; they change nothing here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    priority: int | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options needs stream to be true", "stream_options")
        return self

    @property
    def choices(self) -> int:
        """How many outputs each prompt gets."""
        return self.n or 1

    @abstractmethod
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are to be told; None if no logprobs are."""


class ChatRequest(GenerationRequest, ChatInput):
    """Body of ``POST /v1/chat/completions``."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationRequest.refused,
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "documents": ([],),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    def alternatives(self) -> int | None:
        """See the base class."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationRequest.refused,
        "suffix": ("",),
    }

    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_prompts)]
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    best_of: int | None = None

    @model_validator(mode="after")
    def _choices_are_few(self) -> Self:
        if self.best_of not in (None, self.choices):
            raise _wrong("best_of is not supported here: leave it out", "best_of")
        if self.echo and self.logprobs is not None:
            raise _wrong("logprobs with echo is not supported here: leave one out", "logprobs")
        count = len(self.prompt) * self.choices
        if not 0 < count <= CHOICES_MAX:
            raise _wrong(f"{count} choices: give prompts for 1 to {CHOICES_MAX}", "prompt")
        return self

    def alternatives(self) -> int | None:
        """See the base class."""
        return self.logprobs


class TokenizeRequest(Body, ChatInput):
    """Body of ``POST /tokenize``: a text or a conversation."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "chat_template": (),
        "tools": ([],),
        "mm_processor_kwargs": ({},),
    }

    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    tokens: list[int]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """Check a body. Raises HttpError 400 that names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = [str(step) for step in first["loc"]]
        where = ".".join(path)
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        param = first.get("ctx", {}).get("param") or (path[0] if path else None)
        raise HttpError(400, message, param=param) from error
