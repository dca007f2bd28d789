"""The gpu tier: blocks in one torch tensor on a device, in the attention kernel's order.

Owns the tensor, which the runtime's paged cache computes on, and the life of its slots; the state
is plain Python, since there are few slots and no other process sees them. Never converts a byte
itself: ``view`` describes the tensor's strides, and the one copy at promote and demote, in C,
converts between them and the canonical order. Who calls it: the runtime's workers.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from kvpool.arena import Slot
from kvpool.block import DTYPE_BYTES, HASH_BYTES, BlockHash, BlockLayout, SlotIndex
from kvpool.clock import Clock, SystemClock
from kvpool.errors import CapacityError, ClosedError, UsageError
from kvpool.events import BlockEvicted, EventSink, NullSink
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.base import Tier, TierStats
from kvpool.tiers.dram import DROP_REASONS
from kvpool.tiers.eviction import EvictionPolicy, LRUPolicy

# Dimensions of ``GpuTier.arena``, outermost first. Blocks below this tier are in canonical order.
ARENA_ORDER: Final = ("layer", "kv", "head", "slot", "token", "dim")

_TORCH_DTYPES: Final[dict[str, Any]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}

_State = Literal["free", "reserved", "ready", "quarantined"]


@dataclass(slots=True)
class _Room:
    """One slot: its state, and the block in it while that is ready."""

    state: _State = "free"
    generation: int = 0
    pins: int = 0
    grants: int = 0
    key: BlockHash | None = None  # None once dropped: it goes at its last unpin
    crcs: Crcs | None = None


class GpuTier(Tier):
    """Slots of one tensor. Safe from any thread; nothing waits and nothing is copied here.

    One lock, ``_lock``, guards the bookkeeping. The tensor's bytes belong to whoever holds the slot.

    Args:
        layout: Shape of a block. ``k_dim`` and ``v_dim`` are equal.
        slot_count: How many slots.
        device: A torch device. Only ``"cpu"`` for now: no CUDA path has been run on a card.
        policy: Who goes first when room is needed; None means least recently used.
        clock, events: Components; None means the machine's clock, and no events.

    Attributes:
        arena: The tensor, [layers, 2, kv_heads, slots + 1, block_tokens, head_dim] (``ARENA_ORDER``);
            index 0 of the second axis is K, index 1 is V. Zero at the start.
        null_slot: Number of the last slot, which is not in ``slot_count``: always zero, for padding.

    Raises:
        UsageError: The layout or the device is not supported.
        CapacityError: There is no memory for that many slots.
    """

    name = "gpu"

    def __init__(
        self,
        layout: BlockLayout,
        slot_count: int,
        *,
        device: str = "cpu",
        policy: EvictionPolicy | None = None,
        clock: Clock | None = None,
        events: EventSink | None = None,
    ) -> None:
        if layout.k_dim != layout.v_dim:
            raise UsageError(
                f"K of {layout.k_dim} and V of {layout.v_dim} numbers a token: the gpu tier holds "
                f"only blocks whose K and V are equally wide"
            )
        if layout.dtype not in _TORCH_DTYPES:
            raise UsageError(f"the gpu tier holds {sorted(_TORCH_DTYPES)}, not {layout.dtype!r}")
        if torch.device(device).type != "cpu":
            raise UsageError(f"device {device!r}: the gpu tier runs on 'cpu' only in this version")
        if slot_count <= 0:
            raise UsageError(f"a tier of {slot_count} slots: it needs at least one")
        self.layout = layout
        self.slot_count = slot_count
        self.null_slot = slot_count
        shape = (layout.num_layers, 2, layout.kv_heads, slot_count + 1, layout.block_tokens)
        try:
            self.arena = torch.zeros(
                (*shape, layout.k_dim), dtype=_TORCH_DTYPES[layout.dtype], device=device
            )
        except RuntimeError as refused:
            size = (slot_count + 1) * layout.block_bytes
            raise CapacityError(
                f"no memory for {slot_count} slots of {layout.block_bytes} bytes: ask for fewer",
                tier=self.name,
                size_bytes=size,
            ) from refused
        self._policy: EvictionPolicy = policy or LRUPolicy()
        self._clock: Clock = clock or SystemClock()
        self._events: EventSink = events or NullSink()
        self._lock = threading.Lock()
        self._closed = False
        self._rooms = [_Room() for _ in range(slot_count)]
        # The lowest free slot first, so that a request's slots tend to follow each other.
        self._free = list(range(slot_count - 1, -1, -1))
        self._index: dict[BlockHash, int] = {}
        self._hits = self._misses = self._evictions = self._corruptions = 0

    def reserve(self) -> Slot:
        """Take a slot, evicting at need. See ``Tier``."""
        evicted = 0
        try:
            with self._lock:
                self._require_open()
                while not self._free:
                    # A victim with grants out is quarantined and frees nothing: go on.
                    if not self._evict_one():
                        raise CapacityError(
                            f"all {self.slot_count} slots are reserved, pinned or quarantined",
                            tier=self.name,
                            size_bytes=self.layout.block_bytes,
                        )
                    evicted += 1
                index = self._free.pop()
                room = self._rooms[index]
                room.state = "reserved"
                room.generation += 1
                return Slot(SlotIndex(index), room.generation)
        finally:
            self._tell("capacity", evicted)

    def view(self, slots: Sequence[Slot], *, writable: bool) -> BlockView:
        """Describe the tensor at reserved slots (writable), or at reserved or pinned ones."""
        with self._lock:
            self._require_open()
            for slot in slots:
                room = self._room(slot)
                if room.state != "reserved" and (writable or room.pins == 0):
                    kind = "reserved" if writable else "reserved or pinned"
                    raise UsageError(f"{slot} is not {kind}", tier=self.name)
            return self._strides(slots, writable)

    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Make a written slot readable under ``key``. See ``Tier``."""
        if len(key) != HASH_BYTES or key == parent:
            raise UsageError(f"key {key.hex()} with parent {parent!r} is not the key of a block")
        sums = np.array(crcs, dtype=np.uint32)
        if sums.size != self.layout.crc_count:
            raise UsageError(f"{sums.size} checksums where {self.layout.crc_count} are expected")
        with self._lock:
            self._require_open()
            room = self._room(slot)
            if room.state != "reserved":
                raise UsageError(f"{slot} is not reserved in this life", tier=self.name)
            if key in self._index:
                self._release(slot.index)
                self._policy.use(key, self._clock.now())
                return False
            room.state, room.key = "ready", key
            room.crcs = sums.reshape(self.layout.num_layers, self.layout.kv_heads)
            self._index[key] = slot.index
            self._policy.admit(key, parent, self._clock.now())
            return True

    def abort(self, slot: Slot) -> None:
        """Give a reserved slot back unwritten. See ``Tier``."""
        with self._lock:
            room = self._rooms[slot.index]
            live = room.generation == slot.generation and room.state == "reserved"
            if live and not self._closed:
                self._release(slot.index)

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are here. See ``Tier``."""
        with self._lock:
            self._require_open()
            return len(self._leading(keys))

    def pin(self, keys: bytes) -> Sequence[Slot]:
        """Pin the leading blocks that are here. See ``Tier``."""
        with self._lock:
            self._require_open()
            slots, now = [], self._clock.now()
            for key, index in self._leading(keys):
                room = self._rooms[index]
                room.pins += 1
                self._policy.pin(key)
                self._policy.use(key, now)
                slots.append(Slot(SlotIndex(index), room.generation))
            self._hits += len(slots)
            self._misses += len(keys) // HASH_BYTES - len(slots)
            return slots

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Give pins back. See ``Tier``."""
        with self._lock:
            if self._closed:
                return
            for slot in slots:
                room = self._require_pinned(slot)
                room.pins -= 1
                if room.key is not None:
                    self._policy.unpin(room.key)
                elif room.pins == 0:
                    self._release(slot.index)

    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        """Return the checksums of pinned slots. See ``Tier``."""
        with self._lock:
            self._require_open()
            shape = (len(slots), self.layout.num_layers, self.layout.kv_heads)
            sums = [self._require_pinned(slot).crcs for slot in slots]
            return np.array(sums, dtype=np.uint32).reshape(shape)

    def grant(self, slot: Slot) -> None:
        """Count one more party that may touch the slot. See ``Tier``."""
        with self._lock:
            self._require_open()
            room = self._room(slot)
            if room.state not in ("reserved", "ready"):
                raise UsageError(f"{slot} is neither reserved nor ready", tier=self.name)
            room.grants += 1

    def settle(self, slot: Slot) -> None:
        """Give one grant back. See ``Tier``."""
        with self._lock:
            if self._closed:
                return
            room = self._room(slot)
            if room.grants == 0:
                raise UsageError(f"{slot} has no grant out", tier=self.name)
            room.grants -= 1
            if room.grants == 0 and room.state == "quarantined":
                room.state = "free"
                self._free.append(slot.index)

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Remove a block; ``reason`` is one of ``DROP_REASONS``. See ``Tier``."""
        if reason not in DROP_REASONS:
            raise UsageError(f"reason {reason!r} is not one of {DROP_REASONS}")
        with self._lock:
            self._require_open()
            index = self._index.pop(key, None)
            if index is None:
                return False
            self._policy.remove(key)
            self._corruptions += reason == "corrupt"
            room = self._rooms[index]
            room.key = None
            if room.pins == 0:
                self._release(index)
        self._tell(reason, 1)
        return True

    def evict(self, count: int) -> int:
        """Evict up to ``count`` unpinned blocks. See ``Tier``."""
        evicted = 0
        with self._lock:
            self._require_open()
            while evicted < count and self._evict_one():
                evicted += 1
        self._tell("capacity", evicted)
        return evicted

    def stats(self) -> TierStats:
        """Return a consistent snapshot. See ``Tier``."""
        with self._lock:
            self._require_open()
            states = Counter(room.state for room in self._rooms)
            return TierStats(
                slots=self.slot_count,
                free=states["free"],
                reserved=states["reserved"],
                ready=states["ready"],
                quarantined=states["quarantined"],
                pins=sum(room.pins for room in self._rooms),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                corruptions=self._corruptions,
            )

    def close(self) -> None:
        """Let go of the tensor: it goes when the last view and cache of it do. See ``Tier``."""
        with self._lock:
            self._closed = True
            self.arena = self.arena.new_empty(0)  # a slice would keep the memory

    def _strides(self, slots: Sequence[Slot], writable: bool) -> BlockView:
        """Describe slots by the tensor's own strides, in bytes. Under the lock."""
        arena, layout = self.arena, self.layout
        size = DTYPE_BYTES[layout.dtype]
        layer, kv, head, slot, token, _ = (count * size for count in arena.stride())
        return BlockView(
            layout=layout,
            base=arena.data_ptr(),
            block_stride=slot,
            layer_stride=layer,
            head_stride=head,
            kv_stride=kv,
            k_token_stride=token,
            v_token_stride=token,
            block_ids=np.fromiter((s.index for s in slots), dtype=np.uint64, count=len(slots)),
            owner=arena,
            writable=writable,
        )

    def _leading(self, keys: bytes) -> list[tuple[BlockHash, int]]:
        """Return the leading keys that are here, with their slots. Under the lock."""
        if len(keys) % HASH_BYTES:
            raise UsageError(f"{len(keys)} bytes are not whole keys of {HASH_BYTES}")
        found: list[tuple[BlockHash, int]] = []
        for at in range(0, len(keys), HASH_BYTES):
            key = BlockHash(keys[at : at + HASH_BYTES])
            if (index := self._index.get(key)) is None:
                break
            found.append((key, index))
        return found

    def _room(self, slot: Slot) -> _Room:
        """Return the slot's room, or raise UsageError if it is in another life."""
        if not 0 <= slot.index < self.slot_count:
            raise UsageError(f"{slot} is not a slot of this tier", tier=self.name)
        room = self._rooms[slot.index]
        if room.generation != slot.generation:
            raise UsageError(f"{slot} is in another life", tier=self.name)
        return room

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the tier is closed", tier=self.name)

    def _require_pinned(self, slot: Slot) -> _Room:
        room = self._room(slot)
        if room.pins == 0:
            raise UsageError(f"{slot} is not pinned in this life", tier=self.name)
        return room

    def _evict_one(self) -> bool:
        """Evict the policy's next victim. Under the lock. False if there is none."""
        key = self._policy.victim()
        if key is None:
            return False
        self._release(self._index.pop(key))
        self._evictions += 1
        return True

    def _release(self, index: int) -> None:
        """Free a slot, or quarantine it while grants are out. Under the lock."""
        room = self._rooms[index]
        room.key = room.crcs = None
        if room.grants:
            room.state = "quarantined"
        else:
            room.state = "free"
            self._free.append(index)

    def _tell(self, reason: str, count: int) -> None:
        for _ in range(count):
            self._events.emit(
                BlockEvicted(tier=self.name, reason=reason, size_bytes=self.layout.block_bytes)
            )
