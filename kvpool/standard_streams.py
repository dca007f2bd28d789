"""Standard output and error of a process that serves: nobody who does not read them stops it.

Owns what descriptors 1 and 2 are from the start of a daemon or worker on. What cannot be written at
once (a pipe or terminal that nobody reads, a full disk, a reader that is gone) is lost, and counted:
the next line that goes through says how much. Who calls it: the main functions of processes that stay.
"""

import io
import os
import stat
import sys
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2


def never_wait_for_readers() -> None:
    """Have nothing in this process wait for, or fail with, its standard output and error.

    Holds for C libraries, too, such as gRPC, whose lines go past Python: strangers can make them write.
    Descriptors 0 to 2 that were closed are /dev/null afterwards, else the next file that is opened, say
    of an SSD tier, would be written to as standard error. A regular file on a disk that hangs is still
    waited for. To be called once, before other threads and before logging is set up.
    """
    for descriptor in (_STDIN, _STDOUT, _STDERR):
        _be_open(descriptor)
    sys.stdout = _made_lossy(_STDOUT, sys.stdout)
    sys.stderr = _made_lossy(_STDERR, sys.stderr)


def _be_open(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing == descriptor:
            os.set_inheritable(descriptor, True)
        else:
            os.dup2(nothing, descriptor)
            os.close(nothing)


def _made_lossy(descriptor: int, before: TextIO | None) -> TextIO:
    """Return a text stream to a descriptor that never waits; ``before`` is what Python opened there."""
    if before is None:  # it was closed at the start, and may be somebody's file by now
        return open(os.devnull, "w")
    _stop_waiting(descriptor)
    raw = io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        raw, encoding=before.encoding, errors="backslashreplace", line_buffering=True
    )


def _stop_waiting(descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    try:
        if stat.S_ISSOCK(mode):
            os.set_blocking(descriptor, False)
        elif stat.S_ISFIFO(mode) or os.isatty(descriptor):
            # Opened anew: the flag would hold for others, too, who write to the same pipe.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
            os.dup2(own, descriptor)
            os.close(own)
    except OSError:
        return  # it stays as it is


class _LossyFile(io.FileIO):
    """Takes all that is written to it, whatever becomes of it."""

    _lost = 0

    def write(self, data: "ReadableBuffer", /) -> int:
        if self._lost:
            note = f"({self._lost} pieces of output were lost here: nobody took them)\n"
            if not self._wrote(note.encode()):
                self._lost += 1
                return memoryview(data).nbytes
            self._lost = 0
        if not self._wrote(data):
            self._lost += 1
        return memoryview(data).nbytes

    def _wrote(self, data: "ReadableBuffer") -> bool:
        try:
            return super().write(data) == memoryview(data).nbytes
        except OSError:
            return False
