"""One UCX connection: what to put, what arrived, and its end.

Owns the callbacks and the table of spans of a batch. Never calls the C core: ``UcxEngine``, which
makes connections, does. Who calls it: the UCX endpoint, which speaks the transport contract over it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.block import Incarnation
from kvpool.completion import Completion
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    InternalError,
    KVPoolError,
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import Span
from kvpool.transfer.bounds import numbers, require_puts

if TYPE_CHECKING:
    from kvpool._native import UcxEvent

log = logging.getLogger(__name__)

# Largest note: a notification and what frames it (kvpool_ucx_api.h).
NOTE_BYTES_MAX: Final = 1088
# Notes kept for a connection whose callback is not set yet; with one more it is closed.
EARLY_NOTES_MAX: Final = 1024

# Either (local bytes, offset in the peer's inbox) pairs, or a table of them: uint64 [n, 3] with
# columns local address, size, remote offset, C-contiguous.
Batch = Sequence[tuple[Span, int]] | NDArray[np.uint64]


class UcxStatus(Exception):
    """What libucp answered, kept as the cause of an error."""


def error_of(status: int, code: int, what: str) -> KVPoolError:
    """Return the exception for a kvp_status, with the library's own code as its cause."""
    kinds: dict[int, type[KVPoolError]] = {
        lib.KVP_TIMEOUT: TransferTimeoutError,
        lib.KVP_STALE: StaleIncarnationError,
        lib.KVP_CLOSED: ClosedError,
        lib.KVP_PEER: PeerUnreachableError,
        lib.KVP_INVALID: PeerUnreachableError,
        lib.KVP_FULL: CapacityError,
        lib.KVP_CANCELLED: CancelledTransferError,
    }
    why = {
        lib.KVP_TIMEOUT: "nothing came before the deadline",
        lib.KVP_STALE: "another run of the process answers there",
        lib.KVP_CLOSED: "it was closed here",
        lib.KVP_PEER: "the peer is gone or not reachable",
        lib.KVP_INVALID: "the peer speaks another protocol or an incompatible version of UCX",
        lib.KVP_FULL: "too much is in flight",
        lib.KVP_CANCELLED: "cancelled by the caller",
    }
    error = kinds.get(status, InternalError)(f"{what}: {why.get(status, f'status {status}')}")
    if code != 0:
        error.__cause__ = UcxStatus(f"libucp answered {code}")
    return error


class Engine(Protocol):
    """What a connection asks of the engine that made it."""

    def put(
        self,
        connection: "UcxConnection",
        table: NDArray[np.uint64],
        owner: object,
        deadline_s: float,
        note: bytes,
    ) -> Completion[int]:
        """Submit a batch; ``owner`` keeps its memory alive."""
        ...

    def note(self, connection: "UcxConnection", note: bytes, deadline_s: float) -> None:
        """Send a note alone."""
        ...

    def disconnect(self, connection_id: int) -> None:
        """Close a connection by force."""
        ...

    def post(self, call: Callable[[], None]) -> bool:
        """Run ``call`` soon on the engine's thread."""
        ...


class UcxConnection:
    """One connection to one peer process. Made by an engine. Safe from any thread.

    Attributes:
        peer: The peer's incarnation.
        inbox: Where the peer's puts land in this process, None without an inbox. Until ``on_lost``
            has called back, the peer may still write there.
        peer_inbox_bytes: Size of the inbox that we put into.
        id: The C engine's number of it.
    """

    def __init__(self, engine: Engine, event: "UcxEvent", inbox: Span | None) -> None:
        self.peer = Incarnation(bytes(ffi.buffer(event.peer)))
        self.inbox = inbox
        self.peer_inbox_bytes: int = event.peer_inbox_bytes
        self._engine = engine
        self.id: int = event.endpoint
        self._lock = threading.Lock()  # guards what follows; no callback runs under it
        self._lost: KVPoolError | None = None
        self._on_notification: Callable[[bytes], None] | None = None
        self._on_lost: list[Callable[[UcxConnection], None]] = []
        self._early: deque[bytes] = deque()

    def put(
        self, batch: Batch, deadline_s: float, note: bytes = b"", owner: object = None
    ) -> Completion[int]:
        """Write spans into the peer's inbox, and then deliver a note.

        Args:
            batch: What to write where; may be empty if there is a note. The memory it names belongs
                to the transport until the completion is done, and is the caller's promise: if an
                address is not mapped, the connection ends.
            deadline_s: Seconds from now. When they pass the connection is closed by force, because
                a put can be called back in no other way.
            note: Up to NOTE_BYTES_MAX. When it arrives the spans are visible, and so is everything
                put on this connection before.
            owner: Whatever must stay alive until the completion is done, besides ``batch``.

        Returns:
            A completion of the bytes written. PeerUnreachableError, TransferTimeoutError or
            ClosedError end it otherwise; the peer's inbox then holds any part of the batch. A cancel
            ends it with CancelledTransferError, and no note, if something was not on its way yet:
            at once if nothing was, else when what was has arrived.

        Raises:
            UsageError: A span is empty or passes the end of the peer's inbox, two overlap there,
                there are more than SPANS_MAX, the note is too large, or there is nothing to do.
                Nothing moved.
            CapacityError: Too many batches are in flight, or the peer has not taken enough of the
                earlier notes. Nothing moved; try again later.
            PeerUnreachableError, ClosedError: The connection is lost or closed.

        Never blocks.
        """
        if self._lost is not None:
            raise self.gone()
        table = _table(batch)
        if len(table):
            require_puts(table, self.peer_inbox_bytes)
        return self._engine.put(self, table, (batch, owner), deadline_s, note)

    def notify(self, payload: bytes, deadline_s: float = 5.0) -> bool:
        """Send a note alone, after everything put before. Never blocks.

        Returns:
            False if the peer has not taken enough of the earlier ones: try again later.

        Raises:
            UsageError, PeerUnreachableError, ClosedError: As ``put``.
        """
        if self._lost is not None:
            raise self.gone()
        try:
            self._engine.note(self, payload, deadline_s)
        except CapacityError:
            return False
        return True

    def on_notification(self, callback: Callable[[bytes], None]) -> None:
        """Call back for each note, in order, from the engine's thread. It must not block.

        Notes that came before the first callback was set are handed to it first.
        """
        with self._lock:
            self._on_notification = callback
            early = bool(self._early)
        if early:
            self._engine.post(self._deliver)

    def on_lost(self, callback: "Callable[[UcxConnection], None]") -> None:
        """Call back once when the connection is closed *and drained*; at once if it is already.

        Until then the peer may still write into ``inbox``. Once all callbacks have returned, the
        inbox belongs to another connection.
        """
        with self._lock:
            if self._lost is None:
                self._on_lost.append(callback)
                return
        callback(self)

    def alive(self) -> bool:
        """Say whether the endpoint is open and the peer not known to be dead."""
        return self._lost is None

    def close(self) -> None:
        """End the connection by force. Batches in flight end with ClosedError. Idempotent."""
        self._engine.disconnect(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def gone(self) -> KVPoolError:
        """Return the error that says why nothing can be put any more."""
        if isinstance(self._lost, ClosedError):
            return ClosedError("the connection is closed")
        error = PeerUnreachableError("the connection is lost: connect again")
        error.__cause__ = self._lost
        return error

    def arrived(self, note: bytes) -> None:
        """Hand a note to its callback, or keep it. For the engine's thread."""
        with self._lock:
            self._early.append(note)
            too_many = self._on_notification is None and len(self._early) > EARLY_NOTES_MAX
        if too_many:
            log.error("nobody takes the notes of a connection: it is closed")
            self.close()
        else:
            self._deliver()

    def _deliver(self) -> None:
        while True:
            with self._lock:
                callback = self._on_notification
                if callback is None or not self._early:
                    return
                note = self._early.popleft()
            try:
                callback(note)
            except Exception:
                log.exception("a callback failed")

    def end(self, error: KVPoolError) -> None:
        """Tell the owner that the connection is closed and drained. For the engine's thread."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            callbacks, self._on_lost = self._on_lost, []
        for callback in callbacks:
            _guarded(callback, self)


def _table(batch: Batch) -> NDArray[np.uint64]:
    if isinstance(batch, np.ndarray):
        if batch.dtype != np.uint64 or batch.ndim != 2 or batch.shape[1] != 3:
            raise UsageError(f"a table of {batch.dtype} {batch.shape} is not uint64 [n, 3]")
        # Our own: C reads it again when it posts, and only what was checked may reach the peer.
        return np.array(batch, order="C")
    flat: list[int] = []
    for span, offset in batch:
        flat += (span.address, span.size, offset)
    return numbers(flat, "addresses, sizes and offsets of spans").reshape(len(batch), 3)


def _guarded(callback: Callable[[UcxConnection], None], connection: UcxConnection) -> None:
    try:
        callback(connection)
    except Exception:
        log.exception("a callback failed")
