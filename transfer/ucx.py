"""The transport between hosts: bytes come as puts into the reader's inbox, over UCX, and are checked.

Owns the inbox, the regions, and the endpoints of one engine. Nobody writes into an arena: a reader
asks, the owner puts what it asked for into the reader's part of the inbox, and the reader copies it
out, verified. Who calls it: the pool's server and client, and the workers, when they are told to.

UCX is one trust domain: over TCP a process that can connect can write anywhere in this one. So the
default address is loopback, which every user of this host can reach, and any other needs
``trusted_network``.
"""

import ipaddress
import logging
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool.arena import Arena
from kvpool.block import Incarnation, new_incarnation
from kvpool.completion import Deadline
from kvpool.errors import ClosedError, ConfigError, KVPoolError, PeerUnreachableError, UsageError
from kvpool.memory import Span
from kvpool.transfer.base import Endpoint, RegionDescriptor, Transport
from kvpool.transfer.endpoint import CLOSE_TIMEOUT_S, REGIONS_MAX
from kvpool.transfer.forked import close_in_children
from kvpool.transfer.registered import Registered
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_endpoint import UcxEndpoint
from kvpool.transfer.ucx_engine import UcxEngine
from kvpool.transfer.ucx_library import require_trusted
from kvpool.transfer.ucx_native import TRIAL_BYTES, ReadMode
from kvpool.transfer.ucx_wire import ASKS_MAX, PUT_TIMEOUT_S, Offer

logger = logging.getLogger(__name__)

SCHEME: Final = "ucx://"
# Two windows of 1 MiB blocks and more fit each of its eight windows of 2 MiB.
INBOX_BYTES: Final = 16 << 20
ENDPOINTS_MAX: Final = 64
# A process that is stopped or starved for less than this is not given up; reads that wait for it
# have their own deadlines, so it may be long.
HEARTBEAT_TIMEOUT_S: Final = PUT_TIMEOUT_S
# Longest wait for our own answer at an address that peers are to be told.
PROBE_TIMEOUT_S: Final = 5.0
# Puts and notes in flight, all connections; and reads.
_BATCHES_MAX: Final = 1024
READS_MAX: Final = 1024
# What libucp says of a put that it sends from where the bytes lie.
ZERO_COPY: Final = "zero-copy"


class _Probe:
    """A connection to ourselves, by which an address is tried."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.over = threading.Event()


def parse_address(address: str, scheme: str = SCHEME) -> tuple[str, int]:
    """Split "ucx://HOST:PORT" into a numeric host and a port. An IPv6 host stands in brackets.

    Raises:
        UsageError: It is not of this form.
    """
    host, colon, port = address.removeprefix(scheme).rpartition(":")
    if not address.startswith(scheme) or not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"{address} is not {scheme}HOST:PORT: both sides need the same --transport"
        )
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise UsageError(f"{address}: {host} is no numeric address") from error
    return host, int(port)


def format_address(host: str, port: int, scheme: str = SCHEME) -> str:
    """Return the address that ``parse_address`` reads."""
    return f"{scheme}[{host}]:{port}" if ":" in host else f"{scheme}{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxTrace:
    """How bytes went.

    Attributes:
        put: How libucp describes a put of 64 KiB or more: "put from host memory length 65536
            zero-copy tcp/lo". Known from the first connection on, empty before; reads are puts of
            their owner.
        lanes: Transport and device of each lane of the open connections.
        puts, put_bytes: How many, all connections since the start.
        coalesced: Spans that went in one put with the span before them.
        gets, get_bytes: How many bytes were fetched here, and in how many gets.
    """

    put: str
    lanes: tuple[str, ...]
    puts: int
    put_bytes: int
    coalesced: int
    gets: int
    get_bytes: int

    def zero_copy(self) -> bool | None:
        """Say whether bulk is put without a copy in between; None: nobody has connected yet."""
        return ZERO_COPY in self.put if self.put else None


class UcxTransport(Transport):
    """See ``Transport``. Addresses are "ucx://HOST:PORT"; port 0 takes a free one.

    Args:
        name: Names the thread that callbacks run on.
        host: Numeric address to listen on and connect from; decides device and family.
        trusted_network: Whether everybody who can reach ``host`` may write to this process's
            memory. Needed for anything but loopback.
        advertise: Numeric address of this host that peers are told instead of ``host``. Needed with
            the wildcard 0.0.0.0, which says nothing to a peer. ``listen`` tries it.
        inbox_bytes: Of one connection: what may be on its way to us. A layer of a block has to fit
            an eighth of it. Memory is taken when it is used.
        endpoint_max: Connections, those that are just ending included. More are refused.
        copy_threads: Threads that copy what is read out of the inbox, the progress thread included.
        heartbeat_interval_s, heartbeat_timeout_s, library, tls, read_mode: As for ``UcxEngine``.

    Raises:
        ConfigError: As ``UcxEngine``, or no memory for the inbox.

    One lock guards regions, endpoints and ``_closed``. Nothing is called under it.
    """

    def __init__(
        self,
        name: str = "kvpool-ucx",
        *,
        host: str = "127.0.0.1",
        trusted_network: bool = False,
        advertise: str | None = None,
        inbox_bytes: int = INBOX_BYTES,
        endpoint_max: int = ENDPOINTS_MAX,
        copy_threads: int = 2,
        heartbeat_interval_s: float = 1.0,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        library: str | None = None,
        tls: str = "tcp",
        read_mode: ReadMode = "auto",
    ) -> None:
        self.incarnation = new_incarnation()
        self.host = host
        self._advertise = advertise
        self._library = library
        self._probe: _Probe | None = None
        self._part = inbox_bytes - inbox_bytes % mmap.PAGESIZE
        if self._part < ASKS_MAX * mmap.PAGESIZE or endpoint_max < 1:
            raise ConfigError(
                f"an inbox of {inbox_bytes} bytes for each of {endpoint_max} endpoints: use"
                f" {ASKS_MAX * mmap.PAGESIZE} bytes and one endpoint or more",
                key="transfer.inbox_bytes",
            )
        self._part += TRIAL_BYTES
        self._inbox = _reserve(self._part * endpoint_max)
        self._lock = threading.Lock()
        self._regions: list[Offer] = []
        self._registered = Registered()
        self._endpoints: set[UcxEndpoint] = set()
        self._on_connect: Callable[[Endpoint], None] | None = None
        self._closed = False
        inbox = Span.of(np.frombuffer(self._inbox, dtype=np.uint8))
        self._inbox_address = inbox.address
        self._engine = UcxEngine(
            inbox=inbox,
            host=host,
            trusted_network=trusted_network,
            incarnation=self.incarnation,
            endpoint_max=endpoint_max,
            batch_max=_BATCHES_MAX,
            read_max=READS_MAX,
            copy_threads=copy_threads,
            answer_timeout_s=PUT_TIMEOUT_S,
            heartbeat_interval_s=heartbeat_interval_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            library=library,
            tls=tls,
            read_mode=read_mode,
            trial=True,
            name=name,
        )
        self._said_how = False  # the engine's thread
        close_in_children(self)

    def register(self, arena: Arena, *, writable: bool = False) -> RegionDescriptor:
        """Let peers ask for the slots of an arena, those that come and those that are connected."""
        if arena.incarnation != self.incarnation:
            raise UsageError("open the arena with the transport's incarnation")
        layout = arena.layout
        with self._lock:
            self._require_open()
            if len(self._regions) >= REGIONS_MAX:
                raise UsageError(f"{REGIONS_MAX} regions are registered: share one arena")
            number = self._engine.register(arena)
            self._regions.append(
                Offer(number, arena.slot_count, layout.block_bytes, layout.crc_count)
            )
            self._registered.add(arena, writable)
        self._engine.post(self._tell_regions)
        return RegionDescriptor(self.incarnation, number, arena.slot_count, layout.block_bytes)

    def listen(self, address: str, on_connect: Callable[[Endpoint], None]) -> str:
        """Listen at a port of this transport's host. Raises ConfigError as well: see ``advertise``."""
        host, port = parse_address(address)
        if self._advertise is None and ipaddress.ip_address(host).is_unspecified:
            raise ConfigError(
                f"{host} says nothing to a peer: set transfer.advertise to an address of this host"
                " that its peers reach",
                key="transfer.advertise",
            )
        with self._lock:
            self._require_open()
        if host != self.host:
            raise UsageError(f"{address} is not on {self.host}, where this transport is open")
        before, self._on_connect = self._on_connect, on_connect
        try:
            port = self._engine.listen(self._accept, port)
        except KVPoolError:
            self._on_connect = before
            raise
        if self._advertise is None:
            return format_address(host, port)
        self._require_reachable(self._advertise, port)
        return format_address(self._advertise, port)

    def _require_reachable(self, host: str, port: int) -> None:
        """Connect to this process by the address that peers are told, as one of them would."""
        require_trusted(host, trusted_network=True)
        probe = self._probe = _Probe(new_incarnation())
        try:
            with UcxEngine(
                host=self.host,
                trusted_network=True,
                incarnation=probe.incarnation,
                endpoint_max=1,
                library=self._library,
            ) as peer:
                peer.connect(host, port, PROBE_TIMEOUT_S, self.incarnation)
            # Its slot is free again when this returns.
            probe.over.wait(CLOSE_TIMEOUT_S)
        except KVPoolError as error:
            raise ConfigError(
                f"peers that are told {format_address(host, port)} would not reach this process:"
                f" {error}. Set transfer.advertise to an address of this host",
                key="transfer.advertise",
            ) from error
        finally:
            self._probe = None

    def connect(
        self, address: str, timeout_s: float, expected: Incarnation | None = None
    ) -> Endpoint:
        """Connect to a listening peer. Blocks: not from a callback.

        Raises as ``Transport.connect``, and CapacityError: ``endpoint_max`` are connected.
        """
        host, port = parse_address(address)
        with self._lock:
            self._require_open()
        deadline = Deadline(timeout_s)
        made: list[UcxEndpoint] = []
        self._engine.connect(
            host, port, timeout_s, expected, lambda connection: made.append(self._adopt(connection))
        )
        endpoint = made[0]
        try:
            endpoint.wait_welcome(deadline.remaining_s())
        except ClosedError as error:
            self._require_open()
            raise PeerUnreachableError(f"{address} closed the connection") from error
        except KVPoolError:
            endpoint.close()
            raise
        return endpoint

    def trace(self) -> UcxTrace:
        """Return which operations of UCX carried what has moved so far.

        Raises ClosedError: The transport is closed.
        """
        with self._lock:
            connections = [endpoint.connection.id for endpoint in self._endpoints]
        counts = self._engine.counts()
        return UcxTrace(
            put=self._engine.put_protocol(),
            lanes=tuple(
                sorted({lane for each in connections for lane in self._engine.lanes(each)})
            ),
            puts=counts["puts"],
            put_bytes=counts["put_bytes"],
            coalesced=counts["coalesced"],
            gets=counts["gets"],
            get_bytes=counts["get_bytes"],
        )

    @property
    def library(self) -> str:
        """Path of the libucp that is used; why it is the one is in the log."""
        return self._engine.library

    def put_protocol(self) -> str:
        """Return how libucp carries bulk, in its words; empty until the first connection."""
        return self._engine.put_protocol()

    def counts(self) -> dict[str, int]:
        """Return the engine's counters; see ``UcxEngine.counts``."""
        return self._engine.counts()

    def close(self) -> None:
        """Close all endpoints and the threads; what they said last goes out first."""
        if self._engine.on_thread():
            raise UsageError("a callback cannot close the transport that calls it")
        with self._lock:
            already, self._closed = self._closed, True
            endpoints = list(self._endpoints)
        if already:
            return
        for endpoint in endpoints:  # all hear of it before any is waited for
            endpoint.lose(ClosedError("the transport was closed"))
        deadline = Deadline(CLOSE_TIMEOUT_S / 2)
        for endpoint in endpoints:
            endpoint.wait_drained(deadline.remaining_s())
        self._tell_trace()
        self._engine.close()
        with self._lock:
            self._regions = []

    def after_fork(self) -> None:
        """Be closed in a child; see ``forked``. The peers stay the parent's."""
        self._lock = threading.Lock()
        self._closed = True
        self._registered.after_fork()
        for endpoint in list(self._endpoints):
            endpoint.after_fork()

    def _tell_trace(self) -> None:
        trace = self.trace()
        if trace.puts or trace.gets:
            logger.info("UCX carried %s", trace)

    def _say_how(self) -> None:
        """Say once how bulk will go: the engine tried it as the first connection opened."""
        if self._said_how:
            return
        try:
            put = self._engine.put_protocol()
        except ClosedError:  # meanwhile
            return
        self._said_how = put != ""
        if ZERO_COPY in put:
            logger.info("UCX: %s", put)
        elif put:
            logger.warning("UCX copies every put: %s; kvpool doctor tries the library", put)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the transport is closed")

    # ---- the engine's thread ---------------------------------------------------------------------

    def _accept(self, connection: UcxConnection) -> None:
        probe = self._probe
        if probe is not None and connection.peer == probe.incarnation:
            connection.on_lost(lambda lost: probe.over.set())
        else:
            self._adopt(connection, self._welcomed)

    def _adopt(
        self,
        connection: UcxConnection,
        on_welcome: Callable[[UcxEndpoint], None] = lambda endpoint: None,
    ) -> UcxEndpoint:
        endpoint = UcxEndpoint(
            connection,
            self._engine,
            self._registered,
            on_welcome=on_welcome,
            on_drained=self._forget,
        )
        with self._lock:
            self._endpoints.add(endpoint)
            offers = list(self._regions)
            closed = self._closed
        endpoint.start(offers)
        self._say_how()
        if closed:
            endpoint.lose(ClosedError("the transport was closed"))
        return endpoint

    def _welcomed(self, endpoint: UcxEndpoint) -> None:
        if self._on_connect is not None:
            self._on_connect(endpoint)

    def _forget(self, endpoint: UcxEndpoint) -> None:
        """Drop an endpoint that has ended, and the memory of its inbox part."""
        with self._lock:
            self._endpoints.discard(endpoint)
        inbox = endpoint.connection.inbox
        assert inbox is not None
        self._inbox.madvise(mmap.MADV_DONTNEED, inbox.address - self._inbox_address, self._part)

    def _tell_regions(self) -> None:
        with self._lock:
            endpoints = list(self._endpoints)
            offers = list(self._regions)
        for endpoint in endpoints:
            endpoint.tell_regions(offers)


def _reserve(size: int) -> mmap.mmap:
    """Return private memory that is taken page by page when it is used."""
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"no memory for an inbox of {size} bytes: ask for less", key="transfer.inbox_bytes"
        ) from error
