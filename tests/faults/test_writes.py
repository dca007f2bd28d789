"""Writes whose other side stops or dies: typed errors in time, and no byte in a slot's later life."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena, Slot
from kvpool.block import SlotIndex
from kvpool.completion import Completion
from kvpool.errors import (
    CapacityError,
    LeaseExpiredError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.memory import Span
from kvpool.testing.blocks import payload
from kvpool.testing.pair import Collected, publish
from kvpool.transfer.base import Endpoint, SlotSpan, Transport
from kvpool.transfer.choice import TransportKind, open_transport
from tests.faults.peer import LAYOUT, SEED, WAIT_S, Peer, peer
from tests.waiting import until

BLOCKS = 16
# The deadline of what is expected to time out.
SHORT_S = 0.3
PIECE = 256

pytestmark = pytest.mark.parametrize("kind", ["host", pytest.param("ucx", marks=pytest.mark.ucx)])


@pytest.fixture
def transport(kind: TransportKind) -> Iterator[Transport]:
    with open_transport(kind, "test") as transport:
        yield transport


@pytest.fixture
def other(kind: TransportKind) -> Iterator[Peer]:
    with peer(kind) as other:
        yield other


def address_for(kind: TransportKind, folder: Path) -> str:
    return "ucx://127.0.0.1:0" if kind == "ucx" else str(folder / "socket")


class Writer:
    """Our blocks, and a peer process with slots that they are written into."""

    def __init__(self, transport: Transport, other: Peer, address: str) -> None:
        self.arena = Arena(LAYOUT, BLOCKS, transport.incarnation)
        transport.register(self.arena)
        self.sources = publish(self.arena, payload(LAYOUT, BLOCKS, SEED))
        other.do("listen", path=address)
        pairs = json.loads(str(other.do("take_writes", blocks=BLOCKS)))
        self.into = [Slot(SlotIndex(index), life) for index, life in pairs]
        self.endpoint: Endpoint = transport.connect(str(other.do("where")), WAIT_S)
        self.endpoint.wait_region(0, WAIT_S)

    def write(self, at: int, deadline_s: float = WAIT_S) -> Completion[int]:
        """Write a block, in pieces, so that it takes many turns."""
        source, dest = self.sources[at], self.into[at]
        return self.endpoint.write_spans(
            [
                (
                    SlotSpan(0, source.index, source.generation, begin, PIECE),
                    SlotSpan(0, dest.index, dest.generation, begin, PIECE),
                )
                for begin in range(0, LAYOUT.block_bytes, PIECE)
            ],
            deadline_s,
        )

    def write_until_taken(self, at: int) -> None:
        """Write a block, again while a pull of what was given up is under way yet."""

        def taken() -> bool:
            try:
                return self.write(at).wait(WAIT_S) == LAYOUT.block_bytes
            except CapacityError:
                return False

        until(taken)


def test_writes_to_an_owner_that_stops_end_in_time_and_can_be_tried_again(
    transport: Transport, other: Peer, kind: TransportKind, tmp_path: Path
) -> None:
    writer = Writer(transport, other, address_for(kind, tmp_path))
    writer.write(0).wait(WAIT_S)
    writes = [writer.write(at, SHORT_S) for at in range(BLOCKS)]
    other.stop()
    late = 0
    for write in writes:
        try:
            write.wait(WAIT_S)
        except TransferTimeoutError:
            late += 1
    assert late > 0
    other.resume()
    for at in range(BLOCKS):
        writer.write_until_taken(at)
    assert other.do("written")


def test_writes_to_an_owner_that_is_killed_end(
    transport: Transport, other: Peer, kind: TransportKind, tmp_path: Path
) -> None:
    writer = Writer(transport, other, address_for(kind, tmp_path))
    writes = [writer.write(at) for at in range(BLOCKS) for _ in range(4)]
    writes[0].wait(WAIT_S)
    other.kill()
    for write in writes:
        try:
            write.wait(WAIT_S)
        except (PeerUnreachableError, CapacityError):
            continue
    with pytest.raises(PeerUnreachableError):
        writer.write(0).wait(WAIT_S)
    # Nothing of ours is held for it.
    until(lambda: writer.arena.counts().grants == 0)


@pytest.mark.parametrize("end", ["killed", "resumed"])
def test_a_writer_that_stops_writes_into_no_later_life(
    transport: Transport, other: Peer, kind: TransportKind, tmp_path: Path, end: str
) -> None:
    arena = Arena(LAYOUT, BLOCKS, transport.incarnation)
    transport.register(arena, writable=True)
    into = list(arena.reserve_some(BLOCKS))
    connected = Collected()
    address = transport.listen(address_for(kind, tmp_path), connected)
    other.do("publish", blocks=BLOCKS)
    other.do("connect", path=address)
    connected.wait(1)
    names = json.dumps([[slot.index, slot.generation] for slot in into])
    other.start("write_on", slots=names)
    until(lambda: arena.counts().grants > 0)
    other.stop()
    arena.release(into)  # its holder gives up
    if end == "killed":
        other.kill()
    else:
        other.resume()
        assert other.answer() == LeaseExpiredError.__name__
    until(lambda: arena.counts().free == BLOCKS)
    later = list(arena.reserve_some(BLOCKS))
    view = arena.view(later)
    bytes_of = [
        Span(view.base + int(slot.index) * view.block_stride, LAYOUT.block_bytes).view()
        for slot in later
    ]
    for each in bytes_of:
        np.frombuffer(each, dtype=np.uint8)[:] = 7
    if end == "resumed":
        other.start("write_on", slots=names)
        assert other.answer() == LeaseExpiredError.__name__
    assert all(set(each) == {7} for each in bytes_of)
    assert arena.counts().grants == 0
