"""The harness of exactness: the committed prompts, the model alone, and how answers are compared.

``prompts.json`` holds the prompts in waves; prompts of one wave are asked at the same time. An
``Asker`` answers a wave: the runner in this process (``test_exact_runner.py``) or a server over
HTTP. ``check`` holds its answers against ``model.generate`` of Transformers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve_process import demo_model_folder

PROMPTS: Final = Path(__file__).with_name("prompts.json")

# Two greedy runs may differ where the best two tokens are this close: float32 sums in another order.
GAP: Final = 2e-3
LOGITS_ATOL: Final = 1e-3
DECIDED_MIN: Final = 0.99


@dataclass(frozen=True)
class Prompt:
    """One prompt as it is asked.

    Attributes:
        name: Of its entry in ``prompts.json``.
        kinds: What it is there for.
        messages: The chat, or None for a plain completion.
        text: What the model reads, the chat template applied.
        tokens: The same as tokens.
    """

    name: str
    kinds: tuple[str, ...]
    messages: list[dict[str, str]] | None
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Answer:
    """What an asker got.

    Attributes:
        text: The output without special tokens.
        tokens: Output tokens, without the one that ends it; None if unknown.
        cached: Prompt tokens that were loaded rather than computed.
        logits: [steps, vocabulary] from which each token, the ending one too, was chosen; or None.
    """

    text: str
    tokens: list[int] | None
    cached: int
    logits: torch.Tensor | None = None


class Asker(Protocol):
    """Answers prompts greedily."""

    def ask(self, wave: Sequence[Prompt], max_tokens: int) -> list[Answer]:
        """Answer all prompts of a wave at the same time, in their order."""
        ...


@dataclass(frozen=True)
class Expected:
    """What the model alone says: as ``Answer``, with its logits."""

    text: str
    tokens: list[int]
    logits: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """Transformers alone: its own attention, its own cache. What it said once is kept."""

    model: Any
    tokenizer: Any
    said: dict[tuple[tuple[int, ...], int], Expected] = field(default_factory=dict)

    def generate(self, tokens: Sequence[int], max_tokens: int) -> Expected:
        """Generate greedily, keeping the logits of every step."""
        key = (tuple(tokens), max_tokens)
        if key not in self.said:
            self.said[key] = self._generate(list(tokens), max_tokens)
        return self.said[key]

    def text(self, prompt: str | list[int], max_tokens: int) -> str:
        """Generate greedily: the output without special tokens."""
        tokens = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        return self.generate(tokens, max_tokens).text

    def _generate(self, tokens: list[int], max_tokens: int) -> Expected:
        ids = torch.tensor([tokens])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=self.tokenizer.eos_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = out.sequences[0, len(tokens) :].tolist()
        if new[-1] == self.tokenizer.eos_token_id:
            new.pop()
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return Expected(text, new, torch.cat(out.logits))


@cache
def alone() -> Reference:
    """Load the demo model, once for all tests of a run."""
    torch.set_num_threads(1)  # two threads wait for each other on a machine that is busy
    folder = demo_model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return Reference(model, AutoTokenizer.from_pretrained(folder))


def waves(tokenizer: Any, answers: dict[str, Answer]) -> Iterator[list[Prompt]]:  # noqa: ANN401
    """Yield the waves of ``prompts.json``. Put each wave's answers into ``answers`` before the next.

    A turn of a conversation holds the answers to earlier ones.
    """
    entries: list[dict[str, Any]] = json.loads(PROMPTS.read_text())["prompts"]
    for _, wave in groupby(entries, key=lambda entry: entry["wave"]):
        prompts = []
        for entry in wave:
            messages = None
            if "messages" in entry:
                messages = [
                    {
                        "role": message["role"],
                        "content": message.get("content") or answers[message["answer_of"]].text,
                    }
                    for message in entry["messages"]
                ]
                text = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
            else:
                text = entry["text"]
            tokens = tokenizer(text)["input_ids"]
            prompts.append(Prompt(entry["name"], tuple(entry["kinds"]), messages, text, tokens))
        yield prompts


def max_tokens() -> int:
    """Tokens of each output, at most."""
    count: int = json.loads(PROMPTS.read_text())["max_tokens"]
    return count


def ask_all(
    asker: Asker,
    tokenizer: Any,  # noqa: ANN401
) -> tuple[list[Prompt], dict[str, Answer]]:
    """Ask every wave in order."""
    answers: dict[str, Answer] = {}
    prompts: list[Prompt] = []
    for wave in waves(tokenizer, answers):
        prompts += wave
        for prompt, answer in zip(wave, asker.ask(wave, max_tokens()), strict=True):
            answers[prompt.name] = answer
    return prompts, answers


@dataclass
class Verdict:
    """What comparing found: the names whose output differs, and the logits of all steps.

    Attributes:
        differing: Prompts whose greedy output is not the model's.
        steps, decided: Steps compared, and those where the model's first two are ``GAP`` apart.
        wrong: Decided steps with another argmax.
        error: The largest difference of a logit.
    """

    differing: list[str]
    steps: int = 0
    decided: int = 0
    wrong: int = 0
    error: float = 0.0


def check(reference: Reference, prompts: Sequence[Prompt], answers: dict[str, Answer]) -> Verdict:
    """Compare every answer with the model alone.

    Logits are compared where both runs read the same tokens: up to the first token that differs.
    """
    verdict = Verdict([])
    for prompt in prompts:
        answer = answers[prompt.name]
        expected = reference.generate(prompt.tokens, max_tokens())
        if answer.text != expected.text or answer.tokens not in (None, expected.tokens):
            verdict.differing.append(f"{prompt.name}: {answer.text!r}, not {expected.text!r}")
        if answer.logits is None or answer.tokens is None:
            continue
        same = 0
        for got, wanted in zip(answer.tokens, expected.tokens, strict=False):
            if got != wanted:
                break
            same += 1
        steps = min(same + 1, len(answer.logits), len(expected.logits))
        got_logits, wanted_logits = answer.logits[:steps], expected.logits[:steps]
        first, second = wanted_logits.topk(2).values.unbind(-1)
        decided = first - second > GAP
        wrong = decided & (got_logits.argmax(-1) != wanted_logits.argmax(-1))
        verdict.steps += steps
        verdict.decided += int(decided.sum())
        verdict.wrong += int(wrong.sum())
        error = float((got_logits - wanted_logits).abs().max())
        verdict.error = max(verdict.error, error)
    return verdict
