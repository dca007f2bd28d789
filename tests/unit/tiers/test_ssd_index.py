"""Unit tests of kvpool.tiers.ssd_index."""

from pathlib import Path

import numpy as np

from kvpool.arena import Slots
from kvpool.tiers.ledger import NO_PARENT, Listing
from kvpool.tiers.ssd_index import SsdIndex, read_index

WAIT_S = 60.0
SLOTS = 400


def _block(slot: int, life: int) -> Listing:
    slots = Slots(np.array([slot], dtype=np.uint32), np.array([life], dtype=np.uint64))
    return Listing(slots, life.to_bytes(32, "little"), NO_PARENT)


def test_the_last_word_on_a_slot_is_what_is_written(tmp_path: Path) -> None:
    """However many changes wait, as they came or cut into records."""
    index = SsdIndex(tmp_path / "index", SLOTS, None)
    for life in range(1, 301):
        index.put(_block(life % 7, life))
        if life % 5 == 0:
            index.remove(np.array([life % 7], dtype=np.uint32))
    index.put(_block(SLOTS - 1, 301))
    assert index.wait(WAIT_S)
    assert index.close(WAIT_S) is not None
    last = {life % 7: 0 if life % 5 == 0 else life for life in range(1, 301)}
    last[SLOTS - 1] = 301
    found = read_index(tmp_path / "index")
    here = dict(zip(found.slots.indices.tolist(), found.slots.generations.tolist(), strict=True))
    assert here == {slot: life for slot, life in last.items() if life}
