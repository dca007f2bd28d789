"""An SSD tier on a disk that fails in the kernel: errors and hangs of a FUSE file system.

disk.c plays the same below libc wherever these cannot run; here calls are stuck in the kernel, and what
comes back is what it makes of an error.
"""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import TransferTimeoutError, UnavailableError
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, view_of
from kvpool.tiers.ssd import SsdTier
from tests.tidy.mirror import ROOT
from tests.waiting import until

SLOTS, THREADS = 8, 2
PATIENCE_S = 60.0  # only a hang of our own reaches it
SOON_S = 0.3  # a deadline that is meant to pass
BLOCKS = payload(SMALL_LAYOUT, 4, seed=1)
KEYS = b"".join(key(number) for number in range(4))


class Disk:
    """The file system's process."""

    def __init__(self, folder: Path) -> None:
        self.mounted = folder / "mounted"
        backing = folder / "backing"
        self.mounted.mkdir()
        backing.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fuse_disk", self.mounted, backing],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "mounted\n":
            _, said = self._process.communicate()
            pytest.skip(f"needs FUSE; disk.c stands in for it: {said.splitlines()[-1]}")

    def tell(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse; disk.c stands in for it")
    disk = Disk(tmp_path)
    try:
        yield disk
    finally:
        for operation in ("read", "write", "sync"):
            disk.tell(f"{operation} 0")
        disk.close()


def open_tier(disk: Disk) -> SsdTier:
    return SsdTier(
        disk.mounted / "store", SMALL_LAYOUT, SLOTS, threads=THREADS, timeout_s=PATIENCE_S
    )


def write(tier: SsdTier, deadline_s: float = PATIENCE_S) -> int:
    return tier.write(KEYS, None, view_of(SMALL_LAYOUT, BLOCKS), deadline_s=deadline_s)


def read(tier: SsdTier, deadline_s: float = PATIENCE_S) -> int:
    """Read the chain; how many blocks came, each of them right, and nothing but them if none did."""
    slots = tier.pin(KEYS)
    out = np.zeros((len(slots), SMALL_LAYOUT.block_bytes), dtype=np.uint8)
    good, _ = tier.read(slots, view_of(SMALL_LAYOUT, out), deadline_s=deadline_s)
    tier.unpin(slots)
    np.testing.assert_array_equal(out[:good], BLOCKS[:good])
    return good


def test_errors_of_the_kernel_are_misses_and_typed_errors(disk: Disk) -> None:
    with open_tier(disk) as tier:
        for operation in ("write", "sync"):
            assert disk.tell(f"{operation} {errno.EIO}") == "done"
            with pytest.raises(UnavailableError, match="look at the disk"):
                write(tier)
            assert tier.durable(KEYS) == 0
            disk.tell(f"{operation} 0")
        assert write(tier) == 4
        disk.tell(f"read {errno.EIO}")
        assert read(tier) == 0
        disk.tell("read 0")
        assert read(tier) == 4
        assert (tier.stats().corruptions, tier.stats().quarantined) == (0, 0)
    with open_tier(disk) as tier:
        assert (tier.recovery.source, tier.durable(KEYS), read(tier)) == ("index", 4, 4)


def test_reads_that_the_kernel_holds_end_at_their_deadline(disk: Disk) -> None:
    with open_tier(disk) as tier:
        assert write(tier) == 4
        disk.tell("read hang")
        while tier.ssd_stats().late_threads < THREADS:
            assert read(tier, SOON_S) == 0
        assert int(disk.tell("hanging")) == THREADS
        assert read(tier, SOON_S) == 0  # no thread is left, and still it ends
        disk.tell("read 0")
        until(lambda: tier.ssd_stats().late_threads == 0)
        assert read(tier) == 4
        assert tier.stats().corruptions == 0


def test_slots_that_the_kernel_writes_are_in_quarantine(disk: Disk) -> None:
    with open_tier(disk) as tier:
        disk.tell("write hang")
        while tier.ssd_stats().late_threads < THREADS:
            with pytest.raises(TransferTimeoutError):
                write(tier, SOON_S)
        assert 1 <= tier.stats().quarantined <= THREADS
        disk.tell("write 0")
        until(lambda: tier.stats().quarantined == 0)
        assert write(tier) == 4
        assert read(tier) == 4
        stats = tier.stats()
        assert (stats.reserved, stats.free, stats.corruptions) == (0, SLOTS - 4, 0)
