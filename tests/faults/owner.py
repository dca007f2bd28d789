"""A peer process that owns blocks, our endpoint to it, and reads of them that are checked."""

import copy
import json

import numpy as np

from kvpool.arena import Slot
from kvpool.block import Incarnation, SlotIndex
from kvpool.completion import Completion
from kvpool.testing.blocks import Payload, payload, view_of
from kvpool.testing.pair import empty, named
from kvpool.transfer.base import Endpoint, RemoteSlots, Transport
from tests.faults.peer import LAYOUT, SEED, WAIT_S, Peer


class Owner:
    """A peer process that listens and owns blocks, and our endpoint to it.

    Args:
        transport: Ours.
        other: The peer.
        address: Where it is to listen: a path, or over UCX by default its host and any port.
        blocks: How many it publishes.
    """

    def __init__(
        self, transport: Transport, other: Peer, address: str | None = None, blocks: int = 400
    ) -> None:
        self.peer = other
        self._transport = transport
        said = other.do("listen", path=address or f"ucx://{other.host}:0")
        self.incarnation = Incarnation(bytes.fromhex(str(said)))
        self.address = str(other.do("where"))
        pairs = json.loads(str(other.do("publish", blocks=blocks)))
        self.slots = named(0, [Slot(SlotIndex(index), life) for index, life in pairs])
        self.blocks = payload(LAYOUT, blocks, SEED)
        self.endpoint = self.connect()

    def through(self, transport: Transport) -> "Owner":
        """Return the same owner, connected through another transport of ours."""
        other = copy.copy(self)
        other._transport = transport
        other.connect()
        return other

    def connect(self) -> Endpoint:
        """Connect to it anew."""
        self.endpoint = self._transport.connect(self.address, WAIT_S, self.incarnation)
        self.endpoint.wait_region(0, WAIT_S)
        return self.endpoint

    def read(self, out: Payload, deadline_s: float = WAIT_S) -> Completion[int]:
        """Begin to read its first ``len(out)`` blocks."""
        count = len(out)
        source = RemoteSlots(0, self.slots.slots[:count], self.slots.generations[:count])
        return self.endpoint.read_blocks(
            view_of(LAYOUT, out), source, source_layout=LAYOUT, dest_layer=None,
            deadline_s=deadline_s,
        )  # fmt: skip

    def require_exact(self) -> int:
        """Read all of its blocks, exactly; return how many bytes that were."""
        out = empty(LAYOUT, len(self.blocks))
        assert self.read(out).wait(WAIT_S) == len(self.blocks)
        np.testing.assert_array_equal(out, self.blocks)
        return out.nbytes
