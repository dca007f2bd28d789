"""What every transport's writes must do: exact, into reserved slots alone, and each ends.

A part of ``TransportSuite``.
"""

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pytest

from kvpool.arena import Arena, Slot
from kvpool.block import BlockLayout
from kvpool.completion import Completion
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    KVPoolError,
    LeaseExpiredError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import Span
from kvpool.testing.blocks import Payload, payload
from kvpool.testing.pair import SLOTS, WAIT_S, Collected, Pair, publish
from kvpool.testing.transport_scene import TransportScene
from kvpool.transfer.base import NOTIFICATION_BYTES_MAX, SPANS_MAX, RegionDescriptor, SlotSpan

# What a slot that nothing was written into holds.
POISON = 0xA5
Pairs = list[tuple[SlotSpan, SlotSpan]]


@dataclass(slots=True)
class Desk:
    """An arena of the reader's to write from, and a writable one of the owner's, all poison."""

    here: Arena
    there: Arena
    source_region: RegionDescriptor
    region: RegionDescriptor
    blocks: Payload
    sources: list[Slot]
    into: list[Slot]

    @classmethod
    def open(cls, pair: Pair, layout: BlockLayout, seed: int) -> Self:
        """Register both, publish what can be written, and reserve what can be written into."""
        here = Arena(layout, SLOTS, pair.reader.incarnation)
        there = Arena(layout, SLOTS, pair.owner.incarnation)
        blocks = payload(layout, SLOTS, seed)
        sources = publish(here, blocks)
        source_region = pair.reader.register(here)
        region = pair.owner.register(there, writable=True)
        pair.at_reader.wait_region(region.region, WAIT_S)
        pair.at_owner.wait_region(source_region.region, WAIT_S)
        into = list(there.reserve_some(SLOTS))
        desk = cls(here, there, source_region, region, blocks, sources, into)
        for slot in desk.into:
            desk.content(slot)[:] = POISON
        return desk

    def content(self, slot: Slot) -> Payload:
        """Return the bytes of a slot that is written into."""
        view = self.there.view([slot])
        at = view.base + int(slot.index) * view.block_stride
        return np.frombuffer(Span(at, self.there.layout.block_bytes).view(), dtype=np.uint8)

    def contents(self) -> Payload:
        """Return a copy of the bytes of all slots."""
        return np.stack([self.content(slot) for slot in self.into])

    def span(self, slot: Slot, offset: int, size: int) -> SlotSpan:
        """Name bytes to write from."""
        return SlotSpan(self.source_region.region, slot.index, slot.generation, offset, size)

    def dest(self, slot: Slot, offset: int, size: int) -> SlotSpan:
        """Name bytes to write to."""
        return SlotSpan(self.region.region, slot.index, slot.generation, offset, size)

    def whole(self, count: int) -> Pairs:
        """Write whole slots, each into that of its number."""
        size = self.there.layout.block_bytes
        return [
            (self.span(source, 0, size), self.dest(dest, 0, size))
            for source, dest in zip(self.sources[:count], self.into, strict=False)
        ]

    def scattered(self, at: int) -> Pairs:
        """Write a slot in pieces of two bytes: hundreds of parts, which take their time."""
        source, dest = self.sources[at], self.into[at]
        begins = range(0, self.there.layout.block_bytes, 2)
        return [(self.span(source, begin, 2), self.dest(dest, begin, 2)) for begin in begins]

    def require_settled(self) -> None:
        """Nothing is held for a write any more, and every slot can be released and is free."""
        assert self.there.counts().grants == 0
        self.there.release(self.into)
        assert self.there.counts().free == SLOTS


def shuffled(random: np.random.Generator, count: int) -> list[int]:
    """Return 0 to ``count - 1`` in any order."""
    return [int(at) for at in random.permutation(np.arange(count))]


class WriteChecks(TransportScene):
    """Writes of flat bytes into a peer's slots."""

    def test_writes_are_exact_and_told_of(self, pair: Pair) -> None:
        desk = Desk.open(pair, self.layout, seed=30)
        expected = desk.contents()
        random = np.random.default_rng(30)
        pairs: Pairs = []
        for at in shuffled(random, SLOTS):
            for begin in range(0, self.layout.block_bytes, 512):
                size, number = int(random.integers(1, 513)), int(random.integers(SLOTS))
                offset = int(random.integers(self.layout.block_bytes - size + 1))
                expected[at, begin : begin + size] = desk.blocks[number, offset : offset + size]
                source = desk.span(desk.sources[number], offset, size)
                pairs.append((source, desk.dest(desk.into[at], begin, size)))
        got, told = Collected(), Collected()

        def take(note: bytes) -> None:
            told(desk.contents())
            got(note)

        pair.at_owner.on_notification(take)
        total = sum(dest.size for _, dest in pairs)
        assert pair.at_reader.write_spans(pairs, WAIT_S, b"all there").wait(WAIT_S) == total
        assert got.wait(1) == [b"all there"]
        # What the callback saw, and what is there: every span, and not a byte beside them.
        np.testing.assert_array_equal(told.items[0], expected)
        np.testing.assert_array_equal(desk.contents(), expected)
        desk.require_settled()

    def test_a_large_batch_is_one_write(self, pair: Pair) -> None:
        desk = Desk.open(pair, self.layout, seed=31)
        pairs = desk.scattered(0)
        random = np.random.default_rng(31)
        pairs = [pairs[at] for at in shuffled(random, len(pairs))[:1000]]
        assert pair.at_reader.write_spans(pairs, WAIT_S).wait(WAIT_S) == 2 * len(pairs)
        expected = np.full(self.layout.block_bytes, POISON, dtype=np.uint8)
        for _, dest in pairs:
            at = slice(dest.offset, dest.offset + 2)
            expected[at] = desk.blocks[0, at]
        np.testing.assert_array_equal(desk.content(desk.into[0]), expected)
        desk.require_settled()

    def test_a_write_is_waited_for_in_every_way(self, pair: Pair) -> None:
        desk = Desk.open(pair, self.layout, seed=32)
        pairs = desk.whole(1)
        called = Collected()
        write = pair.at_reader.write_spans(pairs, WAIT_S)
        write.add_done_callback(lambda: called("ended"))

        async def wait() -> int:
            return await write

        assert asyncio.run(wait()) == self.layout.block_bytes
        assert called.wait(1) == ["ended"]
        assert write.done()
        assert write.result() == self.layout.block_bytes
        write.cancel()  # harmless now
        assert write.wait(0.0) == self.layout.block_bytes

    def test_a_note_waits_for_the_first_callback(self, pair: Pair) -> None:
        desk = Desk.open(pair, self.layout, seed=33)
        pairs = desk.whole(1)
        notes = [b"first", np.random.default_rng(33).bytes(NOTIFICATION_BYTES_MAX)]
        for note in notes:
            pair.at_reader.write_spans(pairs, WAIT_S, note).wait(WAIT_S)
        got = Collected()
        pair.at_owner.on_notification(got)
        assert got.wait(2) == notes

    def test_slots_that_are_not_to_be_written_are_not(self, pair: Pair) -> None:
        """A region that only may be read; slots in another life, or that are read already."""
        desk = Desk.open(pair, self.layout, seed=34)
        pairs = desk.whole(3)
        published = pair.publish(payload(self.layout, 1, seed=35))[0]
        before = bytes(pair.arena.crcs([published]))
        size = self.layout.block_bytes
        other = SlotSpan(0, published.index, published.generation, 0, size)
        taken = pair.arena.reserve()
        reserved = SlotSpan(0, taken.index, taken.generation, 0, size)
        here, there = pairs[0]
        desk.here.release(desk.sources[2])
        desk.there.commit(desk.into[1], desk.here.crcs([desk.sources[0]]))
        bad: list[tuple[Pairs, type[KVPoolError]]] = [
            ([(here, other)], UsageError),
            ([(here, reserved)], UsageError),
            ([(here, replace(there, generation=there.generation + 1))], LeaseExpiredError),
            ([(here, replace(there, generation=0))], LeaseExpiredError),
            ([pairs[1]], LeaseExpiredError),  # committed: whoever reads it must not see it change
            ([pairs[0], pairs[1]], LeaseExpiredError),
            ([pairs[2]], LeaseExpiredError),  # the source is gone
            ([(replace(here, generation=2**64 - 1), there)], LeaseExpiredError),
        ]
        for wrong, error in bad:
            with pytest.raises(error):
                pair.at_reader.write_spans(wrong, WAIT_S, b"never").wait(WAIT_S)
        assert (desk.contents()[1:] == POISON).all()
        assert bytes(pair.arena.crcs([published])) == before
        assert pair.at_reader.write_spans(pairs[:1], WAIT_S).wait(WAIT_S) == size
        assert desk.there.counts().grants == pair.arena.counts().grants == 0
        pair.arena.release(taken)

    def test_bad_writes_are_refused_before_anything_moves(self, pair: Pair) -> None:
        desk = Desk.open(pair, self.layout, seed=36)
        (here, there), (here_2, _) = desk.whole(2)
        size = self.layout.block_bytes
        bad: list[Pairs] = [
            [],
            [(replace(here, size=0), replace(there, size=0))],
            [(here, replace(there, size=size - 1))],
            [(replace(here, offset=1), there)],
            [(here, replace(there, offset=1))],
            [(here, replace(there, offset=-1))],
            [(here, replace(there, offset=2**64 - 1))],
            [(replace(here, region=7), there)],
            [(here, replace(there, region=7))],
            [(here, replace(there, region=-1))],
            [(replace(here, slot=SLOTS), there)],
            [(here, replace(there, slot=SLOTS))],
            [(here, replace(there, slot=0.5))],  # type: ignore[arg-type]
            [(here, there), (here_2, there)],
            [
                (replace(here, size=100), replace(there, size=100)),
                (replace(here, size=2), replace(there, offset=99, size=2)),
            ],
            [(replace(here, size=1), replace(there, size=1))] * (SPANS_MAX + 1),
        ]
        for pairs in bad:
            with pytest.raises(UsageError):
                pair.at_reader.write_spans(pairs, WAIT_S)
        for deadline_s in (math.inf, math.nan, 1e10):
            with pytest.raises(UsageError):
                pair.at_reader.write_spans([(here, there)], deadline_s)
        with pytest.raises(UsageError):
            pair.at_reader.write_spans([(here, there)], WAIT_S, bytes(NOTIFICATION_BYTES_MAX + 1))
        assert (desk.contents() == POISON).all()
        assert pair.at_reader.write_spans([(here, there)], WAIT_S).wait(WAIT_S) == size
        desk.require_settled()

    def test_a_deadline_of_years_is_one(self, pair: Pair) -> None:
        """Further off than a selector can sleep."""
        desk = Desk.open(pair, self.layout, seed=39)
        size = self.layout.block_bytes
        for deadline_s in (3e6, 9e8, WAIT_S):
            assert pair.at_reader.write_spans(desk.whole(1), deadline_s).wait(WAIT_S) == size
        desk.require_settled()

    def test_a_passed_deadline_ends_a_write(self, pair: Pair) -> None:
        desk = Desk.open(pair, self.layout, seed=37)
        pairs = desk.whole(1)
        write = pair.at_reader.write_spans(pairs, 0.0)
        with pytest.raises(TransferTimeoutError):
            write.wait(WAIT_S)
        assert (desk.contents() == POISON).all()

    def test_a_write_that_is_cancelled_ends_and_writes_no_more(self, pair: Pair) -> None:
        writes, desk = self._many_writes(pair)
        for write in reversed(writes):
            write.cancel()
        stopped = 0
        for write in writes:
            try:
                write.wait(WAIT_S)
            except CancelledTransferError:
                stopped += 1
        assert stopped > 0
        # Done means that the peer has stopped: what a late copy would still write is not 7.
        for slot in desk.into:
            desk.content(slot)[:] = 7
        assert pair.at_reader.write_spans(self._marks(desk), WAIT_S).wait(WAIT_S) == SLOTS
        assert (desk.contents()[:, 1:] == 7).all()
        desk.require_settled()

    def test_random_ends_of_random_writes(self, pair: Pair) -> None:
        """Under cancels and deadlines: what is complete is exact, and nothing beside it is touched."""
        desk = Desk.open(pair, self.layout, seed=39)
        random = np.random.default_rng(39)
        pieces = self.layout.block_bytes // 64
        between = (np.arange(self.layout.block_bytes) // 32) % 2 == 1  # never written
        complete = 0
        for _ in range(20):
            writes: list[tuple[int, int, Completion[int]]] = []
            for at in shuffled(random, SLOTS)[:5]:
                number = int(random.integers(SLOTS))
                pairs = [
                    (
                        desk.span(desk.sources[number], 64 * piece, 32),
                        desk.dest(desk.into[at], 64 * piece, 32),
                    )
                    for piece in shuffled(random, pieces)
                ]
                deadline_s = float(random.choice([0.001, WAIT_S]))
                write = pair.at_reader.write_spans(pairs, deadline_s)
                if random.random() < 0.3:
                    write.cancel()
                writes.append((at, number, write))
            for at, number, write in writes:
                try:
                    assert write.wait(WAIT_S) == self.layout.block_bytes // 2
                except (CancelledTransferError, TransferTimeoutError, CapacityError):
                    continue  # the last: a pull of one that timed out is under way yet
                complete += 1
                found = desk.content(desk.into[at])
                np.testing.assert_array_equal(found[~between], desk.blocks[number][~between])
            assert (desk.contents()[:, between] == POISON).all()
        assert complete > 0

    def test_a_close_ends_writes(self, pair: Pair) -> None:
        writes, desk = self._many_writes(pair)
        pair.at_reader.close()
        stopped = 0
        for write in writes:
            try:
                write.wait(WAIT_S)
            except ClosedError:
                stopped += 1
        assert stopped > 0
        with pytest.raises(ClosedError):
            pair.at_reader.write_spans(self._marks(desk), WAIT_S)

    def test_writes_to_a_peer_that_closes_end(self, pair: Pair) -> None:
        writes, desk = self._many_writes(pair)
        pair.owner.close()
        for write in writes:
            try:
                write.wait(WAIT_S)
            except (PeerUnreachableError, ClosedError, CancelledTransferError):
                continue
        with pytest.raises((PeerUnreachableError, ClosedError)):
            pair.at_reader.write_spans(self._marks(desk), WAIT_S).wait(WAIT_S)

    def _many_writes(self, pair: Pair) -> tuple[list[Completion[int]], Desk]:
        desk = Desk.open(pair, self.layout, seed=38)
        # Each into a slot of its own: two writes of one slot are never under way at once.
        pairs = [desk.scattered(at) for at in range(SLOTS)]
        return [pair.at_reader.write_spans(each, WAIT_S) for each in pairs], desk

    def _marks(self, desk: Desk) -> Pairs:
        """Write the first byte of every slot."""
        return [(desk.span(desk.sources[0], 0, 1), desk.dest(slot, 0, 1)) for slot in desk.into]
