"""A buffer that someone may still write is not free: a stopped writer's slot is nobody else's.

The writer is a child process that inherited the arena's writable mapping. Only a test can make one:
nobody maps a sealed arena for writing, and kvpool does not fork.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvpool.arena import Arena, Slot
from kvpool.block import BlockLayout, new_incarnation
from kvpool.errors import CapacityError, ClosedError, TransferTimeoutError
from kvpool.memory import Span, copy_blocks
from kvpool.reservation import Reservation
from kvpool.testing.blocks import key, payload, read, view_of, write
from kvpool.tiers.dram import DramTier

LAYOUT = BlockLayout(num_layers=2, kv_heads=2, block_tokens=16, k_dim=32, v_dim=32)
SLOTS = 5
WRITERS_BYTE = 0xAB
# Ends a test that hangs; nothing here takes near as long.
WAIT_S = 30.0

# Python 3.12 warns of a fork beside threads; this child takes no lock and never returns.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.fixture
def tier() -> Iterator[DramTier]:
    with DramTier(Arena(LAYOUT, SLOTS, new_incarnation())) as tier:
        yield tier


class Writer:
    """A child process that fills a slot byte by byte and is stopped (SIGSTOP) when half through."""

    def __init__(self, tier: DramTier, slot: Slot) -> None:
        view = tier.view([slot], writable=True)
        span = Span(view.base + slot.index * view.block_stride, LAYOUT.block_bytes, view.owner)
        buffer = span.view()
        self.process = os.fork()
        if self.process == 0:
            self._write(buffer)
        self.exit_fd = os.pidfd_open(self.process)

    def _write(self, buffer: memoryview) -> None:
        """Run in the child: no lock, no return. It stops itself, so that the moment is certain."""
        try:
            for at in range(len(buffer)):
                buffer[at] = WRITERS_BYTE
                if at == len(buffer) // 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        finally:
            os._exit(1)

    def wait_stopped(self) -> None:
        _, status = os.waitpid(self.process, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "the writer ended before it was stopped"

    def resume(self) -> None:
        os.kill(self.process, signal.SIGCONT)

    def wait_end(self) -> int:
        assert select.select([self.exit_fd], [], [], WAIT_S)[0], "the writer did not end"
        _, status = os.waitpid(self.process, 0)
        self.process = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self.exit_fd)


@contextmanager
def writer_of(tier: DramTier, slot: Slot) -> Iterator[Writer]:
    writer = Writer(tier, slot)
    try:
        yield writer
    finally:
        writer.close()


def raw(tier: DramTier, slot: Slot) -> bytes:
    """Return the bytes of a slot, whatever its state."""
    view = tier.arena.view([slot])
    span = Span(view.base + slot.index * view.block_stride, LAYOUT.block_bytes, view.owner)
    return bytes(span.view())


def fill_the_rest(tier: DramTier) -> int:
    """Store blocks in every slot that can be had, pin them, and return how many."""
    stored = 0
    while True:
        try:
            write(tier, key(stored), payload(LAYOUT, 1, seed=stored))
        except CapacityError:
            return stored
        tier.pin(key(stored))
        stored += 1


def owners_bytes(tier: DramTier, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what the new owners wrote, and what is there now."""
    slots = [slot for number in range(blocks) for slot in tier.pin(key(number))]
    assert len(slots) == blocks
    wanted = np.concatenate([payload(LAYOUT, 1, seed=number) for number in range(blocks)])
    found = np.frombuffer(b"".join(raw(tier, slot) for slot in slots), dtype=np.uint8)
    tier.unpin(slots)
    return wanted.reshape(-1), found


@pytest.mark.parametrize("end", ["finishes", "is killed"])
def test_a_stopped_writer_keeps_its_slot_until_it_has_ended(tier: DramTier, end: str) -> None:
    slot = tier.reserve()
    tier.grant(slot)
    with writer_of(tier, slot) as writer:
        writer.wait_stopped()
        tier.abort(slot)  # as at the reservation's deadline
        assert tier.stats().quarantined == 1

        blocks = fill_the_rest(tier)
        assert blocks == SLOTS - 1
        with pytest.raises(CapacityError):
            tier.reserve()
        before = raw(tier, slot)
        assert before.endswith(b"\0"), "the writer was through before it was stopped"

        if end == "is killed":
            os.kill(writer.process, signal.SIGKILL)
        writer.resume()
        assert writer.wait_end() == (-signal.SIGKILL if end == "is killed" else 0)

        if end == "finishes":  # it did write on, and only into its own slot
            assert raw(tier, slot) == bytes([WRITERS_BYTE]) * LAYOUT.block_bytes
        wanted, found = owners_bytes(tier, blocks)
        np.testing.assert_array_equal(found, wanted)
        with pytest.raises(CapacityError):
            tier.reserve()

    tier.settle(slot)
    for number in range(blocks):
        tier.unpin([*(pins := tier.pin(key(number))), *pins])
    stats = tier.stats()
    assert (stats.quarantined, stats.free, stats.pins) == (0, 1, 0)
    tier.evict(SLOTS)
    assert tier.stats().free == SLOTS


def test_without_the_grant_the_new_owner_would_be_overwritten(tier: DramTier) -> None:
    """The fault that the quarantine is there for: proves that the test above can fail."""
    slot = tier.reserve()
    with writer_of(tier, slot) as writer:
        writer.wait_stopped()
        tier.abort(slot)
        blocks = fill_the_rest(tier)
        assert blocks == SLOTS
        writer.resume()
        assert writer.wait_end() == 0
    wanted, found = owners_bytes(tier, blocks)
    assert (found != wanted).any()


def test_an_abandoned_store_writes_into_quarantine(tier: DramTier) -> None:
    late = Reservation(tier, key(100) + key(101), None)
    slots = {int(index) for index in late.view.block_ids}
    assert late.abandon()  # its deadline has passed, and its writer is still there
    assert tier.stats().quarantined == 2
    blocks = fill_the_rest(tier)
    assert blocks == SLOTS - 2
    taken = {slot.index for number in range(blocks) for slot in tier.pin(key(number))}
    assert not taken & slots

    crcs = copy_blocks(late.view, view_of(LAYOUT, payload(LAYOUT, 2, seed=99)))
    with pytest.raises(TransferTimeoutError):
        late.finish(crcs)
    assert tier.stats().quarantined == 2  # finish is not the writer's end: settle is
    late.settle()
    wanted, found = owners_bytes(tier, blocks)
    np.testing.assert_array_equal(found, wanted)
    stats = tier.stats()
    assert (stats.free, stats.reserved, stats.ready) == (2, 0, blocks)
    assert tier.match(key(100)) == 0


def test_a_writer_still_has_its_memory_after_the_tier_was_closed(tier: DramTier) -> None:
    reservation = Reservation(tier, key(1), None)
    tier.close()
    crcs = copy_blocks(reservation.view, view_of(LAYOUT, payload(LAYOUT, 1, seed=1)))
    with pytest.raises(ClosedError):
        reservation.finish(crcs)
    reservation.settle()


def test_a_store_whose_writer_failed_gives_its_slots_back(tier: DramTier) -> None:
    reservation = Reservation(tier, key(1) + key(2), None)
    assert tier.stats().reserved == 2
    reservation.settle()
    assert (tier.stats().free, tier.stats().quarantined) == (SLOTS, 0)


def test_a_run_of_slots_stays_quarantined_until_each_grant_is_back(tier: DramTier) -> None:
    slots = tier.reserve_run(SLOTS)
    tier.abort_run(slots)
    tier.abort_run(slots)  # idempotent
    assert tier.stats().quarantined == SLOTS
    assert len(tier.reserve_run(1)) == 0
    tier.settle_run(slots[:2])
    assert [slot.index for slot in tier.reserve_run(SLOTS)] == [slots[1].index, slots[0].index]
    assert tier.stats().quarantined == SLOTS - 2


def test_a_written_block_is_read_back_after_all_this(tier: DramTier) -> None:
    blocks = payload(LAYOUT, 3, seed=3)
    write(tier, key(0), blocks[:1])
    hashes = key(0) + key(1) + key(2)
    reservation = Reservation(tier, hashes, None)
    assert reservation.begin == 1
    crcs = copy_blocks(reservation.view.take(0, 1), view_of(LAYOUT, blocks).take(1, 2))
    result = reservation.finish(crcs)
    assert (result.stored, result.new) == (2, 1)
    assert "1 of 2 blocks" in result.refused
    slots = tier.pin(hashes)
    np.testing.assert_array_equal(read(tier, slots), blocks[:2])
    tier.unpin(slots)
    assert tier.stats().free == SLOTS - 2
