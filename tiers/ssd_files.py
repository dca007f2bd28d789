"""The files of an SSD store: one folder, locked, with preallocated segments.

Owns opening, locking, sizes and the superblock. Never reads or writes a slot. Blocks on the disk
without a deadline, as opening a file does. Who calls it: the SSD tier when it opens and closes, fsck.
"""

import errno
import fcntl
import logging
import os
import weakref
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from kvpool.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    KVPoolError,
    UnavailableError,
    UsageError,
)
from kvpool.tiers.ssd_format import (
    INTENT_FILE,
    STORE_ID_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_FILE,
    Geometry,
    Superblock,
    decode_superblock,
    segment_file,
)

logger = logging.getLogger(__name__)

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FILES: Final = (errno.EMFILE, errno.ENFILE)
_NOT_ALLOWED: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_FOLDER: Final = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def translated(error: OSError, doing: str, path: Path) -> KVPoolError:
    """Return the error of kvpool that an error of the system is, with what to do about it."""
    fields = {"tier": "ssd", "path": str(path)}
    if error.errno in _NO_ROOM:
        return CapacityError(
            f"{doing}: {error.strerror}: free some, or give the tier fewer bytes", **fields
        )
    if error.errno in _NO_FILES:
        return UnavailableError(f"{doing}: {error.strerror}: raise ulimit -n", **fields)
    if error.errno in _NOT_ALLOWED:
        return UsageError(
            f"{doing}: {error.strerror}: choose a folder that may be written", **fields
        )
    if error.errno in _NO_FOLDER:
        return UsageError(
            f"{doing}: {error.strerror} ({error.filename or path}): give it a folder of its own",
            **fields,
        )
    return UnavailableError(f"{doing}: {error.strerror or error}: look at the disk", **fields)


@contextmanager
def translating(doing: str, path: Path) -> Generator[None, None, None]:
    """Raise an error of the system as one of kvpool's."""
    try:
        yield
    except OSError as error:
        raise translated(error, doing, path) from error


class _Opened(Protocol):
    """Who has descriptors of a store open."""

    def forget(self) -> None:
        """Close them, in a forked child."""


_OPENED: Final = weakref.WeakSet[_Opened]()


def forget_in_forks(opened: _Opened) -> None:
    """Have a forked child close what it inherits: it would hold the lock for as long as it lives."""
    _OPENED.add(opened)


def _forget_all() -> None:
    for opened in list(_OPENED):
        opened.forget()


os.register_at_fork(after_in_child=_forget_all)


class SsdFiles:
    """The open files of one store. Not thread-safe: its owner sees to that.

    Args:
        folder: Made if it is not there. One process at a time holds its lock.
        planned: What a new store is made for, and an old one must have been.

    Attributes:
        superblock: What the store says of itself now.
        segments: One descriptor a segment, opened for direct I/O where the filesystem has it.
        intent: The descriptor of the intent file.
        lock: The descriptor of the folder, which carries the lock.
        clean: The store was closed in order, and its files are as they were then.
        problems: What was wrong with the files and is mended now, for people.

    Raises:
        UnavailableError: Another process has it, or the system does not give enough descriptors.
        ConfigError: The store was made for other blocks, or another number of slots.
        CapacityError: The filesystem has no room for it. What was made is removed.
        FormatVersionError, CorruptionError: The superblock cannot be read.
        UsageError: The folder may not be written.
    """

    def __init__(self, folder: Path, planned: Geometry) -> None:
        self.folder = folder
        self.problems: list[str] = []
        with ExitStack() as undo:
            with translating(f"the SSD store {folder} cannot be opened", folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.lock = self._open(undo, folder, os.O_RDONLY | os.O_DIRECTORY)
                lock_folder(self.lock, folder)
                self._superblock_fd = self._open(undo, folder / SUPERBLOCK_FILE)
                self.superblock = self._read_superblock(planned)
                was_clean = self.superblock.clean
                self.intent = self._open(undo, folder / INTENT_FILE, direct=True)
                if os.fstat(self.intent).st_size < 2 * SUPERBLOCK_BYTES:
                    os.ftruncate(self.intent, 2 * SUPERBLOCK_BYTES)
                self.segments = self._open_segments(undo)
                os.fsync(self.lock)
                self.clean = was_clean and not self.problems
                self._write_superblock(self.superblock.opened())
            self._undo = undo.pop_all()
        forget_in_forks(self)

    @property
    def geometry(self) -> Geometry:
        """Where slots lie."""
        return self.superblock.geometry

    def mark_clean(self, index_crc: int, index_bytes: int) -> None:
        """Say that the store is closed in order. Raises UnavailableError and the like."""
        with translating("the SSD store cannot be closed in order", self.folder):
            self._write_superblock(self.superblock.closed(index_crc, index_bytes))

    def close(self) -> None:
        """Close all descriptors. The lock goes when the last duplicate is closed too."""
        self._undo.close()

    def forget(self) -> None:
        """In a forked child: close all descriptors; the lock stays its parent's."""
        with suppress(OSError):  # the parent was closing them
            self.close()

    def _open(
        self, undo: ExitStack, path: Path, flags: int = os.O_RDWR | os.O_CREAT, direct: bool = False
    ) -> int:
        flags |= os.O_CLOEXEC
        try:
            fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            fd = os.open(path, flags, 0o600)  # no direct I/O on this filesystem
        undo.callback(os.close, fd)
        return fd

    def _read_superblock(self, planned: Geometry) -> Superblock:
        """Return the superblock of an old store that fits, or one for a new store, written."""
        path = self.folder / SUPERBLOCK_FILE
        copies = os.pread(self._superblock_fd, 2 * SUPERBLOCK_BYTES, 0)
        found = decode_superblock(copies, str(path)) if copies.strip(b"\0") else None
        # One that was made and never opened has no blocks: the disk had no room for it, say.
        if found is None or (found.opens == 0 and found.geometry != planned):
            if found is not None:
                for left in self.folder.glob("segment-*.kvp"):
                    left.unlink()
            made = Superblock(store_id=os.urandom(STORE_ID_BYTES), geometry=planned)
            self._write_superblock(made)
            os.fsync(self.lock)
            return made
        if found.geometry.layout != planned.layout:
            raise ConfigError(
                f"{self.folder} holds blocks of {found.geometry.layout}, not {planned.layout}: "
                "choose another folder, or remove this one",
                path=str(self.folder),
            )
        if found.geometry != planned:
            raise ConfigError(
                f"{self.folder} was made with {found.geometry.slot_count} slots of "
                f"{found.geometry.slot_bytes} bytes, not {planned.slot_count} of "
                f"{planned.slot_bytes}: keep its size, or remove it",
                path=str(self.folder),
            )
        return found

    def _write_superblock(self, superblock: Superblock) -> None:
        copy = superblock.encode()
        written = os.pwrite(self._superblock_fd, copy, superblock.offset)
        if written != len(copy):
            raise UnavailableError(
                f"{written} of {len(copy)} bytes of the superblock were written: look at the disk",
                tier="ssd",
                path=str(self.folder),
            )
        os.fdatasync(self._superblock_fd)
        self.superblock = superblock

    def _open_segments(self, undo: ExitStack) -> list[int]:
        """Open every segment at its full size; what is missing is made anew, empty."""
        fds: list[int] = []
        known = self.superblock.opens > 0
        with ExitStack() as made:
            for number in range(self.geometry.segment_count):
                path = self.folder / segment_file(number)
                size = self.geometry.segment_bytes(number)
                is_new = not path.exists()
                fd = self._open(undo, path, direct=True)
                fds.append(fd)
                if is_new:
                    made.callback(path.unlink, missing_ok=True)
                had = os.fstat(fd).st_size
                if had != size and known:
                    self.problems.append(f"{path.name} has {had} bytes, not {size}")
                if had > size:
                    os.ftruncate(fd, size)
                elif had < size:
                    os.posix_fallocate(fd, had, size - had)
                    os.fsync(fd)
            made.pop_all()
        for problem in self.problems:
            logger.warning("%s: %s: the blocks that it lacks are lost", self.folder, problem)
        return fds


def read_superblock(folder: Path) -> Superblock:
    """Return the superblock of a store without opening it.

    Raises UsageError if there is no store, and as ``decode_superblock`` does.
    """
    path = folder / SUPERBLOCK_FILE
    with translating(f"{path} cannot be read", folder):
        try:
            copies = path.read_bytes()
        except FileNotFoundError:
            copies = b""
    if not copies.strip(b"\0"):
        raise UsageError(f"there is no SSD store in {folder}", path=str(folder))
    if len(copies) < SUPERBLOCK_BYTES:
        raise CorruptionError(
            f"{path} has been cut to {len(copies)} bytes: blocks in this store cannot be told; remove "
            "the folder",
            path=str(path),
        )
    return decode_superblock(copies, str(path))


def lock_folder(fd: int, folder: Path) -> None:
    """Take the lock of a store. Raises UnavailableError if another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UnavailableError(
            f"{folder} is in use by another process: give each its own folder",
            tier="ssd",
            path=str(folder),
        ) from error
