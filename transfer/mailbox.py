"""Mailboxes: a pair of one-way rings of small records between two processes of one host.

Owns the Python face of ``native/src/mailbox.c``. Each side writes only its own ring; what the peer
wrote is checked by the C core. Waking the peer is the caller's. Who calls it: the host transport.
"""

import threading
from typing import TYPE_CHECKING, Final

from kvpool._native import ffi, lib
from kvpool.block import Incarnation
from kvpool.errors import CapacityError, ClosedError, CorruptionError, StaleIncarnationError
from kvpool.transfer.base import NOTIFICATION_BYTES_MAX

if TYPE_CHECKING:
    from kvpool._native import CData

# Records of a ring: 1024 of 1 KiB are 1.1 MiB a side.
RECORD_COUNT: Final = 1024


class Mailbox:
    """Our ring and the peer's. Any thread may push; one thread at a time may pop.

    Args:
        incarnation: This run of this process.
    """

    def __init__(self, incarnation: Incarnation) -> None:
        out = ffi.new("kvp_mailbox **")
        status = lib.kvp_mailbox_open(RECORD_COUNT, NOTIFICATION_BYTES_MAX, incarnation, out)
        if status != lib.KVP_OK:
            raise CapacityError(f"no shared memory for a ring of notifications (status {status})")
        self._mailbox: CData | None = ffi.gc(out[0], lib.kvp_mailbox_close)
        self._lock = threading.Lock()  # guards pushing
        self._record = ffi.new("uint8_t[]", NOTIFICATION_BYTES_MAX)  # of the popping thread
        self._size = ffi.new("size_t *")

    @property
    def fd(self) -> int:
        """The memfd of our ring, to be sent to the peer. Stays this mailbox's."""
        return int(lib.kvp_mailbox_fd(self._open()))

    def attach(self, fd: int, peer: Incarnation) -> None:
        """Map the peer's ring. Before the first push and pop.

        Raises:
            CorruptionError: It is no ring of the same geometry, or not sealed.
            StaleIncarnationError: It belongs to another run than ``peer``.
        """
        status = lib.kvp_mailbox_attach(self._open(), fd, peer)
        if status == lib.KVP_STALE:
            raise StaleIncarnationError("the ring belongs to another run of the peer")
        if status != lib.KVP_OK:
            raise CorruptionError(f"the peer sent no valid ring (status {status})")

    def push(self, payload: bytes) -> bool:
        """Append a record. False if the peer has not read enough of the earlier ones, or closed.

        Raises:
            CorruptionError: The peer says it has read what was never written.
        """
        with self._lock:
            if (mailbox := self._mailbox) is None:
                return False
            status = lib.kvp_mailbox_push(mailbox, payload, len(payload))
        if status == lib.KVP_OK:
            return True
        if status == lib.KVP_FULL:
            return False
        raise CorruptionError(f"the peer's ring is damaged (status {status})")

    def pop(self) -> bytes | None:
        """Take the peer's next record, or None.

        Raises:
            CorruptionError: A sequence number, size or checksum is wrong. Nothing later is read.
        """
        if (mailbox := self._mailbox) is None:
            return None
        status = lib.kvp_mailbox_pop(mailbox, self._record, self._size)
        if status == lib.KVP_OK:
            return bytes(ffi.buffer(self._record, self._size[0]))
        if status == lib.KVP_MISS:
            return None
        raise CorruptionError(f"the peer's ring is damaged (status {status})")

    def close(self) -> None:
        """Unmap both rings as soon as no call is under way. Idempotent."""
        with self._lock:
            self._mailbox = None

    def _open(self) -> "CData":
        if (mailbox := self._mailbox) is None:
            raise ClosedError("the mailbox is closed")
        return mailbox
