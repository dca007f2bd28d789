"""How every transport's work ends: deadlines, cancels, closes, and peers that are lost.

A part of ``TransportSuite``.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvpool.arena import Arena, Slot
from kvpool.completion import Completion
from kvpool.errors import (
    CancelledTransferError,
    ClosedError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import (
    SLOTS,
    WAIT_S,
    Collected,
    Pair,
    empty,
    named,
    send,
)
from kvpool.testing.transport_scene import TransportScene
from kvpool.transfer.base import (
    Endpoint,
)


class EndChecks(TransportScene):
    """Deadlines, cancels, closes, losses."""

    # ---- deadline, cancel, close ------------------------------------------------------------

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

    def test_a_callback_cannot_close_its_transport(self, pair: Pair) -> None:
        told = Collected()

        def close(message: bytes) -> None:
            try:
                pair.owner.close()
            except UsageError as error:
                told(error)

        pair.at_owner.on_notification(close)
        send(pair.at_reader, b"close")
        told.wait(1)
        # Nothing was closed by half.
        assert pair.at_owner.alive()
        assert pair.read(view_of(self.layout, empty(self.layout, 1)), self._one(pair)) == 1

    def test_an_endpoint_is_watched_though_its_callback_raised(self, pair: Pair) -> None:
        lost = Collected()

        def meet(endpoint: Endpoint) -> None:
            endpoint.on_lost(lost)
            raise UsageError("a callback failed")

        address = pair.reader.listen(self.fresh_address(), meet)
        pair.owner.connect(address, WAIT_S).close()
        lost.wait(1)

    def _one(self, pair: Pair) -> list[Slot]:
        return pair.publish(payload(self.layout, 1, seed=21))

    # ---- loss -------------------------------------------------------------------------------

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
