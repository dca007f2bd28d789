"""Between hosts: one-sided puts over UCX into a peer's inbox, and notes that follow them.

Owns one engine of the C core (``native/src/ucx_*.c``) and the thread that hands out its events, and
runs calls and timers beside them. The data path is in C: a batch costs one call, whatever its size.
Never touches an arena: a peer writes into its own part of this process's inbox and nowhere else
that we hand out. Who calls it: ``transfer/ucx.py``, which makes reads of puts.

UCX is one trust domain: over TCP a peer that can connect can write anywhere in this process. So the
default address is loopback, and any other needs ``trusted_network``.
"""

import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.block import Incarnation, new_incarnation
from kvpool.completion import Completion, CompletionSource
from kvpool.errors import ClosedError, ConfigError, InternalError, KVPoolError, UsageError
from kvpool.memory import Span
from kvpool.transfer.calls import Call, Calls
from kvpool.transfer.ucx_connection import UcxConnection, UcxStatus, error_of
from kvpool.transfer.ucx_library import find_library, require_trusted

if TYPE_CHECKING:
    from kvpool._native import CData, UcxEvent

log = logging.getLogger(__name__)

# Fields of kvp_ucx_counts.
COUNTERS: Final = (
    "ucx_major",
    "ucx_minor",
    "ucx_release",
    "endpoints",
    "batches",
    "wakeups",
    "puts",
    "put_bytes",
    "strangers_reset",
)
# Every close is bounded to about this.
CLOSE_TIMEOUT_S: Final = 5.0
# How often strangers at the listener are looked for: longer than a busy machine starves a thread.
LOOK_S: Final = 5.0
# Longest wait for a listener: the progress thread makes it between two of its rounds.
LISTEN_TIMEOUT_S: Final = 10.0


def _text(characters: "CData") -> str:
    return bytes(ffi.string(characters)).decode(errors="replace")


class _Connecting:
    """A connect that waits for its event. Guarded by the transport's lock; ``ended`` is set last."""

    def __init__(self, on_open: Callable[[UcxConnection], None] | None) -> None:
        self.on_open = on_open
        self.ended = threading.Event()
        self.connection: UcxConnection | None = None
        self.error: KVPoolError | None = None


class UcxEngine:
    """One process's connections to peers. Safe from any thread; bound to its process.

    Args:
        inbox: Page-aligned memory that peers put into, in ``endpoint_max`` equal parts, one a
            connection; None if nobody puts here. The transport keeps it alive.
        host: Numeric address to listen on and connect from. Decides the device and the family.
        trusted_network: Whether everybody who can reach ``host`` may write to this process's
            memory. Needed for anything but loopback.
        incarnation: Name of this run of the process; a fresh one by default.
        endpoint_max: Connections, those that drain included. More are refused.
        batch_max: Batches in flight.
        heartbeat_interval_s, heartbeat_timeout_s: What we send; 0 is nothing. A peer that sends
            heartbeats and is then silent for the timeout is lost, even if nothing is in flight (UCX
            does not notice a stopped process). The timeout is at least three intervals.
        spin_s: How long the progress thread polls before it sleeps.
        library: Path of libucp; see ``find_library``.

    Raises:
        ConfigError: An address that is not this host's, or not loopback and not trusted; a size or
            count out of range; a library that cannot be loaded.
    """

    def __init__(
        self,
        *,
        inbox: Span | None = None,
        host: str = "127.0.0.1",
        trusted_network: bool = False,
        incarnation: Incarnation | None = None,
        endpoint_max: int = 16,
        batch_max: int = 256,
        heartbeat_interval_s: float = 1.0,
        heartbeat_timeout_s: float = 5.0,
        spin_s: float = 50e-6,
        library: str | None = None,
    ) -> None:
        self.incarnation = new_incarnation() if incarnation is None else incarnation
        self.library = find_library(library)
        self.port = 0
        require_trusted(host, trusted_network)
        self._inbox = inbox
        self._part = 0 if inbox is None else inbox.size // endpoint_max
        self._part -= self._part % mmap.PAGESIZE
        if inbox is not None and self._part == 0:
            raise ConfigError(
                f"an inbox of {inbox.size} bytes has no page for each of {endpoint_max} connections",
                key="inbox",
            )
        # Guards every call of the engine and what follows. Never held while a callback runs.
        self._lock = threading.Lock()
        self._connections: dict[int, UcxConnection] = {}
        self._connecting: dict[int, _Connecting] = {}
        self._batches: dict[int, tuple[CompletionSource[int], int, object]] = {}
        self._cookie = 0
        self._on_connect: Callable[[UcxConnection], None] | None = None
        engine = self._open(
            host, endpoint_max, batch_max, heartbeat_interval_s, heartbeat_timeout_s, spin_s
        )
        self._engine: CData | None = engine
        _engines.add(self)
        self._calls = Calls(self._wake)
        self._pump = threading.Thread(
            target=self._run, args=(engine,), name="kvpool-ucx-events", daemon=True
        )
        self._pump.start()

    def _open(
        self,
        host: str,
        endpoint_max: int,
        batch_max: int,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
        spin_s: float,
    ) -> "CData":
        texts = [ffi.new("char[]", text.encode()) for text in (self.library, host)]
        incarnation = ffi.new("uint8_t[16]", self.incarnation)
        config = ffi.new(
            "kvp_ucx_config *",
            {
                "library": texts[0],
                "host": texts[1],
                "incarnation": incarnation,
                "inbox": 0 if self._inbox is None else self._inbox.address,
                "inbox_part": self._part,
                "endpoint_max": endpoint_max,
                "batch_max": batch_max,
                "heartbeat_interval_ns": _nanoseconds(heartbeat_interval_s),
                "heartbeat_timeout_ns": _nanoseconds(heartbeat_timeout_s),
                "look_ns": _nanoseconds(LOOK_S),
                "spin_ns": _nanoseconds(spin_s),
            },
        )
        reason = ffi.new("char[256]")
        engine = ffi.new("kvp_ucx **")
        status = lib.kvp_ucx_open(config, reason, len(reason), engine)
        if status != lib.KVP_OK:
            raise ConfigError(f"UCX does not start: {_text(reason)}", key="transfer.ucx")
        return engine[0]

    def listen(self, on_connect: Callable[[UcxConnection], None], port: int = 0) -> int:
        """Accept peers on this engine's host and hand each connection to ``on_connect``.

        Args:
            on_connect: Runs on the engine's thread and must not block. Notes that come before
                it has set a callback are kept.
            port: 0 takes a free one.

        Returns:
            The port.

        Raises:
            UsageError: It listens already, or the port cannot be had.
            TransferTimeoutError: The engine did not get to it within LISTEN_TIMEOUT_S.
            ClosedError: The transport is closed.
        """
        bound, code = ffi.new("uint16_t *"), ffi.new("int *")
        with self._lock:
            engine = self._live()
            before, self._on_connect = self._on_connect, on_connect
            status = lib.kvp_ucx_listen(engine, port, _nanoseconds(LISTEN_TIMEOUT_S), bound, code)
            if status != lib.KVP_OK:
                self._on_connect = before
        if status == lib.KVP_BUSY:
            raise UsageError("the transport listens already")
        if status == lib.KVP_TIMEOUT:
            raise error_of(status, 0, f"listen on port {port}")
        if status != lib.KVP_OK:
            raise UsageError(f"cannot listen on port {port}") from UcxStatus(f"answered {code[0]}")
        self.port = bound[0]
        return self.port

    def connect(
        self,
        host: str,
        port: int,
        timeout_s: float,
        expected: Incarnation | None = None,
        on_open: Callable[[UcxConnection], None] | None = None,
    ) -> UcxConnection:
        """Connect to a listening peer, and wait until both sides know each other.

        Args:
            host: Where it listens, a numeric address.
            port: The same.
            timeout_s: Longest wait.
            expected: Whom to reach; None: anybody.
            on_open: Called on the engine's thread with the connection, before any note is taken.

        Raises:
            UsageError: Not a numeric address of this transport's family, or called from a callback.
            PeerUnreachableError: Nobody listens there, it has no room, or it speaks another version.
            TransferTimeoutError: No hello within ``timeout_s``.
            StaleIncarnationError: The peer is another run than ``expected``.
            CapacityError: ``endpoint_max`` connections are in use.
            ClosedError: The transport is closed.
        """
        if self.on_thread():
            raise UsageError("connect would wait for the very thread that a callback runs on")
        wanted = ffi.NULL if expected is None else ffi.new("uint8_t[16]", expected)
        connection_id = ffi.new("uint64_t *")
        waiting = _Connecting(on_open)
        with self._lock:
            status = lib.kvp_ucx_connect(
                self._live(), host.encode(), port, wanted, _nanoseconds(timeout_s), connection_id
            )
            if status == lib.KVP_OK:
                self._connecting[connection_id[0]] = waiting
        if status == lib.KVP_INVALID:
            raise UsageError(f"{host} port {port} is no numeric address of this transport's family")
        if status != lib.KVP_OK:
            raise error_of(status, 0, f"connect to {host} port {port}")
        # The engine ends it within timeout_s; the margin is for a busy machine.
        if not waiting.ended.wait(timeout_s + CLOSE_TIMEOUT_S):
            raise InternalError(f"connect to {host} port {port} did not end")
        if waiting.connection is None:
            assert waiting.error is not None
            raise waiting.error
        return waiting.connection

    def on_thread(self) -> bool:
        """Say whether the caller is the engine's own thread, on which all callbacks run."""
        return threading.current_thread() is self._pump

    def post(self, call: Call) -> bool:
        """Run ``call`` soon on the engine's thread, in the order of posting. Never blocks.

        Returns False, and does not run it, if the engine is closed.
        """
        return self._calls.post(call)

    def call_later(self, seconds: float, call: Call) -> None:
        """Run ``call`` once on the engine's thread after ``seconds``. A closed engine drops it."""
        self._calls.call_later(seconds, call)

    def _wake(self) -> None:
        if self.on_thread():
            return  # it looks before it sleeps
        with self._lock:
            if self._engine is not None:
                lib.kvp_ucx_wake_events(self._engine)

    def put_protocol(self) -> str:
        """Return how libucp carries puts, in its words; empty until one has had to wait."""
        text = ffi.new("char[256]")
        with self._lock:
            lib.kvp_ucx_put_protocol(self._live(), text, len(text))
        return _text(text)

    def counts(self) -> dict[str, int]:
        """Return the engine's counters: slots and batches in use, wake-ups, puts, bytes, version."""
        counts = ffi.new("kvp_ucx_counts *")
        with self._lock:
            lib.kvp_ucx_count(self._live(), counts)
        return {name: getattr(counts, name) for name in COUNTERS}

    def close(self) -> None:
        """Close all connections and both threads. Idempotent, bounded to about 5 s.

        Everything in flight ends with ClosedError, and its buffers are free when this returns.

        Raises:
            UsageError: Called from a callback.
        """
        if self.on_thread():
            raise UsageError("a callback cannot close the transport that calls it")
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is None:
                return
            lib.kvp_ucx_stop_events(engine)
        self._calls.stop()
        self._pump.join(CLOSE_TIMEOUT_S)
        if self._pump.is_alive():
            log.error("a callback does not return: the engine stays open behind it")
            return
        lib.kvp_ucx_close(engine)
        closed = ClosedError("the transport is closed")
        for source, _, _ in self._batches.values():
            source.fail(closed)
        for waiting in self._connecting.values():
            waiting.error = closed
            waiting.ended.set()
        for connection in list(self._connections.values()):
            connection.end(closed)
        self._batches.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _after_fork(self) -> None:
        """In a child: its parent's threads are not there, and whoever held the lock is not either."""
        self._lock = threading.Lock()
        self._engine = None

    # ---- for connections ----------------------------------------------------------------------

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
                _nanoseconds(deadline_s),
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

    # ---- the thread of events -----------------------------------------------------------------

    def _run(self, engine: "CData") -> None:
        event = ffi.new("kvp_ucx_event *")
        handlers = {
            lib.KVP_UCX_OPENED: self._opened,
            lib.KVP_UCX_ARRIVED: self._arrived,
            lib.KVP_UCX_BATCH: self._ended,
            lib.KVP_UCX_CLOSED: self._closed,
        }
        while True:
            status = lib.kvp_ucx_next_event(engine, _nanoseconds(self._calls.sleep_s()), event)
            if status == lib.KVP_CLOSED:
                return
            if status == lib.KVP_OK:
                _guarded(handlers[event.kind], event)
            for call in self._calls.due():
                _guarded(call)

    def _opened(self, event: "UcxEvent") -> None:
        inbox = None
        if self._inbox is not None:
            inbox = self._inbox.part(event.inbox_offset, self._part)
        connection = UcxConnection(self, event, inbox)
        with self._lock:
            self._connections[connection.id] = connection
            waiting = self._connecting.pop(connection.id, None)
            on_open = self._on_connect if waiting is None else waiting.on_open
        if waiting is None and on_open is None:
            connection.close()  # a listen that was given up came to be after all
        try:
            if on_open is not None:
                on_open(connection)
        finally:
            if waiting is not None:
                waiting.connection = connection
                waiting.ended.set()

    def _arrived(self, event: "UcxEvent") -> None:
        self._connections[event.endpoint].arrived(bytes(ffi.buffer(event.note, event.note_size)))

    def _ended(self, event: "UcxEvent") -> None:
        with self._lock:
            source, size, _ = self._batches.pop(event.cookie)
        if event.status == lib.KVP_OK:
            source.finish(size)
        else:
            source.fail(error_of(event.status, event.ucx_code, "put"))

    def _closed(self, event: "UcxEvent") -> None:
        error = error_of(event.status, event.ucx_code, "the connection ended")
        with self._lock:
            connection = self._connections.pop(event.endpoint, None)
            waiting = self._connecting.pop(event.endpoint, None)
        if connection is not None:
            connection.end(error)
        if waiting is not None:
            waiting.error = error
            waiting.ended.set()
        # Its owner knows: the slot and its part of the inbox may go to the next connection.
        with self._lock:
            if self._engine is not None:
                lib.kvp_ucx_release(self._engine, event.endpoint)


# Those of this process, for its forked children, which must not use them.
_engines: Final[weakref.WeakSet[UcxEngine]] = weakref.WeakSet()


def _close_in_child() -> None:
    for engine in list(_engines):
        engine._after_fork()


os.register_at_fork(after_in_child=_close_in_child)


def _guarded(call: Callable[..., None], *arguments: object) -> None:
    try:
        call(*arguments)
    except Exception:
        log.exception("a callback failed")


def _nanoseconds(seconds: float) -> int:
    if not 0 <= seconds < 1e9:
        raise UsageError(f"{seconds} is not a number of seconds")
    return int(seconds * 1e9)
