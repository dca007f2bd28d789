"""One connection between two processes of one host: a socket, a pidfd and a pair of rings.

Owns how notifications travel (the ring, then one byte on the socket to wake the peer), how regions
registered later become known, and how a dead peer is noticed. The wake-up is a packet and not an
eventfd because the two sides would share an eventfd's O_NONBLOCK, and a hostile peer could make
ours block. Who calls it: ``HostTransport``, on whose progress thread everything here runs that is
not an operation of a caller.
"""

import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.block import Incarnation
from kvpool.errors import CorruptionError, KVPoolError, PeerUnreachableError
from kvpool.transfer import handshake
from kvpool.transfer.base import RegionDescriptor
from kvpool.transfer.descriptor import RegionOffer, decode, encode
from kvpool.transfer.endpoint import CLOSE_TIMEOUT_S, PullEndpoint, require_notification
from kvpool.transfer.engine import CopyEngine
from kvpool.transfer.mailbox import RECORD_COUNT, Mailbox
from kvpool.transfer.progress import ProgressLoop
from kvpool.transfer.registered import Registered
from kvpool.transfer.write_wire import WriteMessage

logger = logging.getLogger(__name__)

_WAKE: Final = b"\0"
# Packets and notifications of one peer that are taken before another peer has its turn.
_PACKETS_PER_TURN: Final = 64
_RECORDS_PER_TURN: Final = 256
# Packets of writes that wait for room in the socket, and when they are tried again.
UNSENT_MAX: Final = 4096
_RETRY_S: Final = 0.001


class HostEndpoint(PullEndpoint):
    """See ``Endpoint``. Takes the socket, pidfd and mailbox over; the loop's thread closes them.

    Args:
        peer: Incarnation of the other side.
        pid: Its process.
        engine, loop: Of the transport.
        sock: Connected, after the handshake.
        mailbox: Attached to the peer's.
        told: Regions of ours that the handshake told of.
        ours: What the transport has registered.
        on_released: Called once at the end.
    """

    def __init__(
        self,
        peer: Incarnation,
        pid: int,
        engine: CopyEngine,
        loop: ProgressLoop,
        sock: socket.socket,
        mailbox: Mailbox,
        told: int,
        ours: Registered,
        on_released: Callable[["HostEndpoint"], None],
    ) -> None:
        self._pidfd = handshake.open_pidfd(pid)
        super().__init__(peer, engine, ours)
        self.pid = pid
        self._loop = loop
        self._socket = sock
        self._mailbox = mailbox
        self._told = told
        self._on_released = on_released
        self._send_lock = threading.Lock()  # no send on a socket that is being closed
        self._torn_down = False
        self._offers: Sequence[tuple[RegionOffer, int]] = ()
        self._unsent: deque[bytes] = deque()  # of writes; the loop's thread alone
        sock.setblocking(False)

    def start(self) -> None:
        """Watch the peer. On the loop's thread, once."""
        if self._torn_down:
            return
        self._loop.watch(self._socket.fileno(), selectors.EVENT_READ, self._on_socket)
        if self._pidfd is not None:
            self._loop.watch(self._pidfd, selectors.EVENT_READ, self._on_death)
        self._deliver()

    def tell_regions(self, ours: Sequence[tuple[RegionOffer, int]]) -> None:
        """Tell the peer of regions it has not been told of. On the loop's thread."""
        self._offers = ours
        try:
            while not self._torn_down and self._told < len(ours):
                offer, fd = ours[self._told]
                with self._send_lock:
                    socket.send_fds(self._socket, [encode(offer)], [fd], socket.MSG_NOSIGNAL)
                self._told += 1
        except BlockingIOError:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._loop.watch(self._socket.fileno(), both, self._on_socket_writable)
        except OSError as error:
            self._lose(f"it closed the connection: {error}")

    def notify(self, payload: bytes) -> bool:
        """Push to the ring and wake the peer."""
        require_notification(payload)
        with self._changed:
            self._require_alive()
        try:
            if not self._mailbox.push(payload):
                return False
        except CorruptionError as error:
            reason = str(error)
            self._loop.post(lambda: self._lose(reason))
            raise PeerUnreachableError(f"process {self.pid}: {reason}") from error
        try:
            with self._send_lock:
                if not self._torn_down:
                    self._socket.send(_WAKE, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            pass  # earlier wake-ups are unread: the peer will look at its ring after those
        except OSError as error:
            raise PeerUnreachableError(f"process {self.pid} is gone: {error}") from error
        return True

    def say_write(self, message: WriteMessage) -> None:
        """Send a packet, behind those that found no room."""
        self._unsent.append(encode(message))
        if len(self._unsent) == 1:
            self._send_unsent()
        elif len(self._unsent) > UNSENT_MAX:
            self._lose("it does not read what it asked for")

    def _send_unsent(self) -> None:
        """Send what waits, now or soon; a region is told of before what names it."""
        try:
            while self._unsent and not self._torn_down and self._told >= len(self._offers):
                with self._send_lock:
                    self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
                self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._unsent.clear()
            self._lose(f"it closed the connection: {error}")
        if self._unsent and not self._torn_down:
            self._loop.call_later(_RETRY_S, self._send_unsent)

    def post(self, call: Callable[[], None]) -> bool:
        """Run ``call`` on the loop."""
        return self._loop.post(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Run ``call`` on the loop, later."""
        self._loop.call_later(seconds, call)

    def close(self) -> None:
        """End the connection; everything is given back when this returns."""
        super().close()
        if not self._loop.run(self._tear_down, CLOSE_TIMEOUT_S):
            logger.debug("the progress thread had ended before an endpoint was closed")

    def _on_death(self) -> None:
        self._deliver_all()
        self._lose("the process died")

    def _on_socket_writable(self) -> None:
        self._loop.watch(self._socket.fileno(), selectors.EVENT_READ, self._on_socket)
        self.tell_regions(self._offers)
        if not self._torn_down:
            self._on_socket()

    def _on_socket(self) -> None:
        try:
            for _ in range(_PACKETS_PER_TURN):
                payload, fds = handshake.receive(self._socket)
                try:
                    if not payload:
                        self._deliver_all()
                        self._lose("it closed the connection")
                        return
                    self._take(payload, fds)
                    if payload == _WAKE:  # one a record: who waits for it waits for no more packets
                        self._deliver_records(1)
                finally:
                    handshake.close_all(fds)
        except BlockingIOError:
            pass
        except (OSError, KVPoolError) as error:
            self._deliver_all()
            self._lose(str(error))
            return
        self._deliver()

    def _take(self, payload: bytes, fds: list[int]) -> None:
        if payload == _WAKE and not fds:
            return
        message = decode(payload)
        if isinstance(message, WriteMessage) and not fds:
            self.take_write(message)
            return
        if not isinstance(message, RegionOffer) or len(fds) != 1:
            raise CorruptionError("the peer sent a message that has no place here")
        region = RegionDescriptor(self.peer, message.region, message.slot_count, message.slot_bytes)
        self.add_region(region, fds[0])

    def _deliver_soon(self) -> None:
        self._loop.post(self._deliver)

    def _deliver(self) -> None:
        """Hand records to the callback, a turn's worth; on the loop's thread."""
        if self._deliver_records(_RECORDS_PER_TURN) == _RECORDS_PER_TURN:
            self._loop.post(self._deliver)

    def _deliver_all(self) -> None:
        """Hand over what the peer wrote before it went away: at most a full ring."""
        self._deliver_records(RECORD_COUNT)

    def _deliver_records(self, limit: int) -> int:
        callback = self._on_notification
        if callback is None:
            return 0
        for count in range(limit):
            try:
                record = self._mailbox.pop()
            except CorruptionError as error:
                self._lose(str(error))
                return count
            if record is None:
                return count
            try:
                callback(record)
            except Exception:
                logger.exception("a notification callback failed")
        return limit

    def _lose(self, reason: str) -> None:
        self.lose(PeerUnreachableError(f"process {self.pid}: {reason}"))

    def _release(self) -> None:
        if self._loop.on_thread() or not self._loop.post(self._tear_down):
            self._tear_down()

    def _tear_down(self) -> None:
        """Close what belongs to this connection. On the loop's thread, or when that has ended."""
        with self._send_lock:
            if self._torn_down:
                return
            self._torn_down = True
            if self._loop.on_thread():
                self._loop.unwatch(self._socket.fileno())
                if self._pidfd is not None:
                    self._loop.unwatch(self._pidfd)
            self._socket.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
        self._mailbox.close()
        self._on_released(self)
