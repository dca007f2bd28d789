"""What one decision costs: 8,192 block hashes, from 8 to 1,024 workers of each kind.

Printed, and kept by pytest-benchmark (``--benchmark-json``); no figure decides a test. The goal is
a p99 below 1 ms at 64 workers of each kind.
"""

import itertools
import random
import time
from collections.abc import Callable
from typing import Final

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvpool.block import HASH_BYTES
from kvpool.integration.conductor.cluster import Cluster
from kvpool.integration.conductor.cost import ProfiledCost
from kvpool.integration.conductor.papers import papers_profile
from kvpool.integration.conductor.plan import Decision, Plan
from kvpool.integration.conductor.planner import Planner, PlannerOptions
from kvpool.integration.conductor.prefill_choice import PolicyName
from kvpool.integration.conductor.snapshot import Objectives, Request

BLOCKS: Final = 8192
BLOCK_TOKENS: Final = 16
TOKENS: Final = BLOCKS * BLOCK_TOKENS
# In a normal run, and in a soak.
ROUNDS: Final = (100, 5000)


def cluster_of(workers: int, chain: bytes) -> Cluster:
    """Make a busy cluster in which every node holds a beginning of the chain, each another."""
    chance = random.Random(workers)
    cluster = Cluster(
        objectives=Objectives(ttft_s=600.0, tbt_s=1.0), block_tokens=BLOCK_TOKENS, decode_s=10.0
    )
    for node in range(workers):
        cluster.add_node(link_bytes_per_s=44e9)
        cluster.caches.add(node, chain[: HASH_BYTES * chance.randrange(BLOCKS)])
        cluster.add_prefill_worker(node, queued_max=256, tokens_max=1 << 20)
        cluster.add_decode_worker(node, running_max=256, tokens_max=1 << 21)
        cluster.prefill.free_at_s[node] = chance.random() * 20
    return cluster


# CPU time of the thread: a decision waits for nothing, and other programs change this little.
@pytest.mark.benchmark(timer=time.thread_time)
@pytest.mark.parametrize("workers", [8, 64, 256, 1024])
@pytest.mark.parametrize("policy", ["kvcache-centric", "slack-aware"])
def test_a_decision(
    policy: PolicyName,
    workers: int,
    benchmark: BenchmarkFixture,
    count: Callable[[int, int], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance = random.Random(0)
    chain = chance.randbytes(HASH_BYTES * BLOCKS)
    cluster = cluster_of(workers, chain)
    planner = Planner(PlannerOptions(policy=policy), ProfiledCost(papers_profile()))
    numbers = itertools.count()

    def request() -> tuple[tuple[Request], dict[str, object]]:
        # Of its own, as it comes out of `hash_chain`: equal, not the same object.
        hashes = bytes(bytearray(chain))
        number = next(numbers)
        return (Request(number=number, tokens=TOKENS, chain=hashes, output_tokens=100),), {}

    def decide(request: Request) -> Decision:
        return planner.decide(cluster.snapshot(0.0), request)

    decided = benchmark.pedantic(  # type: ignore[no-untyped-call]  # it has no types
        decide, setup=request, rounds=count(*ROUNDS)
    )
    assert isinstance(decided, Plan)
    if benchmark.stats is None:  # --benchmark-disable
        return
    seconds = benchmark.stats.stats.sorted_data
    median, p99 = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
    with capsys.disabled():
        print(
            f"\ndecision, {policy}, {workers} + {workers} workers, {BLOCKS} hashes: "
            f"CPU median {median * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms"
        )
