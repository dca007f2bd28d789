"""How reads over UCX are cut, and that every copy out of the inbox is checked."""

from dataclasses import replace

import numpy as np
import pytest

from kvpool._native import ffi, lib
from kvpool.block import Incarnation
from kvpool.errors import CapacityError, CorruptionError, LeaseExpiredError, UsageError
from kvpool.memory import Span, copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import empty
from kvpool.transfer.base import RegionDescriptor, RemoteSlots
from kvpool.transfer.ucx_cuts import BlockJob, Cut, PeerRegion, SpanJob
from kvpool.transfer.ucx_wire import ASK_SLOTS_MAX

LAYOUT = SMALL_LAYOUT
WINDOW = 1 << 20
REGION = PeerRegion(
    RegionDescriptor(Incarnation(bytes(16)), 0, 1000, LAYOUT.block_bytes), LAYOUT.crc_count
)


def source(count: int) -> RemoteSlots:
    return RemoteSlots(0, tuple(range(count)), (1,) * count)


def block_job(count: int, window_bytes: int = WINDOW) -> tuple[BlockJob, np.ndarray]:
    out = empty(LAYOUT, count)
    job = BlockJob(REGION, window_bytes, view_of(LAYOUT, out), source(count), LAYOUT, None, None)
    return job, out


def arrive(cut: Cut, blocks: np.ndarray, crcs: np.ndarray) -> np.ndarray:
    """What the owner puts into a window for a cut."""
    parts = [blocks[slot, cut.offset : cut.offset + cut.size] for slot in cut.slots]
    last = cut.first_crc + cut.crc_count
    rows = crcs.reshape(len(blocks), -1)[list(cut.slots), cut.first_crc : last]
    return np.concatenate([*parts, np.ascontiguousarray(rows).reshape(-1).view(np.uint8)])


def crcs_of(blocks: np.ndarray) -> np.ndarray:
    return copy_blocks(view_of(LAYOUT, empty(LAYOUT, len(blocks))), view_of(LAYOUT, blocks))


@pytest.mark.parametrize("windows", [WINDOW, LAYOUT.layer_bytes * 2 + 100, LAYOUT.layer_bytes + 64])
def test_every_byte_is_in_one_cut_that_fits_a_window(windows: int) -> None:
    job, out = block_job(150, windows)
    blocks = payload(LAYOUT, 150, seed=1)
    crcs = crcs_of(blocks)
    for cut in job.cuts:
        window = arrive(cut, blocks, crcs)
        assert window.size <= windows
        assert len(cut.slots) <= ASK_SLOTS_MAX
        assert job.copy(cut, len(cut.slots), Span.of(window)) == len(cut.slots)
    np.testing.assert_array_equal(out, blocks)
    assert sum(len(cut.slots) * cut.size for cut in job.cuts) == blocks.size


def test_a_flipped_byte_ends_the_leading_blocks() -> None:
    job, _ = block_job(5)
    blocks = payload(LAYOUT, 5, seed=2)
    (cut,) = job.cuts
    window = arrive(cut, blocks, crcs_of(blocks))
    window[3 * LAYOUT.block_bytes + 17] ^= 1
    assert job.copy(cut, 5, Span.of(window)) == 3
    assert job.copy(cut, 2, Span.of(window)) == 2


def test_a_window_too_small_for_a_layer_is_named() -> None:
    with pytest.raises(CapacityError, match="inbox"):
        block_job(1, LAYOUT.layer_bytes)


def test_slots_of_another_shape_are_refused() -> None:
    out = empty(LAYOUT, 1)
    for region in (
        PeerRegion(REGION.descriptor, LAYOUT.crc_count + 1),
        PeerRegion(replace(REGION.descriptor, slot_bytes=64), LAYOUT.crc_count),
    ):
        with pytest.raises(UsageError):
            BlockJob(region, WINDOW, view_of(LAYOUT, out), source(1), LAYOUT, None, None)


def test_spans_alike_share_an_ask_and_large_ones_are_split() -> None:
    out = np.zeros(6000, dtype=np.uint8)
    span = Span.of(out)
    geometry = replace(REGION.descriptor, slot_bytes=8192)
    region = PeerRegion(geometry, 0)
    pairs = [
        (span.part(at, 100), RemoteSlots(0, (at // 100,), (1,)), 7) for at in range(0, 500, 100)
    ]
    pairs.append((span.part(1000, 5000), RemoteSlots(0, (9,), (1,)), 0))
    job = SpanJob(pairs, [region] * len(pairs), 2048)
    assert [len(cut.slots) for cut in job.cuts] == [5, 1, 1, 1]
    slots = np.random.default_rng(3).integers(0, 256, (10, 8192), dtype=np.uint8)
    for cut in job.cuts:
        pieces = [slots[slot, cut.offset : cut.offset + cut.size].copy() for slot in cut.slots]
        crcs = np.array(
            [
                lib.kvp_crc32c(0, ffi.from_buffer("uint8_t[]", piece), piece.size)
                for piece in pieces
            ],
            dtype=np.uint32,
        )
        window = np.concatenate([*pieces, crcs.view(np.uint8)])
        assert window.size <= 2048
        assert job.copy(cut, len(cut.slots), Span.of(window)) == len(cut.slots)
        window[cut.size // 2] ^= 4
        with pytest.raises(CorruptionError):
            job.copy(cut, len(cut.slots), Span.of(window))
    for at in range(0, 500, 100):
        np.testing.assert_array_equal(out[at : at + 100], slots[at // 100, 7:107])
    np.testing.assert_array_equal(out[1000:], slots[9, :5000])
    assert job.result(job.count) == 5500
    with pytest.raises(LeaseExpiredError):
        job.result(2)
