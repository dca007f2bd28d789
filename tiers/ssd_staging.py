"""Staging buffers: memory in which blocks lie while somebody uses the SSD tier through ``Tier``.

Owns which buffer belongs to which reserved slot, and which are lent to a view. A buffer that another
party may still write (a grant) is not free. Who calls it: the SSD tier, under its lock where it says.
"""

import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvpool.arena import Slot, Slots
from kvpool.block import BlockLayout
from kvpool.errors import CapacityError
from kvpool.memory import BlockView, Span
from kvpool.tiers.ssd_format import IO_BYTES


@dataclass(slots=True)
class _Buffer:
    number: int
    grants: int = 0
    ended: bool = False  # the slot is no longer reserved; free when the last grant is back


class _Loan:
    """Owner of a view on lent buffers, which go back with the last reference to it."""

    def __init__(self, memory: object) -> None:
        self.memory = memory


class Staging:
    """``count`` buffers of one block each. Safe from any thread but where it says "locked"."""

    def __init__(self, layout: BlockLayout, count: int) -> None:
        self._count = count
        self._layout = layout
        self._stride = -(-layout.block_bytes // IO_BYTES) * IO_BYTES
        span = Span.of(np.zeros(count * self._stride + IO_BYTES, dtype=np.uint8))
        self._memory = span.part(-span.address % IO_BYTES, count * self._stride)
        # By slot and life: a slot may be reserved anew before its last life's buffer is given back.
        self._assigned: dict[Slot, _Buffer] = {}
        # A deque, because loans come back whenever their view is collected: appending takes no lock.
        self._free: deque[int] = deque(range(count))

    def take(self) -> int:
        """Take one free buffer, whose number is to be assigned or given back.

        Raises CapacityError if there is none.
        """
        return self._take(1)[0]

    def give(self, number: int) -> None:
        """Give a buffer back that was not assigned."""
        self._free.append(number)

    def assign(self, slot: Slot, number: int) -> None:
        """Say that a buffer belongs to a reserved slot. Locked."""
        self._assigned[slot] = _Buffer(number)

    def view(self, slots: Slots) -> BlockView:
        """Describe the buffers of reserved slots. Locked."""
        numbers = [self._assigned[slot].number for slot in slots]
        return self._view(numbers, self._memory, writable=True)

    def free_all(self, slots: Slots) -> None:
        """Say that slots are no longer reserved. Locked."""
        for slot in slots:
            buffer = self._assigned.get(slot)
            if buffer is not None:
                buffer.ended = True
                self._free_ended(slot, buffer)

    def grant(self, slot: Slot) -> None:
        """Count one more party that may write a slot's buffer, if it has one. Locked."""
        buffer = self._assigned.get(slot)
        if buffer is not None and not buffer.ended:
            buffer.grants += 1

    def settle(self, slot: Slot) -> None:
        """Count one fewer. Locked."""
        buffer = self._assigned.get(slot)
        if buffer is not None and buffer.grants:
            buffer.grants -= 1
            self._free_ended(slot, buffer)

    def lend(self, count: int) -> BlockView:
        """Return writable room for ``count`` blocks, until the view is gone.

        Raises CapacityError if so many buffers are not free.
        """
        numbers, loan = self._take(count), _Loan(self._memory)
        weakref.finalize(loan, self._free.extend, numbers)
        return self._view(numbers, loan, writable=True)

    def _take(self, count: int) -> list[int]:
        numbers: list[int] = []
        try:
            while len(numbers) < count:
                numbers.append(self._free.popleft())
        except IndexError:
            self._free.extend(numbers)
            raise CapacityError(
                f"{count} blocks do not fit the free ones of {self._count} staging buffers: commit, "
                "or view fewer at once",
                tier="ssd",
                size_bytes=count * self._layout.block_bytes,
            ) from None
        return numbers

    def _view(self, numbers: list[int], owner: object, *, writable: bool) -> BlockView:
        return BlockView.canonical(
            self._layout, self._memory.address, self._stride, numbers, owner, writable
        )

    def _free_ended(self, slot: Slot, buffer: _Buffer) -> None:
        if buffer.ended and not buffer.grants:
            del self._assigned[slot]
            self._free.append(buffer.number)
