"""Reads over UCX as their caller sees them: what is refused, and how each ends.

The other side of the engine is in native/tests/ucx_reads.c. Here the test stands in for the engine:
it ends reads as C would.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpool._native import lib
from kvpool.block import BlockLayout, Incarnation
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    CorruptionError,
    InternalError,
    KVPoolError,
    LayoutMismatchError,
    LeaseExpiredError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import Span
from kvpool.testing.blocks import SMALL_LAYOUT, view_of
from kvpool.testing.pair import empty
from kvpool.transfer.base import RegionDescriptor, RemoteSlots
from kvpool.transfer.ucx_reads import HEADS_MAX, Ended, Job, PeerRegion, Reads, block_job, span_job

LAYOUT = SMALL_LAYOUT
WAIT_S = 20.0
REGION = PeerRegion(
    RegionDescriptor(Incarnation(bytes(16)), 0, 1000, LAYOUT.block_bytes), LAYOUT.crc_count
)


class Line:
    """An engine whose reads end when the test says so."""

    def __init__(self) -> None:
        self.reads: dict[int, Ended] = {}
        self.cancelled: list[int] = []
        self.refuses: KVPoolError | None = None
        self.all_ended = False
        self.lost: list[KVPoolError] = []

    def read(self, connection_id: int, job: object, deadline_s: float, ended: Ended) -> int:
        if self.refuses is not None:
            raise self.refuses
        self.reads[len(self.reads)] = ended
        return len(self.reads) - 1

    def cancel_read(self, read: int) -> None:
        self.cancelled.append(read)

    def end_reads(self, connection_id: int) -> None:
        self.all_ended = True

    def windows(self, connection_id: int) -> tuple[int, int]:
        return 8, 0


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def reads(line: Line) -> Reads:
    return Reads(line, 1, line.lost.append)


def source(count: int) -> RemoteSlots:
    return RemoteSlots(0, tuple(range(count)), (1,) * count)


def job(count: int = 3) -> Job:
    return block_job(
        REGION, view_of(LAYOUT, empty(LAYOUT, count)), source(count), LAYOUT, None, None
    )


def spans(*sizes: int) -> Job:
    out = Span.of(np.zeros(sum(sizes), dtype=np.uint8))
    ends = np.cumsum(sizes).tolist()
    pairs = [
        (out.part(end - size, size), RemoteSlots(0, (index,), (1,)), 0)
        for index, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    return span_job(pairs, [REGION] * len(pairs))


def test_a_read_ends_with_what_arrived(line: Line, reads: Reads) -> None:
    blocks, flat = reads.submit(job(), WAIT_S), reads.submit(spans(100, 20), WAIT_S)
    assert not reads.drain(0.0)
    line.reads[0](lib.KVP_OK, 0, 2)
    line.reads[1](lib.KVP_OK, 0, 2)
    assert blocks.wait(0.0) == 2
    assert flat.wait(0.0) == 120
    assert reads.drain(0.0)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (lib.KVP_TIMEOUT, TransferTimeoutError),
        (lib.KVP_CANCELLED, CancelledTransferError),
        (lib.KVP_STALE, LeaseExpiredError),
        (lib.KVP_CORRUPT, CorruptionError),
        (lib.KVP_CLOSED, ClosedError),
        (lib.KVP_PEER, PeerUnreachableError),
        (lib.KVP_INVALID, PeerUnreachableError),
        (lib.KVP_SYSTEM, InternalError),
    ],
)
def test_a_read_ends_with_a_typed_error(
    line: Line, reads: Reads, status: int, error: type[KVPoolError]
) -> None:
    read = reads.submit(spans(64, 64), WAIT_S)
    line.reads[0](status, 0, 1)
    with pytest.raises(error):
        read.wait(0.0)
    # Who hears of the read finds the connection lost already.
    assert bool(line.lost) == (error is PeerUnreachableError)


def test_reads_that_were_ended_say_why(line: Line, reads: Reads) -> None:
    first, second = reads.submit(job(), WAIT_S), reads.submit(job(), WAIT_S)
    reads.end(PeerUnreachableError("the cable"))
    assert line.all_ended
    line.reads[0](lib.KVP_CLOSED, 0, 0)
    line.reads[1](lib.KVP_OK, 0, 3)  # it had arrived
    with pytest.raises(PeerUnreachableError, match="the cable"):
        first.wait(0.0)
    assert second.wait(0.0) == 3
    with pytest.raises(PeerUnreachableError, match="the cable"):
        reads.submit(job(), WAIT_S)


def test_a_cancel_reaches_the_engine(line: Line, reads: Reads) -> None:
    read = reads.submit(job(), WAIT_S)
    read.cancel()
    assert line.cancelled == [0]


def test_what_the_engine_refuses_leaves_nothing(line: Line, reads: Reads) -> None:
    line.refuses = CapacityError("planted")
    with pytest.raises(CapacityError, match="planted"):
        reads.submit(job(), WAIT_S)
    assert reads.drain(0.0)
    line.refuses = ClosedError("raced with the end")
    reads.end(PeerUnreachableError("the cable"))
    with pytest.raises(PeerUnreachableError):
        reads.submit(job(), WAIT_S)


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan")])
def test_every_read_needs_a_deadline(reads: Reads, deadline_s: float) -> None:
    with pytest.raises(UsageError):
        reads.submit(job(), deadline_s)


def test_slots_of_another_shape_are_refused() -> None:
    for region in (
        PeerRegion(REGION.descriptor, LAYOUT.crc_count + 1),
        PeerRegion(replace(REGION.descriptor, slot_bytes=64), LAYOUT.crc_count),
    ):
        with pytest.raises(UsageError):
            block_job(region, view_of(LAYOUT, empty(LAYOUT, 1)), source(1), LAYOUT, None, None)
    other = replace(LAYOUT, kv_heads=LAYOUT.kv_heads * 2, k_dim=LAYOUT.k_dim // 2)
    with pytest.raises((LayoutMismatchError, UsageError)):
        block_job(REGION, view_of(other, empty(other, 1)), source(1), LAYOUT, None, None)


def test_more_heads_than_an_answer_has_room_for_are_refused_as_such() -> None:
    """Not as a layer that is too large for the inbox, which a larger inbox would not mend."""
    wire = (Path(__file__).resolve().parents[3] / "native" / "src" / "ucx_wire.h").read_text()
    assert f"KVP_ASK_CRCS_MAX = {HEADS_MAX} " in wire
    for heads in (HEADS_MAX, HEADS_MAX + 1):
        layout = BlockLayout(num_layers=1, kv_heads=heads, block_tokens=16, k_dim=1, v_dim=0)
        region = PeerRegion(
            RegionDescriptor(Incarnation(bytes(16)), 0, 1, layout.block_bytes), layout.crc_count
        )
        dest, source = view_of(layout, empty(layout, 1)), RemoteSlots(0, (0,), (1,))
        if heads <= HEADS_MAX:
            assert block_job(region, dest, source, layout, None, None).slots == (0,)
            continue
        with pytest.raises(UsageError, match="1025 KV heads: over UCX at most 1024"):
            block_job(region, dest, source, layout, None, None)
