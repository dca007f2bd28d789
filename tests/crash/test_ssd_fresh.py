"""A pool in a fresh process serves all that another one left on the SSD, at the first match."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvpool.base import Chain
from kvpool.config import PoolConfig, SsdConfig
from kvpool.pool import Pool
from kvpool.testing.blocks import SMALL_LAYOUT, namespace, payload, view_of
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_format import slot_bytes
from kvpool.tiers.stack import StackTier
from tests.tidy.mirror import ROOT

BLOCKS = 10_000
RUN = 500  # blocks made at a time
PATIENCE_S = 120.0
WRITER = """
import sys, pathlib
from tests.crash.test_ssd_fresh import write_all
write_all(pathlib.Path(sys.argv[1]), sys.argv[2])
"""


def open_pool(folder: Path) -> Pool:
    return Pool.open(
        SMALL_LAYOUT,
        PoolConfig(
            dram_bytes=2 * BLOCKS * SMALL_LAYOUT.block_bytes,  # a slot takes whole pages
            ssd=SsdConfig(
                folder=folder,
                capacity_bytes=BLOCKS * slot_bytes(SMALL_LAYOUT),
                promote_timeout_s=PATIENCE_S,
            ),
        ),
    )


def chain_of(pool: Pool) -> Chain:
    return pool.chain(namespace(SMALL_LAYOUT), range(BLOCKS * SMALL_LAYOUT.block_tokens))


def write_all(folder: Path, how: str) -> None:
    """Store one chain of all blocks, durably; then close in order, or die."""
    with open_pool(folder) as pool:
        chain = chain_of(pool)
        for begin in range(0, BLOCKS, RUN):
            blocks = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, RUN, seed=begin))
            stored = pool.store(
                chain, blocks, first=begin, durability="ssd", deadline_s=PATIENCE_S
            ).wait(PATIENCE_S)
            assert stored.stored == RUN, stored
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "source"), [("closed", "index"), ("killed", "headers")])
def test_ten_thousand_blocks(how: str, source: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WRITER, tmp_path, how], cwd=ROOT, check=False
    ).returncode
    assert ended == (0 if how == "closed" else -signal.SIGKILL)
    with open_pool(tmp_path) as pool:
        chain = chain_of(pool)
        match = pool.match(chain)
        assert match.blocks == BLOCKS
        with pool.lease(match, PATIENCE_S) as lease:
            assert lease.blocks == BLOCKS
            out = np.zeros((BLOCKS, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
            loaded = pool.load(lease, view_of(SMALL_LAYOUT, out), deadline_s=PATIENCE_S)
            assert loaded.wait(PATIENCE_S) == BLOCKS
        for begin in range(0, BLOCKS, RUN):
            np.testing.assert_array_equal(
                out[begin : begin + RUN], payload(SMALL_LAYOUT, RUN, seed=begin)
            )
        assert isinstance(pool.tier, StackTier) and isinstance(pool.tier.slow, SsdTier)
        assert pool.tier.slow.recovery.source == source
        assert pool.tier.slow.stats().corruptions == 0
