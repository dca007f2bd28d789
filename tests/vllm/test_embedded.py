"""One engine with a pool inside it: the same tokens, wherever the KV comes from; nothing leaks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, BlockRemoved, BlockStored
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool.errors import ConfigError
from kvpool.integration.vllm.engine import read_namespace
from kvpool.integration.vllm.shape import part_chain
from kvpool.memory import Span
from tests.vllm.conftest import prompts
from tests.vllm.engines import BLOCK_TOKENS, Answer, Engine
from tests.waiting import until

PROMPTS = [*prompts(180, 200, 321, 64, 20), *prompts(300, 310, 320, seed=1, shared=290)]


def ideal(prompt: list[int], block_tokens: int = BLOCK_TOKENS) -> int:
    """Tokens of a prompt that need not be computed when all of it is in the pool."""
    return (len(prompt) - 1) // block_tokens * block_tokens


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def alone(llama: Path) -> list[Answer]:
    """What the engine answers without kvpool."""
    with Engine(llama, None) as engine:
        return [engine.generate(prompt)[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(llama: Path, alone: list[Answer]) -> Iterator[Engine]:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with Engine(llama, {"dram": "64MiB"}, kv_events_config=events) as engine:
        yield engine


def at_rest(engine: Engine) -> None:
    """Wait until nothing is under way, then demand that nothing is held anywhere."""
    until(lambda: not engine.llm.llm_engine.has_unfinished_requests(), "the end of all requests")
    for _ in range(3):  # what the scheduler says to the worker at the end
        engine.llm.llm_engine.step()
    side, pool = engine.worker_side, engine.connector._pool
    until(lambda: side.saving_slots.free == side.saving_slots.count, "the end of stores")
    until(lambda: not side._loader._waiting, "the end of loads")
    assert side.loading_slots.free == side.loading_slots.count
    until(lambda: pool.stats().leases == 0, "the end of leases")
    stats = pool.stats()
    assert (stats.reserved, stats.quarantined, stats.extra["pins"]) == (0, 0, 0)
    assert not engine.scheduler.requests
    assert not engine.connector._scheduler._tracked
    assert not engine.connector._lookups._asked
    engine.forget()
    assert engine.free_blocks() == engine.scheduler.kv_cache_config.num_blocks - 1  # null block


def test_cold_then_warm(engine: Engine, alone: list[Answer]) -> None:
    cold = [engine.generate(prompt)[0] for prompt in PROMPTS]
    assert tokens(cold) == tokens(alone)
    at_rest(engine)
    warm = [engine.generate(prompt)[0] for prompt in PROMPTS]
    assert tokens(warm) == tokens(alone)
    assert [answer.cached for answer in warm][:5] == [ideal(prompt) for prompt in PROMPTS][:5]
    at_rest(engine)
    together = engine.generate(*PROMPTS)
    assert tokens(together) == tokens(alone)
    at_rest(engine)


def test_a_longer_prompt_loads_its_beginning(engine: Engine, alone: list[Answer]) -> None:
    (longer,) = prompts(200, seed=7)
    prompt = PROMPTS[0] + longer
    engine.generate(PROMPTS[0])
    engine.forget()
    assert engine.generate(prompt)[0].cached == len(PROMPTS[0]) // BLOCK_TOKENS * BLOCK_TOKENS


def test_generated_tokens_are_stored(engine: Engine) -> None:
    (prompt,) = prompts(100, seed=8)
    first = engine.generate(prompt, tokens=60)[0]
    engine.forget()
    dialogue = [*prompt, *first.tokens, 5]
    # The last token that was sampled was never computed, nor is the turn after it.
    assert engine.generate(dialogue)[0].cached == (len(dialogue) - 2) // BLOCK_TOKENS * BLOCK_TOKENS


def test_tenants_are_apart(engine: Engine) -> None:
    (prompt,) = prompts(200, seed=9)
    engine.generate(prompt, salt="one")
    engine.forget()
    assert engine.generate(prompt, salt="two")[0].cached == 0
    engine.forget()
    assert engine.generate(prompt, salt="one")[0].cached == ideal(prompt)


def test_names_tell_apart_what_a_layout_does_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 and float16 have blocks of one size: nothing but the name keeps them apart."""
    config, cache = engine.core.vllm_config, engine.scheduler.kv_cache_config
    model = config.model_config

    def name() -> bytes:
        return read_namespace(config, cache, engine.connector._shape, "").digest

    first, names = name(), set[bytes]()
    changes: list[tuple[Any, str, Any]] = [
        (model, "dtype", torch.bfloat16),
        (model, "dtype", torch.float16),
        (model, "quantization", "fp8"),
        (model, "quantization_config", {"ignore": ["lm_head"]}),
        (config.cache_config, "cache_dtype", "fp8"),
        (config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        (cache, "kv_cache_layout", "another"),
        (torch, "__version__", "2.99"),
    ]
    for owner, field, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, field, value)
            names.add(name())
    assert name() == first
    assert len(names - {first}) == len(changes)
    for file in ("modeling_tiny.py", "preprocessor_config.json"):
        (Path(model.model) / file).write_text("{}")
        names.add(name())
        (Path(model.model) / file).unlink()
    assert name() == first
    assert len(names - {first}) == len(changes) + 1  # both have the same bytes


def test_metrics_are_the_truth(engine: Engine) -> None:
    def counters() -> dict[str, int]:
        return {
            metric.name: metric.value
            for metric in engine.llm.get_metrics()
            if "prefix_cache" in metric.name or "kvpool" in metric.name or "prompt" in metric.name
            if hasattr(metric, "value")
        }

    asked = prompts(150, 222, 300, seed=10)
    at_rest(engine)
    before = counters()
    for prompt in asked:
        engine.generate(prompt)
    at_rest(engine)
    for prompt in asked:
        engine.generate(prompt)
    after = counters()
    name = "vllm:external_prefix_cache"
    hits = sum(ideal(prompt) for prompt in asked)
    assert after[f"{name}_hits"] - before[f"{name}_hits"] == hits
    queries = 2 * sum(len(prompt) for prompt in asked)
    assert after[f"{name}_queries"] - before[f"{name}_queries"] == queries
    blocks = hits // BLOCK_TOKENS
    assert after["vllm:kvpool_loaded_blocks"] - before["vllm:kvpool_loaded_blocks"] == blocks
    assert after["vllm:kvpool_failed_loads"] == before["vllm:kvpool_failed_loads"]


def test_blocks_lost_between_match_and_load(engine: Engine) -> None:
    (prompt,) = prompts(300, seed=11)
    before = engine.generate(prompt)[0]
    at_rest(engine)
    engine.begin(prompt, "lost")
    pool = engine.connector._pool
    assert pool.tier.evict(5)  # the ends of chains go first: a shorter prefix stays
    pool.tier.evict(pool.stats().ready - 3)
    after = engine.run_out()
    assert (after.tokens, after.reason) == (before.tokens, "length")
    at_rest(engine)


def test_damaged_blocks_spoil_nothing(engine: Engine) -> None:
    """What did not verify was in the engine's blocks for a moment: no numbers, times 0, are no 0."""
    (prompt,) = prompts(300, seed=26)
    before = engine.generate(prompt)[0]
    at_rest(engine)
    request = engine.scheduler.requests[engine.begin(prompt, "damaged")]
    shape, tier = engine.connector._shape, engine.connector._pool.tier
    namespace = engine.connector._scheduler._namespace
    slots = tier.pin(part_chain(namespace, shape.groups[0].parts[0], request.block_hashes).hashes)
    view, size = tier.arena.view(slots), shape.layout.block_bytes
    for slot in view.block_ids:
        Span(view.base + int(slot) * view.block_stride, size).view()[:] = b"\xff" * size
    tier.unpin(slots)
    failed = engine.counter("vllm:kvpool_failed_loads")
    after = engine.run_out()
    assert (after.tokens, after.cached) == (before.tokens, 0)
    assert engine.counter("vllm:kvpool_failed_loads") > failed
    at_rest(engine)


def test_hits_have_a_source(engine: Engine) -> None:
    """Vouched for where it is certain: all of this pool is memory of this host."""
    assert engine.connector.get_external_cache_hit_sources(None, 64) == {CacheHitSource.HOST: 64}


def test_events_tell_what_the_pool_has(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that was stored, as vLLM itself describes it; its end, when the pool lost it."""
    published: list[Any] = []
    publisher = engine.scheduler.kv_event_publisher
    monkeypatch.setattr(publisher, "publish", lambda batch: published.extend(batch.events))

    def mine(kind: Any) -> list[Any]:
        return [e for e in published if isinstance(e, kind) and e.medium == MEDIUM_CPU]

    at_rest(engine)
    published.clear()
    (prompt,) = prompts(200, seed=21)
    engine.generate(prompt, salt="of a tenant")
    theirs = [e for e in published if isinstance(e, BlockStored) and e.medium == MEDIUM_GPU]

    def told() -> bool:
        engine.llm.llm_engine.step()
        return len(mine(BlockStored)) >= len(prompt) // BLOCK_TOKENS

    until(told, "the events of stores")
    assert _described(mine(BlockStored)) == _described(theirs)
    assert {(e.locality, e.ownership) for e in mine(BlockStored)} == {("LOCAL", "kvpool")}
    pool = engine.connector._pool
    pool.tier.evict(pool.stats().ready)
    names = {e.block_hashes[0] for e in mine(BlockStored)}

    def ended() -> bool:
        engine.generate(prompts(20, seed=22)[0])  # an engine without requests takes no steps
        return names <= {e.block_hashes[0] for e in mine(BlockRemoved)}

    until(ended, "the ends of claims")
    at_rest(engine)


def _described(events: list[Any]) -> list[tuple[Any, ...]]:
    """Take events apart, block by block."""
    blocks = []
    for event in events:
        parent = event.parent_block_hash
        for index, block in enumerate(event.block_hashes):
            begin = index * event.block_size
            tokens = tuple(event.token_ids[begin : begin + event.block_size])
            extra = event.extra_keys[index] if event.extra_keys else None
            blocks.append((block, parent, tokens, event.block_size, extra, event.group_idx))
            parent = block
    return blocks


def test_a_worker_without_a_pool_holds_nobody_up(engine: Engine) -> None:
    """The scheduler's side found a server that fits, this worker one that does not."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    (prompt,) = prompts(200, seed=17)
    before = engine.generate(prompt)[0]
    at_rest(engine)
    group = get_kv_transfer_group()
    side, group._worker = group._worker, None
    try:
        again = engine.generate(prompt)[0]
    finally:
        group._worker = side
    assert (again.tokens, again.cached) == (before.tokens, 0)
    at_rest(engine)
    assert engine.generate(prompt)[0].cached == ideal(prompt)


def test_a_second_engine_of_this_process_is_refused(engine: Engine) -> None:
    """vLLM would give it the first one's connector, which would store its blocks under wrong names."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    with pytest.raises(ConfigError, match="one connector a process"):
        get_kv_transfer_group().register_kv_caches({})
    (prompt,) = prompts(100, seed=25)
    assert engine.generate(prompt)[0].reason == "length"
    at_rest(engine)


def test_a_reset_hides_what_was_stored(engine: Engine, alone: list[Answer]) -> None:
    """Stores of the request before may be in flight; those of one under way are not kept."""
    (prompt,) = prompts(400, seed=15)
    first = engine.generate(prompt)[0]
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    second = engine.generate(prompt)[0]
    assert (second.cached, second.tokens) == (0, first.tokens)
    assert engine.connector.reset_cache() is True  # once more, with the stores of it under way
    assert engine.generate(prompt)[0].cached == ideal(prompt)  # from the engine's own cache
    engine.forget()
    third = engine.generate(prompt)[0]
    assert (third.cached, third.tokens) == (ideal(prompt), first.tokens)
    at_rest(engine)
