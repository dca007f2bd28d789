"""The transport over ucxx, UCX's own Python binding: for hosts where that is what runs already.

Owns a listener, the hellos, the regions and the endpoints. Slower than ``UcxTransport``, which speaks
to UCX itself: docs/ucx-py.md has the price and says when to use which. Needs ``kvpool[ucx-py]``.
Who calls it: whoever embeds kvpool beside ucxx.

ucxx listens on all interfaces and offers no choice, and UCX is one trust domain. So nothing listens
without ``trusted_network``.
"""

import itertools
import logging
import mmap
import secrets
import threading
from collections.abc import Callable
from typing import Final

from kvpool.arena import Arena, Window
from kvpool.block import BlockLayout, Incarnation, new_incarnation
from kvpool.completion import Deadline
from kvpool.errors import (
    ClosedError,
    ConfigError,
    CorruptionError,
    KVPoolError,
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.transfer.base import Endpoint, RegionDescriptor, Transport
from kvpool.transfer.calls import weakly
from kvpool.transfer.endpoint import CLOSE_TIMEOUT_S, REGIONS_MAX
from kvpool.transfer.forked import close_in_children
from kvpool.transfer.registered import Registered
from kvpool.transfer.ucx import format_address, parse_address
from kvpool.transfer.ucx_wire import Offer
from kvpool.transfer.ucxpy_endpoint import UcxxEndpoint
from kvpool.transfer.ucxpy_library import Listener, RawEndpoint, UcxxWorker
from kvpool.transfer.ucxpy_reads import new_window
from kvpool.transfer.ucxpy_wire import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_MAGIC,
    PROTOCOL_VERSION,
    Hello,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

SCHEME: Final = "ucxx://"
# Two 4 MiB runs of blocks are copied while two are on their way.
WINDOW_BYTES: Final = 4 << 20
# Longest wait for the hello of a peer that connected.
HELLO_TIMEOUT_S: Final = 5.0
ENDPOINTS_MAX: Final = 256
_START_TIMEOUT_S: Final = 10.0


class _Greeting:
    """A connection until its hello has come. On the loop's thread."""

    def __init__(
        self, transport: "UcxxTransport", raw: RawEndpoint, done: Callable[["_Greeting"], None]
    ) -> None:
        self.transport = transport
        self.raw: RawEndpoint | None = raw
        self.hello: Hello | None = None
        self.error: KVPoolError | None = None
        self.told = 0
        self.ours, self.theirs = transport.new_tag(), 0
        self.room = new_window(MESSAGE_BYTES_MAX + mmap.PAGESIZE)
        self._done: Callable[[_Greeting], None] | None = done

    def start(self, hello: Hello) -> None:
        """Exchange tags, say hello, and wait for the peer's."""
        self.told = len(hello.regions)
        message = encode(hello)

        def told(theirs: int | None) -> None:
            if theirs is None:
                self.end(PeerUnreachableError("nobody answers there, or no kvpool over ucxx"))
                return
            self.theirs = theirs
            self._try(lambda raw: self.transport.worker.send_message(raw, message, theirs))
            self._try(
                lambda raw: self.transport.worker.take_message(
                    raw, self.room, self.ours, self._heard
                )
            )

        self._try(lambda raw: self.transport.worker.exchange_tags(raw, self.ours, told))

    def _try(self, call: Callable[[RawEndpoint], None]) -> None:
        if self.raw is None:
            return
        try:
            call(self.raw)
        except Exception as error:  # noqa: BLE001  # ucxx raises its own and RuntimeError
            self.end(PeerUnreachableError(f"nobody answers: {error}"))
        self.transport.worker.loop.post(self.transport.worker.progress)

    def _heard(self, message: bytes | None) -> None:
        if self._done is None:
            return
        if message is None:
            self.end(PeerUnreachableError("nobody answers there, or the connection was refused"))
            return
        try:
            said = decode(message)
            if not isinstance(said, Hello):
                raise CorruptionError("the peer's first message is no hello")
        except KVPoolError as error:
            self.end(error)
            return
        self.hello = said
        self.end(None)

    def give_up(self) -> None:
        """End the wait: it took too long."""
        self.end(TransferTimeoutError(f"no hello within {HELLO_TIMEOUT_S} s"))

    def end(self, error: KVPoolError | None) -> None:
        """End the wait, once. With an error the connection is closed."""
        done, self._done = self._done, None
        if done is None:
            return
        self.error = error
        if error is not None:
            raw, self.raw = self.raw, None
            if raw is not None:
                try:
                    self.transport.worker.close_endpoint(raw)
                except Exception:
                    logger.exception("ucxx did not close a connection")
                self.transport.worker.drop_messages(self.ours)
        done(self)


class UcxxTransport(Transport):
    """See ``Transport``. Addresses are "ucxx://HOST:PORT"; port 0 takes a free one.

    Args:
        name: Names the thread.
        tls: Transports of UCX, as UCX_TLS has them. "tcp" is what is tested.
        trusted_network: Whether everybody who can reach any interface of this host may write to
            this process's memory. Needed to listen.
        window_bytes: Largest answer to one ask; four of them for each connection and way. A block
            has to fit.

    Raises:
        ConfigError: ucxx is not installed, or finds no usable UCX.

    One lock guards regions, endpoints and ``_closed``. Nothing is called under it.
    """

    def __init__(
        self,
        name: str = "kvpool-ucxx",
        *,
        tls: str = "tcp",
        trusted_network: bool = False,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        if window_bytes < 1 << 16:
            raise ConfigError("window_bytes: use 64 KiB or more", key="transfer.window_bytes")
        self.incarnation = new_incarnation()
        self._trusted_network = trusted_network
        self._window_bytes = window_bytes
        self._lock = threading.Lock()
        self._regions: list[tuple[Offer, Window, BlockLayout]] = []
        self._registered = Registered()
        self._endpoints: set[UcxxEndpoint] = set()
        self._greetings: set[_Greeting] = set()  # the loop's thread alone
        self._on_connect: Callable[[Endpoint], None] | None = None
        self._listener: Listener | None = None
        self._closed = False
        # Other processes' asks have tags of their own in our worker: no two may be equal.
        self._tags = itertools.count(secrets.randbits(63))
        self.worker = UcxxWorker(name, tls)
        close_in_children(self)

    def register(self, arena: Arena, *, writable: bool = False) -> RegionDescriptor:
        """Let peers ask for the slots of an arena, those that come and those that are connected."""
        if arena.incarnation != self.incarnation:
            raise UsageError("open the arena with the transport's incarnation")
        layout = arena.layout
        with self._lock:
            self._require_open()
            number = len(self._regions)
            if number >= REGIONS_MAX:
                raise UsageError(f"{REGIONS_MAX} regions are registered: share one arena")
            offer = Offer(number, arena.slot_count, layout.block_bytes, layout.crc_count)
            # A mapping of our own: the arena may be closed before the transport.
            self._regions.append((offer, Window(arena.fd, self.incarnation), layout))
            self._registered.add(arena, writable)
        self.worker.loop.post(self._tell_regions)
        return RegionDescriptor(self.incarnation, number, arena.slot_count, layout.block_bytes)

    def listen(self, address: str, on_connect: Callable[[Endpoint], None]) -> str:
        """Listen at a port; HOST is what peers are told. Raises ConfigError: not trusted."""
        host, port = parse_address(address, SCHEME)
        with self._lock:
            self._require_open()
            if self._on_connect is not None:
                raise UsageError("this transport listens already")
            if not self._trusted_network:
                raise ConfigError(
                    "ucxx listens on all interfaces, and whoever reaches one can write to this"
                    " process's memory: set transfer.trusted_network, or take the ucx transport",
                    key="transfer.trusted_network",
                )
            self._on_connect = on_connect
        problem: list[str] = []

        def start() -> None:
            try:
                self._listener = self.worker.listen(port, self._accept)
            except Exception as error:  # noqa: BLE001  # ucxx raises its own and RuntimeError
                problem.append(str(error))
            self.worker.progress()

        if not self.worker.loop.run(start, _START_TIMEOUT_S) or self._listener is None:
            with self._lock:
                self._on_connect = None
            raise UsageError(f"cannot listen at port {port}: {''.join(problem) or 'no answer'}")
        return format_address(host, self._listener.port, SCHEME)

    def connect(
        self, address: str, timeout_s: float, expected: Incarnation | None = None
    ) -> Endpoint:
        """Connect to a listening peer. Blocks: not from a callback."""
        host, port = parse_address(address, SCHEME)
        with self._lock:
            self._require_open()
        if self.worker.loop.on_thread():
            raise UsageError("a callback cannot connect: use a thread")
        ended = threading.Event()
        deadline = Deadline(timeout_s)
        made: list[UcxxEndpoint] = []
        greeting: list[_Greeting] = []
        failed: list[KVPoolError] = []

        def greeted(ending: _Greeting) -> None:
            self._greetings.discard(ending)
            if ending.error is not None:
                failed.append(ending.error)
            else:
                self._adopt(ending, expected, made, failed)
            ended.set()

        def start() -> None:
            try:
                raw = self.worker.connect(host, port)
            except Exception as error:  # noqa: BLE001  # ucxx raises its own and RuntimeError
                failed.append(PeerUnreachableError(f"{address}: {error}"))
                ended.set()
                return
            greeting.append(_Greeting(self, raw, greeted))
            self._greet(greeting[0])

        late = TransferTimeoutError(f"no hello from {address} within {timeout_s} s")
        if not self.worker.loop.post(start):
            raise ClosedError("the transport is closed")
        if not ended.wait(deadline.remaining_s()):
            self.worker.loop.run(lambda: greeting[0].end(late), CLOSE_TIMEOUT_S)
        if made:
            return made[0]
        error = failed[0] if failed else late
        raise type(error)(str(error))

    def close(self) -> None:
        """Close all endpoints and the thread; what they said last goes out first."""
        if self.worker.loop.on_thread():
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
        self.worker.loop.run(self._stop, CLOSE_TIMEOUT_S / 2)
        self.worker.close()
        with self._lock:
            self._regions = []

    # ---- what endpoints ask ----------------------------------------------------------------------

    def region(self, number: int) -> tuple[Window, BlockLayout]:
        """Return one of our regions. Raises CorruptionError: there is none of this number."""
        with self._lock:
            if number >= len(self._regions):
                raise CorruptionError(f"the peer asked for region {number}, which is not ours")
            return self._regions[number][1:]

    def new_tag(self) -> int:
        """Return a tag that no other ask of this process has. On the loop's thread."""
        return next(self._tags) % 2**64

    def forget(self, endpoint: UcxxEndpoint) -> None:
        """Drop an endpoint that is closed."""
        with self._lock:
            self._endpoints.discard(endpoint)

    # ---- on the loop's thread --------------------------------------------------------------------

    def _greet(self, greeting: _Greeting) -> None:
        with self._lock:
            closed = self._closed
            full = len(self._endpoints) + len(self._greetings) >= ENDPOINTS_MAX
            regions = [offer for offer, _, _ in self._regions]
        self._greetings.add(greeting)
        if closed or full:
            greeting.end(ClosedError("the transport is closed, or has too many connections"))
            return
        greeting.start(Hello(PROTOCOL_MAGIC, PROTOCOL_VERSION, self.incarnation, regions))

    def _accept(self, raw: RawEndpoint) -> None:
        def greeted(ending: _Greeting) -> None:
            self._greetings.discard(ending)
            made: list[UcxxEndpoint] = []
            if ending.error is not None:
                logger.warning("a peer that connected is refused: %s", ending.error)
            else:
                self._adopt(ending, None, made, [])
            if made and self._on_connect is not None:
                self._on_connect(made[0])

        greeting = _Greeting(self, raw, greeted)
        self.worker.loop.call_later(HELLO_TIMEOUT_S, weakly(greeting.give_up))
        self._greet(greeting)

    def _adopt(
        self,
        greeting: _Greeting,
        expected: Incarnation | None,
        made: list[UcxxEndpoint],
        failed: list[KVPoolError],
    ) -> None:
        """Make the endpoint of a connection whose hello has come."""
        hello, raw = greeting.hello, greeting.raw
        assert hello is not None
        assert raw is not None
        peer = Incarnation(hello.incarnation)
        if expected is not None and peer != expected:
            failed.append(StaleIncarnationError("the peer is another run than the one expected"))
            self.worker.close_endpoint(raw)
            self.worker.drop_messages(greeting.ours)
            return
        endpoint = UcxxEndpoint(
            peer,
            raw,
            self.worker,
            self,
            told=greeting.told,
            room=greeting.room,
            our_tag=greeting.ours,
            their_tag=greeting.theirs,
            window_bytes=self._window_bytes,
            ours=self._registered,
        )
        with self._lock:
            self._endpoints.add(endpoint)
            closed = self._closed
        try:
            endpoint.start(hello.regions)
        except KVPoolError as error:
            endpoint.lose(PeerUnreachableError(str(error)))
            failed.append(error)
            return
        made.append(endpoint)
        self._tell_regions()
        if closed:
            endpoint.lose(ClosedError("the transport was closed"))

    def _tell_regions(self) -> None:
        with self._lock:
            endpoints = list(self._endpoints)
            offers = [offer for offer, _, _ in self._regions]
        for endpoint in endpoints:
            endpoint.tell_regions(offers)

    def _stop(self) -> None:
        for greeting in list(self._greetings):
            greeting.end(ClosedError("the transport was closed"))
        self._listener = None
        self.worker.progress()

    def after_fork(self) -> None:
        """Be closed in a child; see ``forked``. UCX does not outlive a fork."""
        self._lock = threading.Lock()
        self._closed = True
        self._registered.after_fork()
        for endpoint in list(self._endpoints):
            endpoint.after_fork()
        self.worker.loop.after_fork()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the transport is closed")
