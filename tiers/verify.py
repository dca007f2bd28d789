"""Verification: every block of a tier in memory against its checksums, while the tier is in use.

Owns nothing. What differs leaves the tier. Who calls it: a server, for an operator.
"""

from dataclasses import dataclass

import numpy as np

from kvpool.block import HASH_BYTES, BlockHash
from kvpool.errors import CorruptionError
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.tiers.slots import SlotTier


@dataclass(frozen=True, slots=True)
class Verified:
    """Blocks that were looked at, and those of them that were bad and are gone."""

    checked: int
    bad: int


def verify_blocks(tier: SlotTier) -> Verified:
    """Read every block that is there now; blocks for as long as that takes. Any thread.

    Raises ClosedError.
    """
    room = np.empty(tier.layout.block_bytes, dtype=np.uint8)
    scratch = BlockView.of_buffer(tier.layout, Span.of(room))
    checked = bad = 0
    keys = tier.keys()
    for at in range(0, len(keys), HASH_BYTES):
        key = BlockHash(keys[at : at + HASH_BYTES])
        slots = tier.hold(key)
        try:
            if slots:  # it may have left meanwhile
                checked += 1
                stored = tier.view(slots, writable=False)
                copy_blocks(scratch, stored, crcs=tier.crcs(slots))
        except CorruptionError:
            bad += tier.drop(key, "corrupt")
        finally:
            tier.unpin(slots)
    return Verified(checked, bad)
