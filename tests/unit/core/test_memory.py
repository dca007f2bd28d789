import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from kvpool._native import ffi, lib
from kvpool.block import BlockLayout
from kvpool.errors import CorruptionError, LayoutMismatchError, UsageError
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of

LAYOUT = BlockLayout(num_layers=3, kv_heads=2, block_tokens=16, k_dim=4, v_dim=2)


def crcs_of(blocks: np.ndarray) -> np.ndarray:
    """Return the CRC32C per (layer, head) of payloads in canonical order."""
    shape = (len(blocks), LAYOUT.num_layers, LAYOUT.kv_heads)
    out = np.zeros(shape, dtype=np.uint32)
    heads = blocks.reshape(*shape, LAYOUT.head_bytes)
    for index in np.ndindex(shape):
        raw = heads[index].tobytes()
        out[index] = lib.kvp_crc32c(0, ffi.from_buffer("uint8_t[]", raw), len(raw))
    return out


def test_a_span_keeps_and_cuts_its_memory() -> None:
    buffer = bytearray(b"0123456789")
    span = Span.of(buffer)
    assert span.size == 10
    span.part(2, 3).view()[:] = b"abc"
    assert buffer == b"01abc56789"
    assert span.part(10, 0).size == 0
    for offset, size in ((8, 3), (-1, 2), (11, 0), (2, -1)):
        with pytest.raises(UsageError):
            span.part(offset, size)


def test_a_copy_carries_bytes_and_checksums() -> None:
    source = payload(LAYOUT, 3, seed=1)
    dest = np.zeros_like(source)
    crcs = copy_blocks(view_of(LAYOUT, dest), view_of(LAYOUT, source))
    np.testing.assert_array_equal(dest, source)
    np.testing.assert_array_equal(crcs, crcs_of(source))


def test_a_copy_of_some_layers_touches_no_other() -> None:
    source = payload(LAYOUT, 2, seed=2)
    dest = np.zeros_like(source)
    crcs = copy_blocks(view_of(LAYOUT, dest), view_of(LAYOUT, source), layers=range(1, 2))
    shape = (2, LAYOUT.num_layers, LAYOUT.layer_bytes)
    np.testing.assert_array_equal(dest.reshape(shape)[:, 1], source.reshape(shape)[:, 1])
    assert not dest.reshape(shape)[:, [0, 2]].any()
    np.testing.assert_array_equal(crcs, crcs_of(source)[:, 1:2])


def paged(array: np.ndarray, blocks: int) -> BlockView:
    """Describe an array [2, layers, blocks, tokens, heads, dim]: an engine's paged cache."""
    kv, layer, block, token, head, _ = array.strides
    span = Span.of(array)
    return BlockView(
        layout=SMALL_LAYOUT,
        base=span.address,
        block_stride=block,
        layer_stride=layer,
        head_stride=head,
        kv_stride=kv,
        k_token_stride=token,
        v_token_stride=token,
        block_ids=np.arange(blocks, dtype=np.uint64),
        owner=span.owner,
    )


def test_a_copy_converts_between_orders_and_back() -> None:
    layout = SMALL_LAYOUT
    shape = (2, layout.num_layers, 4, layout.block_tokens, layout.kv_heads, layout.k_dim)
    cache = np.random.default_rng(3).random(shape, dtype=np.float32)
    flat = np.zeros((4, layout.block_bytes), dtype=np.uint8)
    crcs = copy_blocks(view_of(layout, flat), paged(cache, 4))
    canonical = flat.view(np.float32).reshape(4, *(layout.num_layers, layout.kv_heads, 2, 16, 4))
    np.testing.assert_array_equal(canonical, cache.transpose(2, 1, 4, 0, 3, 5))
    back = np.zeros_like(cache)
    again = copy_blocks(paged(back, 4), view_of(layout, flat), crcs=crcs)
    np.testing.assert_array_equal(back, cache)
    np.testing.assert_array_equal(again, crcs)


def test_block_ids_choose_and_order() -> None:
    source = payload(LAYOUT, 4, seed=4)
    dest = np.zeros((2, LAYOUT.block_bytes), dtype=np.uint8)
    view = view_of(LAYOUT, source)
    copy_blocks(view_of(LAYOUT, dest), view.with_ids([3, 0]))
    np.testing.assert_array_equal(dest, source[[3, 0]])
    assert len(view.take(1, 3)) == 2
    assert view.take(1, 3).block_ids.tolist() == [1, 2]


def test_a_wrong_checksum_names_the_first_bad_block() -> None:
    source = payload(LAYOUT, 4, seed=5)
    crcs = crcs_of(source)
    source[2, 7] ^= 1
    dest = np.zeros_like(source)
    with pytest.raises(CorruptionError) as caught:
        copy_blocks(view_of(LAYOUT, dest), view_of(LAYOUT, source), crcs=crcs)
    assert caught.value.block == 2
    np.testing.assert_array_equal(dest[:2], source[:2])


def test_every_flipped_bit_is_seen() -> None:
    source = payload(LAYOUT, 1, seed=6)
    crcs = crcs_of(source)
    dest = np.zeros_like(source)
    for at in range(0, LAYOUT.block_bytes, 37):
        for bit in range(8):
            source[0, at] ^= 1 << bit
            with pytest.raises(CorruptionError):
                copy_blocks(view_of(LAYOUT, dest), view_of(LAYOUT, source), crcs=crcs)
            source[0, at] ^= 1 << bit


def test_what_does_not_fit_is_refused_and_nothing_is_copied() -> None:
    source, dest = payload(LAYOUT, 2, seed=7), np.zeros((2, LAYOUT.block_bytes), dtype=np.uint8)
    from_view, to_view = view_of(LAYOUT, source), view_of(LAYOUT, dest)
    with pytest.raises(UsageError, match="do not fit"):
        copy_blocks(to_view.take(0, 1), from_view)
    with pytest.raises(UsageError, match="pulled"):
        copy_blocks(replace(to_view, writable=False), from_view)
    for layers in (range(4), range(-1, 2), range(0, 3, 2), range(2, 1)):
        with pytest.raises(UsageError, match="layers"):
            copy_blocks(to_view, from_view, layers=layers)
    with pytest.raises(UsageError, match="shape"):
        copy_blocks(to_view, from_view, crcs=np.zeros((2, 3), dtype=np.uint32))
    with pytest.raises(LayoutMismatchError):
        copy_blocks(replace(to_view, layout=replace(LAYOUT, num_layers=2)), from_view)
    assert not dest.any()


def test_a_copy_of_nothing_is_fine() -> None:
    view = view_of(LAYOUT, payload(LAYOUT, 1, seed=8))
    assert copy_blocks(view.take(0, 0), view.take(0, 0)).shape == (0, 3, 2)
    assert copy_blocks(view, view, layers=range(1, 1)).shape == (1, 0, 2)


def test_a_buffer_of_half_a_block_is_refused() -> None:
    with pytest.raises(UsageError, match="whole blocks"):
        BlockView.of_buffer(LAYOUT, Span.of(bytearray(LAYOUT.block_bytes + 1)))


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros(4, dtype=np.uint32),
        np.zeros(4, dtype=np.int64),
        np.zeros((2, 2), dtype=np.uint64),
        np.zeros(8, dtype=np.uint64)[::2],
    ],
    ids=["short", "signed", "rows", "apart"],
)
def test_block_ids_that_c_would_not_read_as_they_are_meant_are_refused(
    ids: np.typing.NDArray[np.uint64],
) -> None:
    view = view_of(LAYOUT, payload(LAYOUT, 4, seed=1))
    with pytest.raises(UsageError, match=r"block ids .* give a contiguous array"):
        replace(view, block_ids=ids)


def test_a_view_keeps_its_memory_alive() -> None:
    view = view_of(LAYOUT, payload(LAYOUT, 1, seed=9))
    expected = payload(LAYOUT, 1, seed=9)
    payload(LAYOUT, 50, seed=10)  # would take the place of a freed array
    dest = np.zeros_like(expected)
    copy_blocks(view_of(LAYOUT, dest), view)
    np.testing.assert_array_equal(dest, expected)


def test_a_span_of_a_memoryview_may_lie_in_a_garbage_cycle() -> None:
    # In a process of its own: the fault ends the interpreter.
    script = (
        "import gc\n"
        "from kvpool.memory import Span\n"
        "class Node: pass\n"
        "node = Node()\n"
        "node.me, node.span = node, Span.of(memoryview(bytearray(64)))\n"
        "del node\n"
        "gc.collect()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
