"""Parking: the KV of requests that had to make room, copied to DRAM and back.

Owns the copies, their checksums and their limit. They are private: nothing of them is ever found by
another request. Knows nothing of who is parked or why. Who calls it: the decode batch's thread.
"""

import mmap
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool.block import BlockLayout
from kvpool.errors import CapacityError
from kvpool.memory import BlockView, Crcs, Span, copy_blocks

# Parked blocks at most, in multiples of the arena that they came from. While requests are parked
# nobody new is let in, so all of them shared the arena once; each of n equal ones grows to 1/k of it
# when k are left, and 1 + 1/2 + .. + 1/16 = 3.4 for the default of 16 running requests.
PARKED_ARENAS: Final = 4


@dataclass(frozen=True, slots=True)
class Parked:
    """Blocks of one request in DRAM, in canonical order, and what they must sum to."""

    view: BlockView
    crcs: Crcs


class Parking:
    """Room in DRAM for parked blocks. Used by one thread; its counts may be read from any.

    Args:
        layout: Of a block.
        blocks_max: Most blocks parked at a time. Memory is taken when it is needed, not before.

    Attributes:
        blocks: Parked now.
        parks: Requests parked since the start.
    """

    def __init__(self, layout: BlockLayout, blocks_max: int) -> None:
        self._layout = layout
        self._blocks_max = blocks_max
        self.blocks = 0
        self.parks = 0

    def park(self, source: BlockView) -> Parked:
        """Copy blocks to DRAM.

        Raises:
            CapacityError: ``blocks_max`` would be passed.
        """
        count = len(source)
        if self.blocks + count > self._blocks_max:
            raise CapacityError(
                f"no room to park {count} blocks beside {self.blocks} of {self._blocks_max}: "
                "send fewer long requests at a time, or start the worker with more --kv-bytes",
                size_bytes=count * self._layout.block_bytes,
            )
        # A mapping of its own, that goes back to the system as soon as the copy is resumed.
        mapping = mmap.mmap(-1, count * self._layout.block_bytes)
        view = BlockView.of_buffer(self._layout, Span.of(np.frombuffer(mapping, dtype=np.uint8)))
        parked = Parked(view, copy_blocks(view, source))
        self.blocks += count
        self.parks += 1
        return parked

    def resume(self, parked: Parked, dest: BlockView) -> None:
        """Copy blocks back. ``forget`` them afterwards in any case.

        Raises:
            CorruptionError: A checksum differs: the memory was damaged meanwhile.
        """
        copy_blocks(dest, parked.view, crcs=parked.crcs)

    def forget(self, parked: Parked) -> None:
        """Give the DRAM of a copy back."""
        self.blocks -= len(parked.view)
