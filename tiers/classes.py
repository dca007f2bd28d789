"""DRAM of several sizes of blocks: whole chunks of one memory that move between size classes.

Owns the chunks: which class has which, and when one moves. Each class is a tier of its own, for the
blocks of one model; none is ever without a chunk. Memory follows use: a class takes a chunk of another
if nothing in it was used since the taker's own coldest chunk was. Who calls it: pools of several models.
"""

import threading
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.arena import Arena, Slots
from kvpool.block import BlockLayout, Incarnation
from kvpool.clock import Clock
from kvpool.errors import ConfigError, UsageError
from kvpool.events import EventSink
from kvpool.memory import BlockView
from kvpool.tiers.base import TierStats
from kvpool.tiers.slots import SlotTier

# Slots begin on whole pages, and so do chunks.
_PAGE_BYTES: Final = 4096
# Chunks of others that are tried before a class evicts its own blocks: each costs a look at the
# blocks in it, and at those that descend from them.
_TRIES_MAX: Final = 4
_NOBODY: Final = -1


class ChunkMemory:
    """Equal chunks of one arena, shared by the classes of one process. Safe from any thread.

    One lock, ``lock``, guards the chunks, and is the lock of all the classes.

    Args:
        chunk_bytes: Of each chunk, whole pages.
        chunk_count: How many; memory is taken and touched at once.
        incarnation: This run of this process.
        numa_node: Where the memory lies; None means where this thread runs.
        locked: Whether it is kept out of swap.

    Raises:
        UsageError: The chunks are not whole pages.
        ConfigError: There is no such NUMA node, or none may be chosen here.
        CapacityError: The machine does not have that much memory.
    """

    def __init__(
        self,
        chunk_bytes: int,
        chunk_count: int,
        incarnation: Incarnation,
        *,
        numa_node: int | None = None,
        locked: bool = False,
    ) -> None:
        if chunk_bytes <= 0 or chunk_bytes % _PAGE_BYTES:
            raise UsageError(f"chunks of {chunk_bytes} bytes: use whole pages of {_PAGE_BYTES}")
        self.chunk_bytes = chunk_bytes
        self.chunk_count = chunk_count
        self.lock = threading.Lock()
        run = BlockLayout(
            num_layers=1,
            kv_heads=1,
            block_tokens=16,
            k_dim=chunk_bytes // 16,
            v_dim=0,
            dtype="uint8",
        )
        self._arena = Arena(run, chunk_count, incarnation, numa_node=numa_node, locked=locked)
        self._owners: NDArray[np.int64] = np.full(chunk_count, _NOBODY, dtype=np.int64)
        self._classes: dict[int, ClassTier] = {}
        self._joined = 0
        self._uses = 0
        self._last_use: NDArray[np.int64] = np.zeros(chunk_count, dtype=np.int64)

    # ---- of the classes: called under the lock ----------------------------------------------------

    def join(self, tier: "ClassTier") -> int:
        """Enter a class, which gets its first chunk; the number that it is known by."""
        number = self._joined
        self._joined += 1
        self._classes[number] = tier
        self._owners[self._nobodys()[0]] = number
        return number

    def require_room(self) -> None:
        """Raise ConfigError unless another class can have a chunk of its own."""
        if not len(self._nobodys()):
            raise ConfigError(
                f"pool.dram_bytes makes {self.chunk_count} chunks of {self.chunk_bytes} bytes, and "
                "each size of blocks needs one: give the pool more, or open all sizes at once",
                key="pool.dram_bytes",
                size_bytes=self.chunk_bytes,
            )

    def leave(self, number: int) -> None:
        """Take back the chunks of a class that is closed; the last one closes the memory.

        A chunk that somebody may still touch is nobody's from now on, and never used again.
        """
        tier = self._classes.pop(number)
        for chunk in np.flatnonzero(self._owners == number).tolist():
            free = tier.vacate(chunk)
            self._owners[chunk] = _NOBODY if free else number
        if not self._classes:
            self.close()

    def close(self) -> None:
        """Give the memory up, which stays mapped until the last view is gone. Idempotent."""
        self._arena.close()

    def use(self, chunks: NDArray[np.uint32]) -> None:
        """Count chunks as used now, in the order of all the classes' uses."""
        self._uses += 1
        self._last_use[chunks] = self._uses

    def view(self, layout: BlockLayout, slots: NDArray[np.uint64], writable: bool) -> BlockView:
        """Describe slots that begin on the given pages."""
        whole = self._arena.view(Slots.of([]))
        return BlockView.canonical(
            layout, whole.base, _PAGE_BYTES, slots, owner=whole.owner, writable=writable
        )

    def take(self, taker: int) -> int | None:
        """Find a chunk for a class: nobody's, or another's that is colder than all its own."""
        nobodys = self._nobodys()
        if len(nobodys):
            chunk = int(nobodys[0])
            self._owners[chunk] = taker
            return chunk
        coldest = self._last_use[self._owners == taker].min()
        counts = np.bincount(self._owners, minlength=self._joined)  # nobody has none now
        spare = (self._owners != taker) & (counts[self._owners] > 1) & (self._last_use < coldest)
        offers = np.flatnonzero(spare)
        for chunk in offers[np.argsort(self._last_use[offers])[:_TRIES_MAX]].tolist():
            owner = self._classes.get(int(self._owners[chunk]))
            if owner is not None and owner.vacate(chunk):
                self._owners[chunk] = taker
                return int(chunk)
        return None

    def chunks_of(self, number: int) -> NDArray[np.intp]:
        """Return the numbers of a class's chunks."""
        return np.flatnonzero(self._owners == number)

    def _nobodys(self) -> NDArray[np.intp]:
        return np.flatnonzero(self._owners == _NOBODY)


class ClassTier(SlotTier):
    """The blocks of one size in a memory of several. Safe from any thread; see ``SlotTier``.

    Its slots are those of its chunks: ``stats().slots`` changes as chunks come and go. No other
    process can map them.

    Args:
        memory: Shared with other classes; the last one to be closed closes it.
        layout: Of the blocks.
        clock, events: Components; None means the machine's clock, and no events.

    Raises:
        ConfigError: A chunk does not hold one block, or there is no chunk left to begin with.
    """

    name = "dram"
    _has_other_room = True  # the chunks of others

    def __init__(
        self,
        memory: ChunkMemory,
        layout: BlockLayout,
        *,
        clock: Clock | None = None,
        events: EventSink | None = None,
    ) -> None:
        self._slot_pages = -(-layout.block_bytes // _PAGE_BYTES)
        self._per_chunk = memory.chunk_bytes // (self._slot_pages * _PAGE_BYTES)
        if not self._per_chunk:
            raise ConfigError(
                f"chunks of {memory.chunk_bytes} bytes do not hold a block of "
                f"{layout.block_bytes}: make them larger",
                key="pool.chunk_bytes",
                size_bytes=layout.block_bytes,
            )
        super().__init__(
            layout,
            memory.chunk_count * self._per_chunk,
            clock=clock,
            events=events,
            lock=memory.lock,
        )
        self._memory = memory
        self._untold = 0  # blocks that went with a chunk, whose events are due
        # Slots of chunks that are not this class's are reserved by it, in these lives.
        self._lives = self._ledger.reserve(self._ledger.slot_count).generations
        with memory.lock:
            memory.require_room()
            self._number = memory.join(self)
            for chunk in memory.chunks_of(self._number).tolist():
                self._receive(chunk)

    def stats(self) -> TierStats:
        """Return a consistent snapshot; ``slots`` are those of the chunks it has now."""
        with self._lock:
            stats = self._stats()
            slots = len(self._memory.chunks_of(self._number)) * self._per_chunk
            withheld = self._ledger.slot_count - slots
            return replace(stats, slots=slots, reserved=stats.reserved - withheld)

    # ---- of the memory: called under the lock -----------------------------------------------------

    def vacate(self, chunk: int) -> bool:
        """Evict what is in a chunk and give it up. False, and it stays, if it is in use."""
        first = chunk * self._per_chunk
        given = self._ledger.vacate(first, self._per_chunk)
        if given is None:
            return False
        slots, gone = given
        self._lives[slots.indices] = slots.generations
        self._evictions += gone
        self._untold += gone
        return True

    # ---- of the bookkeeping -----------------------------------------------------------------------

    def _describe(self, slots: Slots, writable: bool) -> BlockView:
        numbers, per_chunk = slots.indices.astype(np.uint64), np.uint64(self._per_chunk)
        pages = (numbers // per_chunk) * np.uint64(self._memory.chunk_bytes // _PAGE_BYTES)
        pages += (numbers % per_chunk) * np.uint64(self._slot_pages)
        return self._memory.view(self.layout, pages.astype(np.uint64), writable)

    def _used(self, slots: Slots) -> None:
        self._memory.use(slots.indices // np.uint32(self._per_chunk))

    def _make_room(self) -> bool:
        chunk = self._memory.take(self._number)
        if chunk is None:
            return False
        self._receive(chunk)
        return True

    def _let_go(self) -> None:
        self._memory.leave(self._number)

    def _receive(self, chunk: int) -> None:
        """Free the slots of a chunk that is this class's now."""
        first = chunk * self._per_chunk
        numbers = np.arange(first, first + self._per_chunk, dtype=np.uint32)[::-1]
        self._ledger.release(Slots(numbers, self._lives[numbers]))  # the first goes out first
        self._memory.use(np.array([chunk], dtype=np.uint32))

    def _tell(self, reason: str, count: int) -> None:
        with self._lock:
            untold, self._untold = self._untold, 0
        super()._tell("capacity", untold)
        super()._tell(reason, count)
