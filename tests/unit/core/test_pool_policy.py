"""A pool whose owner chose who decides what leaves: it does, and every byte stays right."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvpool.block import BlockHash
from kvpool.config import PoolConfig
from kvpool.pool import Pool
from kvpool.testing.blocks import SMALL_LAYOUT, namespace, payload, view_of
from kvpool.tiers.eviction import NO_FACTS, EvictionPolicy, Facts, LRUPolicy
from kvpool.tiers.reuse import ReusePolicy

SLOTS = 6
WAIT_S = 60.0
CONFIG = PoolConfig(dram_bytes=SLOTS * 4096)


class Witness(LRUPolicy):
    """Least recently used, that remembers for how many blocks it was made, and what it was told."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.sizes: set[int] = set()

    def admit_run(
        self,
        keys: Sequence[BlockHash],
        parent: BlockHash | None,
        now: float,
        facts: Facts = NO_FACTS,
    ) -> None:
        self.sizes.add(facts.size_bytes)
        super().admit_run(keys, parent, now, facts)


def store(pool: Pool, prompt: int) -> None:
    chain = pool.chain(namespace(SMALL_LAYOUT, str(prompt)), range(2 * SMALL_LAYOUT.block_tokens))
    blocks = payload(SMALL_LAYOUT, 2, prompt)
    pool.store(chain, view_of(SMALL_LAYOUT, blocks), deadline_s=WAIT_S).wait(WAIT_S)
    out = np.zeros_like(blocks)
    with pool.lease(pool.match(chain), WAIT_S) as lease:
        good = pool.load(lease, view_of(SMALL_LAYOUT, out), deadline_s=WAIT_S).wait(WAIT_S)
    assert good == 2
    np.testing.assert_array_equal(out, blocks)


@pytest.mark.parametrize("make", [ReusePolicy, Witness])
def test_a_policy_of_the_owners_choice(make: type[ReusePolicy] | type[Witness]) -> None:
    made: list[EvictionPolicy] = []

    def policy(capacity: int) -> EvictionPolicy:
        made.append(make(capacity))
        return made[-1]

    with Pool.open(SMALL_LAYOUT, CONFIG, policy=policy) as pool:
        for prompt in range(3 * SLOTS):
            store(pool, prompt)
        stats = pool.stats()
        assert (stats.ready, stats.evictions) == (SLOTS, 2 * 3 * SLOTS - SLOTS)
        assert [len(one) for one in made] == [SLOTS]
    if isinstance(witness := made[0], Witness):
        assert (witness.capacity, witness.sizes) == (SLOTS, {SMALL_LAYOUT.block_bytes})
