"""The engine's paged KV cache, as blocks of opaque bytes.

Owns no memory: it describes vLLM's tensors, whose layers lie at one stride, and copies whole blocks
between them and slots. Never looks into a block. Who calls it: the worker's side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvpool.block import BlockLayout
from kvpool.errors import ConfigError, LayoutMismatchError
from kvpool.integration.vllm.shape import Group
from kvpool.memory import BlockView, Crew, copy_blocks


@dataclass(frozen=True, slots=True)
class GroupCache:
    """The tensors of one group.

    Attributes:
        view: Its blocks. Layers past ``layers`` are not there: they are never copied.
        tensors: The layers, in order.
        crew: Threads that share a copy of whole blocks; None: the caller alone.
    """

    view: BlockView
    tensors: Sequence[torch.Tensor]
    crew: Crew | None = None

    @property
    def layers(self) -> int:
        """How many layers the group has."""
        return len(self.tensors)

    @property
    def whole(self) -> bool:
        """Whether every layer of the layout is there, so that a pool can write into it."""
        return self.layers == self.view.layout.num_layers

    @classmethod
    def of_tensors(
        cls,
        layout: BlockLayout,
        group: Group,
        tensors: Mapping[str, torch.Tensor],
        crew: Crew | None = None,
    ) -> "GroupCache":
        """Describe a group's tensors, each [blocks, ...] with whole blocks in one piece.

        Raises:
            ConfigError: They are not in this process's memory, or not laid out at strides.
            LayoutMismatchError: A block of one layer is not ``layout.layer_bytes``.
        """
        parts = [tensors[name] for name in group.layers]
        for name, tensor in zip(group.layers, parts, strict=True):
            if tensor.device.type != "cpu":
                raise ConfigError(f"{name} is on {tensor.device}: this version copies on CPUs only")
            if tensor.dim() < 2 or not tensor[0].is_contiguous():
                raise ConfigError(f"a block of {name} does not lie in one piece: {tensor.stride()}")
            if tensor[0].nbytes != layout.layer_bytes:
                raise LayoutMismatchError(
                    f"a block of {name} has {tensor[0].nbytes} bytes, not {layout.layer_bytes}"
                )
        strides = {two.data_ptr() - one.data_ptr() for one, two in pairwise(parts)}
        blocks = {tensor.stride(0) * tensor.element_size() for tensor in parts}
        if len(strides) > 1 or len(blocks) > 1 or min(strides, default=0) < 0:
            raise ConfigError(f"layers of group {group.number} do not lie at one stride")
        view = BlockView(
            layout=layout,
            base=parts[0].data_ptr(),
            block_stride=blocks.pop(),
            layer_stride=strides.pop() if strides else layout.layer_bytes,
            head_stride=layout.head_bytes,
            kv_stride=layout.head_bytes,
            k_token_stride=layout.k_row_bytes,
            v_token_stride=layout.v_row_bytes,
            block_ids=BlockView.canonical(layout, 0, 0, []).block_ids,
            owner=parts,
        )
        return cls(view, parts, crew)

    def copy_out(self, block_ids: Sequence[int], slots: BlockView, layers: range) -> None:
        """Copy layers of blocks into slots."""
        copy_blocks(slots, self.view.with_ids(list(block_ids)), layers=layers)

    def copy_in(self, block_ids: Sequence[int], slots: BlockView) -> None:
        """Copy all layers of whole blocks out of slots."""
        dest = self.view.with_ids(list(block_ids))
        copy_blocks(dest, slots, layers=range(self.layers), crew=self.crew)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Write zeros into blocks: what came of a load that failed may be no numbers at all."""
        for tensor in self.tensors:
            tensor[list(block_ids)] = 0
