"""Two connected transports, and what suites and tests of transfer do with them."""

import threading
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.arena import Arena, Slot
from kvpool.block import BlockLayout
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.testing.blocks import Payload, view_of
from kvpool.transfer.base import Endpoint, RegionDescriptor, RemoteSlots, Transport

SLOTS: Final = 8
# Ends a test that hangs; nothing here takes near as long.
WAIT_S: Final = 20.0


class Collected:
    """A callback that keeps what it was given and can be waited for."""

    def __init__(self) -> None:
        self.items: list[object] = []
        self._changed = threading.Condition()

    def __call__(self, item: object) -> None:
        """Keep one item."""
        with self._changed:
            self.items.append(item)
            self._changed.notify_all()

    def wait(self, count: int) -> list[object]:
        """Wait for ``count`` items and return all there are."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.items) >= count, WAIT_S), (
                f"{len(self.items)} of {count} came"
            )
            return list(self.items)


@dataclass(slots=True)
class Pair:
    """An owner that listens and has an arena of ``SLOTS`` slots, and a reader that is connected."""

    owner: Transport
    reader: Transport
    address: str
    arena: Arena
    region: RegionDescriptor
    at_owner: Endpoint
    at_reader: Endpoint

    def publish(self, blocks: Payload) -> list[Slot]:
        """Put payloads into slots of the owner's arena."""
        return publish(self.arena, blocks)

    def with_arena(self, layout: BlockLayout) -> "Pair":
        """Return the same two with a second arena, of another layout."""
        arena = Arena(layout, SLOTS, self.owner.incarnation)
        region = self.owner.register(arena)
        self.at_reader.wait_region(region.region, WAIT_S)
        return replace(self, arena=arena, region=region)

    def read(self, dest: BlockView, slots: list[Slot], dest_layer: int | None = None) -> int:
        """Pull whole slots of the owner into a view, and wait."""
        return self.at_reader.read_blocks(
            dest,
            named(self.region.region, slots),
            source_layout=self.arena.layout,
            dest_layer=dest_layer,
            deadline_s=WAIT_S,
        ).wait(WAIT_S)


def publish(arena: Arena, blocks: Payload) -> list[Slot]:
    """Reserve, write and commit one slot for each payload."""
    slots = [arena.reserve() for _ in blocks]
    crcs = copy_blocks(arena.view(slots), view_of(arena.layout, blocks))
    for slot, crc in zip(slots, crcs, strict=True):
        arena.commit(slot, crc)
    return slots


def named(region: int, slots: list[Slot]) -> RemoteSlots:
    """Name slots to a peer."""
    return RemoteSlots(
        region,
        tuple(int(slot.index) for slot in slots),
        tuple(slot.generation for slot in slots),
    )


def empty(layout: BlockLayout, blocks: int) -> Payload:
    """Return room for payloads, all zero."""
    return np.zeros((blocks, layout.block_bytes), dtype=np.uint8)


def send(endpoint: Endpoint, message: bytes) -> None:
    """Send a message as soon as there is room."""
    pause = threading.Event()
    for _ in range(int(WAIT_S * 1000)):
        if endpoint.notify(message):
            return
        pause.wait(0.001)
    pytest.fail("the peer never read")


def flip(arena: Arena, slot: Slot, offset: int) -> None:
    """Flip one bit of a committed slot, behind the back of its checksums."""
    view = arena.view([slot])
    at = view.base + int(slot.index) * view.block_stride + offset
    Span(at, 1, arena).view()[0] ^= 1


def paged(layout: BlockLayout, cache: NDArray[np.float32], block_ids: list[int]) -> BlockView:
    """Describe a cache [layer, kv, block, token, head, dim], as engines have it."""
    layer, kv, block, token, head, _ = cache.strides
    return BlockView(
        layout=layout,
        base=Span.of(cache).address,
        block_stride=block,
        layer_stride=layer,
        head_stride=head,
        kv_stride=kv,
        k_token_stride=token,
        v_token_stride=token,
        block_ids=np.asarray(block_ids, dtype=np.uint64),
        owner=cache,
    )
