"""Blocks between a gpu tier and DRAM: byte for byte, in the right order, and never a damaged one.

Everything runs on torch's CPU device, and again on a card where there is one.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from kvpool.arena import Arena, Slot
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout, new_incarnation
from kvpool.errors import ClosedError, LayoutMismatchError, TransferTimeoutError, UsageError
from kvpool.memory import Span, copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, read, view_of
from kvpool.tiers.dram import DramTier
from kvpool.tiers.flusher import FlushLimits
from kvpool.tiers.gpu import GpuTier
from kvpool.tiers.gpu_mover import GpuMover
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.stack import StackTier
from kvpool.tiers.tokens import TokenRows
from tests.conftest import Count

LAYOUT = SMALL_LAYOUT
BLOCKS = 11
RING = 4  # a buffer of two blocks, so that eleven take six turns of the ring
WAIT_S = 60.0
KEYS = b"".join(key(number) for number in range(BLOCKS))
PAYLOADS = payload(LAYOUT, BLOCKS, seed=5)
TOKENS = np.arange(BLOCKS * LAYOUT.block_tokens, dtype=np.uint32).reshape(BLOCKS, -1)
CARD = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ],
)


@pytest.fixture(params=["cpu", CARD])
def gpu(request: pytest.FixtureRequest) -> Iterator[GpuTier]:
    with GpuTier(LAYOUT, BLOCKS, device=request.param) as tier:
        yield tier


def empty(slots: int = BLOCKS, layout: BlockLayout = LAYOUT) -> DramTier:
    return DramTier(Arena(layout, slots, new_incarnation()))


@pytest.fixture
def full() -> Iterator[DramTier]:
    """Make a DRAM tier with all the blocks, one chain, with their tokens."""
    with empty() as tier:
        fill(tier)
        yield tier


def fill(tier: DramTier) -> None:
    room = tier.reserve_run(BLOCKS)
    tier.note_tokens(room, TOKENS)
    crcs = copy_blocks(tier.view(room, writable=True), view_of(LAYOUT, PAYLOADS))
    tier.settle_run(room)
    assert tier.commit_run(room, KEYS, None, crcs) == BLOCKS


def assert_at_rest(*tiers: DramTier | GpuTier) -> None:
    for tier in tiers:
        stats = tier.stats()
        assert (stats.reserved, stats.quarantined, stats.pins) == (0, 0, 0), tier.name


def damage(tier: DramTier, number: int) -> None:
    """Flip a bit of a block where it lies."""
    slots = tier.hold(key(number))
    view = tier.view(slots, writable=False)
    address = view.base + int(view.block_ids[0]) * view.block_stride + 70
    byte = Span(address, 1).view()
    byte[0] ^= 4
    tier.unpin(slots)


def test_what_comes_later_is_the_child_of_what_is_there(gpu: GpuTier, full: DramTier) -> None:
    """So a block goes before those above it, whichever came first."""
    mover = GpuMover(gpu, ring_blocks=RING)
    for blocks in (3, BLOCKS):
        some = KEYS[: blocks * HASH_BYTES]
        assert mover.promote(some, None, full, deadline_s=WAIT_S) == blocks
    with empty() as below:
        for blocks in (3, BLOCKS):
            some = KEYS[: blocks * HASH_BYTES]
            assert mover.demote(some, None, below, deadline_s=WAIT_S) == blocks
        for tier in (gpu, below):
            assert tier.evict(1) == 1
            assert tier.match(KEYS) == BLOCKS - 1


def test_a_tier_that_closes_meanwhile_leaves_no_slot_in_the_other(gpu: GpuTier) -> None:
    """At any call of either: a tier that closes is seen at each of its next calls."""

    class Closing(DramTier):
        """Closes at one of its calls after the copy."""

        def __init__(self, at: str) -> None:
            super().__init__(Arena(LAYOUT, BLOCKS, new_incarnation()))
            self.at = at

        def tokens(self, slots: Sequence[Slot]) -> TokenRows:
            if self.at == "tokens":
                self.close()
            return super().tokens(slots)

        def drop(self, key: BlockHash, reason: str) -> bool:
            if self.at == "drop":
                self.close()
            return super().drop(key, reason)

    for at in ("tokens", "drop"):
        with Closing(at) as below:
            fill(below)
            if at == "drop":
                damage(below, 3)
            with pytest.raises(ClosedError):
                GpuMover(gpu, ring_blocks=RING).promote(KEYS, None, below, deadline_s=WAIT_S)
        assert_at_rest(gpu)
        assert gpu.match(KEYS) == 0


def test_there_and_back_is_byte_for_byte(gpu: GpuTier, full: DramTier) -> None:
    mover = GpuMover(gpu, ring_blocks=RING)
    assert mover.promote(KEYS, None, full, deadline_s=WAIT_S) == BLOCKS
    assert gpu.match(KEYS) == BLOCKS
    slots = gpu.pin(KEYS)
    np.testing.assert_array_equal(gpu.crcs(slots), full.crcs(full.hold(KEYS)))
    # The arena is layer, kv, head, slot, token, dim; a payload is layer, head, kv, token, dim.
    held = gpu.arena[:, :, :, slots.indices.astype(np.int64)].cpu().permute(3, 0, 2, 1, 4, 5)
    np.testing.assert_array_equal(
        held.contiguous().numpy().view(np.uint8).reshape(BLOCKS, -1), PAYLOADS
    )
    gpu.unpin(slots)
    with empty() as below:
        assert mover.demote(KEYS, None, below, deadline_s=WAIT_S) == BLOCKS
        slots = below.pin(KEYS)
        np.testing.assert_array_equal(read(below, slots), PAYLOADS)
        assert below.same_tokens(slots, TOKENS) == BLOCKS
        assert below.same_tokens(slots, TOKENS[::-1]) == 0
        below.unpin(slots)
        assert_at_rest(gpu, below)
    assert not gpu.arena[:, :, :, gpu.null_slot].any()


def test_blocks_of_halves_keep_every_bit() -> None:
    """Numbers that are none (NaN), and all others, are moved as they are."""
    layout = BlockLayout(
        num_layers=2, kv_heads=3, block_tokens=32, k_dim=4, v_dim=4, dtype="bfloat16"
    )
    blocks = payload(layout, 2, seed=9)
    blocks[0] = 0xFF
    keys = KEYS[:64]
    with empty(2, layout) as source, empty(2, layout) as dest, GpuTier(layout, 2) as gpu:
        room = source.reserve_run(2)
        crcs = copy_blocks(source.view(room, writable=True), view_of(layout, blocks))
        source.settle_run(room)
        source.commit_run(room, keys, None, crcs)
        mover = GpuMover(gpu, ring_blocks=2)
        assert mover.promote(keys, None, source, deadline_s=WAIT_S) == 2
        assert mover.demote(keys, None, dest, deadline_s=WAIT_S) == 2
        np.testing.assert_array_equal(read(dest, dest.pin(keys)), blocks)


@pytest.mark.parametrize("number", [0, 2, 7, BLOCKS - 1])
def test_a_damaged_block_below_does_not_come_up(gpu: GpuTier, full: DramTier, number: int) -> None:
    damage(full, number)
    mover = GpuMover(gpu, ring_blocks=RING)
    assert mover.promote(KEYS, None, full, deadline_s=WAIT_S) == number
    assert gpu.match(KEYS) == number == full.match(KEYS)
    assert full.stats().corruptions == 1
    assert_at_rest(gpu, full)


@pytest.mark.parametrize("number", [0, 2, 7, BLOCKS - 1])
def test_a_damaged_block_of_the_device_does_not_go_down(
    gpu: GpuTier, full: DramTier, number: int
) -> None:
    mover = GpuMover(gpu, ring_blocks=RING)
    assert mover.promote(KEYS, None, full, deadline_s=WAIT_S) == BLOCKS
    slots = gpu.hold(key(number))
    gpu.arena[1, 0, 1, int(slots.indices[0]), 3, 2] = 0
    gpu.unpin(slots)
    with empty() as below:
        assert mover.demote(KEYS, None, below, deadline_s=WAIT_S) == number
        assert below.match(KEYS) == number == gpu.match(KEYS)
        assert gpu.stats().corruptions == 1
        # The ring goes on after a move that ended early.
        assert mover.promote(KEYS, None, full, deadline_s=WAIT_S) == BLOCKS
        assert mover.demote(KEYS, None, below, deadline_s=WAIT_S) == BLOCKS
        np.testing.assert_array_equal(read(below, below.pin(KEYS)), PAYLOADS)


def test_only_what_is_not_there_is_moved(gpu: GpuTier, full: DramTier) -> None:
    mover = GpuMover(gpu, ring_blocks=RING)
    assert mover.promote(KEYS[:96], None, full, deadline_s=WAIT_S) == 3
    before = gpu.hold(KEYS[:96])
    assert mover.promote(KEYS, None, full, deadline_s=WAIT_S) == BLOCKS
    assert gpu.hold(KEYS[:96]) == before
    assert mover.promote(KEYS, None, full, deadline_s=WAIT_S) == BLOCKS
    assert gpu.evict(BLOCKS) == BLOCKS - 3, "a chain of one parent after the other"


def test_a_tier_without_room_takes_what_it_can(full: DramTier) -> None:
    with GpuTier(LAYOUT, 4) as gpu, empty(3) as below:
        mover = GpuMover(gpu, ring_blocks=RING)
        assert mover.promote(KEYS, None, full, deadline_s=WAIT_S) == 4
        assert mover.demote(KEYS, None, below, deadline_s=WAIT_S) == 3
        pinned = below.pin(KEYS)
        assert mover.demote(KEYS[96:], key(2), below, deadline_s=WAIT_S) == 0
        np.testing.assert_array_equal(read(below, pinned), PAYLOADS[:3])
        below.unpin(pinned)
        assert_at_rest(gpu, below, full)


def test_what_is_on_a_disk_alone_comes_up_to_the_device(gpu: GpuTier, tmp_path: Path) -> None:
    """Down from the device to DRAM and the SSD, out of DRAM, and up again through both."""
    size = BLOCKS * LAYOUT.block_bytes
    limits = FlushLimits(
        bytes_s=0,
        batch_bytes=size,
        timeout_s=WAIT_S,
        backlog_bytes_max=size,
        high_bytes=size,
        low_bytes=size,
    )
    disk = SsdTier(tmp_path, LAYOUT, 2 * BLOCKS, threads=2, timeout_s=WAIT_S)
    with StackTier(empty(), disk, limits, durable_bytes_max=size) as stack, empty() as source:
        mover = GpuMover(gpu, ring_blocks=RING)
        room = source.reserve_run(BLOCKS)
        source.note_tokens(room, TOKENS)
        crcs = copy_blocks(source.view(room, writable=True), view_of(LAYOUT, PAYLOADS))
        source.settle_run(room)
        source.commit_run(room, KEYS, None, crcs)
        assert mover.promote(KEYS, None, source, deadline_s=WAIT_S) == BLOCKS
        assert mover.demote(KEYS, None, stack, deadline_s=WAIT_S) == BLOCKS
        assert stack.flusher.wait_idle(WAIT_S)
        assert (stack.evict(BLOCKS), gpu.evict(BLOCKS)) == (BLOCKS, BLOCKS)
        assert mover.promote(KEYS, None, stack, deadline_s=WAIT_S) == BLOCKS
        slots = gpu.pin(KEYS)
        assert gpu.same_tokens(slots, TOKENS) == BLOCKS
        gpu.unpin(slots)
        with empty() as below:
            assert mover.demote(KEYS, None, below, deadline_s=WAIT_S) == BLOCKS
            np.testing.assert_array_equal(read(below, below.pin(KEYS)), PAYLOADS)


def test_threads_that_move_at_the_same_time_see_only_right_bytes(
    gpu: GpuTier, full: DramTier, count: Count
) -> None:
    """One ring for all of them: moves go one after another, whoever evicts in between."""
    mover = GpuMover(gpu, ring_blocks=RING)

    def work(thread: int) -> None:
        for turn in range(count(5, 500)):
            first = (3 * thread + turn) % BLOCKS
            keys = KEYS[32 * first :]
            parent = key(first - 1) if first else None
            mover.promote(keys, parent, full, deadline_s=WAIT_S)
            with empty() as below:
                good = mover.demote(keys, parent, below, deadline_s=WAIT_S)
                slots = below.pin(keys)
                assert len(slots) == good
                np.testing.assert_array_equal(read(below, slots), PAYLOADS[first : first + good])
            gpu.evict(2)

    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(work, range(4)):
            pass
    assert (gpu.stats().corruptions, full.stats().corruptions) == (0, 0)
    assert_at_rest(gpu, full)


def test_what_does_not_fit_is_refused(full: DramTier) -> None:
    other = BlockLayout(num_layers=1, kv_heads=1, block_tokens=16, k_dim=8, v_dim=8)
    with GpuTier(LAYOUT, 2) as gpu, empty(2, other) as below:
        with pytest.raises(UsageError, match="at least 2"):
            GpuMover(gpu, ring_blocks=1)
        mover = GpuMover(gpu, ring_blocks=2)
        with pytest.raises(LayoutMismatchError):
            mover.demote(KEYS, None, below, deadline_s=WAIT_S)
        with pytest.raises(LayoutMismatchError):
            mover.promote(KEYS, None, below, deadline_s=WAIT_S)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_device_that_is_busy_ends_a_move_at_its_deadline(full: DramTier) -> None:
    """A move goes behind what computes the blocks; its wait has an end, and leaves nothing behind."""
    with GpuTier(LAYOUT, BLOCKS, device="cuda") as gpu, empty() as below:
        mover = GpuMover(gpu, ring_blocks=RING)
        assert mover.promote(KEYS, None, full, deadline_s=WAIT_S) == BLOCKS
        weights = torch.rand(4096, 4096, device="cuda")
        for _ in range(2000):  # seconds of work, on the stream that blocks are computed on
            weights = (weights @ weights).clamp_(-1, 1)
        with pytest.raises(TransferTimeoutError):
            mover.demote(KEYS, None, below, deadline_s=0.01)
        assert_at_rest(gpu, below)
        torch.cuda.synchronize()
        assert mover.demote(KEYS, None, below, deadline_s=WAIT_S) == BLOCKS
        np.testing.assert_array_equal(read(below, below.pin(KEYS)), PAYLOADS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_models_stream_sees_what_was_promoted(full: DramTier) -> None:
    """Nobody waits on the host: a kernel that is queued after ``promote`` reads the new blocks."""
    compute = torch.cuda.Stream()
    with GpuTier(LAYOUT, BLOCKS, device="cuda") as gpu:
        mover = GpuMover(gpu, ring_blocks=BLOCKS * 2, compute=compute)
        assert mover.promote(KEYS, None, full, deadline_s=WAIT_S) == BLOCKS
        slots = gpu.hold(KEYS)
        with torch.cuda.stream(compute):
            ids = torch.from_numpy(slots.indices.astype(np.int64)).cuda()
            blocks = gpu.arena.index_select(3, ids).permute(3, 0, 2, 1, 4, 5).contiguous()
        compute.synchronize()
        np.testing.assert_array_equal(
            blocks.cpu().numpy().view(np.uint8).reshape(BLOCKS, -1), PAYLOADS
        )


def test_a_card_has_no_addresses_for_the_host() -> None:
    """Planted: the arena says that it lies on a device that the C core cannot reach."""
    with GpuTier(LAYOUT, 2) as gpu:
        gpu.arena = gpu.arena.to("meta")
        with pytest.raises(UsageError, match="GpuMover"):
            gpu.view([gpu.reserve()], writable=True)
