"""The objects that answer generation requests, as the OpenAI API and vLLM shape them.

Owns names and shapes only. Who calls it: a turn.
"""

import time
from dataclasses import dataclass
from importlib import metadata
from typing import Final

VERSION: Final = metadata.version("kvpool")
FINGERPRINT: Final = f"kvpool-{VERSION}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one choice says: all of it, or what a step adds.

    Attributes:
        text: None in a chat's first part, which tells the role only.
        finish_reason, stop_reason: Why it ended; the stop string, if one did it.
        logprobs: Object of the API's shape, if asked for.
        token_ids, prompt_token_ids: If asked for.
    """

    text: str | None = ""
    finish_reason: str | None = None
    stop_reason: str | None = None
    logprobs: dict[str, object] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


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

    def whole(self, parts: list[Part], used: dict[str, object]) -> dict[str, object]:
        """Return the answer of a request that does not stream."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(index, part) for index, part in enumerate(parts)]
        return self._envelope(kind, choices) | self._prompt(parts[0]) | {"usage": used}

    def chunk(self, index: int, part: Part, *, usage: bool) -> dict[str, object]:
        """Return one object of a stream. With ``usage`` asked for, all but the last have a null one."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        body = self._envelope(kind, [self._delta(index, part)]) | self._prompt(part)
        return body | {"usage": None} if usage else body

    def last(self, used: dict[str, object]) -> dict[str, object]:
        """Return the object of a stream that has the usage and no choices."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._envelope(kind, []) | {"usage": used}

    def _choice(self, index: int, part: Part) -> dict[str, object]:
        body = self._common(index, part)
        if self._chat:
            return body | {"message": {"role": "assistant", "content": part.text, "refusal": None}}
        return body | {"text": part.text}

    def _delta(self, index: int, part: Part) -> dict[str, object]:
        body = self._common(index, part)
        if not self._chat:
            return body | {"text": part.text or ""}
        if part.text is None:
            return body | {"delta": {"role": "assistant", "content": ""}}
        return body | {"delta": {"content": part.text} if part.text else {}}

    def _common(self, index: int, part: Part) -> dict[str, object]:
        body: dict[str, object] = {
            "index": index,
            "logprobs": part.logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if part.token_ids is not None:
            body["token_ids"] = part.token_ids
        if part.prompt_token_ids is not None and not self._chat:
            body["prompt_token_ids"] = part.prompt_token_ids
        return body

    def _prompt(self, part: Part) -> dict[str, object]:
        """Return what a chat tells of its prompt: it has one, so not in each choice."""
        if not self._chat or part.prompt_token_ids is None:
            return {}
        return {"prompt_token_ids": part.prompt_token_ids}

    def _envelope(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }
