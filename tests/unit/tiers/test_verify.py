from pathlib import Path

import pytest

from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, view_of
from kvpool.testing.slow_store import FaultyStore
from kvpool.tiers import verify
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_format import IO_BYTES, segment_file, slot_bytes
from kvpool.tiers.verify import Verified, verify_device

BLOCKS = 10
SIZE = slot_bytes(SMALL_LAYOUT)


def damage(folder: Path, *slots: int) -> None:
    with (folder / segment_file(0)).open("r+b") as file:
        for slot in slots:
            file.seek(slot * SIZE + IO_BYTES + 7)
            byte = file.read(1)[0]
            file.seek(slot * SIZE + IO_BYTES + 7)
            file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("batch", [1, 3, 5, 100])
def test_every_block_of_a_device_is_read_and_what_is_bad_goes(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_READ_BYTES", batch * SMALL_LAYOUT.block_bytes)
    with SsdTier(tmp_path, SMALL_LAYOUT, BLOCKS, threads=2, timeout_s=60) as tier:
        assert verify_device(tier) == Verified(0, 0, 0)
        names = b"".join(key(number) for number in range(BLOCKS))
        source = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, BLOCKS, seed=1))
        assert tier.write(names, None, source, deadline_s=60) == BLOCKS
        before = tier.stats()
        assert verify_device(tier) == Verified(BLOCKS, 0, 0)
        assert tier.stats() == before  # to look is no use, and nothing stays pinned
        damage(tmp_path, 0, 4, 5, BLOCKS - 1)
        assert verify_device(tier) == Verified(BLOCKS, 4, 0)
        assert verify_device(tier) == Verified(BLOCKS - 4, 0, 0)
        stats = tier.stats()
        assert (stats.ready, stats.pins, stats.corruptions) == (BLOCKS - 4, 0, 4)


def test_blocks_that_a_device_does_not_give_are_unread_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = SsdTier(tmp_path, SMALL_LAYOUT, BLOCKS, threads=2, timeout_s=60)
    store = FaultyStore(inner)
    source = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, 3, seed=1))
    assert store.write(key(0) + key(1) + key(2), None, source, deadline_s=60) == 3
    store.failing.set()
    assert verify_device(store) == Verified(3, 0, 3)
    store.failing.clear()
    store.open_gate.clear()  # it hangs
    monkeypatch.setattr(verify, "_READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(verify, "_READ_BYTES", SMALL_LAYOUT.block_bytes)
    before = store.gated
    assert verify_device(store) == Verified(3, 0, 3)
    assert store.gated == before + 1  # once, not for each block
    store.open_gate.set()
    monkeypatch.setattr(verify, "_READ_TIMEOUT_S", 60.0)
    assert verify_device(store) == Verified(3, 0, 0)
    assert inner.stats().pins == 0
    store.close()
