"""Clients of a served tiny model, and what it must answer them."""

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpool.integration.conductor.text import Detokenizer

# Greedy choices closer than this may fall either way: logits differ by some 1e-6 between two orders
# of the same sums. Prompts that lead to one are not asked.
_GAP_MIN: Final = 1e-4
# Ends a client that hangs: more than any request may live.
_TIMEOUT_S: Final = 150.0
# Ordinary tokens of the tiny model's tokenizer.
_TOKENS: Final = range(3, 250)


@dataclass(frozen=True)
class Question:
    """A prompt, how many tokens to answer, and the text that is right."""

    tokens: list[int]
    max_tokens: int
    answer: str


class Questions:
    """Makes prompts, with the answers that Transformers gives.

    Args:
        model: The tiny model's folder.
        seed: Of the prompts.
    """

    def __init__(self, model: Path, seed: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._random = random.Random(seed)

    def make(self, prompt_tokens: int, max_tokens: int) -> Question:
        """Make a fresh one whose answer does not hang on a rounding error."""
        while True:
            tokens = self._random.choices(_TOKENS, k=prompt_tokens)
            with torch.inference_mode():
                said = self._model.generate(
                    torch.tensor([tokens]),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                    pad_token_id=0,
                )
            best = torch.cat(said.logits).topk(2).values
            if float((best[:, 0] - best[:, 1]).min()) > _GAP_MIN:
                return Question(
                    tokens, max_tokens, self._text(said.sequences[0, prompt_tokens:].tolist())
                )

    def _text(self, tokens: list[int]) -> str:
        text = Detokenizer(self._tokenizer)
        end = self._model.config.eos_token_id
        said = [token for token in tokens if token != end]
        return "".join([*map(text.push, said), text.finish()])


class Client(threading.Thread):
    """Asks one question over a connection of its own, from construction on.

    Attributes:
        pieces: Chunks with text that have come, of a stream.
        text: The answer, so far or whole.
        error: The error object, or None.
        gone: True once it hung up itself.
        took_s: From the question to the end.
    """

    def __init__(self, url: str, question: Question, *, stream: bool) -> None:
        super().__init__(name="client", daemon=True)
        self.question = question
        self.stream = stream
        self.pieces = 0
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.gone = False
        self.took_s = 0.0
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self._connection = http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_S)
        self._connection.connect()
        self.start()

    def hang_up(self) -> None:
        """Close the connection under the request."""
        self.gone = True
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Ask, and take the answer."""
        began = time.monotonic()
        body = {
            "prompt": self.question.tokens,
            "max_tokens": self.question.max_tokens,
            "temperature": 0,
            "stream": self.stream,
        }
        try:
            self._connection.request("POST", "/v1/completions", json.dumps(body))
            answer = self._connection.getresponse()
            if answer.status != http.client.OK:
                self.error = json.loads(answer.read())["error"]
            elif self.stream:
                self._follow(answer)
            else:
                self.text = json.loads(answer.read())["choices"][0]["text"]
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self.gone:
                self.error = {"type": "connection", "message": repr(error)}
        finally:
            self._connection.close()
            self.took_s = time.monotonic() - began

    def _follow(self, answer: http.client.HTTPResponse) -> None:
        for event in _events(answer):
            if "error" in event:
                self.error = event["error"]
                return
            for choice in event["choices"]:
                self.text += choice["text"]
                self.pieces += bool(choice["text"])


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := answer.readline():
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
    raise http.client.IncompleteRead(b"")
