"""kvpool-serve with models of other families, made in code: exact over both transports."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve_process import ServeProcess
from tests.tiny_model import tiny_model

OUTPUT = 24
# Shorter than a block, an exact multiple of one, several chunks, and two that share a beginning.
LENGTHS = (5, 32, 150, 333)
SHARED = 128


def prompts() -> list[list[int]]:
    """Prompts as token ids; the byte tokenizer's special tokens are 0 to 2."""
    draw = torch.Generator().manual_seed(7)
    alone = [torch.randint(3, 250, (n,), generator=draw).tolist() for n in LENGTHS]
    beginning = torch.randint(3, 250, (SHARED,), generator=draw).tolist()
    endings = [torch.randint(3, 250, (n,), generator=draw).tolist() for n in (9, 40, 77, 16)]
    return alone + [beginning + ending for ending in endings]


@dataclass(frozen=True)
class Served:
    """A server and what the model alone says to every prompt."""

    process: ServeProcess
    expected: list[str]


def alone(folder: Path) -> list[str]:
    """Greedy outputs of Transformers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    for tokens in prompts():
        ids = torch.tensor([tokens])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.append(tokenizer.decode(found[0, len(tokens) :], skip_special_tokens=True))
    return outputs


@pytest.fixture(scope="module", params=["qwen3-host", "qwen3-ucx", "mistral-host", "mistral-ucx"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind, transport = request.param.split("-")
    folder = tiny_model(tmp_path_factory.mktemp(kind), kind)
    flags = ("--transport", transport, "--chunk-tokens", "100", "--block-tokens", "16")
    with ServeProcess(*flags, model=folder, prefill=2, decode=2) as process:
        yield Served(process, alone(folder))


def ask(process: ServeProcess, tokens: list[int]) -> dict[str, Any]:
    return process.complete(tokens, max_tokens=OUTPUT)


def test_eight_at_once_cold_then_warm(served: Served) -> None:
    before = served.process.wait_idle()
    for cached in (False, True):
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda tokens: ask(served.process, tokens), prompts()))
        assert [answer["choices"][0]["text"] for answer in answers] == served.expected
        if cached:
            for answer, tokens in zip(answers, prompts(), strict=True):
                details = answer["usage"]["prompt_tokens_details"]
                assert details["cached_tokens"] == (len(tokens) - 1) // 16 * 16
        # What was computed may still be on its way into the pool when the last answer comes.
        assert served.process.wait_idle() == before
