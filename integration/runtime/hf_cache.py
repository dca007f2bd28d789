"""The paged cache: Transformers' ``Cache`` over the blocks of a gpu tier, and its attention.

Owns how one forward writes new K and V into slots, and the attention function that reads them
there: in groups of rows small enough to stay in the processor's cache, without expanding K and V to
the query heads. It never reserves or frees a slot. Who calls it: ``runner.py``; the model calls
``update`` and then the attention in each layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from kvpool.tiers.gpu import GpuTier

# The name under which Transformers finds our attention, and that of the argument which carries the
# cache to it. There is no mask function of that name, so Transformers builds no mask.
ATTENTION: Final = "kvpool"
CACHE_ARGUMENT: Final = "kvpool_cache"

# K and V of one layer that are gathered before attention reads them. Twice the usual L2 cache of a
# core: at 8 rows of 2,048 tokens gathering row by row took half the time of gathering all at once,
# and at 8 rows of 64 tokens one group saved a quarter.
GATHER_BYTES_MAX: Final = 2 * 2**20

LayerHook = Callable[[int], None]


def paged_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attend over the paged cache; what Transformers calls as the attention ``"kvpool"``.

    Args:
        module: The attention layer.
        query: [rows, query_heads, new tokens, head_dim].
        key: Unused: it is in the cache.
        value: Unused: it is in the cache.
        attention_mask: Unused: the cache knows the lengths.
        scaling: Factor of the scores; None for ``head_dim ** -0.5``.
        **kwargs: Holds the cache under ``CACHE_ARGUMENT``; the rest is ignored.

    Returns:
        [rows, new tokens, query_heads, head_dim], contiguous; and None for the weights.
    """
    cache: PagedCache = kwargs[CACHE_ARGUMENT]
    return cache.attend(module.layer_idx, query, scaling), None


AttentionInterface.register(ATTENTION, paged_attention)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows ``begin`` to ``end`` of a forward, whose K and V are gathered together.

    Attributes:
        tokens: Of the longest row of the group; the others are padded to it.
        run: (first slot, count) if this is one row whose slots follow each other, else None.
        slots: Slot numbers [rows * blocks].
        mask: None, or what to add to the scores, [rows, 1, new tokens, tokens].
    """

    begin: int
    end: int
    tokens: int
    run: tuple[int, int] | None
    slots: Any
    mask: Any


class PagedCache(Cache):  # type: ignore[misc]  # Transformers is read as Any
    """One worker's view of its arena during a forward. One thread at a time.

    ``begin`` sets the rows of the next forward; in each layer ``update`` writes and ``attend`` reads.

    Args:
        tier: Whose arena holds the blocks. The caller keeps the slots reserved (or pinned, for
            those before the first new token) until the forward has ended.
    """

    def __init__(self, tier: GpuTier) -> None:
        super().__init__(layers=[])
        self._arena = tier.arena
        self._null_slot = tier.null_slot
        self._block_tokens = tier.layout.block_tokens
        self._layer_block_bytes = tier.layout.layer_bytes
        # One [heads, slots, tokens, dim] view of K and of V for each layer, made once.
        self._paged = [(layer[0], layer[1]) for layer in self._arena]
        self._flat = [(k.flatten(1, 2), v.flatten(1, 2)) for k, v in self._paged]
        self._on_layer: LayerHook | None = None
        self._start = 0
        self._targets: Any = None
        self._groups: list[_Group] = []

    def begin(
        self,
        starts: Sequence[int],
        new_tokens: int,
        tables: Sequence[Sequence[int]],
        on_layer: LayerHook | None = None,
    ) -> None:
        """Set up the next forward.

        Args:
            starts: Tokens that each row has in its blocks already.
            new_tokens: Tokens that every row adds.
            tables: Slots of each row, in order, enough for all its tokens.
            on_layer: Called with the layer's number as soon as that layer's new K and V are in the
                arena, before its attention runs. From the thread of the forward.
        """
        size = self._block_tokens
        lengths = [start + new_tokens for start in starts]
        used = [list(t[: -(-n // size)]) for t, n in zip(tables, lengths, strict=True)]
        self._on_layer, self._start = on_layer, max(starts)
        self._clear_tails(starts, lengths, used)
        padded = torch.tensor(self._pad(used), dtype=torch.long)
        positions = torch.tensor(starts)[:, None] + torch.arange(new_tokens)
        targets = padded.gather(1, positions // size) * size + positions % size
        self._targets = targets.flatten().to(self._arena.device)
        self._groups = [
            self._group(begin, end, starts, new_tokens, used)
            for begin, end in self._cuts([len(table) for table in used])
        ]

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write one layer's new K and V into their slots, and tell ``on_layer``.

        Args:
            key_states: [rows, kv_heads, new tokens, head_dim].
            value_states: As ``key_states``.
            layer_idx: The layer.
            *args: What other caches need; ignored.
            **kwargs: The same.

        Returns:
            What was passed in: attention reads the arena itself.
        """
        for flat, states in zip(self._flat[layer_idx], (key_states, value_states), strict=True):
            flat.index_copy_(1, self._targets, states.transpose(0, 1).flatten(1, 2))
        if self._on_layer is not None:
            self._on_layer(layer_idx)
        return key_states, value_states

    def attend(self, layer: int, query: Any, scaling: float | None) -> Any:
        """Return the attention of ``query`` over the rows' blocks, as ``paged_attention`` does."""
        rows, heads, new, dim = query.shape
        keys, values = self._paged[layer]
        if new == 1:
            # The query heads of one KV head become rows of one small product.
            query = query.reshape(rows, keys.shape[0], -1, dim)
        parts = [
            scaled_dot_product_attention(
                query[group.begin : group.end],
                _gather(keys, group),
                _gather(values, group),
                attn_mask=group.mask,
                is_causal=new > 1 and group.mask is None,
                scale=scaling,
                enable_gqa=new > 1,
            )
            for group in self._groups
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if new == 1:
            return out.reshape(rows, 1, heads, dim)
        return out.transpose(1, 2).contiguous()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens that the longest row had before this forward."""
        return self._start

    def _cuts(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Cut the rows into runs whose padded K and V fit ``GATHER_BYTES_MAX``; one row always does."""
        room = GATHER_BYTES_MAX // self._layer_block_bytes
        cuts, begin, widest = [], 0, 0
        for row, count in enumerate(blocks):
            widest = max(widest, count)
            if row > begin and (row + 1 - begin) * widest > room:
                cuts.append((begin, row))
                begin, widest = row, count
        return [*cuts, (begin, len(blocks))]

    def _group(
        self,
        begin: int,
        end: int,
        starts: Sequence[int],
        new_tokens: int,
        used: Sequence[Sequence[int]],
    ) -> _Group:
        """Describe rows ``begin`` to ``end``, and which tokens each of their queries may see."""
        device = self._arena.device
        starts, used = starts[begin:end], used[begin:end]
        tokens = max(starts) + new_tokens
        mask = None
        whole = new_tokens == 1 or max(starts) == 0
        if min(starts) != max(starts) or not whole:
            last_seen = torch.tensor(starts)[:, None] + torch.arange(new_tokens)
            hidden = torch.arange(tokens) > last_seen[:, None, :, None]
            mask = torch.zeros(hidden.shape, dtype=self._arena.dtype)
            mask = mask.masked_fill_(hidden, float("-inf")).to(device)
        slots = torch.tensor(self._pad(used), dtype=torch.long).flatten().to(device)
        return _Group(begin, end, tokens, _consecutive(used), slots, mask)

    def _pad(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Make tables equally long with the slot that is always zero."""
        longest = max(map(len, tables))
        return [[*table, *[self._null_slot] * (longest - len(table))] for table in tables]

    def _clear_tails(
        self, starts: Sequence[int], lengths: Sequence[int], used: Sequence[Sequence[int]]
    ) -> None:
        """Zero what a last block holds past the row's end, when a row first enters that block.

        Padding is masked, but a masked NaN still spoils a sum, and a slot may hold any bytes of an
        earlier life.
        """
        size = self._block_tokens
        for start, length, table in zip(starts, lengths, used, strict=True):
            tail = length % size
            if tail and start <= length - tail:
                self._arena[:, :, :, table[-1], tail:] = 0


def _gather(paged: Any, group: _Group) -> Any:
    """Return K or V of a group's rows, [rows, heads, tokens, dim]; without a copy if it is a run."""
    heads, _, _, dim = paged.shape
    if group.run is not None:
        found = paged.narrow(1, *group.run).flatten(1, 2)
    else:
        found = paged.index_select(1, group.slots)
    rows = group.end - group.begin
    return found.view(heads, rows, -1, dim).transpose(0, 1)[:, :, : group.tokens]


def _consecutive(tables: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Return (first slot, count) if this is one table whose slots follow each other, else None."""
    table = tables[0]
    if len(tables) == 1 and list(table) == list(range(table[0], table[0] + len(table))):
        return table[0], len(table)
    return None
