"""Tiers under pressure: scans larger than the room, everything pinned, many threads, many cycles."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.block import BlockHash, new_incarnation
from kvpool.config import PoolConfig, SsdConfig
from kvpool.errors import CapacityError
from kvpool.pool import Pool
from kvpool.testing.blocks import SMALL_LAYOUT, key, namespace, payload, read, view_of, write
from kvpool.tiers.dram import DramTier
from kvpool.tiers.eviction import EvictionPolicy, LRUPolicy
from kvpool.tiers.reuse import ReusePolicy
from kvpool.tiers.stack import StackTier
from tests.conftest import Count

SLOTS = 40
WAIT_S = 120.0
SLOT_BYTES = 4096


def open_tier(slots: int = SLOTS, policy: EvictionPolicy | None = None) -> DramTier:
    arena = Arena(SMALL_LAYOUT, slots, new_incarnation())
    return DramTier(arena, policy=policy)


@pytest.fixture(
    params=[lambda: None, LRUPolicy, lambda: ReusePolicy(SLOTS)], ids=["ledger", "lru", "reuse"]
)
def tier(request: pytest.FixtureRequest) -> Iterator[DramTier]:
    make: Callable[[], EvictionPolicy | None] = request.param
    with open_tier(policy=make()) as tier:
        yield tier


def block(number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return payload(SMALL_LAYOUT, 1, number)


def assert_at_rest(tier: DramTier, ready: int) -> None:
    stats = tier.stats()
    assert (stats.reserved, stats.quarantined, stats.pins) == (0, 0, 0)
    assert (stats.ready, stats.free) == (ready, stats.slots - ready)


def test_scans_of_a_tenth_more_than_the_room(tier: DramTier, count: Count) -> None:
    """Each block is looked up, and stored if it is not there, in a circle."""
    found, turns = 0, count(10, 2000) * SLOTS
    for turn in range(turns):
        number = turn % (SLOTS + SLOTS // 10)
        slots = tier.pin(key(number))
        if slots:
            np.testing.assert_array_equal(read(tier, slots), block(number))
            tier.unpin(slots)
            found += 1
        else:
            assert write(tier, key(number), block(number))
    assert_at_rest(tier, ready=SLOTS)
    assert tier.stats().evictions == turns - found - SLOTS


def test_scans_of_a_tenth_more_than_dram_are_served_by_the_ssd(
    tmp_path: Path, count: Count
) -> None:
    blocks = 16
    ssd = SsdConfig(folder=tmp_path, capacity_bytes=4 << 20, promote_timeout_s=WAIT_S)
    config = PoolConfig(dram_bytes=blocks * SLOT_BYTES, ssd=ssd)
    with Pool.open(SMALL_LAYOUT, config) as pool:
        assert isinstance(pool.tier, StackTier)
        chains = [
            pool.chain(namespace(SMALL_LAYOUT, f"{number}"), range(SMALL_LAYOUT.block_tokens))
            for number in range(blocks + 2)
        ]
        for number, chain in enumerate(chains):
            source = view_of(SMALL_LAYOUT, block(number))
            pool.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S)
            assert pool.tier.flusher.wait_idle(WAIT_S)
        for _ in range(count(3, 200)):
            for number, chain in enumerate(chains):
                out = np.zeros((1, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
                with pool.lease(pool.match(chain), WAIT_S) as lease:
                    load = pool.load(lease, view_of(SMALL_LAYOUT, out), deadline_s=WAIT_S)
                    assert load.wait(WAIT_S) == 1
                np.testing.assert_array_equal(out, block(number))


def test_everything_pinned_refuses_and_recovers(tier: DramTier, count: Count) -> None:
    for number in range(SLOTS):
        write(tier, key(number), block(number))
    for first in range(0, count(1, 500) * SLOTS, SLOTS):
        next_ones = range(first + SLOTS, first + 2 * SLOTS)
        here = tier.keys()
        pins = [tier.pin(here[at : at + 32]) for at in range(0, len(here), 32)]
        for number in next_ones:
            with pytest.raises(CapacityError):
                write(tier, key(number), block(number))
        assert len(tier.reserve_run(5)) == 0
        assert tier.evict(SLOTS) == 0
        assert tier.keys() == here  # none of them has left, unread
        for slots in pins:
            read(tier, slots)
            tier.unpin(slots)
        for number in next_ones:
            assert write(tier, key(number), block(number))
        assert_at_rest(tier, ready=SLOTS)


def test_one_writer_and_many_readers_of_one_block(tier: DramTier, count: Count) -> None:
    """The block is dropped and stored anew all the time; a reader sees it whole or not at all."""
    stop = threading.Event()
    seen = [0] * 8

    def reads(reader: int) -> None:
        while not stop.is_set():
            slots = tier.pin(key(0))
            if slots:
                np.testing.assert_array_equal(read(tier, slots), block(0))
                seen[reader] += 1
            tier.unpin(slots)

    with ThreadPoolExecutor(len(seen)) as threads:
        running = [threads.submit(reads, reader) for reader in range(len(seen))]
        try:
            turns = 0
            while turns < count(200, 20_000) or not all(seen):
                assert turns < 1_000_000 and not any(one.done() for one in running)
                write(tier, key(0), block(0))
                tier.drop(key(0), "invalid")
                turns += 1
                if turns % 50 == 0:  # so that readers that come late see one, too
                    write(tier, key(0), block(0))
        finally:
            stop.set()
        for one in running:
            one.result(WAIT_S)
    tier.drop(key(0), "invalid")
    assert_at_rest(tier, ready=0)


def test_512_threads(count: Count) -> None:
    """Each stores and loads prompts that others store, too, in a pool that holds a part of them."""
    with Pool.open(SMALL_LAYOUT, PoolConfig(dram_bytes=64 * SLOT_BYTES)) as pool:
        tokens = range(2 * SMALL_LAYOUT.block_tokens)

        def work(number: int) -> int:
            prompt = number % 50
            chain = pool.chain(namespace(SMALL_LAYOUT, f"{prompt}"), tokens)
            blocks = payload(SMALL_LAYOUT, 2, prompt)
            pool.store(chain, view_of(SMALL_LAYOUT, blocks), deadline_s=WAIT_S).wait(WAIT_S)
            out = np.zeros_like(blocks)
            with pool.lease(pool.match(chain), WAIT_S) as lease:
                view = view_of(SMALL_LAYOUT, out[: lease.blocks])
                good = pool.load(lease, view, deadline_s=WAIT_S).wait(WAIT_S)
                assert good == lease.blocks
            np.testing.assert_array_equal(out[:good], blocks[:good])
            return good

        with ThreadPoolExecutor(512) as threads:
            assert sum(threads.map(work, range(count(512, 512 * 40)))) > 0
        stats = pool.stats()
        assert (stats.reserved, stats.quarantined, stats.leases) == (0, 0, 0)
        assert stats.extra["pins"] == 0


def test_probing_all_blocks_while_writing_keeps_nothing_alive(count: Count) -> None:
    """A match is not a use: blocks go in the order in which they came, whoever looks at them."""
    stop = threading.Event()
    with open_tier() as tier:
        probes = [0]

        def probe() -> None:
            while not stop.is_set():
                for number in range(SLOTS):
                    tier.match(key(number))
                probes[0] += 1

        thread = threading.Thread(target=probe)
        thread.start()
        try:
            number = 0
            while number < count(3, 500) * SLOTS or probes[0] < 10:
                write(tier, key(number), block(number % SLOTS))
                first = max(0, number - 4 * SLOTS)  # those before are long gone
                here = [one for one in range(first, number + 1) if tier.match(key(one))]
                assert here == list(range(max(0, number + 1 - SLOTS), number + 1))
                number += 1
        finally:
            stop.set()
            thread.join(WAIT_S)
        assert tier.stats().hits == tier.stats().misses == 0


def test_fragments_whose_parents_are_elsewhere(tier: DramTier, count: Count) -> None:
    """Every other block of long chains, over and over: they are found, they go, nothing piles up."""
    for turn in range(count(20, 1000)):
        for number in range(1, 2 * SLOTS, 2):
            name, parent = key(1000 * turn + number), key(1000 * turn + number - 1)
            assert write(tier, name, block(number), parent)
            slots = tier.pin(name)
            np.testing.assert_array_equal(read(tier, slots), block(number))
            tier.unpin(slots)
    assert_at_rest(tier, ready=SLOTS)
    assert tier.evict(2 * SLOTS) == SLOTS
    assert_at_rest(tier, ready=0)
    policy = tier._policy
    if policy is not None:
        assert isinstance(policy, LRUPolicy | ReusePolicy)
        assert not policy._children


def test_memory_stays_flat_over_many_cycles(tier: DramTier, count: Count) -> None:
    """Blocks come and go; after the first cycles nothing more is kept."""
    crcs = np.zeros((SMALL_LAYOUT.num_layers, SMALL_LAYOUT.kv_heads), dtype=np.uint32)
    cycles = count(12_000, 1_000_000)

    def cycle(begin: int, end: int) -> None:
        parent: BlockHash | None = None
        for number in range(begin, end):
            name = key(number)
            tier.commit(tier.reserve(), name, parent, crcs)
            parent = name if number % 5 else None

    cycle(0, cycles // 4)
    before = _resident_bytes()
    cycle(cycles // 4, cycles)
    assert _resident_bytes() - before < 4 << 20
    assert_at_rest(tier, ready=SLOTS)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
