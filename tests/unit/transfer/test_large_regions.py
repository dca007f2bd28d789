"""Memory of more than 64 GiB: every offset is 64 bits wide, on both paths. No page is touched twice."""

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.block import BlockLayout
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import WAIT_S, Collected
from kvpool.transfer.ucx_engine import UcxEngine

HUGE = 80 << 30
EDGE = 64 << 30
SIZE = 1 << 20
_MAP_NORESERVE = 0x4000  # of Linux; the module names it from Python 3.13 on


@pytest.fixture
def huge() -> Iterator[NDArray[np.uint8]]:
    """Address space without memory: pages come when they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    yield np.frombuffer(mmap.mmap(-1, HUGE, flags=flags), dtype=np.uint8)


@pytest.mark.ucx
def test_puts_reach_every_part_of_a_large_inbox(huge: NDArray[np.uint8]) -> None:
    data = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    # Before, across, and behind each power of two that a narrower number would end at.
    offsets = [0, (4 << 30) - SIZE // 2, EDGE - SIZE // 2, EDGE + SIZE, HUGE - SIZE]
    with (
        UcxEngine(inbox=Span.of(huge), endpoint_max=1) as owner,
        UcxEngine(endpoint_max=1) as writer,
    ):
        arrived = Collected()
        port = owner.listen(lambda connection: connection.on_notification(arrived))
        connection = writer.connect("127.0.0.1", port, WAIT_S)
        pairs = [(Span.of(data), offset) for offset in offsets]
        connection.put(pairs, WAIT_S, b"there").wait(WAIT_S)
        arrived.wait(1)
        for offset in offsets:
            np.testing.assert_array_equal(huge[offset : offset + SIZE], data)
            assert not huge[max(0, offset - 64) : offset].any()
            assert not huge[offset + SIZE : offset + SIZE + 64].any()


def test_blocks_are_copied_at_every_offset_of_a_large_region(huge: NDArray[np.uint8]) -> None:
    layout = BlockLayout(num_layers=2, kv_heads=2, block_tokens=16, k_dim=64, v_dim=64)
    blocks = payload(layout, 3, seed=2)
    view = BlockView.of_buffer(layout, Span.of(huge[: HUGE - HUGE % layout.block_bytes]))
    size = layout.block_bytes
    far = view.with_ids([0, EDGE // size, HUGE // size - 1])
    crcs = copy_blocks(far, view_of(layout, blocks))
    back = np.zeros_like(blocks)
    copy_blocks(view_of(layout, back), far, crcs=crcs)
    np.testing.assert_array_equal(back, blocks)
    at = EDGE // size * size
    np.testing.assert_array_equal(huge[at : at + size], blocks[1])
