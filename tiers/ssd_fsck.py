"""Checking and mending an SSD store that no process has open.

Owns what can be wrong with a store and what is done about it. A block is whole or it is erased: what it
was cannot be told any more. Reads all of it, and writes nothing unless asked to mend. Who calls it:
``kvpool fsck``.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvpool._native import lib
from kvpool.arena import SlotNumbers
from kvpool.errors import UnavailableError
from kvpool.tiers.ledger import Listing
from kvpool.tiers.ssd_device import SsdDevice
from kvpool.tiers.ssd_files import lock_folder, read_superblock, translating
from kvpool.tiers.ssd_format import (
    INDEX_FOLDER,
    INTENT_FILE,
    SUPERBLOCK_FILE,
    Superblock,
    segment_file,
    whole_copies,
)
from kvpool.tiers.ssd_index import checksum_of, read_index
from kvpool.tiers.ssd_recovery import newest_copies, scan

_THREADS: Final = 16
_ERASE_SLOTS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a store.

    Attributes:
        kind: superblock, segment, header, payload, version, other, unreadable, doubled, index or stale.
        where: The file, and the slot if it is one's.
        meaning: What is wrong, for a person.
        mended: It is no more.
    """

    kind: str
    where: str
    meaning: str
    mended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found.

    Attributes:
        slots: Of the store.
        blocks: Whole ones.
        clean: It was closed in order; if not, it opens by its headers, and nothing is lost by that.
        findings: What is wrong.
    """

    slots: int
    blocks: int
    clean: bool
    findings: tuple[Finding, ...]


# Why a slot's block is none: what a look at the whole slot says, after one at its header.
_WRONG: Final = {
    lib.KVP_SLOT_CORRUPT: ("header", "is no header, or damaged"),
    lib.KVP_SLOT_OTHER: ("other", "names another slot or store"),
    lib.KVP_SLOT_VERSION: ("version", "is of another version of the format"),
    lib.KVP_SLOT_FAILED: ("unreadable", "cannot be read: the disk says no"),
}


def check_store(folder: Path, *, mend: bool, timeout_s: float = 60.0) -> Report:
    """Check a store, and mend it if asked: erase what is damaged, give files their size.

    Raises:
        UsageError: There is no store in the folder, or it may not be read.
        UnavailableError: A process has it open, or the disk does not answer for ``timeout_s``.
        FormatVersionError, CorruptionError: Its superblock cannot be read. Nothing can be mended.
    """
    with ExitStack() as undo, translating(f"{folder} cannot be checked", folder):
        superblock = read_superblock(folder)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, lock)
        lock_folder(lock, folder)
        if superblock.opens == 0:  # the disk had no room for it, say: there is nothing, nor was
            return Report(slots=superblock.geometry.slot_count, blocks=0, clean=True, findings=())
        check = _Check(folder, superblock, mend, timeout_s)
        check.superblock_copies()
        segments = check.segments(undo)
        intent = check.open(undo, INTENT_FILE)
        device = SsdDevice(
            superblock.geometry, superblock.store_id, segments, intent, lock, threads=_THREADS
        )
        return check.slots(device)


class _Check:
    """One check under way."""

    def __init__(self, folder: Path, superblock: Superblock, mend: bool, timeout_s: float) -> None:
        self.folder = folder
        self.superblock = superblock
        self.mend = mend
        self.timeout_s = timeout_s
        self.findings: list[Finding] = []

    def find(self, kind: str, where: str, meaning: str) -> None:
        self.findings.append(Finding(kind=kind, where=where, meaning=meaning, mended=self.mend))

    def superblock_copies(self) -> None:
        """Look at both copies; the first may be all there is in a store that was never opened."""
        path = self.folder / SUPERBLOCK_FILE
        whole = whole_copies(path.read_bytes())
        for number in {0, 1} - whole:
            self.find("superblock", path.name, f"copy {number} is damaged; the other one is whole")
        if self.mend and len(whole) == 1:
            with path.open("r+b") as file:
                for sequence in (self.superblock.sequence + 1, self.superblock.sequence + 2):
                    self.superblock = self.superblock.unclean(sequence)
                    file.seek(self.superblock.offset)
                    file.write(self.superblock.encode())
                file.flush()
                os.fsync(file.fileno())

    def open(self, undo: ExitStack, name: str) -> int:
        """Open a file of the store; an empty one stands for one that is not there."""
        flags = os.O_RDWR | os.O_CREAT if self.mend else os.O_RDONLY
        try:
            fd = os.open(self.folder / name, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            fd = os.memfd_create("kvpool-missing", os.MFD_CLOEXEC)
        undo.callback(os.close, fd)
        return fd

    def segments(self, undo: ExitStack) -> list[int]:
        """Open all segments, and look at their sizes."""
        geometry, fds = self.superblock.geometry, list[int]()
        for number in range(geometry.segment_count):
            name, size = segment_file(number), geometry.segment_bytes(number)
            missing = not (self.folder / name).exists()
            fd = self.open(undo, name)
            fds.append(fd)
            had = os.fstat(fd).st_size
            if had != size:
                has = "is missing" if missing else f"has {had} bytes, not {size}"
                self.find("segment", name, f"the segment {has}")
                if self.mend:
                    os.ftruncate(fd, size)
                    os.posix_fallocate(fd, 0, size)
                    os.fsync(fd)
        return fds

    def slots(self, device: SsdDevice) -> Report:
        """Look at every slot whole, and at what the index says of it."""
        count = self.superblock.geometry.slot_count
        headers, seen = scan(device, count, self.timeout_s)
        blocks, results = scan(device, count, self.timeout_s, whole=True)
        bad: list[int] = []
        for slot in np.flatnonzero(np.isin(results, list(_WRONG))).tolist():
            kind, meaning = _WRONG[int(results[slot])]
            if results[slot] == lib.KVP_SLOT_CORRUPT and seen[slot] == lib.KVP_SLOT_DONE:
                kind, meaning = "payload", "has a header and not the payload to it"
            self.find(kind, self.place(slot), meaning)
            bad.append(slot)
        newest = newest_copies(blocks)
        for slot in blocks.slots.indices[~newest].tolist():
            self.find(
                "doubled", self.place(slot), "is an older copy of a block that lies elsewhere"
            )
            bad.append(slot)
        self.index(headers)
        if self.mend and self.findings:
            self.erase(device, np.array(bad, dtype=np.uint32))
            self.distrust_index()
        return Report(
            slots=count,
            blocks=int(newest.sum()),
            clean=self.superblock.clean,
            findings=tuple(self.findings),
        )

    def place(self, slot: int) -> str:
        """Name a slot, for a person."""
        segment = slot // self.superblock.geometry.segment_slots
        return f"{segment_file(segment)} slot {slot}"

    def index(self, headers: Listing) -> None:
        """Compare an index that would be believed with the headers."""
        if not self.superblock.clean:
            return
        folder, told = self.folder / INDEX_FOLDER, self.superblock
        if checksum_of(folder) != (told.index_crc, told.index_bytes):
            self.find("index", INDEX_FOLDER, "is not as it was when the store was closed")
            return
        known = _lives(read_index(folder))
        found = _lives(headers)
        for slot in sorted(known.keys() - found.keys()):
            self.find("index", self.place(slot), "is named by the index, and is not there")
        for slot in sorted(found.keys() - known.keys()):
            self.find("stale", self.place(slot), "holds a block that the index does not name")
        for slot in sorted(known.keys() & found.keys()):
            if known[slot] != found[slot]:
                self.find("index", self.place(slot), "holds another block than the index says")

    def erase(self, device: SsdDevice, slots: SlotNumbers) -> None:
        """Erase headers."""
        for begin in range(0, len(slots), _ERASE_SLOTS):
            outcome = device.erase(slots[begin : begin + _ERASE_SLOTS], self.timeout_s)
            if not outcome.durable:
                raise UnavailableError(
                    f"damaged headers in {self.folder} cannot be erased (errno {outcome.error}): "
                    "look at the disk",
                    path=str(self.folder),
                )

    def distrust_index(self) -> None:
        """Have the store opened by its headers next time."""
        self.superblock = self.superblock.unclean(self.superblock.sequence + 1)
        with (self.folder / SUPERBLOCK_FILE).open("r+b") as file:
            file.seek(self.superblock.offset)
            file.write(self.superblock.encode())
            file.flush()
            os.fsync(file.fileno())


def _lives(blocks: Listing) -> dict[int, tuple[int, bytes]]:
    """Return slot to life and key."""
    keys = [blocks.keys[at : at + 32] for at in range(0, len(blocks.keys), 32)]
    lives = zip(blocks.slots.generations.tolist(), keys, strict=True)
    return dict(zip(blocks.slots.indices.tolist(), lives, strict=True))
