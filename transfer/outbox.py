"""The outbox: slots of one layer each, in which a sender stages what its receivers will pull.

Owns the arena, its registration, and how many slots are out for each peer. Who calls it: the
prefill runtime makes one per process; the senders of layer streams stage in it.
"""

import threading
from collections import Counter
from typing import Final

from kvpool.arena import Arena, ArenaCounts, Slots
from kvpool.block import BlockLayout
from kvpool.errors import LayoutMismatchError
from kvpool.transfer.base import Transport

# A peer may have so many times as many slots as stay free: 4 of 5 if it is alone. One that stops
# leaves a fifth to the others, a second such one a fifth of that, so there is always room for one
# that is well.
_SHARE: Final = 4


class Outbox:
    """Slots for slices of one layer, which peers may pull. Its size bounds what is staged.

    No peer can have all of it: one that does not acknowledge what it was told of, because it is
    stopped, holds up itself alone. Safe from any thread; one lock guards who has how many slots.

    Args:
        transport: The arena is registered with it, and peers map it until the transport is closed.
        slice_layout: Layout of one layer (``num_layers`` 1).
        slot_count: Slices that may be staged at once, over all streams that use it.
    """

    def __init__(self, transport: Transport, slice_layout: BlockLayout, slot_count: int) -> None:
        if slice_layout.num_layers != 1:
            raise LayoutMismatchError(f"an outbox holds single layers, not {slice_layout}")
        self.arena = Arena(slice_layout, slot_count, transport.incarnation)
        self.region = transport.register(self.arena).region
        self._lock = threading.Lock()
        self._held: Counter[object] = Counter()

    def reserve(self, count: int, peer: object) -> Slots:
        """Take up to ``count`` free slots for a peer, of which it has its share; perhaps none.

        Args:
            count: At most so many.
            peer: Whoever is the same for all streams to one process. ``give_back`` says the same.
        """
        with self._lock:
            held, free = self._held[peer], self.arena.counts().free
            room = (_SHARE * free - held) // (_SHARE + 1)
            if not held:
                room = max(room, 1)  # also of an outbox that is small
            slots = self.arena.reserve_some(max(0, min(count, room)))
            self._count(peer, len(slots))
            return slots

    def give_back(self, count: int, peer: object) -> None:
        """Count slots as no longer the peer's: they are free, or were never told of."""
        with self._lock:
            self._count(peer, -count)

    def _count(self, peer: object, change: int) -> None:
        self._held[peer] += change
        if not self._held[peer]:
            del self._held[peer]  # peers come and go

    def counts(self) -> ArenaCounts:
        """Return the slots by state."""
        return self.arena.counts()

    def staged_bytes(self) -> int:
        """Return the bytes of slots that are not free."""
        used = self.arena.slot_count - self.arena.counts().free
        return used * self.arena.layout.block_bytes

    def close(self) -> None:
        """Give the slots up, after the streams that use them have ended. Idempotent."""
        self.arena.close()
