"""Attention over the paged cache equals attention written out plainly."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from kvpool.block import BlockLayout
from kvpool.integration.runtime import hf_cache
from kvpool.integration.runtime.hf_cache import CACHE_ARGUMENT, PagedCache, paged_attention
from kvpool.tiers.gpu import GpuTier

LAYOUT = BlockLayout(num_layers=2, kv_heads=2, block_tokens=16, k_dim=8, v_dim=8)
HEADS = 6
SLOTS = 40


def plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend [heads, new, dim] over [kv_heads, tokens, dim]: the last query sees every token."""
    new, tokens = query.shape[1], keys.shape[1]
    group = query.shape[0] // keys.shape[0]
    scores = query @ keys.repeat_interleave(group, 0).transpose(1, 2) * query.shape[2] ** -0.5
    hidden = torch.arange(tokens) > torch.arange(tokens - new, tokens)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)


class Rows:
    """Rows of random K and V, part of them in the arena already."""

    def __init__(self, starts: Sequence[int], new: int, tables: Sequence[Sequence[int]]) -> None:
        torch.manual_seed(len(starts) * 100 + new)
        self.starts, self.new, self.tables = starts, new, tables
        self.tier = GpuTier(LAYOUT, SLOTS)
        # Whatever an earlier life left behind must not matter.
        self.tier.arena[:, :, :, : self.tier.null_slot] = float("nan")
        self.kv = [torch.randn(2, 2, 2, start + new, 8) for start in starts]  # layer, kv, head
        cache = PagedCache(self.tier)
        for start, table, kv in zip(starts, tables, self.kv, strict=True):
            if start:
                cache.begin([0], start, [table])
                for layer in range(2):
                    cache.update(
                        kv[layer, 0][None, :, :start], kv[layer, 1][None, :, :start], layer
                    )
        self.cache = cache

    def check(self) -> list[int]:
        """Run both layers, compare each row, and return the layers that were announced."""
        announced: list[int] = []
        self.cache.begin(self.starts, self.new, self.tables, announced.append)
        for layer in range(2):
            query = torch.randn(len(self.starts), HEADS, self.new, 8)
            keys, values = (
                torch.stack([kv[layer, which][:, -self.new :] for kv in self.kv])
                for which in (0, 1)
            )
            passed = self.cache.update(keys, values, layer, kwargs={"anything": 1})
            out, weights = paged_attention(
                SimpleNamespace(layer_idx=layer),
                query,
                *passed,
                None,
                **{CACHE_ARGUMENT: self.cache},
            )
            assert weights is None
            assert out.is_contiguous()
            for row, kv in enumerate(self.kv):
                expected = plain(query[row], kv[layer, 0], kv[layer, 1])
                torch.testing.assert_close(out[row], expected, atol=2e-6, rtol=1e-5)
        assert not self.tier.arena[:, :, :, self.tier.null_slot].any()
        return announced


FIRST, SECOND, THIRD = [0, 1, 2, 3], [9, 5, 30, 4], [20, 19, 18, 17]


@pytest.mark.parametrize(
    ("starts", "new", "tables"),
    [
        ([0], 1, [FIRST]),
        ([0], 16, [FIRST]),
        ([0], 37, [FIRST]),
        ([0], 37, [SECOND]),
        ([16], 16, [SECOND]),
        ([21], 27, [FIRST]),
        ([21], 27, [SECOND]),
        ([15], 1, [SECOND]),
        ([16], 1, [FIRST]),
        ([63], 1, [SECOND]),
        ([5, 31, 48], 1, [FIRST, SECOND, THIRD]),
        ([16, 16], 1, [SECOND, THIRD]),
        ([0, 0], 20, [SECOND, THIRD]),
        ([3, 30], 7, [FIRST, THIRD]),
    ],
)
@pytest.mark.parametrize("gather_bytes", [1, hf_cache.GATHER_BYTES_MAX])
def test_paged_attention_is_attention(
    starts: list[int],
    new: int,
    tables: list[list[int]],
    gather_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hf_cache, "GATHER_BYTES_MAX", gather_bytes)
    assert Rows(starts, new, tables).check() == [0, 1]


def test_a_layer_is_announced_once_its_bytes_are_in_the_arena() -> None:
    tier = GpuTier(LAYOUT, SLOTS)
    cache = PagedCache(tier)
    keys, values = torch.randn(2, 1, 2, 3, 8)
    seen = []

    def look(layer: int) -> None:
        seen.append((layer, tier.arena[layer, :, :, 7, :3].clone()))

    cache.begin([0], 3, [[7]], look)
    for layer in range(2):
        cache.update(keys + layer, values + layer, layer)
        assert seen[-1][0] == layer
        torch.testing.assert_close(seen[-1][1], torch.stack([keys[0], values[0]]) + layer)


def test_rows_are_cut_where_their_gathered_bytes_pass_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = PagedCache(GpuTier(LAYOUT, SLOTS))
    monkeypatch.setattr(hf_cache, "GATHER_BYTES_MAX", 6 * LAYOUT.layer_bytes)
    assert cache._cuts([1, 2, 2]) == [(0, 3)]
    assert cache._cuts([1, 2, 3]) == [(0, 2), (2, 3)]
    assert cache._cuts([9, 1, 9]) == [(0, 1), (1, 2), (2, 3)]
    assert cache._cuts([3, 3, 1, 1, 1]) == [(0, 2), (2, 5)]
