"""The index of an SSD store: an LMDB file that says which block lies in which slot.

Owns one record a slot, written by a thread of its own behind the blocks. The slots' headers are the
truth: the index makes opening quick after an orderly close, and at no other time is a byte of it
believed. It is then known by a checksum of the whole file, because LMDB follows damaged pages
wherever they lead; after anything else it is thrown away and written anew. Who calls it: the SSD tier.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import lmdb
import numpy as np

from kvpool.arena import SlotNumbers, Slots
from kvpool.block import HASH_BYTES
from kvpool.completion import Deadline
from kvpool.errors import UnavailableError
from kvpool.tiers.ledger import Listing
from kvpool.tiers.ssd_format import crc32c

logger = logging.getLogger(__name__)

# One slot: docs/formats.md. LMDB's key is the slot number, big-endian, so that they lie in order.
RECORD: Final = np.dtype(
    [
        ("slot", "<u4"),
        ("reserved", "<u4"),
        ("generation", "<u8"),
        ("key", "u1", (HASH_BYTES,)),
        ("parent", "u1", (HASH_BYTES,)),
    ]
)
_FILE: Final = "data.mdb"
_READ_BYTES: Final = 4 << 20
# A record with LMDB's own, in half-full pages, and what a transaction copies: on disk, not memory.
_MAP_BYTES_PER_SLOT: Final = 512
_MAP_BYTES_MIN: Final = 64 << 20
# Records of one transaction, and how long the thread waits for more before it writes fewer.
_BATCH: Final = 10000
_GATHER_S: Final = 0.25
# Changes that wait as they came.
_CHANGES_MAX: Final = 64
# What LMDB raises when the disk fails, or its file.
_FAILURES: Final = (lmdb.Error, OSError)


class SsdIndex:
    """The index while its store is open. Safe from any thread; ``put`` and ``remove`` never wait.

    One lock, ``_changed``, guards what waits to be written: at most one record a slot, and
    ``_CHANGES_MAX`` changes that nobody has cut into records. ``put`` wakes the thread only if it
    sleeps for want of work: it would take the interpreter from who writes blocks. The thread
    ``kvpool-ssd-index`` alone touches LMDB until ``close``. If LMDB fails, the index is given up for
    this run, and the store opens by its headers the next time.

    Args:
        folder: Of the index; what lies there is used if ``checksum`` is of it, else removed.
        slot_count: How many records there may be.
        checksum: CRC32C and size of the file, from a superblock that says clean; None: believe nothing.

    Attributes:
        found: The blocks of a believed index; None if there was nothing to believe.
    """

    def __init__(self, folder: Path, slot_count: int, checksum: tuple[int, int] | None) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._waiting: dict[int, bytes | None] = {}
        self._changes: list[Listing | SlotNumbers] = []  # behind ``_waiting``: put, or removed
        self._idle = False
        self._writing = self._closing = self._broken = False
        self._awaited = 0  # callers of ``wait``
        believed = checksum is not None and checksum_of(folder) == checksum
        self.found: Listing | None = None
        if not believed:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            if not believed:  # LMDB would follow damage in it: through a link, too, nothing stays
                (folder if folder.is_file() else folder / _FILE).unlink(missing_ok=True)
            self._environment = _open(folder, slot_count)
            if believed:
                self.found = _read(self._environment)
        except _FAILURES as error:
            raise UnavailableError(
                f"the index {folder} cannot be opened: {error}: look at the disk, and at ulimit -n",
                path=str(folder),
            ) from error
        self._thread = threading.Thread(target=self._run, name="kvpool-ssd-index", daemon=True)
        self._thread.start()

    def put(self, blocks: Listing) -> None:
        """Say which blocks lie in slots now."""
        self._change(blocks)

    def remove(self, slots: SlotNumbers) -> None:
        """Say that nothing lies in slots any more."""
        self._change(slots)

    def write_all(self, blocks: Listing) -> None:
        """Write an empty index anew, in ascending order of slots. Before anything is ``put``."""
        records = _records(blocks)
        numbers = blocks.slots.indices.tolist()
        for begin in range(0, len(records), _BATCH):
            items = [
                (_key(number), record)
                for number, record in zip(
                    numbers[begin : begin + _BATCH], records[begin : begin + _BATCH], strict=True
                )
            ]
            self._guarded(partial(self._append, items))

    def close(self, timeout_s: float) -> tuple[int, int] | None:
        """End the thread and make the index durable; its checksum, or None if it is not whole."""
        deadline = Deadline(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline.remaining_s())
        if self._thread.is_alive():
            return None  # the disk has it; LMDB is left to the thread
        self._guarded(self._sync)
        self._environment.close()
        return None if self._broken else checksum_of(self._folder)

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything was handed to LMDB; False if the deadline came first."""
        with self._changed:
            self._awaited += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: self._broken or not (self._has_work() or self._writing), timeout_s
                )
            finally:
                self._awaited -= 1

    def _change(self, change: Listing | SlotNumbers) -> None:
        with self._changed:
            self._changes.append(change)
            if len(self._changes) >= _CHANGES_MAX:
                self._gather()
            if self._idle or self._is_due():
                self._changed.notify_all()

    def _gather(self) -> None:
        """Cut changes into records. Locked."""
        changes, self._changes = self._changes, []
        for change in changes:
            if isinstance(change, Listing):
                numbers = change.slots.indices.tolist()
                self._waiting.update(zip(numbers, _records(change), strict=True))
            else:
                self._waiting.update(dict.fromkeys(change.tolist()))

    def _has_work(self) -> bool:
        return bool(self._waiting or self._changes)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle = True
                self._changed.wait_for(lambda: self._has_work() or self._closing)
                self._idle = False
                if not self._has_work():
                    return
                # More may come at once: a transaction each would take time from who writes blocks.
                self._changed.wait_for(self._is_due, _GATHER_S)
                self._gather()
                waiting, self._waiting, self._writing = self._waiting, {}, True
            self._guarded(partial(self._write, waiting))
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _is_due(self) -> bool:
        return self._closing or self._awaited > 0 or len(self._waiting) >= _BATCH

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do something to LMDB unless it has failed before."""
        if self._broken:
            return
        try:
            work()
        except _FAILURES as error:
            self._broken = True
            logger.warning(
                "the index %s cannot be written (%s): the store opens by its headers next time",
                self._folder,
                error,
            )

    def _write(self, records: Mapping[int, bytes | None]) -> None:
        puts = [(_key(slot), record) for slot, record in records.items() if record is not None]
        with self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(puts)
            for slot, record in records.items():
                if record is None:
                    transaction.delete(_key(slot))

    def _sync(self) -> None:
        self._environment.sync(True)

    def _append(self, items: list[tuple[bytes, bytes]]) -> None:
        with self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(items, append=True)


def _records(blocks: Listing) -> list[bytes]:
    rows = np.zeros(len(blocks.slots), dtype=RECORD)
    rows["slot"] = blocks.slots.indices
    rows["generation"] = blocks.slots.generations
    rows["key"] = np.frombuffer(blocks.keys, dtype=np.uint8).reshape(-1, HASH_BYTES)
    rows["parent"] = np.frombuffer(blocks.parents, dtype=np.uint8).reshape(-1, HASH_BYTES)
    raw, size = rows.tobytes(), RECORD.itemsize
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def _key(slot: int) -> bytes:
    return slot.to_bytes(4, "big")


def read_index(folder: Path) -> Listing:
    """Return the blocks of an index that is believed, without opening it for writing."""
    with lmdb.open(str(folder), readonly=True, lock=False) as environment:
        return _read(environment)


def _read(environment: lmdb.Environment) -> Listing:
    """Return all records, oldest life first."""
    with environment.begin() as transaction, transaction.cursor() as cursor:
        raw = b"".join(cursor.iternext(keys=False, values=True))
    records = np.frombuffer(raw, dtype=RECORD)
    records = records[np.argsort(records["generation"], kind="stable")]
    return Listing(
        Slots(records["slot"].astype(np.uint32), records["generation"].astype(np.uint64)),
        records["key"].tobytes(),
        records["parent"].tobytes(),
    )


def checksum_of(folder: Path) -> tuple[int, int] | None:
    """Return CRC32C and size of an index's file, None if it cannot be read."""
    crc = size = 0
    try:
        with (folder / _FILE).open("rb") as file:
            while piece := file.read(_READ_BYTES):
                crc = crc32c(piece, crc)
                size += len(piece)
    except OSError:
        return None
    return crc, size


def _open(folder: Path, slot_count: int) -> lmdb.Environment:
    folder.mkdir(mode=0o700, exist_ok=True)
    return lmdb.open(
        str(folder),
        map_size=_MAP_BYTES_MIN + slot_count * _MAP_BYTES_PER_SLOT,
        # The store's own lock is held, and one thread comes here.
        lock=False,
        # The index is believed after an orderly close alone, which syncs it.
        sync=False,
        metasync=False,
        max_readers=2,
    )
