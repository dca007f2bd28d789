"""What every transport must do. Subclass ``TransportSuite`` once for each implementation and wrapper.

Uses the ``Transport`` and ``Endpoint`` contracts alone. Both sides live in the test's process, also of
a transport between processes; what only another process can do is tested in ``tests/faults``.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.arena import Arena, Slot
from kvpool.block import BlockLayout, new_incarnation
from kvpool.completion import Completion
from kvpool.errors import (
    CancelledTransferError,
    ClosedError,
    KVPoolError,
    LayoutMismatchError,
    LeaseExpiredError,
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import BlockView, Span
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import (
    SLOTS,
    WAIT_S,
    Collected,
    Pair,
    empty,
    flip,
    named,
    paged,
    publish,
    send,
)
from kvpool.transfer.base import (
    NOTIFICATION_BYTES_MAX,
    Endpoint,
    RemoteSlots,
    Transport,
)


class TransportSuite(ABC):
    """The suite."""

    layout: BlockLayout = SMALL_LAYOUT

    @abstractmethod
    def open_transport(self) -> Transport:
        """Make a transport. All of one suite object can reach each other."""

    @abstractmethod
    def fresh_address(self) -> str:
        """Return an address that nobody listens at."""

    @contextmanager
    def open_pair(self) -> Generator[Pair]:
        """Make an owner and a reader, and take them down."""
        with self.open_transport() as owner, self.open_transport() as reader:
            arena = Arena(self.layout, SLOTS, owner.incarnation)
            region = owner.register(arena)
            connected = Collected()
            address = owner.listen(self.fresh_address(), connected)
            at_reader = reader.connect(address, WAIT_S, owner.incarnation)
            at_owner = connected.wait(1)[0]
            assert isinstance(at_owner, Endpoint)
            yield Pair(owner, reader, address, arena, region, at_owner, at_reader)
            arena.close()

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        """Give each test two connected transports."""
        with self.open_pair() as pair:
            yield pair

    # ---- connecting -------------------------------------------------------------------------------

    def test_both_sides_know_each_other(self, pair: Pair) -> None:
        assert pair.at_reader.peer == pair.owner.incarnation
        assert pair.at_owner.peer == pair.reader.incarnation
        assert pair.at_reader.alive()
        assert pair.at_owner.alive()
        assert pair.at_reader.regions() == (pair.region,)

    def test_nobody_listens(self, pair: Pair) -> None:
        with pytest.raises(PeerUnreachableError):
            pair.reader.connect(self.fresh_address(), WAIT_S)

    def test_another_run_than_expected_is_refused(self, pair: Pair) -> None:
        with pytest.raises(StaleIncarnationError):
            pair.reader.connect(pair.address, WAIT_S, new_incarnation())

    def test_an_arena_of_another_run_is_refused(self, pair: Pair) -> None:
        arena = Arena(self.layout, 1, new_incarnation())
        with pytest.raises(UsageError):
            pair.owner.register(arena)
        arena.close()

    def test_a_region_registered_later_becomes_known(self, pair: Pair) -> None:
        with pytest.raises(TransferTimeoutError):
            pair.at_reader.wait_region(1, 0.0)
        arena = Arena(self.layout, 2, pair.owner.incarnation)
        region = pair.owner.register(arena)
        assert pair.at_reader.wait_region(1, WAIT_S) == region
        blocks, out = payload(self.layout, 2, seed=1), empty(self.layout, 2)
        read = pair.at_reader.read_blocks(
            view_of(self.layout, out),
            named(1, publish(arena, blocks)),
            source_layout=self.layout,
            dest_layer=None,
            deadline_s=WAIT_S,
        )
        assert read.wait(WAIT_S) == 2
        np.testing.assert_array_equal(out, blocks)
        arena.close()

    def test_many_endpoints(self, pair: Pair) -> None:
        blocks = payload(self.layout, SLOTS, seed=2)
        source = named(0, pair.publish(blocks))
        endpoints = [pair.reader.connect(pair.address, WAIT_S) for _ in range(16)]
        outs = [empty(self.layout, SLOTS) for _ in endpoints]
        reads = [
            endpoint.read_blocks(
                view_of(self.layout, out),
                source,
                source_layout=self.layout,
                dest_layer=None,
                deadline_s=WAIT_S,
            )
            for endpoint, out in zip(endpoints, outs, strict=True)
        ]
        for read, out in zip(reads, outs, strict=True):
            assert read.wait(WAIT_S) == SLOTS
            np.testing.assert_array_equal(out, blocks)
        for endpoint in endpoints:
            endpoint.close()
        assert pair.at_reader.alive()

    # ---- reading blocks ---------------------------------------------------------------------------

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

    # ---- reading spans ----------------------------------------------------------------------------

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

    # ---- bad input --------------------------------------------------------------------------------

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
        ]
        for pairs in bad:
            with pytest.raises(UsageError):
                pair.at_reader.read_spans(pairs, WAIT_S)
        for deadline_s in (math.inf, math.nan):
            with pytest.raises(UsageError):
                pair.at_reader.read_spans([(span, source, 0)], deadline_s)
        assert not out.any()

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
        ]
        for view, remote, layout, dest_layer in bad:
            with pytest.raises(UsageError):
                pair.at_reader.read_blocks(
                    view, remote, source_layout=layout, dest_layer=dest_layer, deadline_s=WAIT_S
                )
        assert not out.any()

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

    # ---- deadline, cancel, close ------------------------------------------------------------------

    def test_a_passed_deadline_ends_a_read(self, pair: Pair) -> None:
        slots = pair.publish(payload(self.layout, 1, seed=14))
        read = pair.at_reader.read_blocks(
            view_of(self.layout, empty(self.layout, 1)),
            named(0, slots),
            source_layout=self.layout,
            dest_layer=None,
            deadline_s=0.0,
        )
        with pytest.raises(TransferTimeoutError):
            read.wait(WAIT_S)
        assert read.done()

    def test_what_is_cancelled_ends_and_writes_no_more(self, pair: Pair) -> None:
        self._stop_reads(pair, lambda endpoint, read: read.cancel(), CancelledTransferError)

    def test_a_close_ends_reads_and_nothing_writes_after_it(self, pair: Pair) -> None:
        self._stop_reads(pair, lambda endpoint, read: endpoint.close(), ClosedError)

    def _stop_reads(
        self,
        pair: Pair,
        stop: Callable[[Endpoint, Completion[int]], None],
        error: type[KVPoolError],
    ) -> None:
        large = replace(self.layout, k_dim=256, v_dim=256, kv_heads=8)
        pair = pair.with_arena(large)
        blocks = payload(large, SLOTS, seed=15)
        slots = pair.publish(blocks)
        outs = [empty(large, SLOTS) for _ in range(8)]
        reads = [
            pair.at_reader.read_blocks(
                view_of(large, out),
                named(pair.region.region, slots),
                source_layout=large,
                dest_layer=None,
                deadline_s=WAIT_S,
            )
            for out in outs
        ]
        for read in reversed(reads):
            stop(pair.at_reader, read)
        stopped = 0
        for read, out in zip(reads, outs, strict=True):
            try:
                assert read.wait(WAIT_S) == SLOTS
                np.testing.assert_array_equal(out, blocks)
            except error:
                stopped += 1
            out[:] = 7
        assert stopped > 0
        # What a late copy would still write is not 7.
        assert all(bool((out == 7).all()) for out in outs)

    def test_after_close_everything_is_refused(self, pair: Pair) -> None:
        slots = pair.publish(payload(self.layout, 1, seed=16))
        pair.at_reader.close()
        pair.at_reader.close()
        assert not pair.at_reader.alive()
        with pytest.raises(ClosedError):
            pair.read(view_of(self.layout, empty(self.layout, 1)), slots)
        with pytest.raises(ClosedError):
            pair.at_reader.notify(b"late")
        with pytest.raises(ClosedError):
            pair.at_reader.wait_region(5, WAIT_S)
        assert pair.reader.connect(pair.address, WAIT_S).alive()

    def test_a_closed_transport_refuses_everything(self, pair: Pair) -> None:
        arena = Arena(self.layout, 1, pair.reader.incarnation)
        pair.reader.close()
        pair.reader.close()
        assert not pair.at_reader.alive()
        for call in (
            lambda: pair.reader.register(arena),
            lambda: pair.reader.connect(pair.address, WAIT_S),
            lambda: pair.reader.listen(self.fresh_address(), lambda endpoint: None),
        ):
            with pytest.raises(ClosedError):
                call()
        arena.close()

    # ---- notifications ----------------------------------------------------------------------------

    def test_messages_arrive_in_order_both_ways(self, pair: Pair) -> None:
        at_owner, at_reader = Collected(), Collected()
        pair.at_owner.on_notification(at_owner)
        pair.at_reader.on_notification(at_reader)
        sent = [b"%d" % number for number in range(3000)]
        for message in sent:
            send(pair.at_reader, message)
            send(pair.at_owner, message)
        assert at_owner.wait(len(sent)) == sent
        assert at_reader.wait(len(sent)) == sent

    def test_messages_wait_for_the_first_callback_and_fill_up(self, pair: Pair) -> None:
        sent: list[object] = []
        for number in range(1 << 20):
            message = b"%d" % number
            if not pair.at_reader.notify(message):
                break
            sent.append(message)
        assert 1 < len(sent) < 1 << 20
        got = Collected()
        pair.at_owner.on_notification(got)
        assert got.wait(len(sent)) == sent
        send(pair.at_reader, b"room again")
        assert got.wait(len(sent) + 1)[-1] == b"room again"

    def test_sizes_of_messages(self, pair: Pair) -> None:
        got = Collected()
        pair.at_owner.on_notification(got)
        for message in (b"", bytes(NOTIFICATION_BYTES_MAX + 1)):
            with pytest.raises(UsageError):
                pair.at_reader.notify(message)
        largest = np.random.default_rng(17).bytes(NOTIFICATION_BYTES_MAX)
        send(pair.at_reader, b"\0")
        send(pair.at_reader, largest)
        assert got.wait(2) == [b"\0", largest]

    def test_a_callback_that_raises_stops_nothing(self, pair: Pair) -> None:
        got = Collected()

        def callback(message: bytes) -> None:
            got(message)
            raise ValueError("a planted error of a callback")

        pair.at_owner.on_notification(callback)
        send(pair.at_reader, b"1")
        send(pair.at_reader, b"2")
        assert got.wait(2) == [b"1", b"2"]

    # ---- loss -------------------------------------------------------------------------------------

    def test_a_peer_that_closes_is_lost_once(self, pair: Pair) -> None:
        lost = Collected()
        pair.at_owner.on_lost(lost)
        assert lost.items == []
        pair.reader.close()
        assert lost.wait(1) == [pair.at_owner]
        assert not pair.at_owner.alive()
        late = Collected()
        pair.at_owner.on_lost(late)
        assert late.items == [pair.at_owner]
        with pytest.raises((PeerUnreachableError, ClosedError)):
            pair.at_owner.notify(b"to nobody")
        with pytest.raises((PeerUnreachableError, ClosedError)):
            pair.at_owner.wait_region(0, WAIT_S)
        pair.owner.close()
        assert lost.items == [pair.at_owner]

    def test_the_last_words_of_a_peer_are_heard(self, pair: Pair) -> None:
        got, lost = Collected(), Collected()
        pair.at_owner.on_notification(got)
        for number in range(100):
            send(pair.at_reader, b"%d" % number)
        pair.reader.close()
        pair.at_owner.on_lost(lost)
        lost.wait(1)
        assert got.items == [b"%d" % number for number in range(100)]

    def test_other_endpoints_outlive_a_lost_one(self, pair: Pair) -> None:
        with self.open_transport() as third:
            endpoint = third.connect(pair.address, WAIT_S)
            lost = Collected()
            pair.at_owner.on_lost(lost)
            pair.reader.close()
            lost.wait(1)
            blocks, out = payload(self.layout, 2, seed=18), empty(self.layout, 2)
            read = endpoint.read_blocks(
                view_of(self.layout, out),
                named(0, pair.publish(blocks)),
                source_layout=self.layout,
                dest_layer=None,
                deadline_s=WAIT_S,
            )
            assert read.wait(WAIT_S) == 2
            np.testing.assert_array_equal(out, blocks)
