"""What two workers have in common of a model's KV, and how each sees it in its own memory.

A worker of a sharded model has some layers and some heads, in blocks of a size of its own. A stream
between two of them carries one part that both have, in blocks that divide those of both: both sides
describe it as a view of their own memory, and nothing is copied for it. Pure. Who calls it: whoever
opens streams between workers that are not alike.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from kvpool.block import BlockLayout
from kvpool.errors import LayoutMismatchError, UsageError
from kvpool.memory import BlockView


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker has, or one stream carries, of each token.

    Attributes:
        layout: Of its blocks: ``num_layers`` and ``kv_heads`` are those of the part.
        layer_begin, head_begin: The first of them among all layers and KV heads of the model.
    """

    layout: BlockLayout
    layer_begin: int = 0
    head_begin: int = 0

    @property
    def layers(self) -> range:
        """The layers, among the model's."""
        return range(self.layer_begin, self.layer_begin + self.layout.num_layers)

    @property
    def heads(self) -> range:
        """The KV heads, among the model's."""
        return range(self.head_begin, self.head_begin + self.layout.kv_heads)


def common_part(one: Part, other: Part) -> Part | None:
    """Return what a stream between two workers carries, None if they have nothing in common.

    Its blocks have as many tokens as divide the blocks of both.

    Raises:
        LayoutMismatchError: Their rows differ in width or dtype: they are not of one model.
    """
    a, b = one.layout, other.layout
    if (a.k_dim, a.v_dim, a.dtype) != (b.k_dim, b.v_dim, b.dtype):
        raise LayoutMismatchError(f"{a} and {b} have rows of another width or dtype")
    layers = _both(one.layers, other.layers)
    heads = _both(one.heads, other.heads)
    if not layers or not heads:
        return None
    tokens = math.gcd(a.block_tokens, b.block_tokens)
    layout = replace(a, num_layers=len(layers), kv_heads=len(heads), block_tokens=tokens)
    return Part(layout, layers.start, heads.start)


def part_view(view: BlockView, have: Part, wanted: Part) -> BlockView:
    """Describe a part of a worker's blocks, in the same memory.

    Args:
        view: Blocks of ``have.layout``.
        have: What the worker has.
        wanted: A part of it, such as ``common_part`` returns.

    Returns:
        A view of ``wanted.layout``: ``n`` times as many blocks, each 1/n of the tokens, in order.

    Raises:
        UsageError: ``wanted`` is no part of ``have``, or ``view`` is of another layout.
        LayoutMismatchError: Smaller blocks cannot be described here: rows of K and V lie at other
            distances, or a block is no whole number of smaller ones apart.
    """
    view.layout.require_equal(have.layout)
    inside = _both(have.layers, wanted.layers) == wanted.layers
    if not inside or _both(have.heads, wanted.heads) != wanted.heads:
        raise UsageError(f"{wanted} is no part of {have}")
    base = (
        view.base
        + (wanted.layer_begin - have.layer_begin) * view.layer_stride
        + (wanted.head_begin - have.head_begin) * view.head_stride
    )
    counts = wanted.layout
    layout = replace(view.layout, num_layers=counts.num_layers, kv_heads=counts.kv_heads)
    view = replace(view, base=base, layout=layout)
    cuts, rest = divmod(view.layout.block_tokens, wanted.layout.block_tokens)
    if rest:
        raise UsageError(f"{wanted.layout} does not divide {have.layout}")
    if cuts > 1:
        view = _smaller(view, wanted.layout.block_tokens, cuts)
    view.layout.require_equal(wanted.layout)
    return view


def _smaller(view: BlockView, tokens: int, cuts: int) -> BlockView:
    """Describe each block as ``cuts`` blocks of ``tokens``: ids then count these, not those."""
    step = tokens * view.k_token_stride
    apart, rest = divmod(view.block_stride, step) if step else (0, 1)
    if rest or view.k_token_stride != view.v_token_stride:
        raise LayoutMismatchError(
            f"blocks that lie {view.block_stride} bytes apart, with rows {view.k_token_stride} and"
            f" {view.v_token_stride} apart, cannot be seen as blocks of {tokens} tokens"
        )
    first = view.block_ids * np.uint64(apart)
    ids = (first[:, None] + np.arange(cuts, dtype=np.uint64)).reshape(-1).astype(np.uint64)
    layout = replace(view.layout, block_tokens=tokens)
    return replace(view, layout=layout, block_stride=step, block_ids=ids)


def _both(one: range, other: range) -> range:
    """Return what two ranges have in common; empty if nothing."""
    begin = max(one.start, other.start)
    return range(begin, max(begin, min(one.stop, other.stop)))
