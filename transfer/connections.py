"""Endpoints by address, made again after a loss: each peer with a pause of its own after a failure.

Owns which endpoint leads to which address, and when a peer that failed may be tried again. Never
retries by itself: whoever needs the peer does, and hears at once that it is not its time yet. Who
calls it: the prefill runtime.
"""

import random
import threading
from collections.abc import Callable
from typing import Final

from kvpool.block import Incarnation
from kvpool.clock import Clock
from kvpool.completion import Deadline
from kvpool.errors import (
    CapacityError,
    KVPoolError,
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
)
from kvpool.transfer.base import Endpoint, Transport

# Peers that are remembered. Of more, those without an endpoint are forgotten.
PEERS_MAX: Final = 1024
# The first pause after a failure, and the longest; each failure in a row doubles it.
PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 10.0


class _Peer:
    """What is known of one address. Its lock is held while somebody connects to it."""

    def __init__(self) -> None:
        self.connecting = threading.Lock()
        self.endpoint: Endpoint | None = None
        self.expected: Incarnation | None = None
        self.failures = 0
        self.try_at = 0.0


class Connections:
    """Endpoints to peers, connected when they are needed. Safe from any thread.

    A lock guards the table; each peer has one of its own, so that one that does not answer holds up
    those alone who want it.

    Args:
        transport: Connects.
        clock: Where time comes from.
        on_connect: Called with each new endpoint before anybody gets it.
        dice: Spreads the pauses, so that processes that lost one peer together come back apart.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        on_connect: Callable[[Endpoint], None],
        dice: random.Random,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._on_connect = on_connect
        self._dice = dice
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def endpoint(self, address: str, expected: Incarnation, timeout_s: float) -> Endpoint:
        """Return a live endpoint to one run of a peer; connect if there is none.

        Args:
            address: Where it listens.
            expected: The run that is meant. Another one than before is tried at once.
            timeout_s: Longest wait, for others that connect to the same peer too.

        Raises:
            PeerUnreachableError: It is not there, or was not a moment ago and is not tried yet.
            TransferTimeoutError: Not within ``timeout_s``.
            StaleIncarnationError: Another run answers there.
            CapacityError: ``PEERS_MAX`` peers are connected, or the transport has no room.
            ClosedError: The transport is closed.
        """
        deadline = Deadline(timeout_s)
        peer = self._peer(address)
        if not peer.connecting.acquire(timeout=deadline.remaining_s()):
            raise TransferTimeoutError(f"others still connect to {address} after {timeout_s} s")
        try:
            known = peer.endpoint
            if known is not None and known.alive() and known.peer == expected:
                return known
            if known is not None:
                known.close()
                peer.endpoint = None
            if peer.expected != expected:
                peer.expected, peer.failures = expected, 0
            self._require_time(peer, address)
            peer.endpoint = self._connect(peer, address, expected, deadline.remaining_s())
            return peer.endpoint
        finally:
            peer.connecting.release()

    def close(self) -> None:
        """Close every endpoint. Nobody may ask for one meanwhile, or later. Idempotent."""
        with self._lock:
            peers, self._peers = self._peers, {}
        for peer in peers.values():
            if peer.endpoint is not None:
                peer.endpoint.close()

    def _peer(self, address: str) -> _Peer:
        with self._lock:
            if address not in self._peers and len(self._peers) >= PEERS_MAX:
                self._peers = {
                    where: peer
                    for where, peer in self._peers.items()
                    if peer.connecting.locked() or (peer.endpoint and peer.endpoint.alive())
                }
                if len(self._peers) >= PEERS_MAX:
                    raise CapacityError(f"{PEERS_MAX} peers are connected")
            return self._peers.setdefault(address, _Peer())

    def _require_time(self, peer: _Peer, address: str) -> None:
        left_s = peer.try_at - self._clock.now()
        if peer.failures and left_s > 0:
            raise PeerUnreachableError(
                f"{address} did not answer {peer.failures} times: tried again in {left_s:.1f} s"
            )

    def _connect(
        self, peer: _Peer, address: str, expected: Incarnation, timeout_s: float
    ) -> Endpoint:
        try:
            endpoint = self._transport.connect(address, timeout_s, expected)
        except (PeerUnreachableError, TransferTimeoutError, StaleIncarnationError):
            peer.failures += 1
            pause_s = min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(peer.failures - 1, 16))
            with self._lock:
                spread = self._dice.uniform(0.5, 1.0)
            peer.try_at = self._clock.now() + pause_s * spread
            raise
        try:
            self._on_connect(endpoint)
        except KVPoolError:
            endpoint.close()
            raise
        peer.failures = 0
        return endpoint
