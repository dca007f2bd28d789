"""The C core's UCX engine, called: every call of it, under one lock.

Owns the handle of one engine (``native/src/ucx_*.c``), the lock that keeps it open during a call, and
what C was lent: spans, jobs and arenas, until their event. Knows no connection and runs no thread:
that is ``ucx_engine``, which builds upon this. Who calls it: the same.
"""

import mmap
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.arena import Arena
from kvpool.block import Incarnation
from kvpool.completion import Completion, CompletionSource
from kvpool.errors import CapacityError, ClosedError, ConfigError, KVPoolError, UsageError
from kvpool.memory import Span
from kvpool.transfer.ucx_connection import UcxConnection, error_of
from kvpool.transfer.ucx_reads import Ended
from kvpool.transfer.writes import Cancellable

if TYPE_CHECKING:
    from kvpool._native import CData, UcxEvent

# Fields of kvp_ucx_counts.
COUNTERS: Final = (
    "ucx_major",
    "ucx_minor",
    "ucx_release",
    "endpoints",
    "batches",
    "reads",
    "wakeups",
    "puts",
    "put_bytes",
    "coalesced",
    "gets",
    "get_bytes",
    "registrations",
    "strangers_reset",
)
# How reads go: as puts of the slots' owner, as gets of the reader, or by the lanes there are.
ReadMode = Literal["auto", "put", "get"]
_READ_MODES: Final = {
    "auto": lib.KVP_UCX_READ_AUTO,
    "put": lib.KVP_UCX_READ_PUT,
    "get": lib.KVP_UCX_READ_GET,
}
# Room for a peer's trial, at the end of a connection's part of the inbox.
TRIAL_BYTES: Final = lib.KVP_UCX_TRIAL_BYTES
# How often strangers at the listener are looked for: longer than a busy machine starves a thread.
LOOK_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Numbers of one engine; ``UcxEngine`` says what each means."""

    tls: str
    read_mode: ReadMode
    trial: bool
    endpoint_max: int
    batch_max: int
    read_max: int
    copy_threads: int
    answer_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    spin_s: float


class NativeEngine:
    """One engine in C. Safe from any thread.

    One lock guards the handle, every call, and the tables of what C was lent. No callback runs under
    it.

    Args:
        library, host: As for ``UcxEngine``.
        incarnation: Name of this run of the process.
        inbox: The same; cut into equal parts, whose last TRIAL_BYTES are nobody's if there are trials.
        limits: The same.

    Raises:
        ConfigError: The engine does not start with these.
    """

    def __init__(
        self,
        library: str,
        host: str,
        incarnation: Incarnation,
        inbox: Span | None,
        limits: EngineLimits,
    ) -> None:
        self._lock = threading.Lock()
        self._batches: dict[int, tuple[CompletionSource[int], int, object]] = {}
        self._reads: dict[int, Ended] = {}
        self._arenas: list[CData] = []
        self._cookie = 0
        self._inbox = inbox
        self._part = 0 if inbox is None else inbox.size // limits.endpoint_max
        self._part -= self._part % mmap.PAGESIZE
        self._trial_bytes = TRIAL_BYTES if limits.trial and inbox is not None else 0
        if inbox is not None and self._part <= self._trial_bytes:
            raise ConfigError(
                f"an inbox of {inbox.size} bytes has no page for each of {limits.endpoint_max}"
                " connections",
                key="inbox",
            )
        self._engine: CData | None = self._open(library, host, incarnation, limits)

    def _open(
        self, library: str, host: str, incarnation: Incarnation, limits: EngineLimits
    ) -> "CData":
        texts = [ffi.new("char[]", text.encode()) for text in (library, host, limits.tls)]
        name = ffi.new("uint8_t[16]", incarnation)
        config = ffi.new(
            "kvp_ucx_config *",
            {
                "library": texts[0],
                "host": texts[1],
                "tls": texts[2],
                "read_mode": _READ_MODES[limits.read_mode],
                "incarnation": name,
                "inbox": 0 if self._inbox is None else self._inbox.address,
                "inbox_part": self._part,
                "trial_bytes": self._trial_bytes,
                "endpoint_max": limits.endpoint_max,
                "batch_max": limits.batch_max,
                "read_max": limits.read_max,
                "copy_helpers": limits.copy_threads - 1,
                "answer_timeout_ns": nanoseconds(limits.answer_timeout_s),
                "heartbeat_interval_ns": nanoseconds(limits.heartbeat_interval_s),
                "heartbeat_timeout_ns": nanoseconds(limits.heartbeat_timeout_s),
                "look_ns": nanoseconds(LOOK_S),
                "spin_ns": nanoseconds(limits.spin_s),
            },
        )
        reason = ffi.new("char[256]")
        engine = ffi.new("kvp_ucx **")
        status = lib.kvp_ucx_open(config, reason, len(reason), engine)
        if status != lib.KVP_OK:
            raise ConfigError(
                f"UCX does not start over {limits.tls} (transfer.ucx_transports): {text_of(reason)}",
                key="transfer.ucx",
            )
        return engine[0]

    def put_protocol(self) -> str:
        """Return how libucp carries bulk, in its words; empty until it has said so: see ``trial``."""
        text = ffi.new("char[256]")
        with self._lock:
            lib.kvp_ucx_put_protocol(self._live(), text, len(text))
        return text_of(text)

    def lanes(self, connection_id: int) -> tuple[str, ...]:
        """Return the lanes that libucp chose for a connection, such as "tcp/eth0"; none if closed."""
        text = ffi.new("char[128]")
        with self._lock:
            lib.kvp_ucx_lanes(self._live(), connection_id, text, len(text))
        return tuple(text_of(text).split())

    def counts(self) -> dict[str, int]:
        """Return the engine's counters: slots and batches in use, wake-ups, puts, bytes, version."""
        counts = ffi.new("kvp_ucx_counts *")
        with self._lock:
            lib.kvp_ucx_count(self._live(), counts)
        return {name: getattr(counts, name) for name in COUNTERS}

    def _live(self) -> "CData":
        if self._engine is None:
            raise ClosedError("the transport is closed")
        return self._engine

    def disconnect(self, connection_id: int) -> None:
        """Close a connection by force; for the connection itself."""
        with self._lock:
            if self._engine is not None:
                lib.kvp_ucx_disconnect(self._engine, connection_id)

    def put(
        self,
        connection: UcxConnection,
        table: NDArray[np.uint64],
        owner: object,
        deadline_s: float,
        note: bytes,
    ) -> Completion[int]:
        """Submit a batch of a connection, for the connection itself: see ``UcxConnection.put``."""
        source: CompletionSource[int] = CompletionSource()
        source.completion = Cancellable(lambda: self._cancel_put(connection.id, cookie))
        spans = ffi.cast("kvp_ucx_span *", ffi.from_buffer(table))
        with self._lock:
            engine = self._live()
            self._cookie += 1
            cookie = self._cookie
            status = lib.kvp_ucx_put(
                engine,
                connection.id,
                spans,
                len(table),
                note,
                len(note),
                nanoseconds(deadline_s),
                cookie,
            )
            if status == lib.KVP_OK:
                self._batches[cookie] = (source, int(table[:, 1].sum()), (table, owner))
        if status == lib.KVP_INVALID:
            raise UsageError(
                f"a batch of {len(table)} spans and a note of {len(note)} bytes is empty, or leaves"
                f" the peer's inbox of {connection.peer_inbox_bytes} bytes"
            )
        if status == lib.KVP_CLOSED:
            raise connection.gone()
        if status != lib.KVP_OK:
            raise error_of(status, 0, "put")
        return source.completion

    def note(self, connection: UcxConnection, note: bytes, deadline_s: float) -> None:
        """Send a note alone, whose end nobody waits for; see ``UcxConnection.notify``."""
        with self._lock:
            status = lib.kvp_ucx_put(
                self._live(),
                connection.id,
                ffi.NULL,
                0,
                note,
                len(note),
                nanoseconds(deadline_s),
                0,
            )
        if status == lib.KVP_INVALID:
            raise UsageError(f"a note of {len(note)} bytes is empty, or too large")
        if status == lib.KVP_CLOSED:
            raise connection.gone()
        if status != lib.KVP_OK:
            raise error_of(status, 0, "note")

    def _cancel_put(self, connection_id: int, cookie: int) -> None:
        with self._lock:
            if self._engine is not None:
                lib.kvp_ucx_cancel_put(self._engine, connection_id, cookie)

    def register(self, arena: Arena) -> int:
        """Let peers read the READY slots of an arena; return its region's number, from 0 up.

        Its memory stays until the engine is closed.

        Raises:
            UsageError: Too many regions.
            ClosedError: The engine or the arena is closed.
        """
        memory, number = arena.native(), ffi.new("uint32_t *")
        layout = arena.layout
        region = ffi.new(
            "kvp_ucx_region *",
            (memory, arena.slot_count, layout.block_bytes, layout.crc_count),
        )
        with self._lock:
            status = lib.kvp_ucx_register(self._live(), region, number)
            if status == lib.KVP_OK:
                self._arenas.append(memory)
        if status != lib.KVP_OK:
            raise UsageError("too many regions, or too many checksums a slot: share one arena")
        return number[0]

    def read(self, connection_id: int, job: "CData", deadline_s: float, ended: Ended) -> int:
        """Start a read of a connection; see ``ReadEngine``.

        Raises:
            CapacityError: ``read_max`` are in flight, or a layer is larger than a window.
            ClosedError: The connection or the engine is closed.
        """
        name = ffi.new("uint64_t *")
        with self._lock:
            engine = self._live()
            self._cookie += 1
            cookie = self._cookie
            timeout_ns = nanoseconds(deadline_s)
            status = lib.kvp_ucx_read(engine, connection_id, job, timeout_ns, cookie, name)
            if status == lib.KVP_OK:
                self._reads[cookie] = ended
            window = lib.kvp_ucx_window_bytes(engine)
        if status == lib.KVP_SYSTEM:
            raise CapacityError(
                f"a layer of a block is larger than a window of {window} bytes, an eighth of the"
                " inbox: give the transport a larger one",
                size_bytes=window,
            )
        if status == lib.KVP_INVALID:
            raise UsageError("a read of nothing, or into no inbox")
        if status != lib.KVP_OK:
            raise error_of(status, 0, "read")
        return name[0]

    def cancel_read(self, read: int) -> None:
        """End a read soon, if it has not ended."""
        with self._lock:
            if self._engine is not None:
                lib.kvp_ucx_cancel(self._engine, read)

    def end_reads(self, connection_id: int) -> None:
        """End the reads of a connection soon, and refuse new ones. The connection stays."""
        with self._lock:
            if self._engine is not None:
                lib.kvp_ucx_end_reads(self._engine, connection_id)

    def windows(self, connection_id: int) -> tuple[int, int]:
        """Return the windows of a connection's inbox part that are free, and those still owed."""
        free, owed = ffi.new("size_t *"), ffi.new("size_t *")
        with self._lock:
            lib.kvp_ucx_windows(self._live(), connection_id, free, owed)
        return free[0], owed[0]

    def after_fork(self) -> None:
        """In a child: its parent's threads are not there, and whoever held the lock is not either."""
        self._lock = threading.Lock()
        self._engine = None

    # ---- what events end, for the thread of events ---------------------------------------------

    def _ended(self, event: "UcxEvent") -> None:
        with self._lock:
            source, size, _ = self._batches.pop(event.cookie)
        if event.status == lib.KVP_OK:
            source.finish(size)
        else:
            source.fail(error_of(event.status, event.ucx_code, "put"))

    def _read_ended(self, event: "UcxEvent") -> None:
        with self._lock:
            ended = self._reads.pop(event.cookie)
        ended(event.status, event.ucx_code, event.good)

    def _end_all(self, error: KVPoolError) -> None:
        """End what no event will end any more: the engine is closed."""
        with self._lock:
            sources = [source for source, _, _ in self._batches.values()]
            reads = list(self._reads.values())
            self._batches.clear()
            self._reads.clear()
        for source in sources:
            source.fail(error)
        for ended in reads:
            ended(lib.KVP_CLOSED, 0, 0)


def text_of(characters: "CData") -> str:
    """Return a C string."""
    return bytes(ffi.string(characters)).decode(errors="replace")


def nanoseconds(seconds: float) -> int:
    """Return seconds as C takes them. Raises UsageError: negative, or no number."""
    if not 0 <= seconds < 1e9:
        raise UsageError(f"{seconds} is not a number of seconds")
    return int(seconds * 1e9)
