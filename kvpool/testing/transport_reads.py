"""What every transport's reads must do: exact, checked, and refused before anything moves.

A part of ``TransportSuite``.
"""

import math
import threading
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.arena import Slot
from kvpool.block import BlockLayout
from kvpool.errors import (
    LayoutMismatchError,
    LeaseExpiredError,
    UsageError,
)
from kvpool.memory import BlockView, Crcs, Span
from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import (
    SLOTS,
    WAIT_S,
    Collected,
    Pair,
    empty,
    flip,
    named,
    paged,
)
from kvpool.testing.transport_scene import TransportScene
from kvpool.transfer.base import (
    SPANS_MAX,
    RemoteSlots,
)


class ReadChecks(TransportScene):
    """Reads of blocks and of flat bytes, and bad input."""

    # ---- reading blocks ---------------------------------------------------------------------

    def test_random_reads_are_exact(self, pair: Pair) -> None:
        blocks = payload(self.layout, SLOTS, seed=3)
        slots = pair.publish(blocks)
        random = np.random.default_rng(3)
        for _ in range(50):
            chosen = random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)]
            out = empty(self.layout, len(chosen))
            assert pair.read(view_of(self.layout, out), [slots[i] for i in chosen]) == len(chosen)
            np.testing.assert_array_equal(out, blocks[chosen])

    def test_a_read_converts_into_the_order_of_its_destination(self, pair: Pair) -> None:
        layout = self.layout
        shape = (layout.num_layers, 2, SLOTS, layout.block_tokens, layout.kv_heads, layout.k_dim)
        cache: NDArray[np.float32] = np.zeros(shape, dtype=np.float32)
        ids = [5, 0, 3]
        blocks = payload(layout, 3, seed=4)
        assert pair.read(paged(layout, cache, ids), pair.publish(blocks)) == 3
        # block, layer, head, kv, token, dim
        found = cache.transpose(2, 0, 4, 1, 3, 5)[ids]
        np.testing.assert_array_equal(
            np.ascontiguousarray(found).view(np.uint8).reshape(blocks.shape), blocks
        )
        untouched = [number for number in range(SLOTS) if number not in ids]
        assert not cache[:, :, untouched].view(np.uint8).any()

    def test_one_layer_goes_into_its_place(self, pair: Pair) -> None:
        one = replace(self.layout, num_layers=1)
        pair = pair.with_arena(one)
        blocks = payload(one, 3, seed=5)
        slots = pair.publish(blocks)
        out = empty(self.layout, 3)
        for layer in range(self.layout.num_layers):
            assert pair.read(view_of(self.layout, out), slots, dest_layer=layer) == 3
            begin = layer * self.layout.layer_bytes
            end = begin + self.layout.layer_bytes
            np.testing.assert_array_equal(out[:, begin:end], blocks)
            assert not out[:, end:].any()

    def test_a_stale_generation_ends_the_leading_blocks(self, pair: Pair) -> None:
        blocks = payload(self.layout, 4, seed=6)
        slots = pair.publish(blocks)
        pair.arena.release(slots[2])
        out = empty(self.layout, 4)
        assert pair.read(view_of(self.layout, out), slots) == 2
        np.testing.assert_array_equal(out[:2], blocks[:2])
        again = pair.arena.reserve()  # the same slot in another life, not yet written
        assert again.index == slots[2].index
        assert pair.read(view_of(self.layout, out), slots) == 2
        assert pair.read(view_of(self.layout, out[:1]), [again]) == 0
        pair.arena.release(again)

    def test_a_flipped_byte_ends_the_leading_blocks(self, pair: Pair) -> None:
        blocks = payload(self.layout, 4, seed=7)
        slots = pair.publish(blocks)
        flip(pair.arena, slots[1], self.layout.block_bytes // 2)
        out = empty(self.layout, 4)
        assert pair.read(view_of(self.layout, out), slots) == 1
        np.testing.assert_array_equal(out[:1], blocks[:1])

    def test_checksums_of_the_caller_are_what_counts(self, pair: Pair) -> None:
        slots = pair.publish(payload(self.layout, 3, seed=8))
        crcs = pair.arena.crcs(slots)
        out = empty(self.layout, 3)

        def read() -> int:
            return pair.at_reader.read_blocks(
                view_of(self.layout, out),
                named(0, slots),
                source_layout=self.layout,
                dest_layer=None,
                deadline_s=WAIT_S,
                crcs=crcs,
            ).wait(WAIT_S)

        assert read() == 3
        crcs[1, -1, -1] ^= 1
        assert read() == 1

    def test_sums_of_what_arrived_are_handed_over(self, pair: Pair) -> None:
        slots = pair.publish(payload(self.layout, 4, seed=9))
        crcs = pair.arena.crcs(slots)
        flip(pair.arena, slots[2], self.layout.block_bytes - 1)
        out = empty(self.layout, 4)
        for told in (None, crcs):
            sums = np.zeros_like(crcs)
            read = pair.at_reader.read_blocks(
                view_of(self.layout, out),
                named(0, slots),
                source_layout=self.layout,
                dest_layer=None,
                deadline_s=WAIT_S,
                crcs=told,
                sums=sums,
            )
            assert read.wait(WAIT_S) == 2
            np.testing.assert_array_equal(sums[:2], crcs[:2])

    def test_room_for_sums_that_does_not_fit_is_refused(self, pair: Pair) -> None:
        slots = pair.publish(payload(self.layout, 3, seed=10))
        room = pair.arena.crcs(slots)
        fixed = room.copy()
        fixed.flags.writeable = False
        wide = np.zeros((*room.shape[:2], 2 * room.shape[2]), dtype=np.uint32)
        wrong = (room[:2], room.astype(np.int64), room.view(np.int32), fixed, wide[:, :, ::2])
        out = empty(self.layout, 3)
        for sums in wrong:
            with pytest.raises(UsageError):
                pair.at_reader.read_blocks(
                    view_of(self.layout, out),
                    named(0, slots),
                    source_layout=self.layout,
                    dest_layer=None,
                    deadline_s=WAIT_S,
                    sums=cast(Crcs, sums),
                )
        assert not out.any()

    def test_a_block_that_is_overwritten_meanwhile_is_never_delivered(self, pair: Pair) -> None:
        stop = threading.Event()
        started = Collected()
        lives: list[tuple[list[Slot], NDArray[np.uint8]]] = []

        def rewrite() -> None:
            seed = 0
            previous: list[Slot] = []
            while not stop.is_set():
                blocks = payload(self.layout, 1, seed)
                slots = pair.publish(blocks)
                lives.append((slots, blocks))
                started(seed)
                for slot in previous:
                    pair.arena.release(slot)
                previous, seed = slots, seed + 1

        thread = threading.Thread(target=rewrite)
        thread.start()
        out = empty(self.layout, 1)

        def read_current() -> int:
            started.wait(1)
            slots, blocks = lives[-1]
            delivered = pair.read(view_of(self.layout, out), slots)
            if delivered:
                np.testing.assert_array_equal(out, blocks)
            return delivered

        try:
            for _ in range(300):
                read_current()
        finally:
            stop.set()
            thread.join(WAIT_S)
        assert read_current() == 1

    # ---- reading spans ----------------------------------------------------------------------

    def test_spans_are_exact(self, pair: Pair) -> None:
        blocks = payload(self.layout, SLOTS, seed=9)
        slots = pair.publish(blocks)
        random = np.random.default_rng(9)
        out = np.zeros(4096, dtype=np.uint8)
        expected = np.zeros_like(out)
        pairs: list[tuple[Span, RemoteSlots, int]] = []
        for begin in range(0, 4096, 256):
            size, number = int(random.integers(1, 257)), int(random.integers(SLOTS))
            offset = int(random.integers(self.layout.block_bytes - size + 1))
            expected[begin : begin + size] = blocks[number, offset : offset + size]
            pairs.append((Span.of(out).part(begin, size), named(0, [slots[number]]), offset))
        total = sum(span.size for span, _, _ in pairs)
        assert pair.at_reader.read_spans(pairs, WAIT_S).wait(WAIT_S) == total
        np.testing.assert_array_equal(out, expected)

    def test_a_span_of_another_life_is_an_error(self, pair: Pair) -> None:
        slots = pair.publish(payload(self.layout, 1, seed=10))
        pair.arena.release(slots[0])
        out = np.zeros(64, dtype=np.uint8)
        read = pair.at_reader.read_spans([(Span.of(out), named(0, slots), 0)], WAIT_S)
        with pytest.raises(LeaseExpiredError):
            read.wait(WAIT_S)

    # ---- bad input --------------------------------------------------------------------------

    def test_bad_spans_are_refused_before_anything_moves(self, pair: Pair) -> None:
        slots = pair.publish(payload(self.layout, 2, seed=11))
        out = np.zeros(256, dtype=np.uint8)
        span, source = Span.of(out), named(0, slots[:1])
        bad: list[list[tuple[Span, RemoteSlots, int]]] = [
            [],
            [(span.part(0, 0), source, 0)],
            [(span, source, self.layout.block_bytes - 255)],
            [(span, source, -1)],
            [(span, replace(source, region=1), 0)],
            [(span, replace(source, region=-1), 0)],
            [(span, replace(source, slots=(SLOTS,)), 0)],
            [(span, named(0, slots), 0)],
            [(span.part(0, 100), source, 0), (span.part(99, 50), source, 0)],
            [(span.part(0, 100), source, 0), (span.part(0, 100), source, 0)],
            [(Span(2**64 - 32, 64), source, 0)],
            [(Span(2**65, 64), source, 0)],
            [(Span(-5, 64), source, 0)],
            [(Span(0, 64), source, 0)],
            [(span, source, 0.5)],  # type: ignore[list-item]
            [(span, replace(source, region=0.0), 0)],  # type: ignore[arg-type]
            [(span, replace(source, slots=(0.5,)), 0)],  # type: ignore[arg-type]
            [(span, replace(source, generations=()), 0)],
        ]
        for pairs in bad:
            with pytest.raises(UsageError):
                pair.at_reader.read_spans(pairs, WAIT_S)
        for deadline_s in (math.inf, math.nan, 1e10):
            with pytest.raises(UsageError):
                pair.at_reader.read_spans([(span, source, 0)], deadline_s)
        assert not out.any()

    def test_more_than_a_batch_holds_is_refused_before_anything_moves(self, pair: Pair) -> None:
        slots = pair.publish(payload(self.layout, 1, seed=19))
        out = np.zeros(100_000, dtype=np.uint8)
        spans = Span.of(out)
        source = named(0, slots)
        pairs = [(spans.part(at, 1), source, 0) for at in range(len(out))]
        with pytest.raises(UsageError, match=str(SPANS_MAX)):
            pair.at_reader.read_spans(pairs, WAIT_S)
        assert not out.any()
        assert pair.at_reader.read_spans(pairs[:2000], WAIT_S).wait(WAIT_S) == 2000
        many = RemoteSlots(0, (0,) * 100_000, (1,) * 100_000)
        ids = np.arange(len(many.slots), dtype=np.uint64)
        dest = view_of(self.layout, empty(self.layout, 1)).with_ids(ids)
        with pytest.raises(UsageError, match=str(SPANS_MAX)):
            pair.at_reader.read_blocks(
                dest, many, source_layout=self.layout, dest_layer=None, deadline_s=WAIT_S
            )

    def test_random_names_of_slots_achieve_nothing(self, pair: Pair) -> None:
        """Any field of a descriptor may be anything: a typed error, or what it names, exactly."""
        blocks = payload(self.layout, SLOTS, seed=20)
        lives = pair.publish(blocks)
        random = np.random.default_rng(20)
        numbers = [-(2**70), -1, 0, 1, SLOTS - 1, SLOTS, 2**31, 2**32 - 1, 2**32, 2**63, 2**64]
        numbers += [slot.generation for slot in lives]
        for _ in range(300):
            region, slot, life = (numbers[int(random.integers(len(numbers)))] for _ in range(3))
            source = RemoteSlots(int(random.choice([0, region])), (slot,), (life,))
            out = empty(self.layout, 1)
            try:
                read = pair.at_reader.read_blocks(
                    view_of(self.layout, out),
                    source,
                    source_layout=self.layout,
                    dest_layer=None,
                    deadline_s=WAIT_S,
                )
            except UsageError:
                assert not out.any()
                continue
            if read.wait(WAIT_S):
                assert source.region == 0
                assert life == lives[slot].generation
                np.testing.assert_array_equal(out[0], blocks[int(lives[slot].index)])

    def test_bad_blocks_are_refused_before_anything_moves(self, pair: Pair) -> None:
        slots = pair.publish(payload(self.layout, 2, seed=12))
        out = empty(self.layout, 2)
        dest, source = view_of(self.layout, out), named(0, slots)
        one = replace(self.layout, num_layers=1)
        other = replace(self.layout, block_tokens=32)
        bad: list[tuple[BlockView, RemoteSlots, BlockLayout, int | None]] = [
            (dest.take(0, 1), source, self.layout, None),
            (dest.take(0, 0), named(0, []), self.layout, None),
            (dest, replace(source, generations=(1,)), self.layout, None),
            (dest, replace(source, region=7), self.layout, None),
            (dest, replace(source, slots=(0, SLOTS)), self.layout, None),
            (dest, replace(source, slots=(-1, 0)), self.layout, None),
            (dest, replace(source, generations=(-1, 1)), self.layout, None),
            (dest, replace(source, generations=(2**64, 1)), self.layout, None),
            (replace(dest, writable=False), source, self.layout, None),
            (dest.with_ids([1, 1]), source, self.layout, None),
            (dest, source, other, None),
            (dest, source, one, 0),
            (dest, source, self.layout, 0),
            (view_of(other, empty(other, 2)), source, self.layout, None),
            # Rows that lie on one another.
            (replace(dest, block_stride=dest.block_stride // 2), source, self.layout, None),
            (replace(dest, block_stride=0), source, self.layout, None),
            (replace(dest, layer_stride=dest.head_stride), source, self.layout, None),
            (replace(dest, head_stride=0), source, self.layout, None),
            (replace(dest, kv_stride=0), source, self.layout, None),
            (replace(dest, k_token_stride=0, v_token_stride=0), source, self.layout, None),
            (replace(dest, v_token_stride=1), source, self.layout, None),
            # Numbers that are none, and ones that leave what holds the blocks.
            (replace(dest, layer_stride=-8), source, self.layout, None),
            (replace(dest, base=0), source, self.layout, None),
            (replace(dest, base=2**70), source, self.layout, None),
            (dest.with_ids([2**63, 2**63 + 1]), source, self.layout, None),
            (dest.with_ids([0, 2]), source, self.layout, None),
            (replace(dest, base=dest.base - 1), source, self.layout, None),
            (replace(dest, base=0x1000), source, self.layout, None),
        ]
        for view, remote, layout, dest_layer in bad:
            with pytest.raises(UsageError):
                pair.at_reader.read_blocks(
                    view, remote, source_layout=layout, dest_layer=dest_layer, deadline_s=WAIT_S
                )
        assert not out.any()
        # A wrong argument ends its own call, not the connection.
        assert pair.read(dest, slots) == 2

    def test_a_layer_outside_the_destination_is_refused(self, pair: Pair) -> None:
        one = replace(self.layout, num_layers=1)
        pair = pair.with_arena(one)
        slots = pair.publish(payload(one, 1, seed=13))
        out = empty(self.layout, 1)
        for layer in (-1, self.layout.num_layers):
            with pytest.raises(UsageError):
                pair.read(view_of(self.layout, out), slots, dest_layer=layer)
        with pytest.raises(LayoutMismatchError):
            pair.read(view_of(self.layout, out), slots)
        assert not out.any()
