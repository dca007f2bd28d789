"""One endpoint's share of a stream hub: messages out, in order, also while the ring is full.

Owns the messages that wait for room. Who calls it: the hub and both sides of a stream.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kvpool.errors import ClosedError, PeerUnreachableError
from kvpool.transfer.base import Endpoint
from kvpool.transfer.stream_wire import Message, encode

# Messages that may wait for a peer that does not read. A peer that makes us answer more is broken.
_WAITING_MAX: Final = 8192


class StreamLink:
    """Sends messages to one peer. Safe from any thread; nothing blocks.

    Args:
        endpoint: To the peer.
        stir: Wakes the hub's thread, which calls ``flush`` until nothing waits.
    """

    def __init__(self, endpoint: Endpoint, stir: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.broken = False  # the hub closes such an endpoint
        self._stir = stir
        self._lock = threading.Lock()  # guards _waiting and the order of messages
        self._waiting: deque[bytes] = deque()

    def post(self, message: Message) -> None:
        """Send now, or as soon as there is room. Lost with the peer."""
        payload = encode(message)
        with self._lock:
            if not self._waiting and self._notify(payload):
                return
            if len(self._waiting) < _WAITING_MAX:
                self._waiting.append(payload)
            else:
                self.broken = True
        self._stir()

    def offer(self, message: Message) -> bool:
        """Send now if there is room, behind nothing that waits. True also if the peer is gone."""
        payload = encode(message)
        with self._lock:
            return not self._waiting and self._notify(payload)

    def flush(self) -> bool:
        """Send what waits. False if something still does."""
        with self._lock:
            while self._waiting and self._notify(self._waiting[0]):
                self._waiting.popleft()
            return not self._waiting

    def break_off(self) -> None:
        """Mark the peer as misbehaving: the hub's thread closes the endpoint."""
        self.broken = True
        self._stir()

    def _notify(self, payload: bytes) -> bool:
        try:
            return self.endpoint.notify(payload)
        except (PeerUnreachableError, ClosedError):
            return True  # on_lost tells the streams
