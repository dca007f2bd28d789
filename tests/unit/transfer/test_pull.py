"""What a read does, at the moments that two processes cannot be made to hit on purpose."""

import numpy as np
import pytest

from kvpool.arena import Arena, Slot, Window
from kvpool.block import BlockLayout, new_incarnation
from kvpool.errors import LeaseExpiredError, UsageError
from kvpool.memory import BlockView, Span
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import empty, named, publish
from kvpool.transfer.base import RemoteSlots
from kvpool.transfer.pull import BATCH_BYTES, BlockPull, SpanPull, layer_view, require_dest


def test_checksums_of_the_caller_in_any_stride_are_compared() -> None:
    arena = Arena(SMALL_LAYOUT, 4, new_incarnation())
    blocks = payload(SMALL_LAYOUT, 4, seed=1)
    slots = publish(arena, blocks)
    window = Window(arena.fd, arena.incarnation)
    right, good = window.crcs(
        SMALL_LAYOUT, [slot.index for slot in slots], [slot.generation for slot in slots]
    )
    assert good == 4
    wide = np.zeros((8, *right.shape[1:]), dtype=np.uint32)
    wide[::2] = right
    for crcs in (right, wide[::2]):
        out = empty(SMALL_LAYOUT, 4)
        dest, source = view_of(SMALL_LAYOUT, out), named(0, slots)
        pull = BlockPull(window, dest, source, SMALL_LAYOUT, None, crcs)
        assert [pull.copy(0, 2), pull.copy(2, 4)] == [2, 2]
        np.testing.assert_array_equal(out, blocks)
        crcs[2, 0, 0] ^= 1
        assert [pull.copy(0, 4), pull.copy(1, 4)] == [2, 1]
        crcs[2, 0, 0] ^= 1


def test_a_slot_in_another_life_ends_a_batch() -> None:
    arena = Arena(SMALL_LAYOUT, 4, new_incarnation())
    slots = publish(arena, payload(SMALL_LAYOUT, 4, seed=1))
    window = Window(arena.fd, arena.incarnation)
    dest = view_of(SMALL_LAYOUT, empty(SMALL_LAYOUT, 4))
    pull = BlockPull(window, dest, named(0, slots), SMALL_LAYOUT, None)
    arena.release(slots[2])
    assert [pull.copy(0, 4), pull.copy(1, 4), pull.copy(2, 4)] == [2, 1, 0]


def test_batches_cover_all_blocks_in_order() -> None:
    layout = BlockLayout(num_layers=4, kv_heads=8, block_tokens=64, k_dim=64, v_dim=64)
    count = 3 * BATCH_BYTES // layout.block_bytes + 1
    arena = Arena(layout, 1, new_incarnation())
    slot = publish(arena, payload(layout, 1, seed=3))[0]
    dest = BlockView.canonical(layout, 4096, layout.block_bytes, list(range(count)))
    pull = BlockPull(
        Window(arena.fd, arena.incarnation), dest, named(0, [slot] * count), layout, None
    )
    assert pull.batches[0][0] == 0
    assert pull.batches[-1][1] == count
    assert [end for _, end in pull.batches[:-1]] == [begin for begin, _ in pull.batches[1:]]
    assert all((end - begin) * layout.block_bytes <= BATCH_BYTES for begin, end in pull.batches)
    assert len(pull.batches) == 4


def test_spans_of_many_batches() -> None:
    layout = BlockLayout(num_layers=4, kv_heads=8, block_tokens=64, k_dim=128, v_dim=128)
    arena = Arena(layout, 2, new_incarnation())
    blocks = payload(layout, 2, seed=4)
    slots = publish(arena, blocks)
    count = 2 * BATCH_BYTES // layout.block_bytes + 1
    out = empty(layout, count)
    pairs = [(Span.of(out[i]), named(0, [slots[i % 2]]), 0) for i in range(count)]
    window = Window(arena.fd, arena.incarnation)
    pull = SpanPull(pairs, [window] * count)
    assert len(pull.batches) > 1
    assert [pull.copy(begin, end) for begin, end in pull.batches] == [
        end - begin for begin, end in pull.batches
    ]
    np.testing.assert_array_equal(out, blocks[np.arange(count) % 2])
    assert pull.result(count) == out.nbytes
    arena.release(slots[1])
    assert pull.copy(*pull.batches[0]) == 1
    with pytest.raises(LeaseExpiredError):
        pull.result(1)


def test_layer_view_is_the_same_memory() -> None:
    out = empty(SMALL_LAYOUT, 2)
    view = view_of(SMALL_LAYOUT, out)
    layer = layer_view(view, 2)
    assert layer.base == view.base + 2 * SMALL_LAYOUT.layer_bytes
    assert layer.block_stride == view.block_stride
    assert layer.layout.num_layers == 1
    for number in (-1, SMALL_LAYOUT.num_layers):
        with pytest.raises(UsageError):
            layer_view(view, number)


def test_a_destination_cannot_be_a_peers_memory() -> None:
    arena = Arena(SMALL_LAYOUT, 2, new_incarnation())
    slots: list[Slot] = publish(arena, payload(SMALL_LAYOUT, 2, seed=5))
    window = Window(arena.fd, arena.incarnation)
    dest = window.view(SMALL_LAYOUT, [1])
    with pytest.raises(UsageError):
        BlockPull(window, dest, named(0, slots[:1]), SMALL_LAYOUT, None)


@pytest.mark.parametrize("ids", [[3, 1, 3], [0, 0, 1], [2, 1, 1], [5, 4, 3, 5]])
def test_a_block_named_twice_is_refused_in_any_order(ids: list[int]) -> None:
    out = np.zeros((8, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
    view = view_of(SMALL_LAYOUT, out)
    source = RemoteSlots(0, tuple(range(len(ids))), (1,) * len(ids))
    with pytest.raises(UsageError, match="twice"):
        require_dest(view.with_ids(ids), source, SMALL_LAYOUT, None, None)
    distinct = list(dict.fromkeys(ids))
    source = RemoteSlots(0, tuple(range(len(distinct))), (1,) * len(distinct))
    assert len(require_dest(view.with_ids(distinct), source, SMALL_LAYOUT, None, None)) > 0
