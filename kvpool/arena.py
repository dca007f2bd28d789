"""Arenas: slots in one sealed memfd that this process writes and its peers map read-only.

Owns the Python face of ``native/src/arena.c``, where the rules are enforced: the life of a slot
(free, reserved, ready), pins, grants and quarantine. It never decides what to keep. Who calls it:
the DRAM tier, and the outbox that a stream stages layer slices in. It lies on floor 0 because two
wings need it (docs/decisions/0001).
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, overload

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout, Incarnation, SlotIndex
from kvpool.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    CorruptionError,
    InternalError,
    StaleIncarnationError,
    UsageError,
)
from kvpool.host_memory import memory_limit
from kvpool.memory import BlockView, Crcs

if TYPE_CHECKING:
    from kvpool._native import CData

SlotNumbers = NDArray[np.uint32]
Generations = NDArray[np.uint64]

# What a slot that is published without a name carries: outbox slices are known by their slot.
NO_HASH = BlockHash(bytes(32))


# What the C core counts in 63 and 31 bits.
_ARENA_BYTES_MAX: Final = (1 << 63) - 1
_SLOTS_MAX: Final = (1 << 31) - 2

# What a slot must be for each step, for a person.
_NEEDED: Final = {
    lib.KVP_ARENA_PIN: "ready",
    lib.KVP_ARENA_UNPIN: "pinned",
    lib.KVP_ARENA_GRANT: "reserved or ready",
    lib.KVP_ARENA_SETTLE: "granted",
    lib.KVP_ARENA_RELEASE: "reserved or ready, without a pin,",
    lib.KVP_ARENA_REQUIRE_RESERVED: "reserved",
    lib.KVP_ARENA_REQUIRE_PINNED: "pinned",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one payload, in one life.

    Attributes:
        index: Number of the slot in its arena or tier.
        generation: Names this life of the slot; another life has another, larger number.
    """

    index: SlotIndex
    generation: int


class Slots(Sequence[Slot]):
    """Slots as two arrays, which the C core takes as they are; a ``Slot`` is made when asked for.

    Attributes:
        indices: uint32 [slots].
        generations: uint64 [slots].
    """

    __slots__ = ("_native", "generations", "indices")
    __hash__ = None  # type: ignore[assignment]  # equal to a list of the same slots

    def __init__(self, indices: SlotNumbers, generations: Generations) -> None:
        self.indices = indices
        self.generations = generations
        self._native: tuple[CData, CData] | None = None

    @classmethod
    def of(cls, slots: Slot | Sequence[Slot]) -> "Slots":
        """Return one or more slots as arrays: themselves, if they are."""
        if isinstance(slots, Slots):
            return slots
        if isinstance(slots, Slot):
            slots = [slots]
        count = len(slots)
        return cls(
            np.fromiter((slot.index for slot in slots), dtype=np.uint32, count=count),
            np.fromiter((slot.generation for slot in slots), dtype=np.uint64, count=count),
        )

    def native(self) -> "tuple[CData, CData]":
        """Return indices and generations for the C core; made once."""
        made = self._native
        if made is None:
            made = self._native = (
                ffi.from_buffer("uint32_t[]", np.ascontiguousarray(self.indices)),
                ffi.from_buffer("uint64_t[]", np.ascontiguousarray(self.generations)),
            )
        return made

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, at: int) -> Slot: ...
    @overload
    def __getitem__(self, at: slice) -> "Slots": ...
    def __getitem__(self, at: int | slice) -> "Slot | Slots":
        if isinstance(at, slice):
            if not at.start and at.step is None and (at.stop is None or at.stop >= len(self)):
                return self
            return Slots(self.indices[at], self.generations[at])
        return Slot(SlotIndex(int(self.indices[at])), int(self.generations[at]))

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, Slots) else other)

    def __repr__(self) -> str:
        return f"Slots({list(self)!r})"


@dataclass(frozen=True, slots=True)
class ArenaCounts:
    """Slots by state, and the pins and grants that are out."""

    free: int
    reserved: int
    ready: int
    quarantined: int
    pins: int
    grants: int


class Arena:
    """Slots of one layout. Safe from any thread; every call is short.

    Args:
        layout: What one slot holds, in canonical order.
        slot_count: How many slots; memory is taken and touched at once.
        incarnation: This run of this process.
        numa_node: Where the memory lies; None means where this thread runs.
        locked: Whether it is kept out of swap.

    Raises:
        UsageError: No slots are asked for.
        ConfigError: There is no such NUMA node, or none may be chosen here.
        CapacityError: The machine does not have that much memory, or does not let it be locked.
            None is kept.
    """

    def __init__(
        self,
        layout: BlockLayout,
        slot_count: int,
        incarnation: Incarnation,
        *,
        numa_node: int | None = None,
        locked: bool = False,
    ) -> None:
        if slot_count <= 0:
            raise UsageError(f"an arena of {slot_count} slots: it needs at least one")
        self.layout = layout
        self.slot_count = slot_count
        self.incarnation = incarnation
        size = slot_count * layout.block_bytes
        limit = memory_limit()
        if limit is not None and size > limit.available_bytes:
            raise CapacityError(
                f"{slot_count} slots of {layout.block_bytes} bytes are {size >> 20} MiB, and "
                f"{limit.source} leaves {limit.available_bytes >> 20} MiB: ask for less",
                size_bytes=size,
            )
        if size > _ARENA_BYTES_MAX or slot_count > _SLOTS_MAX:
            raise CapacityError(
                f"{slot_count} slots of {layout.block_bytes} bytes are more than memory can have: "
                "ask for less",
                size_bytes=size,
            )
        out = ffi.new("kvp_arena **")
        with _on_node(numa_node):
            status = lib.kvp_arena_open(
                slot_count, layout.block_bytes, layout.crc_count, incarnation, out
            )
        if status != lib.KVP_OK:
            raise CapacityError(
                f"no shared memory for {slot_count} slots of {layout.block_bytes} bytes "
                f"(errno {ffi.errno}): ask for less, or raise the memory limit",
                size_bytes=size,
            )
        # Unmapped when its last holder is gone: this object until close(), a view, a call.
        self._arena: CData | None = ffi.gc(out[0], lib.kvp_arena_close)
        base, stride = lib.kvp_arena_base(out[0]), lib.kvp_arena_slot_stride(out[0])
        # Of no slot, and without an owner: it must not keep the memory.
        self._slots = BlockView.canonical(layout, base, stride, [])
        if locked and lib.kvp_arena_lock(self._arena) != lib.KVP_OK:
            reason = ffi.errno
            self.close()
            raise CapacityError(
                f"{size} bytes may not be locked in memory (errno {reason}): raise the limit "
                "(ulimit -l, LimitMEMLOCK=), or leave pool.locked out",
                size_bytes=size,
            )

    @property
    def fd(self) -> int:
        """The memfd, to be sent to peers. Stays this arena's."""
        arena = self._open()
        return lib.kvp_arena_fd(arena)

    def native(self) -> "CData":
        """Return the ``kvp_arena``; who keeps it keeps the memory. Raises ClosedError."""
        return self._open()

    def reserve(self) -> Slot:
        """Take a free slot. Raises CapacityError if there is none."""
        taken = self.reserve_some(1)
        if not taken:
            raise CapacityError("no free slot", size_bytes=self.layout.block_bytes)
        return taken[0]

    def reserve_some(self, count: int, *, granted: bool = False) -> Slots:
        """Take up to ``count`` free slots, with one grant each if ``granted``."""
        arena = self._open()
        indices = np.empty(count, dtype=np.uint32)
        generations = np.empty(count, dtype=np.uint64)
        taken = lib.kvp_arena_reserve(
            arena,
            count,
            granted,
            ffi.from_buffer("uint32_t[]", indices, require_writable=True),
            ffi.from_buffer("uint64_t[]", generations, require_writable=True),
        )
        return Slots(indices[:taken], generations[:taken])

    def commit(self, slot: Slot, crcs: Crcs, name: BlockHash = NO_HASH) -> None:
        """Publish a reserved slot with its checksums, uint32 with ``layout.crc_count`` values."""
        self.commit_all([slot], crcs, name)

    def commit_all(self, slots: Sequence[Slot], crcs: Crcs, names: bytes) -> None:
        """Publish reserved slots, in order, with ``crc_count`` checksums and 32 bytes each.

        Raises UsageError at the first slot that is not reserved; those before it are published.
        """
        arena, run = self._open(), Slots.of(slots)
        flat = np.ascontiguousarray(crcs, dtype=np.uint32).reshape(-1)
        expected = len(run) * self.layout.crc_count
        if flat.size != expected or len(names) != len(run) * len(NO_HASH):
            raise UsageError(
                f"{flat.size} checksums and {len(names)} bytes of names where {expected} and "
                f"{len(run) * len(NO_HASH)} are expected"
            )
        done = ffi.new("size_t *")
        buffer = ffi.from_buffer("uint32_t[]", flat)
        status = lib.kvp_arena_commit(arena, *run.native(), len(run), names, buffer, done)
        self._check(status, run, done[0], "reserved")

    def pin(self, slots: "Slot | Sequence[Slot]") -> None:
        """Keep ready slots from being released. Raises UsageError at one in another life."""
        self._change(self._open(), lib.KVP_ARENA_PIN, slots)

    def unpin(self, slots: "Slot | Sequence[Slot]") -> None:
        """Give one pin of each slot back."""
        if (arena := self._arena) is not None:
            self._change(arena, lib.KVP_ARENA_UNPIN, slots)

    def grant(self, slots: "Slot | Sequence[Slot]") -> None:
        """Count one more party that may still touch the slots' bytes."""
        self._change(self._open(), lib.KVP_ARENA_GRANT, slots)

    def settle(self, slots: "Slot | Sequence[Slot]") -> None:
        """Give one grant of each slot back."""
        if (arena := self._arena) is not None:
            self._change(arena, lib.KVP_ARENA_SETTLE, slots)

    def release(self, slots: "Slot | Sequence[Slot]") -> None:
        """Give slots up: free now, or quarantined while grants are out. Not while pinned."""
        if (arena := self._arena) is not None:
            self._change(arena, lib.KVP_ARENA_RELEASE, slots)

    def require_reserved(self, slots: Sequence[Slot]) -> None:
        """Raise UsageError unless all slots are reserved, in just these lives."""
        self._change(self._open(), lib.KVP_ARENA_REQUIRE_RESERVED, slots)

    def require_pinned(self, slots: Sequence[Slot]) -> None:
        """Raise UsageError unless all slots are pinned, in just these lives."""
        self._change(self._open(), lib.KVP_ARENA_REQUIRE_PINNED, slots)

    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        """Return the checksums of ready slots, uint32 [slots, layers, kv_heads]."""
        arena, run = self._open(), Slots.of(slots)
        out = np.empty((len(run), self.layout.num_layers, self.layout.kv_heads), dtype=np.uint32)
        done = ffi.new("size_t *")
        buffer = ffi.from_buffer("uint32_t[]", out, require_writable=True)
        status = lib.kvp_arena_crcs(arena, *run.native(), len(run), buffer, done)
        self._check(status, run, done[0], "ready")
        return out

    def keep(self, ledger: "CData") -> None:
        """Have a tier's ledger keep the lives of the slots from now on.

        Nothing can be reserved from the arena itself then; grants are the ledger's, and what can be
        read is what ``publish`` shows. Raises UsageError if slots were taken already.
        """
        status = lib.kvp_arena_keep(self._open(), ledger)
        if status != lib.KVP_OK:
            raise UsageError(f"the arena's {self.slot_count} slots are not the ledger's to keep")

    def publish(self, slots: Slots, crcs: Crcs, names: bytes) -> None:
        """Show peers slots that a ledger keeps, with 32 bytes each.

        Before anybody writes there again: ``hide``. Raises UsageError without a ledger.
        """
        arena, count = self._open(), len(slots)
        sums = np.ascontiguousarray(crcs, dtype=np.uint32)
        if sums.size != count * self.layout.crc_count or len(names) != count * HASH_BYTES:
            raise UsageError(f"{sums.size} checksums and {len(names)} bytes of names")
        buffer = ffi.from_buffer("uint32_t[]", sums)
        status = lib.kvp_arena_publish(arena, *slots.native(), count, names, buffer)
        self._check(status, slots, 0, "kept by its owner's ledger")

    def hide(self, numbers: SlotNumbers) -> None:
        """End what ``publish`` began: whoever looks again learns that those lives are over."""
        if (arena := self._arena) is None:
            return
        run = np.ascontiguousarray(numbers, dtype=np.uint32)
        status = lib.kvp_arena_hide(arena, ffi.from_buffer("uint32_t[]", run), len(run))
        if status != lib.KVP_OK:
            raise UsageError(f"slots {run.tolist()} are not kept by their owner's ledger")

    def view(self, slots: Sequence[Slot], *, writable: bool = True) -> BlockView:
        """Describe slots for a copy. The caller holds them reserved or pinned meanwhile."""
        arena = self._open()
        ids = Slots.of(slots).indices.astype(np.uint64)
        return self._slots.with_ids(ids, owner=arena, writable=writable)

    def counts(self) -> ArenaCounts:
        """Return a consistent snapshot."""
        arena = self._open()
        out = ffi.new("kvp_arena_counts *")
        lib.kvp_arena_count(arena, out)
        names = ArenaCounts.__slots__
        return ArenaCounts(*(int(getattr(out, name)) for name in names))

    def close(self) -> None:
        """Give the memory up. Idempotent. It stays mapped until the last view and call are gone."""
        self._arena = None

    def _open(self) -> "CData":
        if (arena := self._arena) is None:
            raise ClosedError("the arena is closed")
        return arena

    def _change(self, arena: "CData", step: int, slots: "Slot | Sequence[Slot]") -> None:
        run, done = Slots.of(slots), ffi.new("size_t *")
        status = lib.kvp_arena_change(arena, step, *run.native(), len(run), done)
        self._check(status, run, done[0], _NEEDED[step])

    def _check(self, status: int, slots: Slots, done: int, needed: str) -> None:
        if status == lib.KVP_OK:
            return
        slot = slots[done] if done < len(slots) else None
        if status in (lib.KVP_STALE, lib.KVP_BUSY, lib.KVP_INVALID):
            raise UsageError(f"{slot} is not {needed} in this life")
        raise InternalError(f"the arena answered {status} for {slot}")


@contextmanager
def _on_node(node: int | None) -> Generator[None, None, None]:
    """Have this thread's new memory lie on a NUMA node meanwhile."""
    if node is None:
        yield
        return
    status = lib.kvp_memory_node(node)
    if status != lib.KVP_OK:
        why = "there is no such node" if status == lib.KVP_INVALID else f"errno {ffi.errno}"
        raise ConfigError(
            f"pool.numa_node is {node}, and memory cannot be put there ({why}): leave it out, or "
            "see numactl --hardware",
            key="pool.numa_node",
        )
    try:
        yield
    finally:
        lib.kvp_memory_node(-1)


class Window:
    """A peer's arena, mapped read-only. Safe from any thread.

    Args:
        fd: The peer's memfd. Duplicated: the caller closes its own.
        incarnation: The peer's; another one is refused.

    Raises:
        CorruptionError: It is no kvpool arena, or not sealed.
        StaleIncarnationError: It belongs to another run.
    """

    def __init__(self, fd: int, incarnation: Incarnation) -> None:
        out = ffi.new("kvp_window **")
        status = lib.kvp_window_map(fd, incarnation, out)
        if status == lib.KVP_STALE:
            raise StaleIncarnationError("the arena belongs to another run of the peer")
        if status != lib.KVP_OK:
            raise CorruptionError(f"the peer sent no valid arena (status {status})")
        self._window = ffi.gc(out[0], lib.kvp_window_close)
        self.slot_count = int(lib.kvp_window_slot_count(self._window))
        self.slot_bytes = int(lib.kvp_window_slot_bytes(self._window))
        self.slot_stride = int(lib.kvp_window_slot_stride(self._window))
        self.crc_count = int(lib.kvp_window_crc_count(self._window))

    def native(self) -> "CData":
        """Return the ``kvp_window``, which lives as long as this."""
        return self._window

    @property
    def base(self) -> int:
        """Address of slot 0."""
        return int(lib.kvp_window_base(self._window))

    def require_layout(self, layout: BlockLayout) -> None:
        """Raise UsageError unless slots of this window can hold ``layout``."""
        if layout.block_bytes != self.slot_bytes or layout.crc_count != self.crc_count:
            raise UsageError(
                f"slots of {self.slot_bytes} bytes and {self.crc_count} checksums do not hold "
                f"{layout.block_bytes} bytes and {layout.crc_count} checksums"
            )

    def view(self, layout: BlockLayout, slots: "Sequence[int] | SlotNumbers") -> BlockView:
        """Describe slots as a read-only source. Valid while ``leading`` says so, before and after."""
        self.require_layout(layout)
        ids = np.asarray(slots, dtype=np.uint64)
        return BlockView.canonical(
            layout, self.base, self.slot_stride, ids, owner=self, writable=False
        )

    def leading(
        self, slots: "Sequence[int] | SlotNumbers", generations: "Sequence[int] | Generations"
    ) -> int:
        """Count the leading slots that are ready in just these lives now."""
        bad = ffi.new("size_t *")
        status = lib.kvp_window_check(self._window, *self._arrays(slots, generations), bad)
        if status == lib.KVP_OK:
            return len(slots)
        return self._bad(status, int(bad[0]))

    def crcs(
        self,
        layout: BlockLayout,
        slots: "Sequence[int] | SlotNumbers",
        generations: "Sequence[int] | Generations",
    ) -> tuple[Crcs, int]:
        """Return checksums, uint32 [slots, layers, kv_heads], and how many leading ones are valid."""
        self.require_layout(layout)
        out = np.empty((len(slots), layout.num_layers, layout.kv_heads), dtype=np.uint32)
        bad = ffi.new("size_t *")
        buffer = ffi.from_buffer("uint32_t[]", out, require_writable=True)
        good = len(slots)
        while good:  # the C core reads all or nothing; each turn that goes on asks for fewer
            arrays = self._arrays(slots[:good], generations[:good])
            status = lib.kvp_window_crcs(self._window, *arrays, buffer, bad)
            if status == lib.KVP_OK:
                break
            good = self._bad(status, int(bad[0]))
        return out, good

    def _bad(self, status: int, index: int) -> int:
        if status == lib.KVP_STALE:
            return index
        raise UsageError(f"slot {index} of the request is past the end of the peer's region")

    def _arrays(
        self, slots: "Sequence[int] | SlotNumbers", generations: "Sequence[int] | Generations"
    ) -> "tuple[CData, CData, int]":
        if len(slots) != len(generations):
            raise UsageError("as many generations as slots are needed")
        # Arrays of the right type go as they are: the C core looks whether a slot is past the end.
        numbers = np.asarray(slots)
        if numbers.dtype != np.uint32:
            numbers = numbers.astype(np.int64)
            if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.slot_count:
                raise UsageError(f"a slot is not within 0..{self.slot_count - 1}")
            numbers = numbers.astype(np.uint32)
        return (
            ffi.from_buffer("uint32_t[]", numbers),
            ffi.from_buffer("uint64_t[]", np.asarray(generations, dtype=np.uint64)),
            len(slots),
        )
