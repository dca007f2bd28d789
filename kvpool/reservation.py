"""Reservations: slots that were taken for a run of blocks and are being written.

Owns the steps between a store's begin and its end: what is there already is held, room is taken for
the rest, and a writer that is late keeps its slots in quarantine, not in use. Never copies. Who calls
it: the pool, for its own copies and for a server's writers.
"""

import contextlib
import threading
from collections.abc import Sequence

import numpy as np

from kvpool.arena import Slot
from kvpool.base import StoreResult
from kvpool.block import HASH_BYTES, BlockHash
from kvpool.errors import TransferTimeoutError, UsageError
from kvpool.memory import Crcs
from kvpool.tiers.base import BlockTokens, Tier


class Reservation:
    """Room for the blocks of one run that a tier does not hold. Safe from any thread.

    Ends once: with ``finish`` when the writer has ended, or with ``abandon`` while the writer may
    still write. After ``abandon`` the slots are in quarantine until ``settle`` says that the writer
    has ended or is known to be dead. One lock, ``_lock``, guards the end; the tier is called under
    it, and it is locked under nothing.

    Args:
        tier: Where the blocks go.
        hashes: Of the blocks, in chain order, 32 bytes each.
        parent: Hash of the block before the first one, or None.
        tokens: Of the blocks, uint32 [blocks, block_tokens], if they are known. Kept beside those
            that are new, and compared with those that are there.

    Attributes:
        begin: Leading blocks of the run that the tier holds already; held until the end.
        view: Where to write blocks ``begin`` to ``begin + len(view)``; fewer than the run has if
            there is no room for more.

    Raises:
        ClosedError: The tier is closed. Nothing is held.
    """

    def __init__(
        self,
        tier: Tier,
        hashes: bytes,
        parent: BlockHash | None,
        tokens: BlockTokens | None = None,
    ) -> None:
        count, rest = divmod(len(hashes), HASH_BYTES)
        if rest:
            raise UsageError(f"{len(hashes)} bytes are not whole hashes of {HASH_BYTES}")
        self._tier = tier
        self._lock = threading.Lock()
        self._ended = self._settled = False
        self._refused = ""
        self._slots: Sequence[Slot] = []
        self._held: Sequence[Slot] = []
        # Only what is there is pinned, so that a store of new blocks is no miss.
        if here := tier.match(hashes):
            self._held = tier.pin(hashes[: here * HASH_BYTES])
        self.begin = len(self._held)
        self._keys = hashes[self.begin * HASH_BYTES :]
        self._parent = parent
        if self.begin:
            self._parent = BlockHash(hashes[(self.begin - 1) * HASH_BYTES :][:HASH_BYTES])
        try:
            if tokens is not None and self.begin:
                same = tier.same_tokens(self._held, tokens[: self.begin])
                if same < self.begin:  # two prompts, one name: nothing behind it can be stored
                    self.begin = count = same
                    self._refused = f"block {same} is there under this name with other tokens"
            self._slots = tier.reserve_run(
                count - self.begin, None if tokens is None else tokens[self.begin : count]
            )
            self.view = tier.view(self._slots, writable=True)
        except BaseException:
            self.settle()
            raise
        if self.begin + len(self._slots) < count:
            self._refused = (
                f"room for {len(self._slots)} of {count - self.begin} blocks, every slot is "
                "reserved, pinned or quarantined now: close leases first"
            )

    def finish(self, crcs: Crcs) -> StoreResult:
        """Publish the leading blocks that were written; the writer has ended.

        Args:
            crcs: uint32 [written, layers, kv_heads]: the CRC32C of the leading blocks of ``view``
                that were written whole, ``written <= len(view)``.

        Raises:
            TransferTimeoutError: It was abandoned before. Nothing is published.
            UsageError: ``crcs`` does not fit ``view``. Nothing is published.
        """
        layout = self._tier.layout
        shape = (len(crcs), layout.num_layers, layout.kv_heads)
        if crcs.dtype != np.uint32 or crcs.shape != shape or len(crcs) > len(self._slots):
            raise UsageError(f"checksums {crcs.dtype} {crcs.shape} for {len(self._slots)} blocks")
        with self._lock:
            if self._ended:
                raise TransferTimeoutError("the store was given up before its blocks were written")
            self._settled = True
            count = len(crcs)
            written, self._slots = self._slots[:count], self._slots[count:]
            try:
                if self._slots:
                    self._tier.settle_run(self._slots)
                new = self._tier.commit_run(
                    written, self._keys[: count * HASH_BYTES], self._parent, crcs, granted=True
                )
            except BaseException:
                with contextlib.suppress(UsageError):  # their grants were given back already
                    self._tier.settle_run(written)
                self._tier.abort_run(written)
                raise
            finally:
                self._give_up()
        if self._slots:
            self._refused = f"{len(crcs)} of {len(self.view)} blocks were written"
        return StoreResult(self.begin + len(crcs), new, self._refused)

    def abandon(self) -> bool:
        """Give up while the writer may still write. False if it had ended already. Never raises."""
        with self._lock:
            if self._ended:
                return False
            self._give_up()
            return True

    def settle(self) -> None:
        """Say that the writer has ended. What was not finished is given up. Idempotent."""
        with self._lock:
            self._settle()
            if not self._ended:
                self._give_up()

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._tier.settle_run(self._slots)

    def _give_up(self) -> None:
        """Abort what is not committed and let go of what was there. Under the lock, once."""
        self._ended = True
        if self._slots:
            self._tier.abort_run(self._slots)
        if self._held:
            self._tier.unpin(self._held)
