"""Slots of plain memory that blocks pass through between the engine's cache and the pool.

Owns the memory and which slots are free. A slot that the pool may still read or write is not free:
whoever took it gives it back when the pool's completion is done. Who calls it: the worker's side.
"""

import threading

import numpy as np

from kvpool.block import BlockLayout
from kvpool.completion import Deadline
from kvpool.errors import ConfigError, TransferTimeoutError
from kvpool.memory import BlockView, Span


class Slots:
    """A bounded number of slots. Safe from any thread; ``_changed`` guards ``_free``.

    Args:
        layout: Of what a slot holds.
        size_bytes: Memory to take; at least one slot.
    """

    def __init__(self, layout: BlockLayout, size_bytes: int) -> None:
        self.count = size_bytes // layout.block_bytes
        if not self.count:
            raise ConfigError(
                f"staging is {size_bytes} bytes: a block has {layout.block_bytes}", key="staging"
            )
        memory = np.zeros(self.count * layout.block_bytes, dtype=np.uint8)
        self._view = BlockView.of_buffer(layout, Span.of(memory))
        self._changed = threading.Condition()
        self._free = list(range(self.count))

    @property
    def free(self) -> int:
        """How many slots nobody has."""
        with self._changed:
            return len(self._free)

    def take(self, most: int) -> list[int]:
        """Take up to ``most`` slots, perhaps none. Never waits."""
        with self._changed:
            cut = max(0, len(self._free) - most)
            taken, self._free = self._free[cut:], self._free[:cut]
            return taken

    def wait_take(self, most: int, deadline: Deadline) -> list[int]:
        """Take one to ``most`` slots. Raises TransferTimeoutError if none is free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, deadline.remaining_s()):
                raise TransferTimeoutError("no slot of the staging was free in time")
        return self.take(most) or self.wait_take(most, deadline)

    def wait_unused(self, timeout_s: float) -> bool:
        """Wait until nobody has a slot; say whether that came true."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._free) == self.count, timeout_s)

    def give_back(self, slots: list[int]) -> None:
        """Free slots. The pool is done with them."""
        with self._changed:
            self._free += slots
            self._changed.notify_all()

    def view(self, slots: list[int]) -> BlockView:
        """Describe slots as blocks, in this order."""
        return self._view.with_ids(slots)
