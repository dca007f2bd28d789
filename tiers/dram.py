"""The DRAM tier: blocks in the slots of one arena in shared memory.

Owns the arena, which peers may map: it shows them the blocks that can be read, and hides them before
their slots are written again. The bookkeeping is ``slots.py``'s. Who calls it: the pool, and a server
that lets peers map ``arena``.
"""

from kvpool.arena import Arena, SlotNumbers, Slots
from kvpool.clock import Clock
from kvpool.events import EventSink
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.eviction import EvictionPolicy
from kvpool.tiers.slots import SlotTier


class DramTier(SlotTier):
    """One arena of slots. Safe from any thread; see ``SlotTier``.

    Args:
        arena: Where blocks lie. This tier's from now on: ``close`` closes it, and nobody else takes
            slots of it.
        policy: Who goes first when room is needed; None means least recently used.
        clock, events: Components; None means the machine's clock, and no events.
    """

    name = "dram"

    def __init__(
        self,
        arena: Arena,
        *,
        policy: EvictionPolicy | None = None,
        clock: Clock | None = None,
        events: EventSink | None = None,
    ) -> None:
        super().__init__(arena.layout, arena.slot_count, policy=policy, clock=clock, events=events)
        self.arena = arena
        arena.keep(self._ledger.native())

    def _describe(self, slots: Slots, writable: bool) -> BlockView:
        return self.arena.view(slots, writable=writable)

    def _show(self, slots: Slots, keys: bytes, crcs: Crcs) -> None:
        self.arena.publish(slots, crcs, keys)

    def _hide(self, numbers: SlotNumbers) -> None:
        self.arena.hide(numbers)

    def _let_go(self) -> None:
        self.arena.close()
