"""Everything that an SSD tier writes: blocks, and headers erased.

Owns the order of writes (one at a time), and what a failed one leaves behind: slots that the kernel
may still write are kept out of use until it has ended, and headers that may be half written are erased
before anything else is. Who calls it: the SSD tier.
"""

import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool._native import lib
from kvpool.arena import Slot, SlotNumbers, Slots
from kvpool.block import HASH_BYTES, SlotIndex
from kvpool.completion import Deadline
from kvpool.errors import (
    ClosedError,
    CorruptionError,
    KVPoolError,
    TransferTimeoutError,
    UnavailableError,
    UsageError,
)
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.ledger import Ledger, Listing, select
from kvpool.tiers.ssd_device import Outcome, SsdDevice, unbegun
from kvpool.tiers.ssd_files import translated
from kvpool.tiers.ssd_index import SsdIndex
from kvpool.tiers.ssd_stats import SsdCounts
from kvpool.tiers.tokens import TokenRows

logger = logging.getLogger(__name__)

# Headers that one erasure has at most.
ERASE_SLOTS_MAX: Final = 1000
# Slots out of use because the disk does not take a header there. One bad place costs its slots; if it
# is more, the disk fails as a whole, and says so to who writes.
BAD_SLOTS_MAX: Final = 32
# Slots that an intent names ahead of writes: three writes of 2 MiB blocks. Each is read after a
# crash; to list many more for smaller blocks costs what their intents do (decision 0008).
AHEAD_SLOTS: Final = 96


@dataclass(frozen=True, slots=True)
class Incoming:
    """Blocks to be written.

    Attributes:
        keys, parents: 32 bytes each, concatenated.
        source: Where they are, in any order.
        crcs: uint32 [blocks, layers, kv_heads] that they must sum to, or None.
        tokens: What is known of their tokens, or None.
    """

    keys: bytes
    parents: bytes
    source: BlockView
    crcs: Crcs | None
    tokens: TokenRows | None = None

    def __len__(self) -> int:
        return len(self.source)

    def take(self, begin: int, end: int) -> "Incoming":
        """Return blocks ``begin`` to ``end`` (exclusive, cut at the last)."""
        names = slice(begin * HASH_BYTES, end * HASH_BYTES)
        crcs = None if self.crcs is None else self.crcs[begin:end]
        source = self.source.take(begin, end)
        tokens = None if self.tokens is None else self.tokens.take(begin, end)
        return Incoming(self.keys[names], self.parents[names], source, crcs, tokens)

    def only(self, rows: NDArray[np.bool_]) -> "Incoming":
        """Return the blocks that are marked."""
        if rows.all():
            return self
        source = self.source.with_ids(self.source.block_ids[rows])
        crcs = None if self.crcs is None else self.crcs[rows]
        tokens = None if self.tokens is None else self.tokens.only(rows)
        return Incoming(select(self.keys, rows), select(self.parents, rows), source, crcs, tokens)


class SsdWriter:
    """The one who writes. Safe from any thread.

    ``_writing`` is held for the length of a write, ``_lock`` for a few lines: it guards ``_dirty``
    (slots that may hold anything: their headers are erased before the next write) and ``_late``
    (slots that the kernel may still write: granted to it in the ledger).

    Args:
        folder: For messages.
        ledger, index, counts: The tier's.
        evicted: Told how many blocks had to go to make room.
        step: Blocks of one durable write.
    """

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        index: SsdIndex,
        counts: SsdCounts,
        evicted: Callable[[int], None],
        step: int,
    ) -> None:
        self._folder = folder
        self._evicted = evicted
        self._step = step
        self._ahead = AHEAD_SLOTS
        self._ledger = ledger
        self._index = index
        self._counts = counts
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self._late: dict[SlotIndex, Slot] = {}
        self._bad: dict[SlotIndex, Slot] = {}
        self._ended = False  # in a turn

    @contextmanager
    def turn(self, device: SsdDevice, deadline: Deadline) -> Generator[None, None, None]:
        """Be the one who writes, with what earlier writes left behind tidied up.

        Raises TransferTimeoutError if another has the disk until the deadline, ClosedError after
        ``end``, and what the disk said.
        """
        if not self._writing.acquire(timeout=deadline.remaining_s()):
            raise TransferTimeoutError("another write had the disk until the deadline", tier="ssd")
        try:
            if self._ended:
                raise ClosedError("the tier is closed", tier="ssd")
            if self._late:  # which changes in a turn alone
                self._reap(device)
            self._tidy(device, deadline)
            yield
        finally:
            self._writing.release()

    def _tidy(self, device: SsdDevice, deadline: Deadline) -> None:
        """Erase headers that may be half written: before any intent that may not name their slots."""
        if not (self._dirty or self._bad):  # which change in a turn alone
            return
        with self._lock:
            dirty = np.array(sorted(self._dirty | self._bad.keys()), dtype=np.uint32)
        for begin in range(0, len(dirty), ERASE_SLOTS_MAX):
            self._erase(device, dirty[begin : begin + ERASE_SLOTS_MAX], deadline, bans=True)

    def end(self) -> None:
        """Have every turn behind this one refused. In a turn: what it leaves is what stays."""
        self._ended = True

    def distrust(self, slots: SlotNumbers) -> None:
        """Have headers that may be half written erased before anything else is. Before any turn."""
        self._dirty.update(slots.tolist())

    def reap(self, device: SsdDevice) -> None:
        """Take back the slots that the kernel has let go of, unless somebody writes: who does will."""
        if self._writing.acquire(blocking=False):
            try:
                self._reap(device)
            finally:
                self._writing.release()

    def _reap(self, device: SsdDevice) -> None:
        """Take slots back. In a turn: what a write left late is known when it has ended."""
        with self._lock:
            for slot in device.settled():
                del self._late[slot.index]
                self._dirty.add(slot.index)
                self._ledger.settle(slot)

    def reserve(self, count: int) -> Slots:
        """Take up to ``count`` slots, evicting at need."""
        slots, gone = self._ledger.take(count)
        evicted = len(gone)
        while len(slots) < count and len(gone):
            # A victim with grants out is quarantined and frees nothing: go on.
            more, gone = self._ledger.take(count - len(slots))
            evicted += len(gone)
            slots = Slots(
                np.concatenate([slots.indices, more.indices]),
                np.concatenate([slots.generations, more.generations]),
            )
        if evicted:
            self._evicted(evicted)
        return slots

    def write(self, device: SsdDevice, blocks: "Incoming", deadline: Deadline) -> int:
        """Write blocks that are not here; how many leading ones are here and durable then.

        In a turn. All of them stay pinned until it ends, so that none makes room for another. Raises
        what the disk said if the first block could not be written.
        """
        held: list[Slots] = []
        done = 0
        try:
            while True:
                here = self._ledger.pin(blocks.keys[done * HASH_BYTES :])
                held.append(here)
                done += len(here)
                if done == len(blocks):
                    return done
                try:
                    new = self._write_some(device, blocks.take(done, done + self._step), deadline)
                except KVPoolError as error:
                    if done == 0:
                        raise
                    logger.warning("%d of %d blocks were written: %s", done, len(blocks), error)
                    return done
                if not new:
                    return done
                if new == len(blocks) - done:  # nothing more needs room
                    return len(blocks)
        finally:
            for slots in held:
                self._ledger.unpin(slots)

    def put(
        self, device: SsdDevice, slots: Slots, blocks: "Incoming", deadline: Deadline
    ) -> NDArray[np.bool_]:
        """Write blocks that are not here into reserved slots; for each whether it is new.

        In a turn. Consumes the slots. Raises what the disk said if none could be written.
        """
        fresh = ~self._ledger.touch(blocks.keys)
        new = np.zeros(len(slots), dtype=np.bool_)
        done = np.zeros(len(slots), dtype=np.bool_)
        try:
            if not fresh.any():
                return new
            run, wanted = _take(slots, fresh), blocks.only(fresh)
            self._tidy(device, deadline)  # before anything is written in their place
            results = unbegun(len(run))
            try:
                outcome = device.write(
                    run,
                    wanted.keys,
                    wanted.parents,
                    wanted.source,
                    wanted.crcs,
                    deadline.remaining_s(),
                    self._also(device, run),
                    wanted.tokens,
                    results=results,
                )
            except BaseException:  # Ctrl-C: the kernel may be at some slots, and others be written
                self._note_failures(run, Outcome(results, False, True, False, 0))
                raise
            stored = Listing(slots, blocks.keys, blocks.parents)
            if outcome.whole() and run is slots:
                done[:] = True
            else:
                self._note_failures(run, outcome)
                done[fresh] = outcome.are(lib.KVP_SLOT_DONE) & outcome.durable
                stored = stored.take(done)
            added = self._ledger.commit(stored.slots, stored.keys, stored.parents)
            new[done] = added
            self._index.put(stored.take(added))
            if not added.all():  # the same key twice: a header of a block that lies elsewhere
                self._ledger.mark(_take(stored.slots, ~added).indices, stale=True)
        finally:
            if not done.all():
                self._ledger.release(_take(slots, ~done))
        if not done.any():
            raise self._error(outcome, "writing")
        return new

    def erase_stale(self, device: SsdDevice, deadline: Deadline) -> None:
        """Erase the headers of all blocks that have left. In a turn. Raises what the disk said."""
        while len(stale := self._ledger.stale(ERASE_SLOTS_MAX)):
            self._erase(device, stale, deadline)

    def in_order(self) -> bool:
        """Say whether the disk holds just what the ledger does. In a turn."""
        with self._lock:
            unsettled = len(self._dirty) + len(self._late) + len(self._bad)
        return unsettled == 0 and self._ledger.counts().stale == 0

    def _also(self, device: SsdDevice, run: Slots) -> SlotNumbers:
        """Return what an intent has to name besides the slots of a write.

        That is what the kernel may still write, and where nothing could be erased; and if there has to be a new intent, the slots that
        the next writes are likely to take, which then need none.
        """
        late = np.array(sorted(self._late.keys() | self._bad.keys()), dtype=np.uint32)
        if device.named(np.concatenate([run.indices, late]) if len(late) else run.indices):
            return late
        room = lib.KVP_SSD_INTENT_SLOTS - len(run) - len(late)
        return np.concatenate([late, self._ledger.ahead(min(self._ahead, room))])

    def _write_some(self, device: SsdDevice, blocks: "Incoming", deadline: Deadline) -> int:
        """Write the leading blocks that there is room for; how many are new."""
        self._tidy(device, deadline)  # after an earlier part of the same write
        slots = self.reserve(len(blocks))
        if not len(slots):
            if self._bad:
                raise UnavailableError(
                    f"{len(self._bad)} slots cannot be written, and no other is free: look at the disk",
                    tier="ssd",
                )
            return 0
        return int(self.put(device, slots, blocks.take(0, len(slots)), deadline).sum())

    def _erase(
        self, device: SsdDevice, slots: SlotNumbers, deadline: Deadline, *, bans: bool = False
    ) -> None:
        outcome = device.erase(slots, deadline.remaining_s())
        if not outcome.durable:
            failed = outcome.are(lib.KVP_SLOT_FAILED)
            if not (bans and failed.any() and self._ban(slots[failed])):
                raise self._error(outcome, "erasing")
            if not failed.all():
                self._erase(device, slots[~failed], deadline)
            return
        self._index.remove(slots)
        self._ledger.mark(slots, stale=False)
        with self._lock:
            self._dirty.difference_update(slots.tolist())
            for number in self._bad.keys() & set(slots.tolist()):
                self._ledger.settle(self._bad.pop(number))

    def _ban(self, slots: SlotNumbers) -> bool:
        """Take slots out of use that cannot be erased; False if they are too many, or taken."""
        with self._lock:
            for number in slots.tolist():
                if number in self._bad:
                    continue
                taken = self._ledger.vacate(number, 1) if len(self._bad) < BAD_SLOTS_MAX else None
                if taken is None:
                    return False
                self._bad[number] = slot = taken[0][0]
                self._ledger.grant(slot)
                self._ledger.release(slot)
                self._dirty.discard(number)
        return True

    def _note_failures(self, slots: Slots, outcome: Outcome) -> None:
        """Keep slots that the kernel may still write, and those that may hold anything."""
        if outcome.durable and outcome.leading() == len(slots):
            return
        touched = outcome.are(lib.KVP_SLOT_FAILED)
        if not outcome.durable:
            touched |= outcome.are(lib.KVP_SLOT_DONE)
        with self._lock:
            for slot in _take(slots, outcome.are(lib.KVP_SLOT_LATE)):
                self._ledger.grant(slot)
                self._late[slot.index] = slot
            self._dirty.update(slots.indices[touched].tolist())
        self._counts.add(
            write_errors=int(outcome.are(lib.KVP_SLOT_FAILED).sum()),
            write_timeouts=len(slots) if outcome.timed_out else 0,
        )

    def _error(self, outcome: Outcome, doing: str) -> KVPoolError:
        if outcome.blocked:
            return UnavailableError(
                f"{doing}: the disk still has an earlier write that gave up: try again later",
                tier="ssd",
            )
        if outcome.timed_out:
            return TransferTimeoutError(
                f"{doing}: the disk was not done by the deadline", tier="ssd"
            )
        if outcome.error:
            cause = OSError(outcome.error, os.strerror(outcome.error))
            error = translated(cause, f"{doing} in {self._folder}", self._folder)
            if isinstance(error, UsageError):  # it was allowed when the tier was opened
                error = UnavailableError(str(error), tier="ssd", path=str(self._folder))
            error.__cause__ = cause
            return error
        return CorruptionError("the block to be written is not what its checksums say", tier="ssd")


def _take(slots: Slots, rows: NDArray[np.bool_]) -> Slots:
    if rows.all():
        return slots
    return Slots(slots.indices[rows], slots.generations[rows])
