"""The SSD tier: blocks in slots of preallocated files, which outlive the process.

Owns which block lies where, what is being written, and what a restart believes. A slot's header is
the truth; docs/formats.md has the bytes, docs/decisions/0008-ssd-tier.md the order of a write. Never
holds a block in memory but for the moment of a copy. Who calls it: the pool's stack, with ``write``
and ``read``; whoever uses a tier alone, through the contract, in staging memory.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool._native import lib
from kvpool.arena import Slot, Slots
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout
from kvpool.completion import Deadline
from kvpool.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    KVPoolError,
    UnavailableError,
    UsageError,
)
from kvpool.events import BlocksEvicted, DiskUsed, EventSink, NullSink
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.base import Tier, TierStats
from kvpool.tiers.ledger import Ledger, chained, count_of, own_parent
from kvpool.tiers.ssd_device import WRITE_SLOTS_MAX, Outcome, SsdDevice
from kvpool.tiers.ssd_files import SsdFiles
from kvpool.tiers.ssd_format import INDEX_FOLDER, SEGMENT_BYTES, Geometry, slot_bytes
from kvpool.tiers.ssd_index import SsdIndex
from kvpool.tiers.ssd_recovery import recover
from kvpool.tiers.ssd_staging import Staging
from kvpool.tiers.ssd_stats import SsdCounts, SsdStats
from kvpool.tiers.ssd_writer import Incoming, SsdWriter
from kvpool.tiers.tokens import TokenRows

logger = logging.getLogger(__name__)

# Why a block may be dropped; ``capacity`` is eviction's own.
DROP_REASONS: Final = ("corrupt", "invalid")
# Payload of one durable write at most: enough to hide its two syncs behind.
WRITE_BYTES: Final = 64 << 20
# What a slot is that no longer holds the block that was written there.
_WRONG: Final = (
    lib.KVP_SLOT_EMPTY,
    lib.KVP_SLOT_CORRUPT,
    lib.KVP_SLOT_OTHER,
    lib.KVP_SLOT_VERSION,
)


class SsdTier(Tier):
    """One folder of blocks. Safe from any thread.

    ``write`` and ``read`` move blocks between the disk and any memory, with a deadline. A block is
    found, and durable, when ``write`` has returned it; ``durable`` looks at whole chains. Writes go
    one after another. ``_lock`` guards staging buffers, and the end. The methods of ``Tier`` work in
    ``staging_slots`` buffers; those that meet the disk (``commit``, and ``view`` and ``crcs`` of pinned slots) wait for it ``timeout_s`` at most.

    Args:
        folder: Of this tier alone. Made at need.
        layout: What a block is; the same each time.
        slot_count: Capacity, taken on the disk at once and never exceeded; the same each time.
        threads: Reads and writes in the kernel at once.
        staging_slots: Slots that may be reserved, or viewed, at once through the contract.
        segment_bytes: Of one file, if there need not be too many; the same each time.
        timeout_s: Longest wait for the disk in calls without a deadline of their own.
        events: Told of blocks that leave; None means nobody.

    Attributes:
        recovery: What opening found.

    Raises:
        UnavailableError: Another process has the folder, or the disk does not answer.
        CapacityError: The disk has no room, or the machine no memory.
        ConfigError: The folder holds blocks of another layout, or is of another size.
        FormatVersionError, CorruptionError: Another version wrote it, or it cannot be read at all.
    """

    name = "ssd"

    def __init__(
        self,
        folder: Path,
        layout: BlockLayout,
        slot_count: int,
        *,
        threads: int = 16,
        staging_slots: int = 16,
        segment_bytes: int = SEGMENT_BYTES,
        timeout_s: float = 10.0,
        events: EventSink | None = None,
    ) -> None:
        self.layout = layout
        self.folder = folder
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self._events: EventSink = events or NullSink()
        self._lock = threading.Lock()
        self._counts = SsdCounts()
        with contextlib.ExitStack() as undo:
            files = SsdFiles(folder, Geometry.plan(layout, slot_count, segment_bytes))
            undo.callback(files.close)
            superblock = files.superblock
            device = SsdDevice(
                files.geometry,
                superblock.store_id,
                files.segments,
                files.intent,
                files.lock,
                threads=threads,
                close_timeout_s=timeout_s,
            )
            checksum = (superblock.index_crc, superblock.index_bytes)
            self._index = SsdIndex(
                folder / INDEX_FOLDER, slot_count, checksum if files.clean else None
            )
            undo.callback(self._index.close, timeout_s)
            self._ledger = Ledger(slot_count, superblock.first_generation)
            self._writer = SsdWriter(
                folder,
                self._ledger,
                self._index,
                self._counts,
                self._tell_evicted,
                max(1, min(WRITE_SLOTS_MAX, WRITE_BYTES // layout.block_bytes)),
            )
            self.recovery, torn = recover(files, device, self._ledger, self._index, timeout_s)
            self._writer.distrust(torn)
            self._staging = Staging(layout, staging_slots)
            self._noted: dict[Slot, NDArray[np.uint32]] = {}
            undo.pop_all()
        self._files = files
        self._device: SsdDevice | None = device
        logger.info("%s: %s", folder, self.recovery)

    @classmethod
    def slots_in(cls, layout: BlockLayout, capacity_bytes: int) -> int:
        """Return how many slots a capacity gives: what the tier takes of the disk is never more."""
        return capacity_bytes // slot_bytes(layout)

    # ---- whole blocks, from and to any memory -----------------------------------------------------

    def write(
        self,
        keys: bytes,
        parent: BlockHash | None,
        source: BlockView,
        *,
        crcs: Crcs | None = None,
        tokens: TokenRows | None = None,
        deadline_s: float,
    ) -> int:
        """Write a run of blocks, each the parent of the next; return how many leading ones are here.

        Those are durable when this returns: whatever happens to the process or the machine then,
        they are found again, until they are evicted. Blocks that are here are not written again. A
        full tier evicts; one whose blocks are all pinned takes fewer.

        Args:
            keys: Of the blocks, 32 bytes each, concatenated.
            parent: Of the first block, or None.
            source: Where they are, in any order, one for each key. It is read during the call alone.
            crcs: uint32 [blocks, layers, kv_heads] that they must sum to, or None. A block that
                does not is not written.
            tokens: Of the blocks, as far as they are known: kept beside them.
            deadline_s: For everything. What the kernel has by then stays quarantined until it ends.

        Raises:
            UsageError: The arguments do not fit each other.
            UnavailableError: The disk failed at the first block, or at something before it.
            TransferTimeoutError: Nothing was written by the deadline.
            CorruptionError: The first block is not what its checksums say.
            ClosedError: The tier is closed.
        """
        count = count_of(keys)
        self.layout.require_equal(source.layout)
        if len(source) != count:
            raise UsageError(f"{len(source)} blocks for {count} keys")
        if crcs is not None and crcs.shape != (count, self.layout.num_layers, self.layout.kv_heads):
            raise UsageError(f"checksums of shape {crcs.shape} for {count} blocks")
        if tokens is not None and tokens.values.shape != (count, self.layout.block_tokens):
            raise UsageError(f"tokens of shape {tokens.values.shape} for {count} blocks")
        parents = chained(keys, parent)
        if own_parent(keys, parents):
            raise UsageError("a block is its own parent")
        deadline = Deadline(deadline_s)
        device = self._open()
        blocks = Incoming(keys, parents, source, crcs, tokens)
        with self._writer.turn(device, deadline), self._timed("write", count):
            return self._writer.write(device, blocks, deadline)

    def read(
        self,
        slots: Sequence[Slot],
        dest: BlockView,
        *,
        tokens: TokenRows | None = None,
        deadline_s: float,
    ) -> tuple[int, Crcs]:
        """Read pinned blocks into any memory, verified; how many leading ones, and their checksums.

        Fewer than all is no error. A block that is not what it was leaves the tier, counted; one that
        the disk does not give, or not by the deadline, stays. Blocks behind the leading ones are
        undefined. ``dest`` is not touched any more when this has returned.

        Args:
            slots: As ``pin`` returned them; still pinned.
            dest: Room for as many blocks, in any order.
            tokens: As many rows, that those of the leading blocks are filled into; or None.
            deadline_s: Longest wait.

        Returns:
            The count, and uint32 [count, layers, kv_heads].
        """
        run = Slots.of(slots)
        self.layout.require_equal(dest.layout)
        if len(dest) != len(run) or not dest.writable:
            raise UsageError(
                f"{len(run)} blocks do not fit a view of {len(dest)}, or it is read-only"
            )
        device = self._open()
        self._ledger.require_pinned(run)
        keys, _, _ = self._ledger.names(run)
        if tokens is not None:
            self._require_rows(run, tokens.values)
        with self._timed("read", len(run)):
            outcome, crcs = device.read(run, keys, dest, deadline_s, tokens)
        self._take_note(run, keys, outcome)
        good = outcome.leading()
        return good, crcs[:good]

    def durable(self, keys: bytes) -> int:
        """Count the leading keys whose blocks, and all blocks above them, are here and durable."""
        self._open()
        return self._ledger.rooted(keys)

    def blocks(self) -> tuple[bytes, bytes]:
        """Return the keys of all blocks that are here and their parents, 32 bytes each, in no order.

        The parent of a first block is zeros.
        """
        self._open()
        listing, _ = self._ledger.blocks(0, self._ledger.slot_count)
        return listing.keys, listing.parents

    def flush(self, deadline_s: float) -> bool:
        """Make what has left the tier leave the disk, too; False if the index is still being written.

        Until then a crash may bring evicted and dropped blocks back, whole. Raises
        TransferTimeoutError at the deadline, and UnavailableError if the disk failed.
        """
        deadline = Deadline(deadline_s)
        device = self._open()
        with self._writer.turn(device, deadline):
            self._writer.erase_stale(device, deadline)
        return self._index.wait(deadline.remaining_s())

    # ---- the contract -----------------------------------------------------------------------------

    def reserve(self) -> Slot:
        """Take a slot and a staging buffer, evicting at need. See ``Tier``."""
        self._open()
        buffer = self._staging.take()
        slots = self._writer.reserve(1)
        if not slots:
            self._staging.give(buffer)
            raise CapacityError(
                "every slot is reserved, pinned or quarantined: close leases first",
                tier=self.name,
                size_bytes=self.layout.block_bytes,
            )
        with self._lock:
            self._staging.assign(slots[0], buffer)
        return slots[0]

    def view(self, slots: Sequence[Slot], *, writable: bool) -> BlockView:
        """Describe staging buffers: of reserved slots, or that pinned ones are read into.

        See ``Tier``. Raises CapacityError without enough buffers, CorruptionError or UnavailableError
        if a block cannot be read.
        """
        self._open()
        run = Slots.of(slots)
        if writable:
            self._ledger.require_reserved(run)
            with self._lock:
                return self._staging.view(run)
        view, _ = self._staged(run)
        return view

    def crcs(self, slots: Sequence[Slot]) -> Crcs:
        """Return the checksums of pinned slots, read from the disk. See ``Tier`` and ``view``."""
        run = Slots.of(slots)
        parts = [np.zeros((0, self.layout.num_layers, self.layout.kv_heads), dtype=np.uint32)]
        parts += [self._staged(run[at : at + 1])[1] for at in range(len(run))]
        return np.concatenate(parts)

    def note_tokens(self, slots: Sequence[Slot], tokens: NDArray[np.uint32]) -> None:
        """Keep the tokens of reserved slots, for their headers. See ``Tier``."""
        self._open()
        run = Slots.of(slots)
        self._require_rows(run, tokens)
        self._ledger.require_reserved(run)
        with self._lock:
            self._noted.update(zip(run, tokens.astype(np.uint32), strict=True))

    def same_tokens(self, slots: Sequence[Slot], tokens: NDArray[np.uint32]) -> int:
        """Count the leading pinned slots of these tokens, by their headers on the disk. See ``Tier``.

        One whose header cannot be read may be the same: reading the block says what is wrong.
        """
        device = self._open()
        run = Slots.of(slots)
        self._require_rows(run, tokens)
        self._ledger.require_pinned(run)
        rows = TokenRows.unknown(len(run), self.layout.block_tokens)
        device.scan(run.indices, whole=False, timeout_s=self._timeout_s, tokens=rows)
        same = rows.leading_same(tokens)
        self._counts.add(mismatches=int(same < len(run)))
        return same

    def commit(self, slot: Slot, key: BlockHash, parent: BlockHash | None, crcs: Crcs) -> bool:
        """Write a staged block, durably. See ``Tier``, and ``write`` for what it may raise besides."""
        return self.commit_run([slot], key, parent, crcs) == 1

    def commit_run(
        self,
        slots: Sequence[Slot],
        keys: bytes,
        parent: BlockHash | None,
        crcs: Crcs,
        *,
        granted: bool = False,
    ) -> int:
        """Write staged blocks of a run, durably. See ``Tier``, and ``write`` for its errors.

        All slots are consumed, unless UsageError says that one of them was not reserved.
        """
        run, parents = Slots.of(slots), chained(keys, parent)
        if count_of(keys) != len(run) or own_parent(keys, parents):
            raise UsageError(
                f"{count_of(keys)} keys for {len(run)} slots, or a block is its own parent"
            )
        if crcs.size != len(run) * self.layout.crc_count:
            raise UsageError(f"{crcs.size} checksums for {len(run)} blocks")
        crcs = crcs.reshape(len(run), self.layout.num_layers, self.layout.kv_heads)
        self._open()
        self._ledger.require_reserved(run)
        if granted:
            self.settle_run(run)
        with self._lock:
            source, tokens = self._staging.view(run), self._take_noted(run)
        deadline = Deadline(self._timeout_s)
        try:
            device = self._open()
            with self._writer.turn(device, deadline):
                blocks = Incoming(keys, parents, source, crcs, tokens)
                new = self._writer.put(device, run, blocks, deadline)
        finally:
            with self._lock:
                self._staging.free_all(run)
        return int(new.sum())

    def abort(self, slot: Slot) -> None:
        """Give a reserved slot and its buffer back unwritten. See ``Tier``."""
        if self._device is None:
            return
        with contextlib.suppress(UsageError), self._lock:  # committed, or given back before
            self._ledger.release(slot)
            self._staging.free_all(Slots.of(slot))
            self._noted.pop(slot, None)

    def match(self, keys: bytes) -> int:
        """Count the leading keys that are here. See ``Tier``."""
        self._open()
        return self._ledger.match(keys)

    def pin(self, keys: bytes) -> Slots:
        """Pin the leading blocks that are here. See ``Tier``."""
        self._open()
        slots = self._ledger.pin(keys)
        self._counts.add(hits=len(slots), misses=count_of(keys) - len(slots))
        return slots

    def hold(self, keys: bytes) -> Slots:
        """Pin the leading blocks that are here, for work behind the scenes: not a use, not counted."""
        self._open()
        return self._ledger.pin(keys, use=False)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Give pins back. See ``Tier``."""
        if self._device is not None:
            self._ledger.unpin(slots)

    def grant(self, slot: Slot) -> None:
        """Count one more party that may touch the slot, or its buffer. See ``Tier``."""
        self._open()
        with self._lock:
            self._ledger.grant(slot)
            self._staging.grant(slot)

    def settle(self, slot: Slot) -> None:
        """Give one grant back. See ``Tier``."""
        if self._device is not None:
            with self._lock:
                self._ledger.settle(slot)
                self._staging.settle(slot)

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Remove a block; ``reason`` is one of ``DROP_REASONS``. See ``Tier``.

        It is gone from the disk, too, after the next ``flush``; a crash before may bring it back.
        """
        if reason not in DROP_REASONS:
            raise UsageError(f"reason {reason!r} is not one of {DROP_REASONS}")
        self._open()
        if not self._ledger.drop(key):
            return False
        self._counts.add(corruptions=int(reason == "corrupt"))
        self._tell(reason, 1)
        return True

    def evict(self, count: int) -> int:
        """Evict up to ``count`` unpinned blocks. See ``Tier``; from the disk as ``drop``."""
        self._open()
        evicted = self._ledger.evict(count)
        self._tell_evicted(evicted)
        return evicted

    def stats(self) -> TierStats:
        """Return a snapshot. See ``Tier``."""
        self._writer.reap(self._open())
        counts, numbers = self._ledger.counts(), self._counts.numbers()
        return TierStats(
            slots=self._ledger.slot_count,
            free=counts.free,
            reserved=counts.reserved,
            ready=counts.ready,
            quarantined=counts.quarantined,
            pins=counts.pins,
            hits=numbers.hits,
            misses=numbers.misses,
            evictions=numbers.evictions,
            corruptions=numbers.corruptions,
            mismatches=numbers.mismatches,
        )

    def ssd_stats(self) -> SsdStats:
        """Return what only an SSD tier counts."""
        device, numbers = self._open(), self._counts.numbers()
        return SsdStats(
            stale=self._ledger.counts().stale,
            late_threads=device.late(),
            read_errors=numbers.read_errors,
            write_errors=numbers.write_errors,
            read_timeouts=numbers.read_timeouts,
            write_timeouts=numbers.write_timeouts,
            recovery=self.recovery,
        )

    def close(self) -> None:
        """Make removals and the index durable, within ``timeout_s``, and close the files.

        See ``Tier``. If the disk does not answer, or was not in order, the next opening goes by the
        headers. Threads that the kernel holds end when it lets them, and hold the folder until then.
        In a forked child it touches nothing.
        """
        if os.getpid() != self._process:  # a fork: the store is its parent's, who goes on
            self._device = None
            return
        deadline = Deadline(self._timeout_s)
        with self._lock:
            device, self._device = self._device, None
        if device is None:
            return
        device.end_by(deadline)
        try:
            in_order = False
            try:
                with self._writer.turn(device, deadline):
                    self._writer.erase_stale(device, deadline)
                    in_order = self._writer.in_order()
                    self._writer.end()  # who waits behind this would write what the index lacks
            except KVPoolError as error:
                # As text: whoever keeps the record would keep the error's frames, and the device.
                logger.warning("%s was not closed in order: %s", self.folder, str(error))
            checksum = self._index.close(deadline.remaining_s())
            if in_order and checksum is not None:
                self._files.mark_clean(*checksum)
        except KVPoolError as error:
            logger.warning("%s", str(error))
        finally:
            device.stop()
            self._files.close()

    # ---- inside -----------------------------------------------------------------------------------

    def _open(self) -> SsdDevice:
        device = self._device
        if device is None:
            raise ClosedError("the tier is closed", tier=self.name)
        return device

    @contextlib.contextmanager
    def _timed(self, operation: str, blocks: int) -> Generator[None, None, None]:
        """Tell how long a call at the disk took, however it ends."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._events.emit(DiskUsed(operation=operation, blocks=blocks, seconds=seconds))

    def _require_rows(self, slots: Slots, tokens: NDArray[np.uint32]) -> None:
        if tokens.shape != (len(slots), self.layout.block_tokens):
            raise UsageError(f"tokens of shape {tokens.shape} for {len(slots)} blocks")

    def _take_noted(self, slots: Slots) -> TokenRows | None:
        """Take the tokens that were noted of reserved slots. Locked."""
        noted = [self._noted.pop(slot, None) for slot in slots]
        if not any(row is not None for row in noted):
            return None
        rows = TokenRows.unknown(len(slots), self.layout.block_tokens)
        for at, row in enumerate(noted):
            if row is not None:
                rows.values[at], rows.known[at] = row, True
        return rows

    def _take_note(self, slots: Slots, keys: bytes, outcome: Outcome) -> None:
        """Drop the blocks that a read found to be others than they were, and count what failed."""
        wrong = np.isin(outcome.results, _WRONG)
        _, _, ready = self._ledger.names(slots)
        for at in np.flatnonzero(wrong & ready).tolist():
            key = BlockHash(keys[at * HASH_BYTES : (at + 1) * HASH_BYTES])
            if self.drop(key, "corrupt"):
                logger.warning(
                    "%s: slot %d is not what was written there (result %d): block dropped",
                    self.folder,
                    slots.indices[at],
                    outcome.results[at],
                )
        timeouts = outcome.are(lib.KVP_SLOT_LATE) | outcome.are(lib.KVP_SLOT_SKIPPED)
        self._counts.add(
            read_errors=int(outcome.are(lib.KVP_SLOT_FAILED).sum()),
            read_timeouts=int(timeouts.sum()),
        )

    def _staged(self, slots: Slots) -> tuple[BlockView, Crcs]:
        """Read pinned blocks into staging buffers that go back with the view."""
        view = self._staging.lend(len(slots))
        good, crcs = self.read(slots, view, deadline_s=self._timeout_s)
        if good < len(slots):
            _, _, ready = self._ledger.names(slots[good : good + 1])
            if not ready.all():
                raise CorruptionError(f"block {good} of {len(slots)} is damaged", block=good)
            raise UnavailableError(
                f"block {good} of {len(slots)} cannot be read: look at the disk", block=good
            )
        return view, crcs

    def _tell_evicted(self, count: int) -> None:
        self._counts.add(evictions=count)
        self._tell("capacity", count)

    def _tell(self, reason: str, count: int) -> None:
        if count:
            size_bytes = count * self.layout.block_bytes
            self._events.emit(
                BlocksEvicted(tier=self.name, reason=reason, blocks=count, size_bytes=size_bytes)
            )
