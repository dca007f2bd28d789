"""The gpu tier, on torch's CPU device, passes the suite of tiers; its order is the attention's."""

from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch

from kvpool.arena import Slot
from kvpool.block import BlockHash, BlockLayout
from kvpool.errors import CapacityError, UsageError
from kvpool.memory import Crcs, copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, view_of, write
from kvpool.testing.planted import failing_tests
from kvpool.testing.tier_suite import SLOTS, TierSuite
from kvpool.tiers.base import Tier
from kvpool.tiers.gpu import GpuTier

LAYOUT = SMALL_LAYOUT


class TestGpuTier(TierSuite):
    layout = LAYOUT

    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        return GpuTier(layout, slot_count)


class TestGpuTierOfHalves(TierSuite):
    layout = BlockLayout(
        num_layers=2, kv_heads=3, block_tokens=32, k_dim=4, v_dim=4, dtype="bfloat16"
    )

    def open_tier(self, layout: BlockLayout, slot_count: int) -> Tier:
        return GpuTier(layout, slot_count)


def test_a_view_is_the_tensor_and_converts_to_canonical_order() -> None:
    rng = np.random.default_rng(3)
    with GpuTier(LAYOUT, SLOTS) as tier:
        slots = [tier.reserve(), tier.reserve()]
        numbers = [slot.index for slot in slots]
        shape = (3, 2, 2, 2, 16, 4)  # layer, kv, head, slot, token, dim: ARENA_ORDER
        values = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        tier.arena[:, :, :, numbers] = values
        out = np.zeros((2, LAYOUT.block_bytes), dtype=np.uint8)
        copy_blocks(view_of(LAYOUT, out), tier.view(slots, writable=False))
        # Canonical: block, layer, head, K then V, token, dim.
        expected = values.permute(3, 0, 2, 1, 4, 5).contiguous().numpy()
        np.testing.assert_array_equal(out.view(np.float32).reshape(expected.shape), expected)


def test_the_null_slot_is_never_given_out() -> None:
    with GpuTier(LAYOUT, SLOTS) as tier:
        for number in range(SLOTS):
            write(tier, key(number), payload(LAYOUT, 1, seed=number))
        with pytest.raises(UsageError):
            tier.drop(key(0), "because")
        assert not tier.arena[:, :, :, tier.null_slot].any()


def test_close_lets_go_of_the_memory() -> None:
    tier = GpuTier(LAYOUT, SLOTS)
    tier.close()
    assert tier.arena.untyped_storage().nbytes() == 0


def test_slots_of_one_request_tend_to_follow_each_other() -> None:
    with GpuTier(LAYOUT, SLOTS) as tier:
        assert [tier.reserve().index for _ in range(SLOTS)] == list(range(SLOTS))


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(UsageError, match="equally wide"):
        GpuTier(BlockLayout(num_layers=1, kv_heads=1, block_tokens=16, k_dim=8, v_dim=4), SLOTS)
    with pytest.raises(UsageError, match="no such device"):
        GpuTier(LAYOUT, SLOTS, device="cuda" if not torch.cuda.is_available() else "meta")
    with pytest.raises(UsageError, match="at least one"):
        GpuTier(LAYOUT, 0)
    with pytest.raises(CapacityError):
        GpuTier(LAYOUT, 2**45)


class _ForgetsParents(GpuTier):
    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """A planted bug: every block begins a chain."""
        return super().commit(slot, key, None, crcs)


def test_the_suite_fails_on_a_tier_that_forgets_parents() -> None:
    def fresh() -> AbstractContextManager[Tier]:
        return _ForgetsParents(LAYOUT, SLOTS)

    assert failing_tests(TestGpuTier(), fresh) == [
        "test_a_block_goes_before_its_ancestors",
        "test_a_commit_that_does_not_fit_changes_nothing",
        "test_a_pinned_block_and_its_ancestors_stay",
        "test_branches_go_before_their_common_parent",
    ]
