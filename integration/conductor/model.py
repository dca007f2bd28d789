"""What the Conductor knows of the model: its name, its limits, its tokenizer and chat template.

Owns the way from messages or text to tokens. Loads no weights and needs no torch. Who calls it: the
Conductor's app.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvpool.integration.conductor.dispatch import Job
from kvpool.integration.conductor.schemas import (
    ChatRequest,
    GenerationRequest,
    HttpError,
    Message,
)
from kvpool.integration.runtime.handoff import Sampling
from kvpool.integration.runtime.model import load_tokenizer, read_spec

# Where the client sets no limit: OpenAI's default for completions; for chat, enough for an answer
# without taking a worker's whole memory for one that ends itself long before.
COMPLETION_TOKENS: Final = 16
CHAT_TOKENS: Final = 1024
_SEED_BITS: Final = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """A model's text side. Safe from any thread.

    Attributes:
        name: What clients call it.
        tokenizer: Its tokenizer, of Transformers.
        context_tokens: Most tokens of prompt and output together.
        stop_tokens: Ids that end an output.
        vocabulary: Ids are below this.
        temperature, top_p, top_k: Where the client says nothing: as ``model.generate`` would do.
    """

    name: str
    tokenizer: Any
    context_tokens: int
    stop_tokens: tuple[int, ...]
    vocabulary: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def load(cls, folder: Path, name: str, context_tokens: int | None = None) -> "ModelText":
        """Read tokenizer and configs of a model folder.

        Args:
            folder: A local folder in Hugging Face form.
            name: What clients call the model.
            context_tokens: A lower limit than the model's own.

        Raises:
            UsageError: The folder holds no model, or no tokenizer.
        """
        from transformers import GenerationConfig

        spec = read_spec(folder)
        tokenizer = load_tokenizer(folder)
        try:
            generation: Any = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except OSError:
            generation = GenerationConfig()
        draws = bool(generation.do_sample)
        ends = dict.fromkeys([*spec.eos_tokens, tokenizer.eos_token_id])
        return cls(
            name=name,
            tokenizer=tokenizer,
            context_tokens=min(spec.context_tokens, context_tokens or spec.context_tokens),
            stop_tokens=tuple(token for token in ends if token is not None),
            vocabulary=spec.vocabulary,
            temperature=float(generation.temperature or 1.0) if draws else 0.0,
            top_p=float(generation.top_p or 1.0) if draws else 1.0,
            top_k=int(generation.top_k or 0) if draws else 0,
        )

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Render a conversation with the model's template. Raises HttpError 400."""
        if not self.tokenizer.chat_template:
            raise HttpError(400, f"{self.name} has no chat template: use /v1/completions")
        plain = []
        for message in messages:
            fields = message.model_dump(exclude_none=True)
            if isinstance(message.content, list):
                fields["content"] = "".join(part.text for part in message.content)
            plain.append(fields)
        try:
            text = self.tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise HttpError(
                400, f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return self._tokenize(text, special=False)

    def prompt_tokens(self, prompt: str | list[int]) -> list[int]:
        """Turn one prompt into tokens. Raises HttpError 400 for tokens outside the vocabulary."""
        if isinstance(prompt, str):
            return self._tokenize(prompt, special=True)
        bad = [token for token in prompt if not 0 <= token < self.vocabulary]
        if bad:
            raise HttpError(
                400, f"token {bad[0]} is not within 0..{self.vocabulary - 1}", param="prompt"
            )
        return prompt

    def job(self, request: GenerationRequest, tokens: list[int]) -> Job:
        """Say what to generate for one prompt.

        Raises:
            HttpError: 400: the prompt is empty, or with its output too long for the model.
        """
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        if not tokens:
            raise HttpError(400, "the prompt is empty: give at least one token", param=param)
        room = self.context_tokens - len(tokens)
        if room < 1:
            raise HttpError(
                400,
                f"the prompt has {len(tokens)} tokens and leaves no room for an output: "
                f"the model's context is {self.context_tokens} tokens",
                param=param,
                code="context_length_exceeded",
            )
        wanted, param = _limit(request)
        if wanted is not None and wanted > room:
            raise HttpError(
                400,
                f"{len(tokens)} prompt tokens and {wanted} output tokens are more than the "
                f"model's context of {self.context_tokens}: shorten the prompt or the output",
                param=param,
                code="context_length_exceeded",
            )
        default = CHAT_TOKENS if isinstance(request, ChatRequest) else COMPLETION_TOKENS
        return Job(
            tokens=tokens,
            max_tokens=wanted or min(default, room),
            stop_tokens=list(self.stop_tokens),
            sampling=self._sampling(request),
            salt=f"client:{request.cache_salt}" if request.cache_salt else "",
        )

    def _sampling(self, request: GenerationRequest) -> Sampling:
        seed = request.seed
        return Sampling(
            temperature=self.temperature if request.temperature is None else request.temperature,
            top_p=self.top_p if request.top_p is None else request.top_p,
            top_k=self.top_k if request.top_k is None else request.top_k,
            seed=random.getrandbits(_SEED_BITS) if seed is None else seed % (1 << _SEED_BITS),
        )

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])


def _limit(request: GenerationRequest) -> tuple[int | None, str]:
    """Return the output limit that the client set, and the name of its field."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"
