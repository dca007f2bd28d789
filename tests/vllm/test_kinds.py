"""Other kinds of attention, and two workers: the same tokens, wherever the KV comes from."""

import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from kvpool.base import Chain, Match
from kvpool.block import HASH_BYTES
from kvpool.integration.vllm.shape import BlockRun, part_chain
from kvpool.memory import BlockView, Span
from tests.server_process import ServerProcess
from tests.vllm.conftest import prompts
from tests.vllm.engines import BLOCK_TOKENS, Answer, Engine, answers_of_another_process
from tests.vllm.models import WINDOW_TOKENS, make_model
from tests.vllm.test_embedded import at_rest, ideal, tokens

PROMPTS = [*prompts(180, 320, 64, 40, seed=30), *prompts(300, 310, seed=31, shared=290)]


# Kind -> settings of its engine. Latent attention has blocks of 16 tokens on a CPU.
KINDS: dict[str, dict[str, Any]] = {"gemma3": {}, "deepseek": {"block_size": 16}}
SIZES = {"gemma3": BLOCK_TOKENS, "deepseek": 16}


@dataclass(frozen=True)
class Kind:
    """A model, and what its engine answers without kvpool."""

    model: Path
    settings: dict[str, Any]
    block_tokens: int
    alone: list[Answer]

    def hits(self, asked: list[list[int]]) -> list[int]:
        return [ideal(prompt, self.block_tokens) for prompt in asked]


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    name, settings = request.param, KINDS[request.param]
    model = make_model(name, tmp_path_factory.mktemp("models") / name)
    with Engine(model, None, **settings) as engine:
        alone = engine.one_by_one(PROMPTS)
    return Kind(model, settings, SIZES[name], alone)


def test_a_pool_in_the_engine(kind: Kind) -> None:
    with Engine(kind.model, {"dram": "128MiB"}, **kind.settings) as engine:
        assert tokens(engine.one_by_one(PROMPTS)) == tokens(kind.alone)
        at_rest(engine)
        warm = engine.one_by_one(PROMPTS)
        assert tokens(warm) == tokens(kind.alone)
        assert [answer.cached for answer in warm][:4] == kind.hits(PROMPTS[:4])
        at_rest(engine)
        assert tokens(engine.generate(*PROMPTS)) == tokens(kind.alone)
        at_rest(engine)
        engine.begin(PROMPTS[1], "lost")
        pool = engine.connector._pool
        pool.tier.evict(pool.stats().ready)
        assert engine.run_out().tokens == kind.alone[1].tokens
        at_rest(engine)
        _abort(engine)
        assert tokens(engine.generate(*PROMPTS)) == tokens(kind.alone)
        at_rest(engine)


def _abort(engine: Engine) -> None:
    source = random.Random(32)
    core = engine.llm.llm_engine
    sampling = SamplingParams(max_tokens=20, temperature=0, detokenize=False, ignore_eos=True)
    for number in range(30):
        core.add_request(f"a{number}", {"prompt_token_ids": source.choice(PROMPTS)}, sampling)
        for _ in range(source.randrange(4)):
            core.step()
        core.abort_request([f"a{number}"])
    at_rest(engine)


def test_a_small_pool_evicts(kind: Kind) -> None:
    with Engine(kind.model, {"dram": "1200KiB"}, **kind.settings) as engine:
        for _ in range(2):
            for prompt, answer in zip(PROMPTS, kind.alone, strict=True):
                assert engine.generate(prompt)[0].tokens == answer.tokens
                at_rest(engine)
        assert engine.connector._pool.stats().evictions


def test_a_server_for_two_processes(kind: Kind, tmp_path: Path) -> None:
    """Cold in one process; warm in another, whose engine is new; then the server is lost."""
    folder = tmp_path / "kvpool"
    server = ServerProcess(folder, 128 << 20)
    extra = {"server": str(folder)}
    cold = answers_of_another_process(kind.model, extra, PROMPTS, **kind.settings)
    assert tokens(cold) == tokens(kind.alone)
    assert [answer.cached for answer in cold][:4] == [0] * 4
    with Engine(kind.model, extra, **kind.settings) as engine:
        for _ in range(2):
            warm = engine.one_by_one(PROMPTS)
            assert tokens(warm) == tokens(kind.alone)
            assert [answer.cached for answer in warm][:4] == kind.hits(PROMPTS[:4])
            engine.forget()
        found = engine.lose_in_mid_load(server, PROMPTS[1])
        assert found.tokens == kind.alone[1].tokens
        engine.forget(settled=False)
        assert tokens(engine.one_by_one(PROMPTS)) == tokens(kind.alone)


def test_a_sliding_window_needs_its_window_only(tmp_path: Path) -> None:
    """The pool has none of the windows' early blocks, as after an eviction: all of it still hits."""
    model = make_model("gemma3", tmp_path / "gemma3")
    with Engine(model, {"dram": "64MiB"}) as engine:
        (prompt,) = prompts(321, seed=33)
        saver = engine.worker_side._saver
        begin_step = saver.begin_step

        def late(namespace: Any, runs: list[BlockRun]) -> None:  # the first step completes 8 blocks
            full = engine.connector._shape.groups
            begin_step(
                namespace,
                [run for run in runs if run.begin >= 8 or not full[run.group].window_tokens],
            )

        saver.begin_step = late
        cold = engine.generate(prompt)[0]
        at_rest(engine)
        assert engine.connector._pool.stats().ready == 10 + 2 + 2
        saver.begin_step = begin_step
        shape = engine.connector._shape
        windows = [group for group in shape.groups if group.window_tokens == WINDOW_TOKENS]
        assert len(windows) == 2
        assert windows[0].first_needed(10, 32) == 8
        warm = engine.generate(prompt)[0]
        assert (warm.tokens, warm.cached) == (cold.tokens, 320)
        metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
        assert metrics["vllm:kvpool_loaded_blocks"].value == 10 + 2 + 2
        assert metrics["vllm:kvpool_failed_loads"].value == 0


def test_two_workers(llama: Path, tmp_path: Path) -> None:
    """Each rank stores and loads its own heads; a new engine finds both parts; the server is lost."""
    asked = PROMPTS[:3]
    settings: dict[str, Any] = {"tensor_parallel_size": 2}
    hits = [ideal(prompt) for prompt in asked]
    folder = tmp_path / "kvpool"
    server = ServerProcess(folder, 4 << 20)
    extra = {"server": str(folder)}
    with Engine(llama, None, **settings) as engine:
        alone = tokens(engine.one_by_one(asked))
    with Engine(llama, extra, **settings) as engine:
        cold = engine.one_by_one(asked)
        assert (tokens(cold), [answer.cached for answer in cold]) == (alone, [0, 0, 0])
        engine.forget()
        warm = engine.one_by_one(asked)
        assert (tokens(warm), [answer.cached for answer in warm]) == (alone, hits)
        for ranks in (0, 1):
            assert _lost(engine, asked[1], kept_ranks=ranks).tokens == alone[1]
            engine.forget()
            assert tokens(engine.one_by_one(asked)) == alone
            engine.forget()
            assert engine.generate(asked[1])[0].cached == hits[1]
    with Engine(llama, extra, **settings) as engine:
        warm = engine.one_by_one(asked)
        assert (tokens(warm), [answer.cached for answer in warm]) == (alone, hits)
        engine.forget()
        assert engine.lose_in_mid_load(server, asked[1]).tokens == alone[1]
        engine.forget(settled=False)
        assert tokens(engine.one_by_one(asked)) == alone
        # A new server, too small for all of it.
        with ServerProcess(folder, 12 * 4 * 16384):
            engine.connector._pool.wait_connected(30)
            for _ in range(3):
                engine.forget()
                assert tokens(engine.one_by_one(asked)) == alone


def _lost(engine: Engine, prompt: list[int], kept_ranks: int) -> Answer:
    """Lose a prompt's blocks between match and load, all but those of the first so many ranks."""
    engine.forget()
    failed, name = engine.counter("vllm:kvpool_failed_loads"), f"lost-{kept_ranks}"
    request = engine.scheduler.requests[engine.begin(prompt, name)]
    pool, shape = engine.connector._pool, engine.connector._shape
    namespace = engine.connector._scheduler._namespace
    blocks = ideal(prompt) // BLOCK_TOKENS
    with ExitStack() as kept:
        for part in shape.groups[0].parts[:kept_ranks]:  # what is leased is not evicted
            chain = part_chain(namespace, part, request.block_hashes[:blocks])
            assert kept.enter_context(pool.lease(Match(chain, blocks), 300)).blocks == blocks
        count = pool.stats().slots - kept_ranks * blocks
        memory = np.zeros(count * shape.layout.block_bytes, dtype=np.uint8)
        others = Chain(namespace, random.Random(0).randbytes(count * HASH_BYTES))
        source = BlockView.of_buffer(shape.layout, Span.of(memory))
        assert pool.store(others, source, deadline_s=60).wait(60).stored == count
    answer = engine.run_out()
    assert engine.counter("vllm:kvpool_failed_loads") > failed
    assert answer.cached == 0
    return answer
