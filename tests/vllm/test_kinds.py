"""Other kinds of attention, and two workers: the same tokens, wherever the KV comes from."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.platforms.cpu import CpuPlatform

from tests.server_process import ServerProcess, until
from tests.vllm.conftest import prompts
from tests.vllm.engines import Engine
from tests.vllm.models import WINDOW_TOKENS, make_model
from tests.vllm.test_embedded import at_rest, ideal, tokens

PROMPTS = [*prompts(180, 320, 64, 40, seed=30), *prompts(300, 310, seed=31, shared=290)]


def test_a_hybrid_model_cold_warm_and_aborted(tmp_path: Path) -> None:
    model = make_model("gemma3", tmp_path / "gemma3")
    with Engine(model, None) as engine:
        alone = [engine.generate(prompt)[0] for prompt in PROMPTS]
    with Engine(model, {"dram": "128MiB"}) as engine:
        cold = [engine.generate(prompt)[0] for prompt in PROMPTS]
        assert tokens(cold) == tokens(alone)
        at_rest(engine)
        warm = [engine.generate(prompt)[0] for prompt in PROMPTS]
        assert tokens(warm) == tokens(alone)
        assert [answer.cached for answer in warm][:4] == [ideal(prompt) for prompt in PROMPTS[:4]]
        at_rest(engine)
        assert tokens(engine.generate(*PROMPTS)) == tokens(alone)
        at_rest(engine)
        _lose_blocks(engine, alone[1].tokens)
        _abort(engine)
        assert tokens(engine.generate(*PROMPTS)) == tokens(alone)
        at_rest(engine)


def _lose_blocks(engine: Engine, wanted: tuple[int, ...]) -> None:
    """Take blocks away between match and load: the request fails to load, and is computed."""
    core = engine.llm.llm_engine
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    core.add_request("lost", {"prompt_token_ids": PROMPTS[1]}, sampling)
    (name,) = engine.connector._scheduler._tracked
    until(lambda: engine.connector._lookups.answer(name), "the answer of the lookup")
    pool = engine.connector._pool
    pool.tier.evict(pool.stats().ready)
    output = [done for _ in iter(core.has_unfinished_requests, False) for done in core.step()]
    assert tuple(output[-1].outputs[0].token_ids) == wanted
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


def test_a_sliding_window_needs_its_window_only(tmp_path: Path) -> None:
    """The pool loses the windows' early blocks, as eviction would have it: all of it still hits."""
    model = make_model("gemma3", tmp_path / "gemma3")
    with Engine(model, {"dram": "64MiB"}) as engine:
        (prompt,) = prompts(321, seed=33)
        cold = engine.generate(prompt)[0]
        at_rest(engine)
        shape = engine.connector._shape
        windows = [group for group in shape.groups if group.window_tokens == WINDOW_TOKENS]
        assert len(windows) == 2
        assert windows[0].first_needed(10, 32) == 8
        loaded = engine.worker_side.counts()
        warm = engine.generate(prompt)[0]
        assert (warm.tokens, warm.cached) == (cold.tokens, 320)
        assert not loaded["failed_loads"]


# A step of latent attention in these tests: a prompt is cut at its multiples.
STEP_TOKENS = 160


@pytest.fixture
def latent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of latent attention, and vLLM told to run it on every CPU as it does with AMX.

    Without AMX vLLM computes a prompt in one step, and reuses no prefix: its answers depend on how
    a prompt is cut. Here it is cut where a hit cuts it, so that they can be compared.
    """
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    update = CpuPlatform.check_and_update_config.__func__

    def updated(platform: type[CpuPlatform], config: Any) -> None:
        update(platform, config)
        config.cache_config.enable_prefix_caching = True
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = STEP_TOKENS

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(updated))
    return make_model("deepseek", tmp_path / "deepseek")


def test_latent_attention(latent: Path) -> None:
    """The bytes of every block come back, and answers cut alike are the same."""
    asked = prompts(161, 170, 176, 321, 330, 336, seed=34)
    with Engine(latent, None, block_size=16) as engine:
        alone = [engine.generate(prompt)[0] for prompt in asked]
    with Engine(latent, {"dram": "64MiB"}, block_size=16) as engine:
        (cache,) = engine.worker_side._saver._caches.values()
        layers = cache.view.owner
        for prompt, answer in zip(asked, alone, strict=True):
            cold = engine.generate(prompt)[0]
            stored = _blocks(layers)
            at_rest(engine)
            for layer in layers:
                layer.zero_()
            warm = engine.generate(prompt)[0]
            assert (cold.tokens, cold.cached) == (answer.tokens, 0)
            assert (warm.tokens, warm.cached) == (
                answer.tokens,
                len(prompt) // STEP_TOKENS * STEP_TOKENS,
            )
            loaded = _blocks(layers)
            assert len(loaded & stored) >= warm.cached // 16
            at_rest(engine)


def _blocks(layers: list[torch.Tensor]) -> set[bytes]:
    """Read every block of an engine's cache but the empty ones."""
    blocks = {
        b"".join(layer[index].numpy().tobytes() for layer in layers)
        for index in range(len(layers[0]))
    }
    return {block for block in blocks if any(block)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "kvpool", 64 << 20) as server:
        yield server


def test_two_workers(llama: Path, server: ServerProcess) -> None:
    """Each rank stores and loads its own heads; the second engine finds both parts."""
    asked = PROMPTS[:3]
    settings: dict[str, Any] = {"tensor_parallel_size": 2}
    with Engine(llama, {"run_dir": str(server.run_dir)}, **settings) as engine:
        first = [engine.generate(prompt)[0] for prompt in asked]
        assert [answer.cached for answer in first] == [0, 0, 0]
        engine.forget()
        again = [engine.generate(prompt)[0] for prompt in asked]
        assert tokens(again) == tokens(first)
        assert [answer.cached for answer in again] == [160, 288, 32]
    with Engine(llama, None, **settings) as engine:
        assert tokens([engine.generate(prompt)[0] for prompt in asked]) == tokens(first)
