"""Engines and pools that are too small: blocks are evicted, requests preempted, nothing is wrong."""

from pathlib import Path

import pytest

from tests.vllm.conftest import prompts
from tests.vllm.engines import Engine
from tests.vllm.test_embedded import PROMPTS, at_rest, ideal, tokens
from tests.vllm.test_moments import PARKED, moment
from tests.waiting import until


def test_a_small_staging_is_enough(llama: Path) -> None:
    """Loads go through two slots, stores that find none are left out; the pool evicts."""
    block = 4 * 16384
    extra = {"dram": str(6 * block), "staging": str(2 * block)}
    with Engine(llama, None) as engine:
        alone = [engine.generate(prompt)[0] for prompt in PROMPTS]
    with Engine(llama, extra) as engine:
        for _ in range(3):
            for prompt, answer in zip(PROMPTS, alone, strict=True):
                assert engine.generate(prompt)[0].tokens == answer.tokens
                engine.forget()
        assert engine.connector._pool.stats().evictions
        at_rest(engine)
        (prompt,) = prompts(100, seed=12)  # three blocks, one a step
        for _ in range(4):
            engine.generate(prompt)
            engine.forget()
        assert engine.generate(prompt)[0].cached == ideal(prompt)


def test_preempted_requests_go_on(llama: Path) -> None:
    asked = prompts(200, 210, 220, 230, 190, 180, seed=16)
    with Engine(llama, None) as engine:
        wanted = [engine.generate(prompt, tokens=150)[0].tokens for prompt in asked]
    with Engine(llama, {"dram": "64MiB"}, num_gpu_blocks_override=44) as engine:
        assert tokens(engine.generate(*asked, tokens=150)) == wanted
        preempted = engine.counter("vllm:num_preemptions")
        assert preempted > 0
        # Each prompt was new: what was loaded is what preempted requests had computed before.
        assert engine.counter("vllm:kvpool_loaded_blocks") > 0
        at_rest(engine)
        assert tokens(engine.generate(*asked, tokens=150)) == wanted
        at_rest(engine)
        assert _abort_the_preempted(engine, asked) > 0
        at_rest(engine)
        assert tokens(engine.generate(*asked, tokens=150)) == wanted
        at_rest(engine)


def _abort_the_preempted(engine: Engine, asked: list[list[int]]) -> int:
    """Abort each request that was preempted, waiting or loading what it had; return how many."""
    core, requests = engine.llm.llm_engine, engine.scheduler.requests
    names = {engine.add(prompt, f"p{at}", 150): f"p{at}" for at, prompt in enumerate(asked)}
    aborted = 0
    while core.has_unfinished_requests():
        core.step()
        for inner in [name for name, one in requests.items() if one.num_preemptions]:
            if moment(engine, inner) in {"PREEMPTED", PARKED, "loaded"}:
                core.abort_request([names[inner]])
                aborted += 1
    return aborted


def test_a_step_that_raises_stores_nothing(llama: Path) -> None:
    """vLLM ends it as any other: what it did not compute must not get a name."""
    (prompt,) = prompts(200, seed=18)
    with Engine(llama, {"dram": "64MiB"}) as engine:
        engine.generate(*prompts(90, seed=19))
        at_rest(engine)
        before = engine.connector._pool.stats().ready
        assert before
        runner = engine.core.model_executor.driver_worker.worker.model_runner

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("planted")

        runner.model.model.layers[2].mlp.forward = fail
        with pytest.raises(RuntimeError, match="planted"):
            engine.generate(prompt)
        side = engine.worker_side
        until(lambda: side.saving_slots.free == side.saving_slots.count, "the end of stores")
        assert engine.connector._pool.stats().ready == before
