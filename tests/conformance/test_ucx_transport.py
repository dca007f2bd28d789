"""The UCX transport passes the suite of transports, whichever way its reads go."""

import socket

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.errors import PeerUnreachableError
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import SLOTS, WAIT_S, Pair, empty, named, publish
from kvpool.testing.transport_reads import ReadChecks
from kvpool.testing.transport_scene import TransportScene
from kvpool.testing.transport_suite import TransportSuite
from kvpool.transfer.base import Transport
from kvpool.transfer.ucx import UcxTransport
from tests.waiting import until


@pytest.mark.ucx
class TestUcxTransport(TransportSuite):
    def open_transport(self) -> Transport:
        return UcxTransport()

    def fresh_address(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return f"ucx://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.ucx
class TestUcxGets(ReadChecks):
    """Reads as the reader's gets, which libucp emulates over TCP.

    The suite's reads alone: a connection that fails in the middle of such a get ends the process
    (docs/decisions/0003-ucx.md, finding 15). How gets end is tested in ``native/tests/ucx_reads.c``.
    """

    fresh_address = TestUcxTransport.fresh_address

    def open_transport(self) -> Transport:
        return UcxTransport(read_mode="get")

    def test_reads_are_gets(self, pair: Pair) -> None:
        """And a region is registered once, however often it is read."""
        owner, reader = pair.owner, pair.reader
        assert isinstance(owner, UcxTransport)
        assert isinstance(reader, UcxTransport)
        blocks = payload(self.layout, SLOTS, seed=50)
        slots = pair.publish(blocks)
        out = empty(self.layout, SLOTS)
        before = owner.counts()["registrations"]
        for _ in range(20):
            assert pair.read(view_of(self.layout, out), slots) == SLOTS
        np.testing.assert_array_equal(out, blocks)
        assert owner.counts()["registrations"] == before + 1
        assert owner.counts()["puts"] == reader.counts()["puts"] == 0
        trace = reader.trace()
        assert trace.gets >= 20
        assert trace.get_bytes == 20 * SLOTS * self.layout.block_bytes
        # Nothing is held for a reader that has it: the owner heard so.
        until(lambda: pair.arena.counts().grants == 0)


@pytest.mark.ucx
def test_gets_that_are_emulated_are_refused_by_an_owner_that_did_not_ask_for_them() -> None:
    with UcxTransport("owner") as owner, UcxTransport("reader", read_mode="get") as reader:
        arena = Arena(SMALL_LAYOUT, 1, owner.incarnation)
        owner.register(arena)
        endpoint = reader.connect(owner.listen("ucx://127.0.0.1:0", lambda each: None), WAIT_S)
        endpoint.wait_region(0, WAIT_S)
        read = endpoint.read_blocks(
            view_of(SMALL_LAYOUT, empty(SMALL_LAYOUT, 1)),
            named(0, publish(arena, payload(SMALL_LAYOUT, 1, seed=52))),
            source_layout=SMALL_LAYOUT,
            dest_layer=None,
            deadline_s=WAIT_S,
        )
        with pytest.raises(PeerUnreachableError):
            read.wait(WAIT_S)
        assert arena.counts().grants == owner.counts()["puts"] == 0
        arena.close()


@pytest.mark.ucx
class TestUcxPuts(TransportScene):
    """What repeated puts cost in registrations: nothing, since the inbox is registered at open."""

    def open_transport(self) -> Transport:
        return UcxTransport(read_mode="put")

    fresh_address = TestUcxTransport.fresh_address

    def test_nothing_is_registered_again(self, pair: Pair) -> None:
        assert isinstance(pair.owner, UcxTransport)
        assert isinstance(pair.reader, UcxTransport)
        before = [each.counts()["registrations"] for each in (pair.owner, pair.reader)]
        slots = pair.publish(payload(self.layout, SLOTS, seed=51))
        for _ in range(20):
            out = empty(self.layout, SLOTS)  # of its own each time
            assert pair.read(view_of(self.layout, out), slots) == SLOTS
        assert pair.owner.counts()["puts"] > 0
        after = [each.counts()["registrations"] for each in (pair.owner, pair.reader)]
        assert after == before
