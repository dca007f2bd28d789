"""Verification: every block of a tier against its checksums, while the tier is in use.

Owns nothing. What differs leaves the tier. Who calls it: a server, for an operator.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool.arena import Slots
from kvpool.block import HASH_BYTES, BlockHash
from kvpool.completion import Deadline
from kvpool.errors import CorruptionError, UnavailableError
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.tiers.flusher import SlowStore
from kvpool.tiers.slots import SlotTier

# Bytes of a device that are looked at by one read: enough to keep its threads busy.
_READ_BYTES: Final = 32 << 20
# Longest wait for one read: a disk that takes longer gives nothing.
_READ_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of it.

    Attributes:
        checked: Blocks that were looked at.
        bad: Those of them that are not what was stored, and are gone.
        unread: Those that the device did not give: they may be whole, and stay.
    """

    checked: int
    bad: int
    unread: int = 0


def verify_blocks(tier: SlotTier) -> Verified:
    """Read every block that is there now; blocks for as long as that takes. Any thread.

    Raises ClosedError.
    """
    room = np.empty(tier.layout.block_bytes, dtype=np.uint8)
    scratch = BlockView.of_buffer(tier.layout, Span.of(room))
    checked = bad = 0
    keys = tier.keys()
    for key in _cut(keys):
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


def verify_device(tier: SlowStore) -> Verified:
    """Read every block that is on a device now, as ``verify_blocks`` does in memory.

    A device that hangs is given up after one read: what was not read by then is ``unread``.
    """
    count = max(1, _READ_BYTES // tier.layout.block_bytes)
    room = np.empty(count * tier.layout.block_bytes, dtype=np.uint8)
    scratch = BlockView.of_buffer(tier.layout, Span.of(room))
    checked = bad = unread = at = 0
    keys, _ = tier.blocks()
    while at < len(keys):
        slots = tier.hold(keys[at : at + count * HASH_BYTES])
        deadline = Deadline(_READ_TIMEOUT_S)
        try:
            good = _read(tier, slots, scratch, deadline)
            held = keys[at : at + len(slots) * HASH_BYTES]
            at += good * HASH_BYTES
            # What was damaged has left, wherever it stands; the others behind the first are read again.
            rest = _cut(held[good * HASH_BYTES :])
            here = [tier.match(key) == 1 for key in rest]
            stuck = int(here[:1] == [True])
            checked += good + here.count(False) + stuck
            bad += here.count(False)
            unread += stuck
        finally:
            tier.unpin(slots)
        if stuck and deadline.passed():  # it hangs: nobody waits for that once for each block
            left = (len(keys) - at) // HASH_BYTES - 1
            return Verified(checked + left, bad, unread + left)
        if good < count:  # on behind the first that did not come, or that had left
            at += HASH_BYTES
    return Verified(checked, bad, unread)


def _read(tier: SlowStore, slots: Slots, scratch: BlockView, deadline: Deadline) -> int:
    """Return how many leading blocks came whole."""
    if not slots:
        return 0
    try:
        dest = scratch.take(0, len(slots))
        return tier.read(slots, dest, deadline_s=deadline.remaining_s())[0]
    except UnavailableError:
        return 0


def _cut(keys: bytes) -> list[BlockHash]:
    return [BlockHash(keys[at : at + HASH_BYTES]) for at in range(0, len(keys), HASH_BYTES)]
