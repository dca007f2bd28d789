"""A batch whose slots a transport still holds waits for them: until they come, its end, or the pool's."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import pytest

from kvpool.client import protocol
from kvpool.client.rpc import Asked, Caller, Method, Reply, Request
from kvpool.client.staging import Batch, Staging
from kvpool.completion import Deadline
from kvpool.errors import (
    CapacityError,
    ClosedError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.memory import copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import empty
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport

SLOTS = 2
PATIENCE_S = 20.0
BATCH = Batch(
    hashes=bytes(32 * SLOTS),
    ancestors=b"",
    source=view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, SLOTS, seed=1)),
    hold_s=0.0,
)


class _Asked(Exception):
    """The batch has its slots and went to the server."""


class _Nobody:
    """A server that shows that it was asked."""

    client = b"nobody"
    slots_tell_sums = True

    @property
    def caller(self) -> Caller:
        raise _Asked

    def close(self) -> None:
        pass


class _Kept(Caller):
    """Keeps the request of a store."""

    request: protocol.StoreRequest | None = None

    def ask(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> Asked[Reply]:
        assert isinstance(request, protocol.StoreRequest)
        self.request = request
        raise _Asked


@dataclass
class _Server:
    """A server of an old or a new version."""

    caller: _Kept
    slots_tell_sums: bool
    client: bytes = b"server"

    def close(self) -> None:
        pass


class _Silent:
    """A server that does not answer in time, and notes how many slots are free when its path is closed."""

    client = b"silent"
    slots_tell_sums = True

    def __init__(self, staging: Staging, error: KVPoolError) -> None:
        self.staging, self.error = staging, error
        self.free_at_close: list[int] = []

    @property
    def caller(self) -> Caller:
        raise self.error

    def close(self) -> None:
        self.free_at_close.append(self.staging.arena.counts().free)


@pytest.fixture
def staging() -> Iterator[Staging]:
    with ExitStack() as stack:
        transport = stack.enter_context(LoopbackTransport(LoopbackNetwork()))
        staging = Staging(SMALL_LAYOUT, SLOTS * SMALL_LAYOUT.block_bytes, transport)
        stack.callback(staging.close)
        yield staging


def test_no_slot_until_the_deadline(staging: Staging) -> None:
    held = staging.arena.reserve()
    with pytest.raises(TransferTimeoutError, match="no slot"):
        staging.send(_Nobody(), BATCH, Deadline(0.05), 1.0)
    staging.arena.release(held)
    assert staging.arena.counts().free == SLOTS


@pytest.mark.parametrize("slots_tell_sums", [False, True])
def test_checksums_are_sent_to_who_does_not_ask_the_slots(
    staging: Staging, slots_tell_sums: bool
) -> None:
    with closing(_Kept("unix:/nobody")) as kept:
        with pytest.raises(_Asked):
            staging.send(_Server(kept, slots_tell_sums), BATCH, Deadline(PATIENCE_S), 1.0)
        assert kept.request is not None
        sent = np.frombuffer(kept.request.crcs, dtype="<u4")
    told = copy_blocks(view_of(SMALL_LAYOUT, empty(SMALL_LAYOUT, SLOTS)), BATCH.source)
    np.testing.assert_array_equal(sent, [] if slots_tell_sums else told.ravel())


def test_slots_are_named_in_the_order_in_which_they_lie(staging: Staging) -> None:
    """Beside each other they go over a network in one piece; an arena hands out the last one first."""
    with closing(_Kept("unix:/nobody")) as kept:
        for _ in range(3):
            with pytest.raises(_Asked):
                staging.send(_Server(kept, True), BATCH, Deadline(PATIENCE_S), 1.0)
            assert kept.request is not None
            assert list(kept.request.slots) == list(range(SLOTS))


def test_stop_ends_the_wait(staging: Staging) -> None:
    held = staging.arena.reserve()
    ends: list[KVPoolError] = []

    def send() -> None:
        try:
            staging.send(_Nobody(), BATCH, Deadline(10 * PATIENCE_S), 1.0)
        except KVPoolError as error:
            ends.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    begun = Deadline(PATIENCE_S)
    while staging.arena.counts().free and not begun.passed():
        thread.join(0.001)
    staging.stop()
    thread.join(PATIENCE_S)
    assert [type(error) for error in ends] == [ClosedError]
    staging.arena.release(held)
    assert staging.arena.counts().free == SLOTS


def test_a_slot_that_comes_back_is_taken(staging: Staging) -> None:
    held = staging.arena.reserve()
    threading.Timer(0.01, staging.arena.release, [held]).start()
    with pytest.raises(_Asked):
        staging.send(_Nobody(), BATCH, Deadline(PATIENCE_S), 1.0)
    assert staging.arena.counts().free == SLOTS


@pytest.mark.parametrize(
    "error", [TransferTimeoutError("no answer"), PeerUnreachableError("it is silent")]
)
def test_the_path_to_a_silent_server_is_closed_before_its_slots_are_free(
    staging: Staging, error: KVPoolError
) -> None:
    """It may be pulling out of them still."""
    server = _Silent(staging, error)
    with pytest.raises(type(error)):
        staging.send(server, BATCH, Deadline(PATIENCE_S), 1.0)
    assert server.free_at_close == [0]
    assert staging.arena.counts().free == SLOTS


def test_the_path_to_a_server_that_refuses_stays_open(staging: Staging) -> None:
    server = _Silent(staging, CapacityError("too many stores"))
    with pytest.raises(CapacityError):
        staging.send(server, BATCH, Deadline(PATIENCE_S), 1.0)
    assert server.free_at_close == []
    assert staging.arena.counts().free == SLOTS
