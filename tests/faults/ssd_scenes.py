"""What an SSD tier does on a disk that fails: scenes, each in a process with disk.c preloaded.

python -m tests.faults.ssd_scenes SCENE FOLDER
"""

import ctypes
import errno
import fcntl
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from kvpool.block import BlockHash
from kvpool.config import PoolConfig, SsdConfig
from kvpool.errors import (
    CapacityError,
    ClosedError,
    KVPoolError,
    TransferTimeoutError,
    UnavailableError,
)
from kvpool.pool import Pool
from kvpool.testing.blocks import SMALL_LAYOUT, Payload, key, namespace, payload, view_of
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_device import intent_slots
from kvpool.tiers.ssd_files import read_superblock
from kvpool.tiers.ssd_format import INTENT_FILE, slot_bytes
from tests.waiting import until

SLOTS, THREADS = 16, 3
READS, WRITES, SYNCS = range(3)
HANGS, IS_SHORT, IS_INTERRUPTED = -1, -2, -3
PATIENCE_S = 120.0  # only a hang of our own reaches it
SOON_S = 0.3  # a deadline that is meant to pass

_libc = ctypes.CDLL(None)


def fault(operation: int, what: int, *, after: int = 0, files: str = "segment") -> None:
    """Make the disk fail; 0 makes it well."""
    _libc.disk_fault(operation, what, after, files.encode())


def open_tier(folder: Path, timeout_s: float = PATIENCE_S) -> SsdTier:
    return SsdTier(folder, SMALL_LAYOUT, SLOTS, threads=THREADS, timeout_s=timeout_s)


def chain(first: int, count: int) -> tuple[bytes, Payload]:
    """Return keys and bytes of made-up blocks."""
    numbers = range(first, first + count)
    blocks = [payload(SMALL_LAYOUT, 1, seed=number) for number in numbers]
    return b"".join(key(number) for number in numbers), np.concatenate(blocks)


def write(tier: SsdTier, first: int, count: int, deadline_s: float = PATIENCE_S) -> int:
    keys, blocks = chain(first, count)
    parent: BlockHash | None = None
    return tier.write(keys, parent, view_of(SMALL_LAYOUT, blocks), deadline_s=deadline_s)


def read(tier: SsdTier, first: int, count: int, deadline_s: float = PATIENCE_S) -> int:
    """Read a chain; how many blocks came, each of them right, with nothing behind them touched."""
    keys, blocks = chain(first, count)
    slots = tier.pin(keys)
    out = np.zeros((len(slots), SMALL_LAYOUT.block_bytes), dtype=np.uint8)
    good, _ = tier.read(slots, view_of(SMALL_LAYOUT, out), deadline_s=deadline_s)
    tier.unpin(slots)
    np.testing.assert_array_equal(out[:good], blocks[:good])
    return good


def raised(kind: type[KVPoolError], work: Callable[[], object]) -> str:
    """Return the message of the error that must be raised."""
    try:
        work()
    except kind as error:
        assert type(error) is kind, repr(error)
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def name_nothing_ahead(tier: SsdTier) -> None:
    """Have a write at slots that the last one was not at need an intent of its own."""
    tier._writer._ahead = 0  # pyright: ignore[reportPrivateUsage]


def reads_that_fail(folder: Path) -> None:
    """A disk that does not give is a miss; the blocks stay, and come when it gives again."""
    with open_tier(folder) as tier:
        assert write(tier, 0, 4) == 4
        fault(READS, errno.EIO)
        assert read(tier, 0, 4) == 0
        fault(READS, errno.EIO, after=2)
        assert 0 <= read(tier, 0, 4) < 4
        fault(READS, 0)
        assert read(tier, 0, 4) == 4
        assert tier.ssd_stats().read_errors > 4
        assert tier.stats().corruptions == 0


def writes_that_fail(folder: Path) -> None:
    """A disk that does not take: a typed error, nothing promised, nothing lost, and it goes on."""
    with open_tier(folder) as tier:
        name_nothing_ahead(tier)
        assert write(tier, 0, 2) == 2
        for number, (code, kind) in enumerate(
            [
                (errno.ENOSPC, CapacityError),
                (errno.EIO, UnavailableError),
                (errno.EROFS, UnavailableError),
            ]
        ):
            for files in ("intents", "segment"):
                fault(WRITES, code, files=files)
                raised(kind, lambda: write(tier, 10, 3))
                assert tier.durable(key(10)) == 0
                assert read(tier, 0, 2) == 2
                fault(WRITES, 0)
            first = 100 * (number + 1)
            fault(WRITES, code, after=1)  # one block gets through, whichever
            try:
                assert write(tier, first, 3) < 3
            except kind:
                pass
            fault(WRITES, 0)
            assert write(tier, first, 3) == 3
            assert read(tier, first, 3) == 3
        assert write(tier, 10, 3) == 3
        stats = tier.stats()
        assert (stats.quarantined, stats.reserved, stats.corruptions) == (0, 0, 0)
    with open_tier(folder) as tier:
        assert tier.recovery.source == "index"
        assert [read(tier, first, count) for first, count in ((10, 3), (300, 3))] == [3, 3]


def a_bad_place(folder: Path) -> None:
    """One slot that the disk does not take costs one slot, also over a crash, for as long as it lasts."""

    def opened() -> SsdTier:  # with a file for each slot
        return SsdTier(
            folder, SMALL_LAYOUT, SLOTS, threads=THREADS, timeout_s=PATIENCE_S, segment_bytes=1
        )

    def go_on(tier: SsdTier, begin: int) -> None:
        for first in range(begin, begin + 50, 5):
            assert write(tier, first, 5) == 5
            assert read(tier, first, 5) == 5
        assert tier.stats().corruptions == 0

    fault(WRITES, errno.EIO, files="segment-0003")
    tier = opened()
    name_nothing_ahead(tier)
    assert write(tier, 0, 8) == 8
    go_on(tier, 100)
    # Whoever opens it after a crash looks at what lies there.
    store_id = read_superblock(folder).store_id
    assert 3 in intent_slots((folder / INTENT_FILE).read_bytes(), store_id)
    assert (tier.stats().quarantined, tier.stats().ready) == (1, SLOTS - 1)
    leave(tier)
    del tier
    until(lambda: gc.collect() >= 0 and not locked(folder))
    with opened() as tier:
        assert tier.recovery.source == "headers"
        assert read(tier, 145, 5) == 5
        go_on(tier, 200)
        assert tier.stats().quarantined == 1
        fault(WRITES, 0)
        go_on(tier, 300)
        assert (tier.stats().quarantined, tier.stats().ready) == (0, SLOTS)
    with opened() as tier:
        assert tier.recovery.source == "index"
        fault(WRITES, errno.EIO)  # everything is bad
        for first in range(400, 500, 5):
            raised(UnavailableError, partial(write, tier, first, 5))
        fault(WRITES, 0)
        go_on(tier, 500)
        assert tier.stats().quarantined == 0


def syncs_that_fail(folder: Path) -> None:
    """What could not be synced is not promised, and not found."""
    with open_tier(folder) as tier:
        name_nothing_ahead(tier)
        assert write(tier, 0, 2) == 2
        for files in ("intents", "segment"):
            fault(SYNCS, errno.EIO, files=files)
            raised(UnavailableError, lambda: write(tier, 10, 3))
            assert tier.match(key(10)) == 0
            fault(SYNCS, 0)
        assert read(tier, 0, 2) == 2
        assert write(tier, 10, 3) == 3
        assert read(tier, 10, 3) == 3
        assert tier.stats().ready == 5


def a_failed_write_before_a_crash(folder: Path) -> None:
    """Headers that a failed write may have left are erased before the next one."""
    tier = open_tier(folder)
    fault(SYNCS, errno.EIO)
    raised(UnavailableError, lambda: write(tier, 10, 3))
    fault(SYNCS, 0)
    assert write(tier, 20, 1) == 1
    leave(tier)
    with open_tier(folder) as tier:
        assert tier.recovery.source == "headers"
        assert tier.match(key(10)) == 0
        assert read(tier, 20, 1) == 1


def leave(tier: SsdTier) -> None:
    """Let go of a tier's files as a killed process does."""
    tier._files.close()  # pyright: ignore[reportPrivateUsage]
    tier._device = None  # pyright: ignore[reportPrivateUsage]


def transfers_that_are_cut(folder: Path) -> None:
    """Short and interrupted transfers go on."""
    with open_tier(folder) as tier:
        for what in (IS_SHORT, IS_INTERRUPTED):
            fault(READS, what)
            fault(WRITES, what)
            fault(SYNCS, IS_INTERRUPTED, files=".kvp")
            for first in range(0, 40, 5):
                assert write(tier, first, 5) == 5
                assert read(tier, first, 5) == 5
        assert tier.stats().corruptions == 0


def reads_that_hang(folder: Path) -> None:
    """A hung read ends at its deadline; its buffer is nobody's until the kernel is done."""
    with open_tier(folder) as tier:
        assert write(tier, 0, 8) == 8
        keys, blocks = chain(0, 8)
        slots = tier.pin(keys)
        out = np.zeros_like(blocks)
        fault(READS, HANGS)
        while tier.ssd_stats().late_threads < THREADS:
            good, _ = tier.read(slots, view_of(SMALL_LAYOUT, out), deadline_s=SOON_S)
            assert good == 0
        assert _libc.disk_hanging() == THREADS
        assert read(tier, 0, 8, SOON_S) == 0  # no thread is left, and still it ends
        raised(TransferTimeoutError, lambda: write(tier, 20, 1, SOON_S))
        fault(READS, 0)
        until(lambda: tier.ssd_stats().late_threads == 0)
        assert not out.any()
        good, _ = tier.read(slots, view_of(SMALL_LAYOUT, out), deadline_s=PATIENCE_S)
        assert good == 8
        np.testing.assert_array_equal(out, blocks)
        tier.unpin(slots)
        assert tier.ssd_stats().read_timeouts >= 8
        assert tier.stats().corruptions == 0


def writes_that_hang(folder: Path) -> None:
    """Slots that the kernel may still write are in quarantine, whatever is asked for meanwhile."""
    with open_tier(folder) as tier:
        assert write(tier, 0, SLOTS) == SLOTS
        fault(WRITES, HANGS)
        turn = 0
        while tier.ssd_stats().late_threads < THREADS:
            turn += 1
            raised(TransferTimeoutError, partial(write, tier, 100 * turn, 4, SOON_S))
        quarantined = tier.stats().quarantined
        assert 1 <= quarantined <= THREADS
        late = SLOTS - quarantined
        reserved = [tier.reserve() for _ in range(late)]
        raised(CapacityError, tier.reserve)
        for slot in reserved:
            tier.abort(slot)
        fault(WRITES, 0)
        until(lambda: tier.stats().quarantined == 0)
        for first in range(1000, 1050, 5):
            assert write(tier, first, 5) == 5
            assert read(tier, first, 5) == 5
        stats = tier.stats()
        assert (stats.corruptions, stats.reserved) == (0, 0)
        assert stats.free + stats.ready == SLOTS


def an_intent_that_hangs(folder: Path) -> None:
    """No write overtakes an older intent that the kernel may still write."""
    with open_tier(folder) as tier:
        name_nothing_ahead(tier)
        assert write(tier, 0, 2) == 2
        fault(WRITES, HANGS, files="intents")
        while tier.ssd_stats().late_threads == 0:
            raised(TransferTimeoutError, lambda: write(tier, 10, 2, SOON_S))
        assert "earlier write" in raised(UnavailableError, lambda: write(tier, 10, 2))
        assert read(tier, 0, 2) == 2
        fault(WRITES, 0)
        until(lambda: tier.ssd_stats().late_threads == 0)
        assert write(tier, 10, 2) == 2
        assert read(tier, 10, 2) == 2


def a_close_that_hangs(folder: Path) -> None:
    """Closing ends in time; the folder stays locked until the kernel has let go."""
    tier = open_tier(folder, timeout_s=1.0)
    assert write(tier, 0, 4) == 4
    fault(WRITES, HANGS)
    while tier.ssd_stats().late_threads == 0:
        raised(TransferTimeoutError, lambda: write(tier, 10, 4, SOON_S))
    tier.close()
    tier.close()
    raised(ClosedError, lambda: write(tier, 20, 1))
    assert "another process" in raised(UnavailableError, lambda: open_tier(folder))
    fault(WRITES, 0)

    def opens() -> bool:
        try:
            again = open_tier(folder)
        except UnavailableError:
            return False
        with again:
            assert again.recovery.source == "headers"
            assert read(again, 0, 4) == 4
            assert read(again, 10, 4) in range(5)
            assert again.stats().corruptions == 0
        return True

    until(opens)


def a_pool_whose_disk_hangs(folder: Path) -> None:
    """A pool closes with stores under way in a disk that does not answer, and long before it does."""
    config = PoolConfig(
        dram_bytes=64 * SMALL_LAYOUT.block_bytes,
        ssd=SsdConfig(folder=folder, capacity_bytes=64 * slot_bytes(SMALL_LAYOUT)),
    )
    pool = Pool.open(SMALL_LAYOUT, config)
    fault(WRITES, HANGS)
    space = namespace(SMALL_LAYOUT)
    durable, plain = (pool.chain(space, range(at, at + 64)) for at in (0, 64))
    blocks = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, len(plain), seed=1))
    under_way = pool.store(durable, blocks, durability="ssd", deadline_s=PATIENCE_S)
    assert pool.store(plain, blocks, deadline_s=PATIENCE_S).wait(PATIENCE_S).new == len(plain)
    until(lambda: _libc.disk_hanging() > 0)
    began = time.monotonic()
    pool.close()
    took_s = time.monotonic() - began
    assert took_s < PATIENCE_S / 2, took_s
    raised(ClosedError, lambda: pool.match(plain))
    try:
        assert under_way.wait(PATIENCE_S).refused
    except ClosedError:
        pass
    assert _libc.disk_hanging() > 0
    fault(WRITES, 0)
    until(lambda: gc.collect() >= 0 and not locked(folder))
    with Pool.open(SMALL_LAYOUT, config) as again:
        assert again.match(durable).blocks in range(len(durable) + 1)


def an_open_that_hangs(folder: Path) -> None:
    """Opening ends in time, leaves no thread of Python's, and works when the disk does.

    Nothing is lost, whether headers do not come or the payloads of slots that intents name.
    """
    tier = open_tier(folder)
    assert write(tier, 0, 4) == 4
    leave(tier)
    del tier
    until(lambda: gc.collect() >= 0 and not locked(folder))
    threads = {thread.name for thread in threading.enumerate()}
    for headers in (0, SLOTS):
        fault(READS, HANGS, after=headers)
        assert "did not give" in raised(UnavailableError, lambda: open_tier(folder, SOON_S))
        fault(READS, 0)
        until(lambda: gc.collect() >= 0 and not locked(folder))
    assert {thread.name for thread in threading.enumerate()} <= threads
    with open_tier(folder) as tier:
        assert read(tier, 0, 4) == 4


def locked(folder: Path) -> bool:
    """Say whether somebody holds a store's lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def a_folder_that_is_removed(folder: Path) -> None:
    """Open files stay; nothing raises, and a new store begins empty."""
    tier = open_tier(folder)
    assert write(tier, 0, 4) == 4
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    assert read(tier, 0, 4) == 4
    assert write(tier, 10, 4) == 4
    assert read(tier, 10, 4) == 4
    tier.close()
    with open_tier(folder) as tier:
        assert tier.match(key(0)) == 0
        assert write(tier, 0, 4) == 4


SCENES = (
    reads_that_fail,
    writes_that_fail,
    a_bad_place,
    syncs_that_fail,
    a_failed_write_before_a_crash,
    transfers_that_are_cut,
    reads_that_hang,
    writes_that_hang,
    an_intent_that_hangs,
    a_close_that_hangs,
    a_pool_whose_disk_hangs,
    an_open_that_hangs,
    a_folder_that_is_removed,
)

if __name__ == "__main__":
    {scene.__name__: scene for scene in SCENES}[sys.argv[1]](Path(sys.argv[2]))
