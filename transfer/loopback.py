"""A real transport inside one process: for unit tests, and where both sides share a process.

Owns a registry of addresses, given to each transport, and the pairs of endpoints. Bytes are pulled
through a read-only mapping of the other's arena, as between processes. Who calls it: tests, and
``LossyTransport``.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kvpool.arena import Arena
from kvpool.block import Incarnation, new_incarnation
from kvpool.errors import (
    ClosedError,
    PeerUnreachableError,
    StaleIncarnationError,
    UsageError,
)
from kvpool.transfer.base import Endpoint, RegionDescriptor, Transport
from kvpool.transfer.endpoint import REGIONS_MAX, PullEndpoint, require_notification
from kvpool.transfer.engine import CopyEngine
from kvpool.transfer.progress import ProgressLoop
from kvpool.transfer.registered import Registered
from kvpool.transfer.write_wire import WriteMessage

logger = logging.getLogger(__name__)

# Notifications that may wait at a receiver; as many as a ring of the host transport has records.
INBOX_MAX: Final = 1024


class LoopbackNetwork:
    """Who listens where. One lock guards the table and every change of regions and connections."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.listeners: dict[str, LoopbackTransport] = {}


class LoopbackEndpoint(PullEndpoint):
    """One side of a pair. See ``Endpoint``."""

    def __init__(self, transport: "LoopbackTransport", peer: Incarnation) -> None:
        super().__init__(peer, transport.engine, transport.registered)
        self._transport = transport
        self._inbox: deque[bytes] = deque()
        self._inbox_lock = threading.Lock()
        self.twin: LoopbackEndpoint | None = None

    def notify(self, payload: bytes) -> bool:
        """Put the message into the other side's inbox."""
        require_notification(payload)
        with self._changed:
            self._require_alive()
        if self.twin is None:
            raise PeerUnreachableError("the other side has not been connected")
        return self.twin._receive(bytes(payload))

    def _receive(self, payload: bytes) -> bool:
        with self._inbox_lock:
            if len(self._inbox) >= INBOX_MAX:
                return False
            self._inbox.append(payload)
            first = len(self._inbox) == 1
        if first:
            self._deliver_soon()
        return True

    def say_write(self, message: WriteMessage) -> None:
        """Hand the message to the other side's thread."""
        if (twin := self.twin) is not None:
            twin.post(lambda: twin.take_write(message))

    def post(self, call: Callable[[], None]) -> bool:
        """Run ``call`` on the transport's loop."""
        return self._transport.loop.post(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Run ``call`` on the transport's loop, later."""
        self._transport.loop.call_later(seconds, call)

    def _deliver_soon(self) -> None:
        self._transport.loop.post(self._deliver)

    def _deliver(self) -> None:
        if not self.alive():
            return
        while (callback := self._on_notification) is not None:
            with self._inbox_lock:
                if not self._inbox:
                    return
                payload = self._inbox.popleft()
            try:
                callback(payload)
            except Exception:
                logger.exception("a notification callback failed")

    def _release(self) -> None:
        self._transport.forget(self)
        twin = self.twin
        if twin is not None:
            # On the twin's thread, after the messages that were sent before.
            twin._transport.loop.post(twin._left)

    def _left(self) -> None:
        self._deliver()
        self.lose(PeerUnreachableError("the other side closed the connection"))


class LoopbackTransport(Transport):
    """See ``Transport``. Addresses are any strings, known to one network.

    Args:
        network: Shared by the transports that may meet.
    """

    def __init__(self, network: LoopbackNetwork, *, copy_threads: int = 1) -> None:
        self.incarnation = new_incarnation()
        self.network = network
        self.engine = CopyEngine("kvpool-loopback-copy", threads=copy_threads)
        self.loop = ProgressLoop("kvpool-loopback-progress")
        self.registered = Registered()
        self._regions: list[tuple[RegionDescriptor, int]] = []
        self._endpoints: set[LoopbackEndpoint] = set()
        self._on_connect: Callable[[Endpoint], None] | None = None
        self._closed = False

    def register(self, arena: Arena, *, writable: bool = False) -> RegionDescriptor:
        """Let the peers map an arena."""
        if arena.incarnation != self.incarnation:
            raise UsageError("open the arena with the transport's incarnation")
        with self.network.lock:
            self._require_open()
            number = len(self._regions)
            if number >= REGIONS_MAX:
                raise UsageError(f"{REGIONS_MAX} regions are registered: share one arena")
            region = RegionDescriptor(
                self.incarnation, number, arena.slot_count, arena.layout.block_bytes
            )
            fd = os.dup(arena.fd)  # our own: the arena may be closed before the transport
            self._regions.append((region, fd))
            self.registered.add(arena, writable)
            for endpoint in self._endpoints:
                if endpoint.twin is not None:
                    endpoint.twin.add_region(region, fd)
        return region

    def listen(self, address: str, on_connect: Callable[[Endpoint], None]) -> str:
        """Take an address of the network."""
        with self.network.lock:
            self._require_open()
            if address in self.network.listeners or self in self.network.listeners.values():
                raise UsageError(f"{address} is taken, or this transport listens already")
            self._on_connect = on_connect
            self.network.listeners[address] = self
        return address

    def connect(
        self, address: str, timeout_s: float, expected: Incarnation | None = None
    ) -> Endpoint:
        """Make a pair of endpoints with whoever listens at ``address``. Does not wait."""
        with self.network.lock:
            self._require_open()
            other = self.network.listeners.get(address)
            if other is None or other._on_connect is None:
                raise PeerUnreachableError(f"nobody listens at {address}")
            if expected is not None and other.incarnation != expected:
                raise StaleIncarnationError(f"{address} is another run than the one expected")
            ours = LoopbackEndpoint(self, other.incarnation)
            theirs = LoopbackEndpoint(other, self.incarnation)
            ours.twin, theirs.twin = theirs, ours
            for endpoint, owner in ((ours, other), (theirs, self)):
                for region, fd in owner._regions:
                    endpoint.add_region(region, fd)
            self._endpoints.add(ours)
            other._endpoints.add(theirs)
            on_connect = other._on_connect
            other.loop.post(lambda: on_connect(theirs))
        return ours

    def forget(self, endpoint: LoopbackEndpoint) -> None:
        """Drop an endpoint that has ended."""
        with self.network.lock:
            self._endpoints.discard(endpoint)

    def close(self) -> None:
        """Close all endpoints and the threads."""
        if self.loop.on_thread():
            raise UsageError("a callback cannot close the transport that calls it")
        with self.network.lock:
            if self._closed:
                return
            self._closed = True
            endpoints = list(self._endpoints)
            for address, listener in list(self.network.listeners.items()):
                if listener is self:
                    del self.network.listeners[address]
        for endpoint in endpoints:
            endpoint.close()
        self.loop.close()
        self.engine.close()
        with self.network.lock:
            for _, fd in self._regions:
                os.close(fd)
            self._regions = []

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the transport is closed")
