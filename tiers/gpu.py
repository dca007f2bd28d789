"""The gpu tier: blocks in one torch tensor on a device, in the attention kernel's order.

Owns the tensor, which the runtime's paged cache computes on; the bookkeeping is ``slots.py``'s.
Never converts a byte itself: ``view`` describes the tensor's strides, and the one copy at promote and
demote, in C, converts between them and the canonical order. Who calls it: the runtime's workers.
"""

from typing import Any, Final

import numpy as np
import torch

from kvpool.arena import Slots
from kvpool.block import DTYPE_BYTES, BlockLayout
from kvpool.clock import Clock
from kvpool.errors import CapacityError, UsageError
from kvpool.events import EventSink
from kvpool.memory import BlockView
from kvpool.tiers.eviction import EvictionPolicy
from kvpool.tiers.slots import SlotTier

# Dimensions of ``GpuTier.arena``, outermost first. Blocks below this tier are in canonical order.
ARENA_ORDER: Final = ("layer", "kv", "head", "slot", "token", "dim")

_TORCH_DTYPES: Final[dict[str, Any]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}


class GpuTier(SlotTier):
    """Slots of one tensor. Safe from any thread; see ``SlotTier``.

    The tensor's bytes belong to whoever holds the slot.

    Args:
        layout: Shape of a block. ``k_dim`` and ``v_dim`` are equal.
        slot_count: How many slots.
        device: A torch device, ``"cpu"`` or ``"cuda"``. Blocks of a card go in and out through a
            ``GpuMover``: their addresses are not the host's, and ``view`` refuses.
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
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            raise UsageError(f"device {device!r}: torch has no such device here; use 'cpu'")
        if slot_count <= 0:
            raise UsageError(f"a tier of {slot_count} slots: it needs at least one")
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
        super().__init__(layout, slot_count, policy=policy, clock=clock, events=events)

    def _describe(self, slots: Slots, writable: bool) -> BlockView:
        """Describe slots by the tensor's own strides, in bytes."""
        arena, layout = self.arena, self.layout
        if arena.device.type != "cpu":
            raise UsageError(
                f"blocks on {arena.device} have no address on the host: move them with a GpuMover"
            )
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
            block_ids=slots.indices.astype(np.uint64),
            owner=arena,
            writable=writable,
        )

    def _require_readable(self, slots: Slots) -> None:
        """Let reserved slots be read, too: the runtime computes on them before they are whole."""
        try:
            self._ledger.require_reserved(slots)
        except UsageError:
            for slot in slots:
                if not self._is_reserved(slot):
                    self._ledger.require_pinned([slot])

    def _let_go(self) -> None:
        """Let go of the tensor: it goes when the last view and cache of it do."""
        self.arena = self.arena.new_empty(0)  # a slice would keep the memory
