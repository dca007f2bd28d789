"""The paged cache: Transformers' ``Cache`` over the blocks of a gpu tier, and its attention.

Owns how one forward writes new K and V into slots and gathers what attention reads, and the
attention function that reads it without expanding K and V to the query heads. It never reserves or
frees a slot. Who calls it: ``runner.py``; the model calls ``update`` in each layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from kvpool.tiers.gpu import GpuTier

# The name under which Transformers finds our attention. It has no mask function of that name, so
# Transformers builds no mask and hands ours through.
ATTENTION: Final = "kvpool"

LayerHook = Callable[[int], None]


def paged_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attend over gathered K and V; what Transformers calls as the attention ``"kvpool"``.

    Args:
        module: The attention layer; unused.
        query: [rows, query_heads, new tokens, head_dim].
        key, value: [rows, kv_heads, tokens, head_dim]; any strides, the last dim's is 1.
        attention_mask: None, or added to the scores: [rows, 1, new tokens, tokens]. None means that
            every token is visible to one new token, and that several new tokens are the whole
            sequence, each seeing those before it.
        scaling: Factor of the scores; None for ``head_dim ** -0.5``.
        dropout: Must be 0.
        **kwargs: What other attentions need; ignored.

    Returns:
        [rows, new tokens, query_heads, head_dim], contiguous; and None for the weights.
    """
    rows, heads, new, dim = query.shape
    if new == 1:
        # The query heads of one KV head become rows of one small product: nothing is expanded.
        kv_heads = key.shape[1]
        folded = query.reshape(rows, kv_heads, heads // kv_heads, dim)
        out = scaled_dot_product_attention(
            folded, key, value, attn_mask=attention_mask, scale=scaling
        )
        return out.reshape(rows, 1, heads, dim), None
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, paged_attention)


class PagedCache(Cache):  # type: ignore[misc]  # Transformers is read as Any
    """One worker's view of its arena during a forward. One thread at a time.

    ``begin`` sets the rows of the next forward; each layer's ``update`` then writes and gathers.

    Args:
        tier: Whose arena holds the blocks. The caller keeps the slots reserved (or pinned, for
            those before the first new token) until the forward has ended.
    """

    def __init__(self, tier: GpuTier) -> None:
        super().__init__(layers=[])
        self.tier = tier
        self._block_tokens = tier.layout.block_tokens
        arena = tier.arena
        # One [heads, slots, tokens, dim] view of K and of V for each layer, made once.
        self._paged = [(layer[0], layer[1]) for layer in arena]
        self._flat = [(k.flatten(1, 2), v.flatten(1, 2)) for k, v in self._paged]
        self._on_layer: LayerHook | None = None
        self._rows = self._new = self._tokens = 0
        self._run: tuple[int, int] | None = None
        self._targets: Any = None
        self._gathered: Any = None

    def begin(
        self,
        starts: Sequence[int],
        new_tokens: int,
        tables: Sequence[Sequence[int]],
        on_layer: LayerHook | None = None,
    ) -> Any:
        """Set up the next forward.

        Args:
            starts: Tokens that each row has in its blocks already.
            new_tokens: Tokens that every row adds.
            tables: Slots of each row, in order, enough for all its tokens.
            on_layer: Called with the layer's number as soon as that layer's new K and V are in the
                arena, before its attention runs. From the thread of the forward.

        Returns:
            The attention mask to hand to the model: None, or what to add to the scores.
        """
        arena, size = self.tier.arena, self._block_tokens
        device = arena.device
        self._rows, self._new, self._on_layer = len(starts), new_tokens, on_layer
        lengths = [start + new_tokens for start in starts]
        self._tokens = max(lengths)
        blocks = -(-self._tokens // size)
        used = [
            list(table[: -(-length // size)]) for table, length in zip(tables, lengths, strict=True)
        ]
        self._clear_tails(starts, lengths, used)
        padded = [table + [self.tier.null_slot] * (blocks - len(table)) for table in used]
        slots = torch.tensor(padded, dtype=torch.long)
        positions = torch.tensor(starts)[:, None] + torch.arange(new_tokens)
        targets = slots.gather(1, positions // size) * size + positions % size
        self._targets = targets.flatten().to(device)
        self._run = _consecutive(used[0]) if len(used) == 1 else None
        self._gathered = slots.flatten().to(device)
        return self._mask(starts, lengths)

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
                self.tier.arena[:, :, :, table[-1], tail:] = 0

    def _mask(self, starts: Sequence[int], lengths: Sequence[int]) -> Any:
        """Return what to add to the scores, or None where ``paged_attention`` needs nothing."""
        ragged = min(lengths) != self._tokens
        if not ragged and (self._new == 1 or max(starts) == 0):
            return None
        arena = self.tier.arena
        last_seen = torch.tensor(starts)[:, None] + torch.arange(self._new)
        hidden = torch.arange(self._tokens) > last_seen[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=arena.dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(arena.device)

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write one layer's new K and V, tell ``on_layer``, and return all K and V of the rows.

        Args:
            key_states, value_states: [rows, kv_heads, new tokens, head_dim].
            layer_idx: The layer.
            *args, **kwargs: What other caches need; ignored.

        Returns:
            K and V, [rows, kv_heads, tokens, head_dim]: of one row with consecutive slots the arena
            itself, otherwise one copy. Read them before the next ``begin``.
        """
        for flat, states in zip(self._flat[layer_idx], (key_states, value_states), strict=True):
            flat.index_copy_(1, self._targets, states.transpose(0, 1).flatten(1, 2))
        if self._on_layer is not None:
            self._on_layer(layer_idx)
        keys, values = (self._gather(paged) for paged in self._paged[layer_idx])
        return keys, values

    def _gather(self, paged: Any) -> Any:
        heads, _, _, dim = paged.shape
        if self._run is not None:
            found = paged.narrow(1, *self._run)
        else:
            found = paged.index_select(1, self._gathered)
        return found.view(heads, self._rows, -1, dim).transpose(0, 1)[:, :, : self._tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens that the longest row had before this forward."""
        return self._tokens - self._new


def _consecutive(table: Sequence[int]) -> tuple[int, int] | None:
    """Return (first slot, count) if the slots follow each other, else None."""
    first = table[0]
    if all(slot == first + index for index, slot in enumerate(table)):
        return first, len(table)
    return None
