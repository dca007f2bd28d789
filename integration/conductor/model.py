"""What the Conductor knows of the model: its name, its limits, its tokenizer and chat template.

Owns the way from messages or text to tokens. Loads no weights and needs no torch. Who calls it: the
Conductor's app.
"""

import inspect
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from kvpool.block import sha256
from kvpool.integration.conductor.dispatch import Job
from kvpool.integration.conductor.http_error import HttpError
from kvpool.integration.conductor.schemas import (
    ChatInput,
    ChatRequest,
    GenerationRequest,
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
        characters_max: A text that is longer certainly has more tokens than the context.
        temperature, top_p, top_k: Where the client says nothing: as ``model.generate`` would do.
    """

    name: str
    tokenizer: Any
    context_tokens: int
    stop_tokens: tuple[int, ...]
    vocabulary: int
    characters_max: int
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
        context = min(spec.context_tokens, context_tokens or spec.context_tokens)
        return cls(
            name=name,
            tokenizer=tokenizer,
            context_tokens=context,
            characters_max=context * max(map(len, tokenizer.get_vocab())),
            stop_tokens=tuple(token for token in ends if token is not None),
            vocabulary=spec.vocabulary,
            temperature=float(generation.temperature or 1.0) if draws else 0.0,
            top_p=float(generation.top_p or 1.0) if draws else 1.0,
            top_k=int(generation.top_k or 0) if draws else 0,
        )

    def chat_tokens(
        self, request: ChatInput, messages: Sequence[Message], *, special: bool
    ) -> list[int]:
        """Render a conversation with the model's template, and tokenize it.

        Args:
            request: How the prompt ends, and the template's own options.
            messages: The conversation.
            special: Add the special tokens of a text's begin and end; templates mostly have them.

        Raises:
            HttpError: 400: the template refuses the conversation, or it is too long.
        """
        if not self.tokenizer.chat_template:
            raise HttpError(400, f"{self.name} has no chat template: use /v1/completions")
        options = request.chat_template_kwargs or {}
        # Among these is `chat_template`: a program that a client may not bring.
        if taken := sorted(_template_arguments(self.tokenizer).intersection(options)):
            raise HttpError(
                400, f"{taken[0]} is not an option of a template", param="chat_template_kwargs"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [message.fields() for message in messages],
                tokenize=False,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **options,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise HttpError(
                400, f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return self.tokens(text, special=special, param="messages")

    def tokens(self, text: str, *, special: bool, param: str = "prompt") -> list[int]:
        """Tokenize a text. Raises HttpError 400 for one that no context of the model holds."""
        if len(text) > self.characters_max:
            raise HttpError(
                400,
                f"{len(text)} characters are more than the model's context of "
                f"{self.context_tokens} tokens can hold: shorten the text",
                param=param,
                code="context_length_exceeded",
            )
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def known(self, tokens: list[int], *, param: str = "prompt") -> list[int]:
        """Return the tokens. Raises HttpError 400 if one is outside the vocabulary."""
        bad = [place for place, token in enumerate(tokens) if not 0 <= token < self.vocabulary]
        if bad:
            raise HttpError(
                400,
                f"token {tokens[bad[0]]} (number {bad[0]}) is not within 0..{self.vocabulary - 1}, the vocabulary",
                param=param,
            )
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Return tokens as text, special tokens by their names."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def jobs(self, request: GenerationRequest, tokens: list[int]) -> list[Job]:
        """Return one job for each choice of one prompt. They differ in their seeds only.

        Raises:
            HttpError: 400, as ``job``.
        """
        first = self.job(request, tokens)
        return [
            replace(first, sampling=msgspec.structs.replace(first.sampling, seed=seed))
            for seed in (choice_seed(first.sampling.seed, n) for n in range(request.choices))
        ]

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
            stop_tokens=[
                *(() if request.ignore_eos else self.stop_tokens),
                *self.known(request.stop_token_ids or [], param="stop_token_ids"),
            ],
            sampling=self._sampling(request),
            salt=f"client:{request.cache_salt}" if request.cache_salt else "",
        )

    def _sampling(self, request: GenerationRequest) -> Sampling:
        seed = request.seed
        top_k = self.top_k if request.top_k is None else max(0, request.top_k)
        biases = request.logit_bias
        self.known([token for token, _ in biases], param="logit_bias")
        return Sampling(
            temperature=self.temperature if request.temperature is None else request.temperature,
            top_p=self.top_p if request.top_p is None else request.top_p,
            top_k=min(top_k, self.vocabulary),
            seed=random.getrandbits(_SEED_BITS) if seed is None else seed % (1 << _SEED_BITS),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=tuple(biases),
            top_logprobs=request.alternatives() or 0,
        )


def choice_seed(seed: int, number: int) -> int:
    """Return the seed of a request's choice: the request's own for the first, or derived from it."""
    if not number:
        return seed
    digest = sha256(b"kvpool-choice-1" + struct.pack("<QQ", seed, number))
    return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)


def _template_arguments(tokenizer: Any) -> frozenset[str]:
    """Return what the call of a template means itself, so that no option may have such a name."""
    return frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {
        *("self", "messages", "tools", "documents"),
    }


def _limit(request: GenerationRequest) -> tuple[int | None, str]:
    """Return the output limit that the client set, and the name of its field."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"
