"""Figures of what is found in the cache: FAST'25 figures 9 and 10.

Owns what the papers print of them, and the reference replay's hit rates. Who calls it: ``kvpool
simulate``.
"""

from dataclasses import replace
from typing import Final

from kvpool.integration.simulator.figure import Chart, Check, Figure, Series
from kvpool.integration.simulator.suite import (
    CLUSTER,
    CONVERSATION,
    PAPERS,
    SYNTHETIC,
    Scenario,
    Suite,
)
from kvpool.integration.simulator.trace import BLOCK_TOKENS
from kvpool.tiers.eviction import LRUPolicy
from kvpool.tiers.replay import TraceRequest, replay

_TOKENS: Final = tuple(int(tokens) for tokens in (1e4, 1e5, 1e6, 2e6, 4e6, 5e6, 8e6, 1e7, 5e7, 1e8))
_FIG9: Final = {
    CONVERSATION: (0.045, 0.073, 0.087, 0.120, 0.215, 0.247, 0.300, 0.326, 0.398, 0.401),
    SYNTHETIC: (0.001, 0.012, 0.146, 0.235, 0.381, 0.435, 0.545, 0.589, 0.658, 0.658),
}
# Of an independent replay with exact LRU, block-weighted; the last room holds everything.
_BLOCKS: Final = (1_000, 5_859, 10_000, 30_000, 50_000, 100_000, 1_000_000)
_REFERENCE_REQUESTS: Final = {CONVERSATION: 12_031, SYNTHETIC: 3_993}
_REFERENCE: Final = {
    CONVERSATION: (0.0445, 0.1355, 0.2112, 0.3257, 0.3546, 0.3637, 0.3664),
    SYNTHETIC: (0.0825, 0.3094, 0.4235, 0.6242, 0.6396, 0.6396, 0.6396),
}
_FIG10_HIT: Final = {CONVERSATION: (0.169, 0.374), SYNTHETIC: (0.263, 0.621)}
_FIG10_PREFILL_S: Final = {CONVERSATION: (1.38, 1.05), SYNTHETIC: (1.50, 0.78)}


def figure9(suite: Suite) -> Figure:
    """Draw FAST'25 figure 9: hit rate by capacity, one store, exact LRU."""
    rows: list[list[str | float | int | None]] = []
    checks: list[Check] = []
    series: list[Series] = []
    rooms = sorted({*_BLOCKS, *(tokens // BLOCK_TOKENS for tokens in _TOKENS)})
    for trace, requests in suite.traces.items():
        asked = [TraceRequest(at_s=one.arrival_s, keys=one.blocks) for one in requests]
        found: dict[int, float] = {}
        for index, blocks in enumerate(rooms):
            suite.tell(f"fig9 {trace}", index / len(rooms))
            found[blocks] = replay(LRUPolicy(), asked, blocks, parents=False).hit_rate
        printed = dict(
            zip((tokens // BLOCK_TOKENS for tokens in _TOKENS), _FIG9.get(trace, ()), strict=False)
        )
        whole = len(requests) == _REFERENCE_REQUESTS.get(trace)
        reference = dict[int, float](zip(_BLOCKS, _REFERENCE[trace] if whole else (), strict=False))
        for blocks, rate in found.items():
            tokens = blocks * BLOCK_TOKENS
            rows.append([trace, tokens, blocks, rate, reference.get(blocks), printed.get(blocks)])
        if reference:
            wrong = [blocks for blocks in reference if round(found[blocks], 4) != reference[blocks]]
            text = f"{trace}: equal to the reference replay to 4 digits at {len(reference)} rooms"
            checks.append(Check(text + (f", but for {wrong} blocks" if wrong else ""), not wrong))
        xs = [blocks * BLOCK_TOKENS for blocks in rooms]
        series.append(Series(name=trace, xs=xs, ys=[found[blocks] for blocks in rooms]))
        ys = [printed.get(blocks) for blocks in rooms]
        if printed:
            series.append(Series(name=f"{trace}, printed", xs=xs, ys=ys, printed=True))
    return Figure(
        name="fig9",
        title="Hit rate by capacity of one store",
        printed_in="FAST'25, figure 9",
        columns=["trace", "tokens", "blocks", "hit_rate", "reference_hit_rate", "printed_hit_rate"],
        rows=rows,
        charts=[
            Chart(
                title="exact LRU",
                kind="lines",
                x_label="capacity, tokens",
                y_label="hit rate, of blocks",
                series=series,
                log_x=True,
            )
        ],
        checks=checks,
        text="Replayed through kvpool's LRU without the rule that a block goes before its "
        "ancestors, as published hit rates are. The papers' store has blocks of 256 tokens, the "
        "public traces name blocks of 512: half a block more a request would match, about what "
        "is missing here to the printed values.",
    )


def figure10(suite: Suite) -> Figure:
    """Draw FAST'25 figure 10: a store a node against one pool; outputs of one token."""
    rows: list[list[str | float | None]] = []
    checks: list[Check] = []
    hits: dict[str, list[float]] = {"local": [], "global": []}
    printed: dict[str, list[float | None]] = {"local": [], "global": []}
    for trace in suite.traces:
        rates: list[float] = []
        for index, kind in enumerate(("local", "global")):
            scenario = Scenario(
                trace=trace,
                planner=replace(PAPERS, policy="load-balancing"),
                cluster=replace(CLUSTER, prefill_count=10, pooled=kind == "global"),
                one_token=True,
            )
            outcome = suite.run(scenario, f"fig10 {trace} {kind}")
            rates.append(outcome.hit_rate())
            known = _FIG10_HIT.get(trace)
            shown = _FIG10_PREFILL_S.get(trace)
            hits[kind].append(rates[-1])
            printed[kind].append(known[index] if known else None)
            rows.append(
                [
                    *(trace, kind, rates[-1], known[index] if known else None),
                    *(outcome.mean_prefill_s(), shown[index] if shown else None),
                ]
            )
        ratio = rates[1] / rates[0] if rates[0] else float("inf")
        checks.append(Check(f"{trace}: global / local hit rate is above 2: {ratio:.2f}", ratio > 2))
    names = list(suite.traces)
    return Figure(
        name="fig10",
        title="A store a node against one pool",
        printed_in="FAST'25, figure 10",
        columns=[
            *("trace", "store", "hit_rate", "printed_hit_rate"),
            *("mean_prefill_s", "printed_prefill_s"),
        ],
        rows=rows,
        charts=[
            Chart(
                title="10 prefill nodes of 3 M tokens",
                kind="bars",
                x_label="trace",
                y_label="hit rate, of tokens",
                series=[
                    Series(name="local", xs=names, ys=hits["local"]),
                    Series(name="global", xs=names, ys=hits["global"]),
                    Series(name="local, printed", xs=names, ys=printed["local"], printed=True),
                    Series(name="global, printed", xs=names, ys=printed["global"], printed=True),
                ],
            )
        ],
        checks=checks,
        text="Ten prefill nodes of 3 M tokens each, requests to the shortest queue, as the papers "
        "have it; what the pool holds on other nodes comes over the network.",
    )
