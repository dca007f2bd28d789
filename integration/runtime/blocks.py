"""Room for requests: slots of a gpu tier, handed out first come first served, counted until free.

Owns who waits for slots and who holds them. A request's blocks go back when the last holder (the
request itself, a store into the pool that reads them) has let go. While requests are parked for want
of room, nobody new is let in. Who calls it: both workers.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable

from kvpool.arena import Slot
from kvpool.errors import CapacityError, UsageError
from kvpool.memory import BlockView
from kvpool.tiers.gpu import GpuTier

logger = logging.getLogger(__name__)


class Blocks:
    """The slots of one request, in the order of its blocks. Safe from any thread.

    Made with one hold. ``hold`` adds one; each ``drop`` gives one back, and the last one frees.
    """

    def __init__(self, room: "Room", slots: list[Slot]) -> None:
        self.slots = slots
        self.indices: list[int] = [slot.index for slot in slots]
        self._room = room
        self._holds = 1
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.slots)

    def view(self, begin: int, end: int) -> BlockView:
        """Describe blocks ``begin`` to ``end`` (exclusive) for a copy. Valid while held."""
        return self._room.tier.view(self.slots[begin:end], writable=True)

    def grow(self) -> bool:
        """Add one slot at the end, for the request that holds them. False if none is free."""
        slots = self._room.reserve_slots(1)
        self.slots += slots
        self.indices += [slot.index for slot in slots]
        return bool(slots)

    def hold(self) -> "Blocks":
        """Keep the slots for one more user. Only while somebody holds them."""
        with self._lock:
            if not self._holds:
                raise UsageError("these blocks are free already")
            self._holds += 1
        return self

    def drop(self) -> None:
        """Give one hold back."""
        with self._lock:
            self._holds -= 1
            last = self._holds == 0
        if last:
            self._room.put_back(self.slots)


class Room:
    """Hands out the slots of a tier. ``take`` in one asyncio loop; everything else from any thread.

    One lock, ``_taking``, guards the count of holders and makes each reservation all or nothing.

    Args:
        tier: Whose slots. Nobody else reserves in it.
        loop: The loop in which ``take`` runs.
        holders_max: Most requests that hold blocks at a time.
        waiting_max: Most requests that wait.

    Attributes:
        on_free: Called when slots came back, from any thread; it must not block.
    """

    def __init__(
        self,
        tier: GpuTier,
        loop: asyncio.AbstractEventLoop,
        *,
        holders_max: int,
        waiting_max: int,
    ) -> None:
        self.tier = tier
        self._loop = loop
        self._holders_max = holders_max
        self._holders = 0
        self._waiting_max = waiting_max
        self._waiting: deque[tuple[int, asyncio.Future[Blocks]]] = deque()
        self._parked = 0
        self._taking = threading.Lock()
        self.on_free: Callable[[], object] = lambda: None

    @property
    def total(self) -> int:
        """Slots there are."""
        return self.tier.stats().slots

    @property
    def free(self) -> int:
        """Slots that are free now."""
        return self.tier.stats().free

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def require(self, count: int) -> None:
        """Raise UsageError for a request that needs more slots than there will ever be."""
        if not 0 < count <= self.total:
            raise UsageError(
                f"the request needs {count} blocks of {self.tier.layout.block_tokens} tokens and "
                f"the worker has {self.total}: shorten it, or start the worker with more --kv-bytes"
            )

    async def take(self, count: int, timeout_s: float) -> Blocks:
        """Reserve ``count`` slots, in turn.

        Raises:
            UsageError: More than there will ever be.
            CapacityError: ``waiting_max`` requests wait already, or it was not this one's turn
                within ``timeout_s``.
        """
        self.require(count)
        open_to_all = not self._waiting and not self._parked
        if open_to_all and (blocks := self.reserve(count)) is not None:
            return blocks
        if len(self._waiting) >= self._waiting_max:
            raise CapacityError(f"{self._waiting_max} requests wait for room: try again later")
        turn: asyncio.Future[Blocks] = self._loop.create_future()
        entry = (count, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(turn)
        except BaseException as error:
            if turn.done():
                turn.result().drop()
            else:
                turn.cancel()
                self._waiting.remove(entry)
                self._admit()
            if isinstance(error, TimeoutError):
                raise CapacityError(f"no room within {timeout_s:.1f} s: try again later") from error
            raise

    def reserve(self, count: int) -> Blocks | None:
        """Reserve ``count`` slots out of turn, or return None if they are not free now."""
        with self._taking:
            if self._holders >= self._holders_max:
                return None
            slots = self._reserve_slots(count)
            if not slots:
                return None
            self._holders += 1
        return Blocks(self, sorted(slots, key=lambda slot: slot.index))

    def reserve_slots(self, count: int) -> list[Slot]:
        """Reserve slots for blocks that are held already: all of them, or none."""
        with self._taking:
            return self._reserve_slots(count)

    def _reserve_slots(self, count: int) -> list[Slot]:
        slots: list[Slot] = []
        try:
            for _ in range(count):
                slots.append(self.tier.reserve())
        except CapacityError:
            self._abort(slots)
            slots.clear()
        return slots

    def keep_for_parked(self, parked: int) -> None:
        """Let nobody new in while ``parked`` requests wait to be resumed."""
        was, self._parked = self._parked, parked
        if was and not parked:
            self._admit_soon()

    def put_back(self, slots: list[Slot]) -> None:
        """Free slots and let the next one in."""
        self._abort(slots)
        with self._taking:
            self._holders -= 1
        self.on_free()
        self._admit_soon()

    def _abort(self, slots: list[Slot]) -> None:
        for slot in reversed(slots):  # the tier hands out last what came back first
            self.tier.abort(slot)

    def _admit_soon(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._admit)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("blocks came back after the end of the loop")

    def _admit(self) -> None:
        """Serve those who wait, in order, until one does not fit."""
        while self._waiting and not self._parked:
            count, turn = self._waiting[0]
            blocks = self.reserve(count)
            if blocks is None:
                return
            self._waiting.popleft()
            turn.set_result(blocks)
