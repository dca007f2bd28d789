"""Staging: slots of this process from which a server pulls the blocks of a store.

Owns one arena, registered with this process's transport, and the life of its slots: written,
published, granted to the server, and free again when the server has ended or its path is closed.
Who calls it: the remote pool.
"""

import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from kvpool.arena import Arena, Slots
from kvpool.block import BlockLayout
from kvpool.client import protocol
from kvpool.client.life import reply_of_store
from kvpool.client.rpc import Caller
from kvpool.completion import Deadline
from kvpool.errors import (
    ClosedError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.memory import BlockView, Crew, copy_blocks
from kvpool.transfer.base import Transport

# Most blocks of a batch: more names than one message should carry at once.
_SLOTS_MAX: Final = 1024
# Threads that copy a batch together, the caller included; the server pulls it with as many.
_COPY_THREADS: Final = 2
# How much longer than the server's own deadline a client waits for its answer. A server that is
# silent for longer is treated as lost.
_GRACE_S: Final = 1.0
# How often a free slot is looked for while the transport lets go of the batch before.
_SLOT_WAIT_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks that fit the staging at once, in chain order.

    Attributes:
        hashes: Their hashes, 32 bytes each.
        ancestors: Hashes of all blocks before the first one.
        source: Where they lie.
        hold_s: Seconds that the server shall lease them to the client; 0 for none.
        durable: Whether only what is on a device counts as stored.
    """

    hashes: bytes
    ancestors: bytes
    source: BlockView
    hold_s: float
    durable: bool = False


class Server(Protocol):
    """Whom a batch goes to: a link, as far as it is needed here."""

    @property
    def caller(self) -> Caller:
        """Calls."""
        ...

    @property
    def client(self) -> bytes:
        """The name of the connection."""
        ...

    @property
    def slots_tell_sums(self) -> bool:
        """Whether it knows a store's checksums from the slots."""
        ...

    def close(self) -> None:
        """Close the path."""
        ...


class Staging:
    """A bounded number of slots. Safe from any thread: one batch is under way at a time.

    Args:
        layout: Of the blocks.
        size_bytes: Most bytes of a batch, at least one block.
        transport: The arena is registered with it and has its incarnation.
    """

    def __init__(self, layout: BlockLayout, size_bytes: int, transport: Transport) -> None:
        self.slot_count = min(size_bytes // layout.block_bytes, _SLOTS_MAX)
        self.arena = Arena(layout, self.slot_count, transport.incarnation)
        try:
            self._region = transport.register(self.arena).region
        except BaseException:
            self.arena.close()
            raise
        self._crew = Crew(_COPY_THREADS)
        self._turn = threading.Lock()
        self._stopped = False

    def send(
        self, link: Server, batch: Batch, deadline: Deadline, silent_s: float
    ) -> protocol.StoreReply:
        """Stage one batch and have the server pull it.

        Raises:
            TransferTimeoutError, PeerUnreachableError: The deadline passed, or the server gave no
                sign of life for ``silent_s``: then the link was closed before the slots were freed.
            ClosedError: ``stop`` was called.
            CapacityError, UsageError: As the server says.

        Blocks until the server has ended, at most ``_GRACE_S`` longer than the deadline.
        """
        if not self._turn.acquire(timeout=deadline.remaining_s()):
            raise TransferTimeoutError("other stores of this process took all the time there was")
        try:
            if self._stopped:
                raise ClosedError("the pool was closed")
            slots = self._reserve(len(batch.source), deadline)
            try:
                return self._send(link, batch, slots, deadline, silent_s)
            finally:
                self.arena.release(slots)
        finally:
            self._turn.release()

    def _reserve(self, count: int, deadline: Deadline) -> Slots:
        """Take so many slots. A transport may hold those of the batch before a moment longer."""
        while True:
            slots = self.arena.reserve_some(count)
            if len(slots) == count:
                return _in_order(slots)
            self.arena.release(slots)
            if self._stopped:
                raise ClosedError("the pool was closed")
            if deadline.passed():
                raise TransferTimeoutError("the deadline of the store passed: no slot")
            time.sleep(_SLOT_WAIT_S)

    def _send(
        self,
        link: Server,
        batch: Batch,
        slots: Slots,
        deadline: Deadline,
        silent_s: float,
    ) -> protocol.StoreReply:
        crcs = copy_blocks(self.arena.view(slots), batch.source, crew=self._crew)
        self.arena.commit_all(slots, crcs, batch.hashes)
        timeout_s = deadline.remaining_s()
        if not timeout_s:
            raise TransferTimeoutError("the deadline of the store passed while it was staged")
        request = protocol.StoreRequest(
            client=link.client,
            hashes=batch.hashes,
            ancestors=batch.ancestors,
            region=self._region,
            slots=slots.indices.tolist(),
            generations=slots.generations.tolist(),
            crcs=b"" if link.slots_tell_sums else crcs.astype("<u4").tobytes(),
            timeout_s=min(timeout_s, protocol.STORE_TIMEOUT_MAX_S),
            hold_s=batch.hold_s,
            durable=batch.durable,
        )
        self.arena.grant(slots)
        try:
            asked = link.caller.ask(protocol.STORE, request, timeout_s + _GRACE_S)
            return reply_of_store(link.caller, asked, silent_s)
        except (TransferTimeoutError, PeerUnreachableError):
            link.close()  # close the path first, free the slots second
            raise
        finally:
            self.arena.settle(slots)

    def stop(self) -> None:
        """Refuse every batch from now on with ClosedError; the one under way ends with its link."""
        self._stopped = True

    def close(self) -> None:
        """Close the arena. Idempotent."""
        self.arena.close()


def _in_order(slots: Slots) -> Slots:
    """Sort slots: those beside each other go over a network in one piece.

    An arena hands out the slots of the batch before in the opposite order.
    """
    order = np.argsort(slots.indices)
    return Slots(slots.indices[order], slots.generations[order])
