"""What a server's metrics say of its tiers: each miss under its reason, what the disk did, and no more."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.base import Chain
from kvpool.config import PoolConfig, SsdConfig
from kvpool.metrics import Metrics
from kvpool.pool import Pool
from kvpool.server.tier_report import TierReport, tier_counts
from kvpool.testing.blocks import SMALL_LAYOUT, namespace, payload, view_of
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_format import SLOT_HEADER_BYTES, segment_file, slot_bytes
from kvpool.tiers.stack import StackTier

WAIT_S = 60.0
BLOCKS = 4
HEADER_BYTES = slot_bytes(SMALL_LAYOUT) - -(-SMALL_LAYOUT.block_bytes // 4096) * 4096


class Shown:
    """A pool over a disk, and what its metrics say after each report."""

    def __init__(self, folder: Path) -> None:
        self.metrics = Metrics(wings=("tiers",))
        ssd = SsdConfig(folder=folder, capacity_bytes=16 * slot_bytes(SMALL_LAYOUT))
        config = PoolConfig(dram_bytes=8 * 4096, ssd=ssd)
        self.pool = Pool.open(SMALL_LAYOUT, config, events=self.metrics)
        self.report = TierReport(self.metrics)

    def say(self, metric: str) -> float:
        """Report, and return the value of a line ``metric``."""
        self.report.tell(self.pool.tier)
        values = [
            float(line.rpartition(" ")[2])
            for line in self.metrics.expose().decode().splitlines()
            if line.startswith(metric)
        ]
        assert len(values) == 1, metric
        return values[0]

    def missed(self, tier: str, reason: str) -> float:
        return self.say(f'kvpool_tiers_missed_blocks_total{{reason="{reason}",tier="{tier}"}}')

    def chain(self, *, first: int = 0) -> Chain:
        count = BLOCKS * SMALL_LAYOUT.block_tokens
        return self.pool.chain(namespace(SMALL_LAYOUT), range(first, first + count))

    def store(self) -> None:
        source = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, BLOCKS, 1))
        store = self.pool.store(self.chain(), source, durability="ssd", deadline_s=WAIT_S)
        assert store.wait(WAIT_S).stored == BLOCKS
        tier = self.pool.tier
        assert isinstance(tier, StackTier)
        assert tier.flusher.wait_idle(WAIT_S)  # it holds no block any more


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    shown = Shown(tmp_path)
    with shown.pool:
        yield shown


def test_each_miss_has_its_reason(shown: Shown, tmp_path: Path) -> None:
    tier = shown.pool.tier
    assert isinstance(tier, StackTier) and isinstance(tier.slow, SsdTier)
    shown.store()
    assert [shown.missed("ssd", why) for why in ("absent", "mismatch", "corrupt")] == [0, 0, 0]
    keys = shown.chain().hashes
    tier.pin(b"x" * 32)
    assert shown.missed("dram", "absent") == 1
    slots = tier.pin(keys)
    others = np.zeros((BLOCKS, SMALL_LAYOUT.block_tokens), dtype=np.uint32)
    assert tier.same_tokens(slots, others) == 0
    tier.unpin(slots)
    assert shown.missed("dram", "mismatch") == 1
    assert tier.evict(BLOCKS) == BLOCKS
    with (tmp_path / segment_file(0)).open("r+b") as segment:
        slot = int(tier.slow.pin(keys[:32])[0].index)
        segment.seek(slot * slot_bytes(SMALL_LAYOUT) + HEADER_BYTES)
        segment.write(b"damaged!")
    assert tier.promote(keys, wait_s=WAIT_S) == 0
    assert shown.missed("ssd", "corrupt") == 1
    assert shown.say('kvpool_tiers_evicted_blocks_total{reason="corrupt",tier="ssd"}') == 1
    # Said once, however often it is reported.
    assert shown.missed("ssd", "corrupt") == 1


def test_what_the_disk_did_is_told(shown: Shown) -> None:
    shown.store()
    assert shown.say('kvpool_tiers_disk_seconds_count{operation="write"}') >= 1
    tier = shown.pool.tier
    assert tier.evict(BLOCKS) == BLOCKS
    assert tier.promote(shown.chain().hashes, wait_s=WAIT_S) == BLOCKS
    assert shown.say('kvpool_tiers_disk_seconds_count{operation="read"}') >= 1
    assert shown.say("kvpool_tiers_late_call_count ") == 0
    assert shown.say('kvpool_tiers_failed_write_blocks_total{reason="failed"}') == 0
    assert shown.say('kvpool_tiers_failed_write_blocks_total{reason="late"}') == 0


def test_what_opening_found_is_told(shown: Shown, tmp_path: Path) -> None:
    shown.store()
    shown.pool.close()
    with (tmp_path / segment_file(0)).open("r+b") as segment:
        segment.seek(SLOT_HEADER_BYTES // 2)
        segment.write(b"damaged!")
    (tmp_path / "index" / "data.mdb").unlink()  # so that it goes by the headers
    again = Shown(tmp_path)
    with again.pool:
        whole, lost, damaged = (
            again.say(f'kvpool_tiers_recovered_block_count{{state="{state}"}}')
            for state in ("whole", "torn", "damaged")
        )
        assert (whole, lost + damaged) == (BLOCKS - 1, 1)
        counts = tier_counts(again.pool.tier)["ssd"]
        assert (counts["recovered"], counts["ready"]) == (BLOCKS - 1, BLOCKS - 1)
