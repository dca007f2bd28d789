"""The runner with KV from the pool says what the model alone says, on the real model.

One gpu tier computes prompts in chunks; their blocks go through a DRAM pool, in canonical order,
into a second gpu tier, where all prompts of a wave are decoded together; what decode filled goes to
the pool too. So every byte that is attended to has been converted twice.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from kvpool.arena import Slot
from kvpool.config import PoolConfig
from kvpool.integration.runtime.demo_model import demo_model
from kvpool.integration.runtime.handoff import Sampling
from kvpool.integration.runtime.model import LoadedModel, load_model
from kvpool.integration.runtime.runner import ModelRunner, Row
from kvpool.integration.runtime.sampling import sample
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.pool import Pool
from kvpool.tiers.gpu import GpuTier
from tests.e2e.exactness import (
    DECIDED_MIN,
    LOGITS_ATOL,
    PROMPTS,
    Answer,
    Prompt,
    Verdict,
    alone,
    ask_all,
    check,
)

pytestmark = pytest.mark.model

CHUNK_TOKENS = 40  # divides no prompt, and is no multiple of a block
SLOTS = 160
GREEDY = Sampling()
WAIT_S = 30.0


@dataclass
class Running:
    """One prompt while it is answered."""

    sequence: list[int]
    prompt_tokens: int
    cached: int
    slots: list[Slot]
    logits: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False

    @property
    def table(self) -> list[int]:
        return [slot.index for slot in self.slots]


class InProcess:
    """Prefill and decode over two gpu tiers and a pool, in this process."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.spec, self.tokenizer = loaded.spec, loaded.tokenizer
        self.size = json.loads(PROMPTS.read_text())["block_tokens"]
        layout = self.spec.layout(self.size)
        self.pool = Pool.open(layout, PoolConfig(dram_bytes=layout.block_bytes * SLOTS * 2))
        self.prefill = ModelRunner(loaded.model, self.spec, GpuTier(layout, SLOTS))
        self.decode = ModelRunner(loaded.model, self.spec, GpuTier(layout, SLOTS))
        self.namespace = self.spec.namespace(self.size)

    def ask(self, wave: Sequence[Prompt], max_tokens: int) -> list[Answer]:
        running = [self.hand_over(self.compute(prompt), max_tokens) for prompt in wave]
        while rows := [one for one in running if not one.ended]:
            self.step(rows, max_tokens)
        return [self.finish(one) for one in running]

    def compute(self, prompt: Prompt) -> Running:
        """Load what the pool has, compute the rest in chunks, and store the full blocks."""
        tokens, tier = prompt.tokens, self.prefill.tier
        slots = [tier.reserve() for _ in range(-(-len(tokens) // self.size))]
        chain = self.pool.chain(self.namespace, tokens)
        # The last token is always computed: its logits choose the first output token.
        usable = self.pool.chain(self.namespace, tokens[:-1])
        start = 0
        with self.pool.lease(self.pool.match(usable), seconds=WAIT_S) as lease:
            if lease.blocks:
                dest = tier.view(slots[: lease.blocks], writable=True)
                loaded = self.pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S)
                start = loaded * self.size
        cached, logits = start, torch.empty(0)
        table = [slot.index for slot in slots]
        while start < len(tokens):
            new = tokens[start : start + CHUNK_TOKENS]
            logits = self.prefill.forward([Row(new, start, table)])
            start += len(new)
        if len(chain):
            source = tier.view(slots[: len(chain)], writable=False)
            stored = self.pool.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S)
            assert stored.stored == len(chain)
        one = Running(list(tokens), len(tokens), cached, slots)
        self.choose([one], logits)
        return one

    def hand_over(self, one: Running, max_tokens: int) -> Running:
        """Move the prompt's blocks to the decode tier: full ones by the pool, the tail by itself."""
        total = one.prompt_tokens + max_tokens
        slots = [self.decode.tier.reserve() for _ in range(-(-total // self.size))]
        full = one.prompt_tokens // self.size
        chain = self.pool.chain(self.namespace, one.sequence[: one.prompt_tokens])
        with self.pool.lease(self.pool.match(chain), seconds=WAIT_S) as lease:
            assert lease.blocks == full
            if full:
                dest = self.decode.tier.view(slots[:full], writable=True)
                assert self.pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S) == full
        if one.prompt_tokens % self.size:
            buffer = np.empty(self.spec.layout(self.size).block_bytes, dtype=np.uint8)
            tail = BlockView.of_buffer(self.spec.layout(self.size), Span.of(buffer))
            source = self.prefill.tier.view(one.slots[full:], writable=False)
            crcs = copy_blocks(tail, source)
            dest = self.decode.tier.view(slots[full : full + 1], writable=True)
            copy_blocks(dest, tail, crcs=crcs)
        for slot in one.slots:
            self.prefill.tier.abort(slot)
        one.slots = slots
        return one

    def step(self, rows: Sequence[Running], max_tokens: int) -> None:
        """Decode one token of each row, in one forward."""
        forwards = self.decode.forwards
        waiting = [one for one in rows if len(one.logits) < max_tokens]
        for one in rows:
            one.ended = one not in waiting
        if waiting:
            logits = self.decode.forward(
                [Row([one.sequence[-1]], len(one.sequence) - 1, one.table) for one in waiting]
            )
            assert self.decode.forwards == forwards + 1
            self.choose(waiting, logits)

    def choose(self, rows: Sequence[Running], logits: torch.Tensor) -> None:
        drawn = [len(one.logits) for one in rows]
        picks = sample(logits, [GREEDY] * len(rows), drawn, [()] * len(rows))
        for one, pick, row in zip(rows, picks, logits, strict=True):
            one.logits.append(row)
            if pick.token in self.spec.eos_tokens:
                one.ended = True
            else:
                one.sequence.append(pick.token)

    def finish(self, one: Running) -> Answer:
        """Store the full blocks that decode produced, and give the slots back."""
        # The KV of the last token is not there unless it was fed to a further step.
        known = (
            one.sequence if one.logits[-1].argmax() in self.spec.eos_tokens else one.sequence[:-1]
        )
        chain = self.pool.chain(self.namespace, known)
        if len(chain):
            source = self.decode.tier.view(one.slots[: len(chain)], writable=False)
            self.pool.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S)
        for slot in one.slots:
            self.decode.tier.abort(slot)
        new = one.sequence[one.prompt_tokens :]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return Answer(text, new, one.cached, torch.stack(one.logits))

    def close(self) -> None:
        for tier in (self.prefill.tier, self.decode.tier):
            stats = tier.stats()
            assert (stats.free, stats.pins) == (stats.slots, 0)
            tier.close()
        self.pool.close()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # Threads that wait for each other are very slow where others use the cores too.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model(Path.home() / ".cache" / "kvpool")


@pytest.fixture(scope="module")
def asked(folder: Path) -> Iterator[tuple[list[Prompt], dict[str, Answer]]]:
    asker = InProcess(load_model(folder))
    yield ask_all(asker, asker.tokenizer)
    asker.close()


@pytest.fixture(scope="module")
def verdict(asked: tuple[list[Prompt], dict[str, Answer]]) -> Verdict:
    return check(alone(), *asked)


def test_the_prompts_are_what_they_are_said_to_be(
    asked: tuple[list[Prompt], dict[str, Answer]],
) -> None:
    prompts, answers = asked
    assert len(prompts) >= 12
    kinds = {kind: [p for p in prompts if kind in p.kinds] for p in prompts for kind in p.kinds}
    assert set(kinds) == {
        "cold",
        "warm",
        "prefix extended",
        "prefix shared",
        "multi-turn",
        "eight at once",
        "chunks that do not divide the prompt",
        "shorter than a block",
        "exact multiple of a block",
    }
    cached = {p.name: answers[p.name].cached for p in prompts}
    assert len(kinds["eight at once"]) == 8
    for prompt in kinds["cold"]:
        assert cached[prompt.name] in (0, 16)  # the template's own first block is shared by all
    for kind in ("warm", "prefix extended", "prefix shared"):
        for prompt in kinds[kind]:
            assert cached[prompt.name] > 16, prompt
    for prompt in kinds["shorter than a block"]:
        assert len(prompt.tokens) < 16
    for prompt in kinds["exact multiple of a block"]:
        assert len(prompt.tokens) % 16 == 0
    for prompt in kinds["chunks that do not divide the prompt"]:
        assert len(prompt.tokens) > 2 * CHUNK_TOKENS
        assert (len(prompt.tokens) - cached[prompt.name]) % CHUNK_TOKENS


def test_a_later_turn_reuses_what_decode_produced(
    asked: tuple[list[Prompt], dict[str, Answer]],
) -> None:
    prompts, answers = asked
    turns = [prompt for prompt in prompts if "multi-turn" in prompt.kinds]
    produced = 0
    for before, after in pairwise(turns):
        said = answers[before.name].tokens
        assert said is not None
        # All full blocks of the turn before, those with its answer in them too.
        assert answers[after.name].cached == (len(before.tokens) + len(said)) // 16 * 16
        produced += answers[after.name].cached - len(before.tokens) // 16 * 16
    assert produced >= 16


def test_greedy_tokens_are_equal(verdict: Verdict) -> None:
    assert verdict.differing == []


def test_logits_agree_at_every_step(verdict: Verdict) -> None:
    assert verdict.wrong == 0
    assert verdict.error < LOGITS_ATOL
    assert verdict.decided >= DECIDED_MIN * verdict.steps
    assert verdict.steps > 200  # and not by chance of a few


def test_a_wrong_byte_is_seen(folder: Path) -> None:
    """A planted fault: the comparison can fail."""
    asker = InProcess(load_model(folder))
    prompt = Prompt("x", (), None, "", alone().tokenizer("Rivers begin as small")["input_ids"])
    one = asker.hand_over(asker.compute(prompt), 4)
    asker.decode.tier.arena[3, 1, 0, one.slots[0].index, 2] += 1.0
    while not one.ended:
        asker.step([one], 4)
    verdict = check(alone(), [prompt], {"x": asker.finish(one)})
    assert verdict.error > LOGITS_ATOL
    asker.close()
