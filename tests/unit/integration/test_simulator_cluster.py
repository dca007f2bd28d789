"""A simulated cluster: every request ends once, equal seeds give equal outcomes, more is not less."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError, InternalError
from kvpool.integration.conductor.plan import Decision, Plan, Rejection
from kvpool.integration.conductor.planner import Planner, PlannerOptions
from kvpool.integration.conductor.snapshot import Objectives, Request, Snapshot
from kvpool.integration.simulator.job import End
from kvpool.integration.simulator.machine import papers_machine
from kvpool.integration.simulator.outcome import Outcome
from kvpool.integration.simulator.setting import ClusterSetting
from kvpool.integration.simulator.simulation import Simulation
from kvpool.integration.simulator.trace import BLOCK_TOKENS, Arrival, block_name
from kvpool.integration.simulator.workload import Workload, generated

COST = papers_machine()
NONE = Objectives(ttft_s=float("inf"), tbt_s=float("inf"))
TIGHT = Objectives(ttft_s=5.0, tbt_s=0.05)
POLICIES = ("random", "load-balancing", "cache-aware", "kvcache-centric", "slack-aware")
SMALL = ClusterSetting(
    prefill_count=2,
    decode_count=2,
    cache_tokens=60_000,
    decode_tokens_max=120_000,
    prompt_tokens_max=60_000,
    queued_max=12,
    running_max=12,
)
LOAD = Workload(request_count=150, rate_per_s=2.0)


def simulate(
    setting: ClusterSetting = SMALL,
    load: Workload = LOAD,
    objectives: Objectives = TIGHT,
    seed: int = 1,
    sample_s: float = 0.0,
    **options: Any,  # noqa: ANN401 - of PlannerOptions, which checks them
) -> Outcome:
    planner = Planner(PlannerOptions(**options), COST)
    return Simulation(setting, planner, COST, objectives, seed, sample_s).run(generated(load, seed))


def columns(outcome: Outcome) -> list[list[float]]:
    names = ("number", "end", "ttft_s", "tbt_s", "prefill_s", "cached_tokens", "ended_s")
    return [np.nan_to_num(outcome.column(name), nan=-1.0).tolist() for name in names]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ["none", "baseline", "early", "predicted"])
def test_every_request_ends_once_and_leaves_nothing(policy: str, admission: str) -> None:
    outcome = simulate(policy=policy, admission=admission)  # fails itself if anything is left
    assert sorted(outcome.column("number").tolist()) == list(range(150))
    ends = [outcome.count(end) for end in End]
    assert sum(ends) == 150
    assert sum(outcome.reasons.values()) == ends[End.REJECTED] + ends[End.DROPPED]
    served = outcome.ended(End.DONE)
    assert np.isfinite(outcome.column("ttft_s")[served]).all()
    assert (outcome.column("ttft_s")[served] > 0).all()
    assert (outcome.column("cached_tokens") < outcome.column("input_tokens")).all()
    assert (outcome.column("moved_tokens") <= outcome.column("input_tokens")).all()
    assert bool((outcome.column("ended_s") >= outcome.column("arrival_s")).all())


@settings(max_examples=15)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 120),
    st.sampled_from([0.3, 3.0, 30.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(POLICIES),
)
def test_nothing_is_left_behind_by_any_cluster(
    prefill: int, decode: int, blocks: int, rate: float, pooled: bool, layered: bool, policy: str
) -> None:
    setting = replace(
        SMALL,
        prefill_count=prefill,
        decode_count=decode,
        cache_tokens=blocks * BLOCK_TOKENS,
        pooled=pooled,
        layer_wise=layered,
        port_bytes_per_s=5e9,
    )
    load = Workload(request_count=40, rate_per_s=rate)
    assert len(simulate(setting, load, policy=policy)) == 40


def test_equal_seeds_give_equal_outcomes() -> None:
    first = simulate(sample_s=5.0)
    again = simulate(sample_s=5.0)
    assert columns(first) == columns(again)
    assert first.pressure == again.pressure
    assert columns(first) != columns(simulate(seed=2))


def test_a_leak_is_no_quiet_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvpool.integration.simulator.cache.NodeCache.unpin", lambda self, held: None
    )
    with pytest.raises(InternalError, match="left something behind.*pins"):
        simulate()


@pytest.mark.parametrize("policy", ["load-balancing", "kvcache-centric"])
def test_more_nodes_serve_no_less(policy: str) -> None:
    load = Workload(request_count=250, rate_per_s=3.0)
    shares = []
    for nodes in (1, 2, 4, 8):
        setting = replace(SMALL, prefill_count=nodes, decode_count=nodes)
        outcome = simulate(setting, load, policy=policy, admission="early")
        shares.append(outcome.effective_share(TIGHT))
    for fewer, more in pairwise(shares):
        assert more >= fewer - 0.02
    assert shares[-1] > shares[0] + 0.2


def test_a_faster_link_and_layers_cost_no_time() -> None:
    wide = replace(SMALL, cache_tokens=3_000_000)
    options: dict[str, Any] = {"policy": "kvcache-centric", "admission": "none"}
    narrow = replace(wide, port_bytes_per_s=3e9)
    serial = replace(narrow, layer_wise=False)
    waits = [
        simulate(setting, objectives=NONE, **options).mean_ttft_s()
        for setting in (wide, narrow, serial)
    ]
    assert waits[0] < waits[1] < waits[2]


def repeated(count: int) -> list[Arrival]:
    """Make requests for one of two prompts of 40 blocks, in turn, far apart, of one output token."""
    prompts = [tuple(block_name(100 * p + i) for i in range(40)) for p in range(2)]
    return [
        Arrival(number, 10.0 * number, 40 * BLOCK_TOKENS, 1, prompts[number // 2 % 2])
        for number in range(count)
    ]


def test_what_a_node_holds_is_not_computed_again() -> None:
    setting = replace(SMALL, prefill_count=1, decode_count=1)
    planner = Planner(PlannerOptions(policy="cache-aware", admission="none"), COST)
    outcome = Simulation(setting, planner, COST, NONE, 0).run(repeated(4))
    tokens = 40 * BLOCK_TOKENS
    assert outcome.column("cached_tokens").tolist() == [0, tokens - 1, 0, tokens - 1]
    first, second = outcome.column("ttft_s")[:2].tolist()
    assert first == pytest.approx(COST.prefill_s(tokens, 0))
    assert second == pytest.approx(COST.prefill_s(tokens, tokens - 1))
    assert outcome.column("tbt_s").tolist() == [0.0] * 4


def test_a_pool_finds_what_any_node_computed() -> None:
    options: dict[str, Any] = {"policy": "random", "admission": "none"}
    setting = replace(SMALL, prefill_count=4, cache_tokens=200_000)
    local = simulate(setting, objectives=NONE, **options)
    pooled = simulate(replace(setting, pooled=True), objectives=NONE, **options)
    assert pooled.hit_rate() > 1.3 * local.hit_rate()
    assert pooled.column("moved_tokens").sum() > 0
    assert local.column("moved_tokens").sum() == 0


def test_a_hot_prefix_spreads_and_both_nodes_keep_it() -> None:
    prompt = tuple(block_name(i) for i in range(100))
    burst = [Arrival(n, 60.0 + 0.01 * n, 100 * BLOCK_TOKENS, 1, prompt) for n in range(1, 30)]
    load = [Arrival(0, 0.0, 100 * BLOCK_TOKENS, 1, prompt), *burst]
    planner = Planner(PlannerOptions(policy="kvcache-centric", admission="none"), COST)
    setting = replace(
        SMALL, cache_tokens=10**6, decode_tokens_max=10**7, queued_max=100, running_max=100
    )
    outcome = Simulation(setting, planner, COST, NONE, 0).run(load)
    moved = outcome.column("moved_tokens")
    assert (moved > 0).sum() >= 1
    assert outcome.column("cached_tokens")[1:].min() == 100 * BLOCK_TOKENS - 1
    assert outcome.sent_bytes >= moved.max() * COST.kv_bytes_per_token


@pytest.mark.parametrize(
    ("objectives", "key"),
    [
        (Objectives(ttft_s=0.0, tbt_s=1.0), "ttft_s"),
        (Objectives(ttft_s=-1.0, tbt_s=1.0), "ttft_s"),
        (Objectives(ttft_s=float("nan"), tbt_s=1.0), "ttft_s"),
        (Objectives(ttft_s=1e-6, tbt_s=1.0), "ttft_s"),
        (Objectives(ttft_s=1.0, tbt_s=1e-6), "tbt_s"),
        (Objectives(ttft_s=1.0, tbt_s=0.02), "tbt_s"),
    ],
)
def test_objectives_that_nothing_can_meet_are_refused(objectives: Objectives, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is .*an idle cluster needs") as raised:
        simulate(objectives=objectives)
    assert raised.value.key == key


@pytest.mark.parametrize("key", [name for name in ClusterSetting.__dataclass_fields__])
def test_a_setting_without_meaning_is_refused(key: str) -> None:
    if isinstance(getattr(SMALL, key), bool):
        return
    unlimited = () if key == "held_tbt_s" else (float("inf"),)
    for value in (0, -1, float("nan"), *unlimited):
        with pytest.raises(ConfigError, match=key):
            replace(SMALL, **cast("dict[str, Any]", {key: value}))


def test_rejections_have_reasons_and_waste_is_told_apart() -> None:
    crowded = Workload(request_count=300, rate_per_s=8.0)
    baseline = simulate(load=crowded, policy="load-balancing", admission="baseline")
    early = simulate(load=crowded, policy="load-balancing", admission="early")
    assert baseline.count(End.DROPPED) > early.count(End.DROPPED)
    assert early.count(End.REJECTED) > 0
    dropped = baseline.ended(End.DROPPED)
    assert (baseline.column("prefill_s")[dropped] > 0).all()
    assert not baseline.effective(NONE)[dropped].any()


class Elsewhere:
    """A policy that breaks its word: it plans on blocks that are nowhere."""

    def __init__(self) -> None:
        self._planner = Planner(PlannerOptions(admission="none"), COST)

    def decide(self, snapshot: Snapshot, request: Request) -> Decision:
        plan = self._planner.decide(snapshot, request)
        assert isinstance(plan, Plan)
        return replace(plan, cached_tokens=request.tokens - 1)

    def recheck(self, snapshot: Snapshot, request: Request, plan: Plan) -> Rejection | None:
        return None


def test_a_plan_on_blocks_that_are_nowhere_computes_them() -> None:
    outcome = Simulation(SMALL, Elsewhere(), COST, NONE, 0).run(repeated(1))
    assert outcome.column("cached_tokens").tolist() == [0]
