"""The outbox: slots of one layer each, in which a sender stages what its receivers will pull.

Owns the arena and its registration. Who calls it: the prefill runtime makes one per process; the
senders of layer streams stage in it.
"""

from kvpool.arena import Arena, ArenaCounts, Slot
from kvpool.block import BlockLayout
from kvpool.errors import CapacityError, LayoutMismatchError
from kvpool.transfer.base import Transport


class Outbox:
    """Slots for slices of one layer, which peers may pull. Its size bounds what is staged.

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

    def reserve(self, count: int) -> list[Slot]:
        """Take up to ``count`` free slots; perhaps none."""
        slots: list[Slot] = []
        try:
            while len(slots) < count:
                slots.append(self.arena.reserve())
        except CapacityError:
            pass
        return slots

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
