"""Poison under reads: whatever is cancelled, closed, late or evicted meanwhile, no byte is wrong.

The owner's slots are evicted and written anew all the time. What a read delivers is exactly what was
named; a byte outside its destination never changes; and after its end nothing writes to it.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena, Slot
from kvpool.block import BlockLayout
from kvpool.completion import Completion
from kvpool.errors import CancelledTransferError, ClosedError, TransferTimeoutError
from kvpool.testing.blocks import Payload, payload, view_of
from kvpool.testing.pair import WAIT_S, empty, named, publish
from kvpool.transfer.base import Endpoint, Transport
from kvpool.transfer.choice import TransportKind, listen_address, open_transport
from tests.conftest import Count

LAYOUT = BlockLayout(num_layers=4, kv_heads=2, block_tokens=16, k_dim=32, v_dim=32)
SLOTS = 48
# Blocks before and behind a destination, that belong to somebody else.
GUARD = 2
POISON = 0xA5


class Owner:
    """An arena whose blocks are evicted and replaced by a thread; each life has a seed of its own."""

    def __init__(self, transport: Transport) -> None:
        self.arena = Arena(LAYOUT, SLOTS, transport.incarnation)
        transport.register(self.arena)
        self.lives: list[tuple[Slot, int]] = []
        self.seeds: dict[tuple[int, int], int] = {}
        self._next = 0
        for _ in range(SLOTS - 4):
            self._publish()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._evict)
        self._thread.start()

    def _publish(self) -> None:
        self._next += 1
        (slot,) = publish(self.arena, payload(LAYOUT, 1, self._next))
        self.seeds[int(slot.index), slot.generation] = self._next
        self.lives.append((slot, self._next))

    def _evict(self) -> None:
        dice = np.random.default_rng(3)
        while not self._stop.wait(0.0005):
            slot, _ = self.lives.pop(int(dice.integers(len(self.lives))))
            self.arena.release(slot)
            if self.arena.counts().free:  # what is on its way to a peer keeps its slot
                self._publish()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self.arena.close()


class Reader:
    """A connection to the owner, that is closed and made again now and then."""

    def __init__(self, transport: Transport, address: str) -> None:
        self._transport = transport
        self._address = address
        self.endpoint: Endpoint = self._connect()

    def _connect(self) -> Endpoint:
        endpoint = self._transport.connect(self._address, WAIT_S)
        endpoint.wait_region(0, WAIT_S)
        return endpoint

    def reconnect(self) -> None:
        """Close in the middle of whatever is read, and connect anew."""
        self.endpoint.close()
        self.endpoint = self._connect()


class Place:
    """A destination between guards, all poison."""

    def __init__(self) -> None:
        self.all = empty(LAYOUT, SLOTS + 2 * GUARD)
        self.all[:] = POISON
        self.named: list[Slot] = []
        self.read: Completion[int] | None = None

    def start(self, endpoint: Endpoint, slots: list[Slot], deadline_s: float) -> None:
        self.all[:] = POISON
        self.named = slots
        self.read = endpoint.read_blocks(
            view_of(LAYOUT, self.out),
            named(0, slots),
            source_layout=LAYOUT,
            dest_layer=None,
            deadline_s=deadline_s,
        )

    @property
    def out(self) -> Payload:
        return self.all[GUARD : GUARD + len(self.named)]

    def end(self, seeds: dict[tuple[int, int], int]) -> int:
        """Wait for the end; check what came and what is around it; return the blocks that came."""
        assert self.read is not None
        good = 0
        try:
            good = self.read.wait(WAIT_S)
        except (CancelledTransferError, ClosedError, TransferTimeoutError):
            assert self.read.done()
        for block, slot in zip(self.out[:good], self.named, strict=False):
            seed = seeds[int(slot.index), slot.generation]
            np.testing.assert_array_equal(block, payload(LAYOUT, 1, seed)[0])
        assert bool((self.all[:GUARD] == POISON).all())
        assert bool((self.all[GUARD + len(self.named) :] == POISON).all())
        self.all[:] = 9  # the next owner's
        return good

    def require_untouched(self) -> None:
        assert bool((self.all == 9).all())


@pytest.fixture(params=["host", pytest.param("ucx", marks=pytest.mark.ucx)])
def kind(request: pytest.FixtureRequest) -> Iterator[TransportKind]:
    yield request.param


def test_reads_under_evictions_cancels_and_reconnects(
    kind: TransportKind, tmp_path: Path, count: Count
) -> None:
    dice = np.random.default_rng(5)
    with open_transport(kind, "owner") as owning, open_transport(kind, "reader") as reading:
        owner = Owner(owning)
        address = owning.listen(listen_address(kind, tmp_path / "us"), lambda endpoint: None)
        reader = Reader(reading, address)
        places = [Place() for _ in range(6)]
        came = 0
        for _ in range(count(80, 4000)):
            for place in places:
                lives = list(owner.lives)
                chosen = dice.permutation(len(lives))[: dice.integers(1, len(lives))]
                deadline_s = float(dice.choice([0.0005, 0.005, WAIT_S]))
                place.start(reader.endpoint, [lives[at][0] for at in chosen], deadline_s)
            for place in places:
                if dice.random() < 0.3 and place.read is not None:
                    place.read.cancel()
            if dice.random() < 0.1:
                reader.reconnect()
            came += sum(place.end(owner.seeds) for place in places)
            for place in places:
                place.require_untouched()
        assert came > 0
        owner.close()
