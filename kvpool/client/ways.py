"""The ways of this process to servers: one transport and one staging of each kind, made when needed.

Owns transports that nobody handed in, and the staging of each. Who calls it: links, when they
connect.
"""

import logging
import threading
from dataclasses import dataclass

from kvpool.block import BlockLayout
from kvpool.client.staging import Staging
from kvpool.config import TransferConfig
from kvpool.errors import ClosedError, KVPoolError
from kvpool.transfer.base import Transport
from kvpool.transfer.choice import TRANSPORT_KINDS, TransportKind, open_transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """A transport of this process, and the staging that is registered with it."""

    transport: Transport
    staging: Staging


class Ways:
    """Ways by kind. Safe from any thread: ``_lock`` guards the table, and is held while one is opened.

    Args:
        layout: Of the blocks that go through the stagings.
        config: ``staging_bytes`` of each, and where UCX binds.
        transport: The only one to use, whatever kind it is; it stays the caller's.
    """

    def __init__(
        self, layout: BlockLayout, config: TransferConfig, transport: Transport | None = None
    ) -> None:
        self._layout = layout
        self._config = config
        self._lock = threading.Lock()
        self._ways: dict[str, Way] = {}
        self._owned: list[Transport] = []
        self._stopped = self._closed = False
        self.given = transport is not None
        self.kinds: tuple[TransportKind, ...] = TRANSPORT_KINDS
        if transport is None:
            self.kinds = tuple(kind for kind in TRANSPORT_KINDS if kind in config.ways)
        if transport is not None:
            self._ways[""] = Way(transport, self._staging(transport))

    def way(self, kind: TransportKind) -> Way:
        """Return the way of a kind, or the one there is if a transport was handed in.

        Raises:
            ConfigError: This kind cannot be used here; the message says why.
            ClosedError: ``close`` was called.
        """
        with self._lock:
            if self._closed or self._stopped:
                raise ClosedError("the pool is closed: connect again")
            if self.given:
                return self._ways[""]
            if kind not in self._ways:
                transport = open_transport(kind, "kvpool-client", self._config)
                try:
                    self._ways[kind] = Way(transport, self._staging(transport))
                except KVPoolError:
                    transport.close()
                    raise
                self._owned.append(transport)
            return self._ways[kind]

    def stop(self) -> None:
        """Refuse every batch from now on; those under way end with their links."""
        with self._lock:
            self._stopped = True
            for way in self._ways.values():
                way.staging.stop()

    def close(self) -> None:
        """Close the stagings and the transports that were made here. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for way in self._ways.values():
                way.staging.close()
            for transport in self._owned:
                transport.close()

    def _staging(self, transport: Transport) -> Staging:
        return Staging(self._layout, self._config.staging_bytes, transport)
