"""Staging: slots of this process from which a server pulls the blocks of a store.

Owns one arena, registered with this process's transport, and the life of its slots: written,
published, granted to the server, and free again when the server has ended or its path is closed.
Who calls it: the remote pool.
"""

import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.arena import Arena, Slot
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout
from kvpool.client import protocol
from kvpool.client.life import reply_of_store
from kvpool.client.rpc import Caller
from kvpool.completion import Deadline
from kvpool.errors import (
    CapacityError,
    ClosedError,
    PeerUnreachableError,
    TransferTimeoutError,
)
from kvpool.memory import BlockView, copy_blocks
from kvpool.transfer.base import Transport

# Most blocks of a batch: the server enters them one by one, some 10 us each.
_SLOTS_MAX: Final = 1024
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
        slots: list[Slot] = []
        try:
            if self._stopped:
                raise ClosedError("the pool was closed")
            try:
                self._reserve(slots, len(batch.source), deadline)
                return self._send(link, batch, slots, deadline, silent_s)
            finally:
                for slot in slots:
                    self.arena.release(slot)
        finally:
            self._turn.release()

    def _reserve(self, slots: list[Slot], count: int, deadline: Deadline) -> None:
        """Take slots into ``slots``. A transport may hold those of the batch before a moment longer."""
        while len(slots) < count:
            try:
                slots.append(self.arena.reserve())
            except CapacityError:
                if self._stopped:
                    raise ClosedError("the pool was closed") from None
                if deadline.passed():
                    raise TransferTimeoutError(
                        "the deadline of the store passed: no slot"
                    ) from None
                time.sleep(_SLOT_WAIT_S)

    def _send(
        self,
        link: Server,
        batch: Batch,
        slots: list[Slot],
        deadline: Deadline,
        silent_s: float,
    ) -> protocol.StoreReply:
        crcs = copy_blocks(self.arena.view(slots), batch.source)
        for index, slot in enumerate(slots):
            begin = index * HASH_BYTES
            name = BlockHash(batch.hashes[begin : begin + HASH_BYTES])
            self.arena.commit(slot, crcs[index], name)
        timeout_s = deadline.remaining_s()
        if not timeout_s:
            raise TransferTimeoutError("the deadline of the store passed while it was staged")
        request = protocol.StoreRequest(
            client=link.client,
            hashes=batch.hashes,
            ancestors=batch.ancestors,
            region=self._region,
            slots=[slot.index for slot in slots],
            generations=[slot.generation for slot in slots],
            crcs=crcs.astype("<u4").tobytes(),
            timeout_s=timeout_s,
            hold_s=batch.hold_s,
            durable=batch.durable,
        )
        for slot in slots:
            self.arena.grant(slot)
        try:
            asked = link.caller.ask(protocol.STORE, request, timeout_s + _GRACE_S)
            return reply_of_store(link.caller, asked, silent_s)
        except (TransferTimeoutError, PeerUnreachableError):
            link.close()  # close the path first, free the slots second
            raise
        finally:
            for slot in slots:
                self.arena.settle(slot)

    def stop(self) -> None:
        """Refuse every batch from now on with ClosedError; the one under way ends with its link."""
        self._stopped = True

    def close(self) -> None:
        """Close the arena. Idempotent."""
        self.arena.close()
