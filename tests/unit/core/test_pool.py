import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvpool.arena import Arena, Slot, Slots
from kvpool.base import Chain
from kvpool.block import BlockLayout, new_incarnation
from kvpool.clock import ManualClock
from kvpool.config import PoolConfig
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    ConfigError,
    LeaseExpiredError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.events import BlocksEvicted, ListSink
from kvpool.memory import BlockView, Crcs, Span
from kvpool.pool import BATCH_BYTES, Pool, batches
from kvpool.testing.blocks import SMALL_LAYOUT, Payload, namespace, payload, view_of
from kvpool.tiers.base import BlockTokens
from kvpool.tiers.dram import DramTier

WAIT_S = 20.0
SLOTS = 6
PAGE = 4096


def config(**limits: float) -> PoolConfig:
    return PoolConfig(dram_bytes=SLOTS * PAGE, **limits)  # type: ignore[arg-type]  # whole numbers


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.open(SMALL_LAYOUT, config()) as pool:
        yield pool


def chain_of(pool: Pool, blocks: int, salt: str = "") -> Chain:
    tokens = list(range(blocks * pool.layout.block_tokens))
    return pool.chain(namespace(pool.layout, salt), tokens)


def store(pool: Pool, chain: Chain, seed: int = 1) -> Payload:
    blocks = payload(pool.layout, len(chain), seed)
    result = pool.store(chain, view_of(pool.layout, blocks), deadline_s=WAIT_S).wait(WAIT_S)
    assert result.stored == len(chain)
    return blocks


def empty(blocks: Payload) -> tuple[Payload, BlockView]:
    out = np.zeros_like(blocks)
    return out, view_of(SMALL_LAYOUT, out)


def flip_a_byte(pool: Pool, slot: Slot, layer: int) -> None:
    assert isinstance(pool.tier, DramTier)
    view = pool.tier.arena.view([slot])
    address = view.base + slot.index * view.block_stride + layer * view.layer_stride
    Span(address, pool.layout.layer_bytes, view.owner).view()[5] ^= 4


def slots_of(pool: Pool, chain: Chain) -> Sequence[Slot]:
    slots = pool.tier.pin(chain.hashes)
    pool.tier.unpin(slots)
    return slots


class GatedTier(DramTier):
    """Holds every reader at ``crcs`` and every writer at ``reserve_run`` until the gate opens."""

    def __init__(self) -> None:
        super().__init__(Arena(SMALL_LAYOUT, SLOTS, new_incarnation()))
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.gate.set()

    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        self.wait()
        return super().crcs(slots)

    def reserve_run(self, count: int, tokens: BlockTokens | None = None) -> Slots:
        self.wait()
        return super().reserve_run(count, tokens)

    def wait(self) -> None:
        self.reached.set()
        assert self.gate.wait(WAIT_S)

    def shut(self) -> None:
        self.gate.clear()
        self.reached.clear()


# ---- opening --------------------------------------------------------------------------------------


def test_the_bytes_asked_for_become_whole_slots() -> None:
    with Pool.open(SMALL_LAYOUT, PoolConfig(dram_bytes=3 * PAGE - 1)) as pool:
        assert pool.stats().slots == 2


def test_bytes_for_less_than_a_block_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        Pool.open(SMALL_LAYOUT, PoolConfig(dram_bytes=PAGE - 1))
    assert refused.value.key == "pool.dram_bytes"


# Python 3.12 warns of a fork beside threads; this child takes no lock and never returns.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_to_open_its_own(pool: Pool) -> None:
    chain = chain_of(pool, 1)
    child = os.fork()
    if child == 0:
        try:
            pool.match(chain)
        except UsageError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- corrupt blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(SMALL_LAYOUT.num_layers))
def test_a_corrupt_block_cuts_the_load_and_leaves(layer: int) -> None:
    events = ListSink()
    with Pool.open(SMALL_LAYOUT, config(), events=events) as pool:
        chain = chain_of(pool, 4)
        blocks = store(pool, chain)
        flip_a_byte(pool, slots_of(pool, chain)[2], layer)
        out, dest = empty(blocks)
        with pool.lease(pool.match(chain), WAIT_S) as lease:
            assert pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S) == 2
            np.testing.assert_array_equal(out[:2], blocks[:2])
            assert pool.match(chain).blocks == 2
            assert pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S) == 2
            tail = pool.load(lease, dest.take(0, 1), first=3, deadline_s=WAIT_S)
            assert tail.wait(WAIT_S) == 1
        assert pool.stats().corruptions == 1
        told = [event.reason for event in events.events if isinstance(event, BlocksEvicted)]
        assert told == ["corrupt"]


def test_a_chain_whose_first_block_is_corrupt_delivers_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.pool.BATCH_BYTES", 1)  # one layer at a time
    chain = chain_of(pool, 3)
    blocks = store(pool, chain)
    flip_a_byte(pool, slots_of(pool, chain)[0], 1)
    with pool.lease(pool.match(chain), WAIT_S) as lease:
        done = pool.load(lease, empty(blocks)[1], deadline_s=WAIT_S)
        assert done.wait(WAIT_S) == 0
        assert done.layers_ready() == 1
    store(pool, chain)
    assert pool.match(chain).blocks == 3


def test_a_block_stored_anew_outlives_a_second_load_of_the_old_one(pool: Pool) -> None:
    chain = chain_of(pool, 1)
    blocks = store(pool, chain)
    flip_a_byte(pool, slots_of(pool, chain)[0], 0)
    with pool.lease(pool.match(chain), WAIT_S) as lease:
        dest = empty(blocks)[1]
        assert pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S) == 0
        store(pool, chain)
        assert pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S) == 0
        assert pool.match(chain).blocks == 1


# ---- leases ---------------------------------------------------------------------------------------


def test_a_lease_runs_out_by_the_clock() -> None:
    clock = ManualClock()
    with Pool.open(SMALL_LAYOUT, config(), clock=clock) as pool:
        chain = chain_of(pool, SLOTS)
        blocks = store(pool, chain)
        lease = pool.lease(pool.match(chain), 10)
        clock.advance(9.9)
        out, dest = empty(blocks)
        assert pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S) == SLOTS
        np.testing.assert_array_equal(out, blocks)
        clock.advance(0.1)
        with pytest.raises(LeaseExpiredError):
            pool.load(lease, dest, deadline_s=WAIT_S)
        store(pool, chain_of(pool, SLOTS, salt="b"), seed=2)
        assert pool.stats().leases == 0


def test_a_lease_that_runs_out_in_mid_load_keeps_its_blocks_to_the_end() -> None:
    tier = GatedTier()
    clock = ManualClock()
    with Pool(tier, config(), clock=clock) as pool:
        chain = chain_of(pool, SLOTS)
        blocks = store(pool, chain)
        lease = pool.lease(pool.match(chain), 10)
        tier.shut()
        out, dest = empty(blocks)
        done = pool.load(lease, dest, deadline_s=WAIT_S)
        assert tier.reached.wait(WAIT_S)
        clock.advance(11)
        assert pool.leases.expire() == 0
        assert tier.evict(SLOTS) == 0
        tier.gate.set()
        assert done.wait(WAIT_S) == SLOTS
        np.testing.assert_array_equal(out, blocks)
        assert pool.stats().leases == 0
        assert tier.evict(SLOTS) == SLOTS


def test_the_quota_of_leased_bytes_is_kept() -> None:
    with Pool.open(SMALL_LAYOUT, config(lease_bytes_max=2 * SMALL_LAYOUT.block_bytes)) as pool:
        chain = chain_of(pool, 3)
        store(pool, chain)
        with pytest.raises(CapacityError, match="quota|leased bytes"):
            pool.lease(pool.match(chain), 10)
        with pool.lease(pool.match(chain_of(pool, 2)), 10) as lease:
            assert lease.blocks == 2
        assert pool.stats().extra == {"pins": 0, "lease_bytes": 0, "mismatches": 0}


def test_a_lease_of_another_pool_is_refused(pool: Pool) -> None:
    with Pool.open(SMALL_LAYOUT, config()) as other:
        chain = chain_of(other, 1)
        blocks = store(other, chain)
        store(pool, chain)
        with other.lease(other.match(chain), 10) as lease, pytest.raises(UsageError):
            pool.load(lease, empty(blocks)[1], deadline_s=WAIT_S)


def test_layers_are_announced_in_batches_and_every_block_is_in_one() -> None:
    layout = BlockLayout(
        num_layers=5, kv_heads=1, block_tokens=16, k_dim=BATCH_BYTES // 256, v_dim=0
    )
    cut = list(batches(layout, 1))
    assert [(layers, list(blocks)) for layers, blocks in cut] == [
        (range(4), [0]),
        (range(4, 5), [0]),
    ]
    assert {layers.start for layers, _ in batches(layout, 9)} == set(range(5))
    for count in range(12):
        told = [(a, b) for layers, blocks in batches(layout, count) for a in layers for b in blocks]
        assert told == sorted(set(told)) and len(told) == 5 * count


# ---- ends -----------------------------------------------------------------------------------------


def test_a_load_in_flight_ends_at_cancel_and_holds_its_pins_until_then() -> None:
    tier = GatedTier()
    with Pool(tier) as pool:
        chain = chain_of(pool, 2)
        blocks = store(pool, chain)
        lease = pool.lease(pool.match(chain), WAIT_S)
        tier.shut()
        done = pool.load(lease, empty(blocks)[1], deadline_s=WAIT_S)
        assert tier.reached.wait(WAIT_S)
        lease.close()
        done.cancel()
        assert not done.done()
        assert tier.stats().pins == 2
        tier.gate.set()
        with pytest.raises(CancelledTransferError):
            done.wait(WAIT_S)
        assert tier.stats().pins == 0


def test_a_store_in_flight_ends_at_cancel_and_leaves_no_slot_behind() -> None:
    tier = GatedTier()
    with Pool(tier) as pool:
        chain = chain_of(pool, 3)
        tier.shut()
        source = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, 3, seed=1))
        done = pool.store(chain, source, deadline_s=WAIT_S)
        assert tier.reached.wait(WAIT_S)
        done.cancel()
        tier.gate.set()
        with pytest.raises(CancelledTransferError):
            done.wait(WAIT_S)
        assert (tier.stats().free, pool.match(chain).blocks) == (SLOTS, 0)


def test_deadline_and_cancel_are_looked_at_between_layers_and_batches() -> None:
    layout = BlockLayout(
        num_layers=3, kv_heads=1, block_tokens=16, k_dim=BATCH_BYTES // 128, v_dim=0
    )
    with Pool.open(layout, PoolConfig(dram_bytes=4 * layout.block_bytes)) as pool:
        chain = chain_of(pool, 4)
        store(pool, chain)
        looks, layers = [0], [0]

        def look() -> None:
            looks[0] += 1
            if looks[0] == 6:
                raise TransferTimeoutError("over")

        lease = pool.lease(pool.match(chain), WAIT_S)
        out = np.zeros((4, layout.block_bytes), dtype=np.uint8)
        with pool.leases.reading(lease.lease_id) as held, pytest.raises(TransferTimeoutError):
            pool._copy_out(held, view_of(layout, out), 0, lambda n: layers.append(n), look)
        # One look before, two batches a layer: the sixth is in the middle of the third layer.
        assert layers[-1] == 2


def test_close_ends_what_is_in_flight_and_what_is_queued() -> None:
    tier = GatedTier()
    pool = Pool(tier, copy_threads=1)
    chain = chain_of(pool, 2)
    blocks = store(pool, chain)
    lease = pool.lease(pool.match(chain), WAIT_S)
    tier.shut()
    started = [pool.load(lease, empty(blocks)[1], deadline_s=WAIT_S) for _ in range(3)]
    assert tier.reached.wait(WAIT_S)
    closing = threading.Thread(target=pool.close)
    closing.start()
    while not pool._closed:
        assert closing.is_alive()
    tier.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    for done in started:
        with pytest.raises(ClosedError):
            done.result()


# ---- tokens beside blocks -------------------------------------------------------------------------


def other_tokens(chain: Chain, block: int) -> Chain:
    """Return a chain of the same names, one of whose blocks has other tokens: a collision."""
    assert chain.tokens is not None
    tokens = chain.tokens.copy()
    tokens[(block + 1) * SMALL_LAYOUT.block_tokens - 1] += 1
    return Chain(chain.namespace, chain.hashes, tokens)


def test_a_block_of_other_tokens_under_the_same_name_is_a_miss(pool: Pool) -> None:
    chain = chain_of(pool, 4)
    blocks = store(pool, chain)
    asked = other_tokens(chain, 2)
    with pool.lease(pool.match(asked), 10) as lease:
        assert lease.blocks == 2
        out, dest = empty(blocks[:2])
        assert pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S) == 2
    np.testing.assert_array_equal(out, blocks[:2])
    stats = pool.stats()
    assert (stats.misses, stats.extra["mismatches"], stats.extra["pins"]) == (2, 1, 0)
    with pool.lease(pool.match(chain), 10) as lease:
        assert lease.blocks == 4


def test_nothing_is_stored_behind_a_block_of_other_tokens(pool: Pool) -> None:
    chain = chain_of(pool, 5)
    store(pool, Chain(chain.namespace, chain.hashes[: 3 * 32], chain.block_tokens(0, 3)))
    blocks = payload(pool.layout, 5, seed=9)
    source = view_of(SMALL_LAYOUT, blocks)
    result = pool.store(other_tokens(chain, 1), source, deadline_s=WAIT_S).wait(WAIT_S)
    assert (result.stored, result.new) == (1, 0)
    assert "other tokens" in result.refused
    stats = pool.stats()
    assert (stats.ready, stats.reserved, stats.extra["pins"]) == (3, 0, 0)


def test_a_chain_of_hashes_alone_is_not_compared(pool: Pool) -> None:
    chain = chain_of(pool, 3)
    nameless = Chain(chain.namespace, chain.hashes)
    store(pool, nameless)
    for asked in (chain, other_tokens(chain, 0), nameless):
        with pool.lease(pool.match(asked), 10) as lease:
            assert lease.blocks == 3
    assert pool.stats().extra["mismatches"] == 0


def test_a_chain_keeps_its_own_tokens(pool: Pool) -> None:
    tokens = np.arange(3 * SMALL_LAYOUT.block_tokens + 5, dtype=np.uint32)
    chain = pool.chain(namespace(pool.layout), tokens)
    tokens[:] = 0
    assert chain == chain_of(pool, 3)
    assert chain.tokens is not None
    np.testing.assert_array_equal(chain.tokens, np.arange(3 * SMALL_LAYOUT.block_tokens))
    np.testing.assert_array_equal(chain.block_tokens(1, 1), [np.arange(16, 32)])
    with pytest.raises(UsageError, match="partial block"):
        Chain(chain.namespace, chain.hashes, tokens)


def test_a_prompt_of_less_than_a_block_has_a_chain_without_blocks(pool: Pool) -> None:
    chain = pool.chain(namespace(pool.layout), list(range(SMALL_LAYOUT.block_tokens - 1)))
    with pool.lease(pool.match(chain), 10) as lease:
        assert (len(chain), lease.blocks) == (0, 0)
    nothing = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, 0, seed=1))
    assert pool.store(chain, nothing, deadline_s=WAIT_S).wait(WAIT_S).stored == 0
