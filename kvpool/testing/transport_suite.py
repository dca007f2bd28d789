"""What every transport must do. Subclass ``TransportSuite`` once for each implementation and wrapper.

Uses the ``Transport`` and ``Endpoint`` contracts alone. Both sides live in the test's process, also of
a transport between processes; what only another process can do is tested in ``tests/faults``.
"""

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.block import new_incarnation
from kvpool.errors import (
    PeerUnreachableError,
    StaleIncarnationError,
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
    publish,
    send,
)
from kvpool.testing.transport_ends import EndChecks
from kvpool.testing.transport_reads import ReadChecks
from kvpool.testing.transport_writes import WriteChecks
from kvpool.transfer.base import (
    NOTIFICATION_BYTES_MAX,
)


class TransportSuite(ReadChecks, WriteChecks, EndChecks):
    """The suite: connections and messages here; reads, writes and ends in its parts."""

    # ---- connecting -------------------------------------------------------------------------

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

    # ---- notifications ----------------------------------------------------------------------

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
