"""copy.c: blocks between layouts against numpy."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.block import BlockLayout
from kvpool.errors import CorruptionError
from kvpool.memory import BlockView, Crcs, Span, copy_blocks

BLOCKS = 3
AXES = ("block", "layer", "head", "kv", "token")
Numbers = NDArray[np.uint8]


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    k_dim = draw(st.integers(1, 90))
    return BlockLayout(
        num_layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        block_tokens=16,
        k_dim=k_dim,
        v_dim=draw(st.sampled_from([0, k_dim, 7])),
        dtype="uint8",
    )


def make_view(
    layout: BlockLayout, order: tuple[str, ...], seed: int
) -> tuple[BlockView, Numbers, Numbers]:
    """Make memory whose axes lie in ``order``; return the view, the memory, and its canonical axes.

    The last is an array [block, layer, head, kv, token, byte] over the same memory, as wide as the
    wider of K and V.
    """
    counts = {
        "block": BLOCKS,
        "layer": layout.num_layers,
        "head": layout.kv_heads,
        "kv": 2,
        "token": layout.block_tokens,
    }
    width = max(layout.k_row_bytes, layout.v_row_bytes)
    shape = [*(counts[axis] for axis in order), width]
    memory = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    axes = memory.transpose([*(order.index(axis) for axis in AXES), 5])
    block, layer, head, kv, token, _ = axes.strides
    view = BlockView(
        layout=layout,
        base=memory.ctypes.data,
        block_stride=block,
        layer_stride=layer,
        head_stride=head,
        kv_stride=kv,
        k_token_stride=token,
        v_token_stride=token,
        block_ids=np.array([2, 0, 1], dtype=np.uint64),
        owner=memory,
    )
    return view, memory, axes


def reference(layout: BlockLayout, axes: Numbers, block_ids: list[int]) -> Crcs:
    """Sum each (layer, head) of the blocks, K rows then V rows, with the plain CRC function."""
    crcs = np.zeros((len(block_ids), layout.num_layers, layout.kv_heads), dtype=np.uint32)
    for block, layer, head in np.ndindex(crcs.shape):
        at = axes[block_ids[block], layer, head]
        payload = (
            at[0, :, : layout.k_row_bytes].tobytes() + at[1, :, : layout.v_row_bytes].tobytes()
        )
        crcs[block, layer, head] = lib.kvp_crc32c(0, payload, len(payload))
    return crcs


@settings(deadline=None)
@given(
    layout=layouts(),
    dest_order=st.permutations(AXES).map(tuple),
    source_order=st.permutations(AXES).map(tuple),
    seed=st.integers(0, 2**32),
    begin=st.integers(0, 2),
)
def test_between_layouts(
    layout: BlockLayout,
    dest_order: tuple[str, ...],
    source_order: tuple[str, ...],
    seed: int,
    begin: int,
) -> None:
    dest, dest_memory, dest_axes = make_view(layout, dest_order, seed)
    source, _, source_axes = make_view(layout, source_order, seed + 1)
    dest = dest.with_ids([0, 1, 2])
    layers = range(min(begin, layout.num_layers), layout.num_layers)

    expected = dest_memory.copy()
    expected_axes = expected.transpose([*(dest_order.index(axis) for axis in AXES), 5])
    for to, come_from in zip([0, 1, 2], [2, 0, 1], strict=True):
        for kv, width in enumerate([layout.k_row_bytes, layout.v_row_bytes]):
            expected_axes[to, layers.start :, :, kv, :, :width] = source_axes[
                come_from, layers.start :, :, kv, :, :width
            ]
    crcs = reference(layout, source_axes, [2, 0, 1])[:, layers.start :]

    assert np.array_equal(copy_blocks(dest, source, layers=layers, crcs=crcs), crcs)
    assert np.array_equal(dest_memory, expected)
    assert dest_axes.shape == source_axes.shape


@settings(deadline=None)
@given(layout=layouts(), seed=st.integers(0, 2**32))
def test_a_bad_block_is_named(layout: BlockLayout, seed: int) -> None:
    dest, _, dest_axes = make_view(layout, AXES, seed)
    source, _, source_axes = make_view(layout, AXES, seed + 1)
    crcs = reference(layout, source_axes, [2, 0, 1])
    where = tuple(seed // 7 % size for size in crcs.shape)
    crcs[where] ^= np.uint32(1 << seed % 32)

    with pytest.raises(CorruptionError) as caught:
        copy_blocks(dest, source, crcs=crcs)
    assert caught.value.block == where[0]
    k = slice(0, layout.k_row_bytes)
    for block_id in [2, 0, 1][: where[0]]:
        assert np.array_equal(
            dest_axes[block_id, ..., 0, :, k], source_axes[block_id, ..., 0, :, k]
        )


def test_spans_stop_when_cancelled() -> None:
    source, dest = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    starts = np.array([0, 16, 48], dtype=np.uintp)
    sizes = np.array([16, 32, 16], dtype=np.uintp)
    arguments = (
        ffi.from_buffer("uintptr_t[]", starts + np.uintp(dest.ctypes.data)),
        ffi.from_buffer("uintptr_t[]", starts + np.uintp(source.ctypes.data)),
        ffi.from_buffer("size_t[]", sizes),
        len(starts),
    )
    cancel, done = ffi.new("int32_t *", 1), ffi.new("size_t *")
    assert lib.kvp_copy_spans(*arguments, cancel, done) == lib.KVP_CLOSED
    assert done[0] == 0
    assert not dest.any()
    cancel[0] = 0
    assert lib.kvp_copy_spans(*arguments, cancel, done) == lib.KVP_OK
    assert done[0] == 3
    assert np.array_equal(dest, source)


def test_a_checksum_is_of_the_copy_even_if_the_source_changes_meanwhile() -> None:
    # Streamed, because it is large. A kernel that read the source twice failed one copy in 1,000.
    layout = BlockLayout(
        num_layers=4, kv_heads=1, block_tokens=64, k_dim=512, v_dim=512, dtype="uint8"
    )
    source = np.zeros(layout.block_bytes, dtype=np.uint8)
    copy = np.zeros((layout.num_layers, layout.layer_bytes), dtype=np.uint8)
    views = [BlockView.of_buffer(layout, Span.of(array.reshape(-1))) for array in (copy, source)]
    ended = threading.Event()

    def change() -> None:
        value = 0
        while not ended.is_set():
            value = (value + 1) % 256
            source.fill(value)

    peer = threading.Thread(target=change)
    peer.start()
    try:
        for _ in range(2000):
            crcs = copy_blocks(views[0], views[1])
            for layer in range(layout.num_layers):
                data = ffi.from_buffer("uint8_t[]", copy[layer])
                assert lib.kvp_crc32c(0, data, layout.layer_bytes) == crcs[0, layer, 0]
    finally:
        ended.set()
        peer.join()
