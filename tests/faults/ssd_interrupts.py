"""What Ctrl-C does to who waits for a disk that hangs: scenes, each in a process with disk.c preloaded.

python -m tests.faults.ssd_interrupts SCENE FOLDER
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from kvpool.base import StoreResult
from kvpool.completion import Completion
from kvpool.config import PoolConfig, SsdConfig
from kvpool.errors import CapacityError, ClosedError, TransferTimeoutError, UnavailableError
from kvpool.pool import Pool
from kvpool.testing.blocks import SMALL_LAYOUT, namespace, payload, view_of
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_format import slot_bytes
from kvpool.tiers.stack import StackTier
from tests.faults.ssd_scenes import (
    HANGS,
    PATIENCE_S,
    SLOTS,
    WRITES,
    fault,
    open_tier,
    raised,
    read,
    write,
)
from tests.waiting import until

BLOCKS = 4
A_WHILE_S = 1.0  # a deadline that is meant to pass, and not before Ctrl-C comes

_libc = ctypes.CDLL(None)


@contextmanager
def interrupts(waits: Callable[[], bool], count: int = 1) -> Generator[None, None, None]:
    """Press Ctrl-C once what is run here waits; it must end by that."""

    def press() -> None:
        until(waits)
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        yield
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it was not interrupted")
    finally:
        while presser.is_alive():
            try:
                presser.join()
            except KeyboardInterrupt:  # the second one may come when the first is dealt with
                continue


def hanging() -> int:
    """Return how many calls hang in the disk."""
    count: int = _libc.disk_hanging()
    return count


def a_write_of_the_tier(folder: Path) -> None:
    """What the kernel may still write stays out of use, though nobody heard how the write ended."""
    with open_tier(folder) as tier:
        assert write(tier, 0, SLOTS) == SLOTS
        fault(WRITES, HANGS)
        with interrupts(lambda: hanging() > 0):
            write_in_vain(tier)
        late = tier.ssd_stats().late_threads
        assert tier.stats().quarantined == late > 0
        reserved = [tier.reserve() for _ in range(SLOTS - late)]
        raised(CapacityError, tier.reserve)
        for slot in reserved:
            tier.abort(slot)
        fault(WRITES, 0)
        at_rest(tier)
        for first in range(1000, 1050, 5):
            assert write(tier, first, 5) == 5
            assert read(tier, first, 5) == 5
        assert tier.stats().corruptions == 0
    with open_tier(folder) as tier:
        assert tier.recovery.source == "index"
        assert read(tier, 1045, 5) == 5


def write_in_vain(tier: SsdTier) -> None:
    """Write to a disk that hangs, until Ctrl-C: the deadline may come before a thread is at it."""
    while True:
        raised(TransferTimeoutError, partial(write, tier, 100, 4, A_WHILE_S))


def at_rest(tier: SsdTier) -> None:
    """Wait until nothing is out: every slot is free or holds a block."""
    until(lambda: tier.stats().quarantined == 0)
    stats = tier.stats()
    assert (stats.reserved, stats.pins, stats.free + stats.ready) == (0, 0, stats.slots)


def config(folder: Path) -> PoolConfig:
    return PoolConfig(
        dram_bytes=64 * 4096,
        ssd=SsdConfig(folder=folder, capacity_bytes=64 * slot_bytes(SMALL_LAYOUT)),
    )


def durable_store(
    pool: Pool, prompt: int, deadline_s: float = PATIENCE_S
) -> Completion[StoreResult]:
    tokens = [prompt, *range(1, BLOCKS * SMALL_LAYOUT.block_tokens)]
    blocks = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, BLOCKS, seed=prompt))
    chain = pool.chain(namespace(SMALL_LAYOUT), tokens)
    return pool.store(chain, blocks, durability="ssd", deadline_s=deadline_s)


def served(pool: Pool, prompt: int) -> int:
    """Load a prompt; how many of its blocks came, each of them right."""
    tokens = [prompt, *range(1, BLOCKS * SMALL_LAYOUT.block_tokens)]
    expected = payload(SMALL_LAYOUT, BLOCKS, seed=prompt)
    with pool.lease(pool.match(pool.chain(namespace(SMALL_LAYOUT), tokens)), PATIENCE_S) as lease:
        out = np.zeros((lease.blocks, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
        load = pool.load(lease, view_of(SMALL_LAYOUT, out), deadline_s=PATIENCE_S)
        good = load.wait(PATIENCE_S)
    np.testing.assert_array_equal(out[:good], expected[:good])
    return good


def press_while_it_waits(store: Completion[StoreResult], count: int) -> None:
    """Wait for a store until Ctrl-C ends the waiting: at once, whatever the disk does."""
    waits = threading.Event()
    began = time.monotonic()
    with interrupts(lambda: waits.is_set() and hanging() > 0, count):
        waits.set()
        store.wait(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2


def a_durable_store(folder: Path) -> None:
    """Whoever waits goes on at once; the store ends well as soon as the disk does. Also twice."""
    with Pool.open(SMALL_LAYOUT, config(folder)) as pool:
        assert isinstance(pool.tier, StackTier) and isinstance(pool.tier.slow, SsdTier)
        fault(WRITES, HANGS)
        store = durable_store(pool, 1)
        for count in (1, 2):
            press_while_it_waits(store, count)
            assert not store.done()
        others = [durable_store(pool, prompt) for prompt in (2, 3, 4)]
        tokens = range(SMALL_LAYOUT.block_tokens)
        plain = pool.chain(namespace(SMALL_LAYOUT, "other"), tokens)
        for _ in range(3):  # which no store waits behind that waits for the disk
            block = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, 1, seed=9))
            done = [pool.store(plain, block, deadline_s=PATIENCE_S) for _ in range(3)]
            assert [one.wait(PATIENCE_S / 2).stored for one in done] == [1, 1, 1]
        fault(WRITES, 0)
        for one in (store, *others):
            result = one.wait(PATIENCE_S)
            assert result.stored == BLOCKS, result
        at_rest(pool.tier.slow)
        stats = pool.stats()
        assert (stats.reserved, stats.quarantined, stats.extra["pins"]) == (0, 0, 0)
    with Pool.open(SMALL_LAYOUT, config(folder)) as pool:
        assert [served(pool, prompt) for prompt in (1, 2, 3, 4)] == [BLOCKS] * 4


def a_pool_that_is_left(folder: Path) -> None:
    """Ctrl-C out of a pool's ``with``: it closes in its time, and opens when the disk lets go of it."""
    began = time.monotonic()
    with Pool.open(SMALL_LAYOUT, config(folder)) as pool:
        result = durable_store(pool, 1).wait(PATIENCE_S)
        assert result.stored == BLOCKS
        fault(WRITES, HANGS)
        store = durable_store(pool, 2)
        press_while_it_waits(store, 2)
    assert time.monotonic() - began < PATIENCE_S / 2
    try:
        assert store.wait(PATIENCE_S).stored == 0
    except ClosedError:
        pass
    del pool, store
    fault(WRITES, 0)

    def opens() -> bool:
        try:
            again = Pool.open(SMALL_LAYOUT, config(folder))
        except UnavailableError as error:
            assert "in use" in str(error), repr(error)
            return False
        with again:
            assert served(again, 1) == BLOCKS
            assert served(again, 2) in range(BLOCKS + 1)
        return True

    until(opens)


SCENES = (a_write_of_the_tier, a_durable_store, a_pool_that_is_left)

if __name__ == "__main__":
    # Whoever runs the tests in the background may have Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    {scene.__name__: scene for scene in SCENES}[sys.argv[1]](Path(sys.argv[2]))
