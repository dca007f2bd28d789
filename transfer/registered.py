"""The arenas that one transport has registered: where their slots lie, and which are being written.

Owns the claim of a slot that bytes are brought into: granted, so that it is nobody else's until they
have come, and one write at a time. Who calls it: the transports, and ``writes``.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool._native import lib
from kvpool.arena import Arena, Slot
from kvpool.block import SlotIndex
from kvpool.errors import CapacityError, LeaseExpiredError, UsageError
from kvpool.memory import Span
from kvpool.transfer.write_wire import Rows

if TYPE_CHECKING:
    from kvpool._native import CData


@dataclass(frozen=True, slots=True)
class _Region:
    """An arena; ``memory`` keeps it mapped after the arena's close."""

    arena: Arena
    memory: "CData"
    base: int
    stride: int
    writable: bool


@dataclass(slots=True)
class _Claim:
    """A slot that is being written, by ``count`` parts of one write."""

    writer: object
    count: int


class Registered:
    """What a transport has registered, by number. Safe from any thread.

    One lock guards both tables; the arena's mutex is taken under it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: list[_Region] = []
        self._claims: dict[tuple[int, int], _Claim] = {}

    def add(self, arena: Arena, writable: bool) -> None:
        """Take the transport's next region."""
        memory = arena.native()
        base, stride = lib.kvp_arena_base(memory), lib.kvp_arena_slot_stride(memory)
        with self._lock:
            self._regions.append(_Region(arena, memory, base, stride, writable))

    def geometries(self) -> list[tuple[int, int]]:
        """Return slot count and slot bytes of each region."""
        with self._lock:
            return [
                (each.arena.slot_count, each.arena.layout.block_bytes) for each in self._regions
            ]

    def claim(self, rows: Rows, writer: object) -> list[Span]:
        """Hold the slots that a peer wants written; return where its spans go.

        Args:
            rows: Of a peer: every field may be anything.
            writer: Names the write. Its parts share slots, two writes do not.

        Raises:
            UsageError: A span is not inside a slot of a writable region. Nothing is held.
            LeaseExpiredError: A slot is not reserved in the life named. Nothing is held.
            CapacityError: A slot is being written by another. Nothing is held.
            ClosedError: An arena is closed. Nothing is held.
        """
        spans: list[Span] = []
        held: set[tuple[int, int, int]] = set()
        with self._lock:
            try:
                for row in rows:
                    region, slot, life, offset, size = (
                        int(row[name])
                        for name in ("region", "slot", "generation", "offset", "size")
                    )
                    spans.append(self._span(region, slot, offset, size))
                    if (region, slot, life) not in held:
                        self._hold(region, slot, life, writer)
                        held.add((region, slot, life))
            except BaseException:
                for each in held:
                    self._let_go(*each)
                raise
        return spans

    def give_back(self, rows: Rows) -> None:
        """End what ``claim`` of these rows began: nothing moves into them any more."""
        names = ["region", "slot", "generation"]
        with self._lock:
            for region, slot, life in {tuple(row) for row in rows[names].tolist()}:
                self._let_go(region, slot, life)

    def after_fork(self) -> None:
        """Hold nothing in a child; see ``forked``."""
        self._lock = threading.Lock()
        self._claims = {}

    def _span(self, region: int, slot: int, offset: int, size: int) -> Span:
        """Return where a span lies, checked. Under the lock."""
        if region >= len(self._regions) or not self._regions[region].writable:
            raise UsageError(f"region {region} is not registered as writable at its owner")
        there = self._regions[region]
        slot_bytes = there.arena.layout.block_bytes
        if slot >= there.arena.slot_count or not 0 < size <= slot_bytes - min(offset, slot_bytes):
            raise UsageError(
                f"{size} bytes at {offset} of slot {slot} leave the slot or the region"
            )
        return Span(there.base + slot * there.stride + offset, size, there.memory)

    def _hold(self, region: int, slot: int, life: int, writer: object) -> None:
        """Claim and grant a slot. Under the lock."""
        claim = self._claims.get((region, slot))
        if claim is not None and claim.writer != writer:
            raise CapacityError(f"slot {slot} is being written already: try again")
        arena, named = self._regions[region].arena, Slot(SlotIndex(slot), life)
        granted = False
        try:
            arena.grant(named)
            granted = True
            arena.require_reserved([named])
        except UsageError as error:
            if granted:
                arena.settle(named)
            raise LeaseExpiredError(
                f"slot {slot} is in another life, or not reserved: ask its owner for another"
            ) from error
        if claim is None:
            self._claims[region, slot] = _Claim(writer, 1)
        else:
            claim.count += 1

    def _let_go(self, region: int, slot: int, life: int) -> None:
        """Settle a slot, and free it for other writes after the last part. Under the lock."""
        self._regions[region].arena.settle(Slot(SlotIndex(slot), life))
        claim = self._claims[region, slot]
        claim.count -= 1
        if claim.count == 0:
            del self._claims[region, slot]
