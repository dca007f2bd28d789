"""A fresh process serves all that another one left on the SSD, at the first match."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import BlockHash
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, view_of
from kvpool.tiers.ssd import SsdTier
from tests.tidy.mirror import ROOT

BLOCKS = 10_000
RUN = 500  # blocks made at a time
PATIENCE_S = 120.0


def keys_of(begin: int, end: int) -> bytes:
    return b"".join(key(number) for number in range(begin, end))


def open_tier(folder: Path) -> SsdTier:
    return SsdTier(folder, SMALL_LAYOUT, BLOCKS, timeout_s=PATIENCE_S)


def write_all(folder: Path, how: str) -> None:
    """Write one chain of all blocks; then close in order, or die."""
    tier = open_tier(folder)
    parent: BlockHash | None = None
    for begin in range(0, BLOCKS, RUN):
        blocks = payload(SMALL_LAYOUT, RUN, seed=begin)
        names = keys_of(begin, begin + RUN)
        source = view_of(SMALL_LAYOUT, blocks)
        assert tier.write(names, parent, source, deadline_s=PATIENCE_S) == RUN
        parent = BlockHash(names[-32:])
    if how == "closed":
        tier.close()


@pytest.mark.parametrize(("how", "source"), [("closed", "index"), ("killed", "headers")])
def test_ten_thousand_blocks(how: str, source: str, tmp_path: Path) -> None:
    writer = (
        "import os, sys, pathlib\n"
        "from tests.crash.test_ssd_fresh import write_all\n"
        "write_all(pathlib.Path(sys.argv[1]), sys.argv[2])\n"
        "os.kill(os.getpid(), 9) if sys.argv[2] == 'killed' else None\n"
    )
    subprocess.run([sys.executable, "-c", writer, tmp_path, how], cwd=ROOT, check=False)
    with open_tier(tmp_path) as tier:
        assert tier.recovery.source == source
        keys = keys_of(0, BLOCKS)
        assert (tier.match(keys), tier.durable(keys)) == (BLOCKS, BLOCKS)
        for begin in range(0, BLOCKS, RUN):
            slots = tier.pin(keys_of(begin, begin + RUN))
            out = np.zeros((RUN, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
            good, _ = tier.read(slots, view_of(SMALL_LAYOUT, out), deadline_s=PATIENCE_S)
            tier.unpin(slots)
            assert good == RUN
            np.testing.assert_array_equal(out, payload(SMALL_LAYOUT, RUN, seed=begin))
        assert tier.stats().corruptions == 0
