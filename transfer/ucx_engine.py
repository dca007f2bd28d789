"""Between hosts: one-sided puts over UCX into a peer's inbox, notes that follow them, and reads.

Owns the connections of one engine of the C core and the thread that hands out its events, and runs
calls and timers beside them; the calls into C are ``ucx_native``'s. The data path is in C: a batch or a read costs one call, whatever
its size. A peer writes into its own part of this process's inbox and nowhere else that we hand out.
Who calls it: ``transfer/ucx.py``.

UCX is one trust domain: over TCP a peer that can connect can write anywhere in this process. So the
default address is loopback, and any other needs ``trusted_network``.
"""

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from kvpool._native import ffi, lib
from kvpool.block import Incarnation, new_incarnation
from kvpool.errors import ClosedError, InternalError, KVPoolError, UsageError
from kvpool.memory import Span
from kvpool.transfer.calls import Call, Calls
from kvpool.transfer.forked import close_in_children
from kvpool.transfer.ucx_connection import UcxConnection, UcxStatus, error_of
from kvpool.transfer.ucx_library import choose_library, require_trusted
from kvpool.transfer.ucx_native import EngineLimits, NativeEngine, ReadMode, nanoseconds

if TYPE_CHECKING:
    from kvpool._native import CData, UcxEvent

log = logging.getLogger(__name__)

# Every close is bounded to about this.
CLOSE_TIMEOUT_S: Final = 5.0
# Longest wait for a listener: the progress thread makes it between two of its rounds.
LISTEN_TIMEOUT_S: Final = 10.0


class _Connecting:
    """A connect that waits for its event. Guarded by the transport's lock; ``ended`` is set last."""

    def __init__(self, on_open: Callable[[UcxConnection], None] | None) -> None:
        self.on_open = on_open
        self.ended = threading.Event()
        self.connection: UcxConnection | None = None
        self.error: KVPoolError | None = None


class UcxEngine(NativeEngine):
    """One process's connections to peers. Safe from any thread; bound to its process.

    Args:
        inbox: Page-aligned memory that peers put into, in ``endpoint_max`` equal parts, one a
            connection; None if nobody puts here. The transport keeps it alive.
        host: Numeric address to listen on and connect from. Decides the device and the family.
        trusted_network: Whether everybody who can reach ``host`` may write to this process's
            memory. Needed for anything but loopback.
        incarnation: Name of this run of the process; a fresh one by default.
        tls: Transports that libucp may use, as UCX_TLS has them.
        read_mode: How reads go: "put" by the owner, "get" by the reader, or "auto": as gets over lanes
            whose hardware or kernel reads another process's memory by itself, else as puts. "get"
            over any other lane is for tests, on both sides: a connection that fails in the middle of
            a get that libucp emulates ends the owner's process.
        trial: Whether peers have the last TRIAL_BYTES of each part for a first put that nobody reads. One
            whose peer has such room knows ``put_protocol`` from its first connection on.
        endpoint_max: Connections, those that drain included. More are refused.
        batch_max: Batches in flight.
        read_max: Reads in flight, all connections; each needs an inbox to come into.
        copy_threads: Threads that copy what is read out of the inbox, the progress thread included.
        answer_timeout_s: A peer that has not taken what it asked for by then is lost.
        heartbeat_interval_s, heartbeat_timeout_s: What we send; 0 is nothing. A peer that sends
            heartbeats and is then silent for the timeout is lost, even if nothing is in flight (UCX
            does not notice a stopped process). The timeout is at least three intervals.
        spin_s: How long the progress thread polls before it sleeps.
        library: Path of libucp; see ``choose_library``.
        name: Names the thread that callbacks run on.

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
        tls: str = "tcp",
        read_mode: ReadMode = "auto",
        trial: bool = False,
        endpoint_max: int = 16,
        batch_max: int = 256,
        read_max: int = 256,
        copy_threads: int = 1,
        answer_timeout_s: float = 15.0,
        heartbeat_interval_s: float = 1.0,
        heartbeat_timeout_s: float = 5.0,
        spin_s: float = 50e-6,
        library: str | None = None,
        name: str = "kvpool-ucx",
    ) -> None:
        self.incarnation = new_incarnation() if incarnation is None else incarnation
        choice = choose_library(library)
        self.library = choice.path
        self.port = 0
        require_trusted(host, trusted_network)
        limits = EngineLimits(
            tls=tls,
            read_mode=read_mode,
            trial=trial,
            endpoint_max=endpoint_max,
            batch_max=batch_max,
            read_max=read_max,
            copy_threads=copy_threads,
            answer_timeout_s=answer_timeout_s,
            heartbeat_interval_s=heartbeat_interval_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            spin_s=spin_s,
        )
        super().__init__(self.library, host, self.incarnation, inbox, limits)
        # Guarded by the lock.
        self._connections: dict[int, UcxConnection] = {}
        self._connecting: dict[int, _Connecting] = {}
        self._on_connect: Callable[[UcxConnection], None] | None = None
        engine = self._live()
        close_in_children(self)
        log.info("UCX on %s: %s, %s", host, choice.path, choice.why)
        self._calls = Calls(self._wake)
        self._pump = threading.Thread(
            target=self._run, args=(engine,), name=f"{name}-events", daemon=True
        )
        self._pump.start()

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
            status = lib.kvp_ucx_listen(engine, port, nanoseconds(LISTEN_TIMEOUT_S), bound, code)
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
                self._live(), host.encode(), port, wanted, nanoseconds(timeout_s), connection_id
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
        for call in self._calls.due():  # what was promised to run, such as the end of a write
            _guarded(call)
        closed = ClosedError("the transport is closed")
        self._end_all(closed)
        for waiting in self._connecting.values():
            waiting.error = closed
            waiting.ended.set()
        for connection in list(self._connections.values()):
            connection.end(closed)

    def after_fork(self) -> None:
        """Be closed in a child; see ``forked``."""
        super().after_fork()
        if hasattr(self, "_calls"):  # the fork may come while this is made
            self._calls.after_fork()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- the thread of events -----------------------------------------------------------------

    def _run(self, engine: "CData") -> None:
        event = ffi.new("kvp_ucx_event *")
        handlers = {
            lib.KVP_UCX_OPENED: self._opened,
            lib.KVP_UCX_ARRIVED: self._arrived,
            lib.KVP_UCX_BATCH: self._ended,
            lib.KVP_UCX_CLOSED: self._closed,
            lib.KVP_UCX_READ: self._read_ended,
        }
        while True:
            status = lib.kvp_ucx_next_event(engine, nanoseconds(self._calls.sleep_s()), event)
            if status == lib.KVP_CLOSED:
                return
            if status == lib.KVP_OK:
                _guarded(handlers[event.kind], event)
            for call in self._calls.due():
                _guarded(call)

    def _opened(self, event: "UcxEvent") -> None:
        inbox = None
        if self._inbox is not None:
            inbox = self._inbox.part(event.inbox_offset, self._part - self._trial_bytes)
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


def _guarded(call: Callable[..., None], *arguments: object) -> None:
    try:
        call(*arguments)
    except Exception:
        log.exception("a callback failed")
