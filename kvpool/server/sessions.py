"""The clients of a server: which connection bears which name, and when it ends.

Owns the map from a client's name (16 random bytes that it chose, sent as the first notification on
its connection) to the connection. Everything here runs in the server's event loop, but for ``get`` and
``is_alive``, which any thread may ask; the transport's thread hands on what greeted clients say, and
posts the rest. Who calls it: the service.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Final

from kvpool.client.call_wire import Parts
from kvpool.client.protocol import CLIENT_BYTES
from kvpool.errors import (
    CapacityError,
    StaleIncarnationError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.server.tenant import Tenant, calling_tenant
from kvpool.tiers.lease import LeaseId
from kvpool.transfer.base import Endpoint

logger = logging.getLogger(__name__)

# Longest wait of a hello for the notification that was sent before it.
_NAMING_TIMEOUT_S: Final = 2.0
# Notifications of a connection without a greeted name that wait for the loop; a name is one.
_HEARD_MAX: Final = 64


@dataclass(slots=True, eq=False)
class Session:
    """One connected client."""

    client: bytes
    endpoint: Endpoint | None  # None: bytes go through streams
    greeted: bool = False
    used_at: float = 0.0
    leases: set[LeaseId] = field(default_factory=set)  # of a client without a connection
    tenant: str = ""
    stays: bool = False  # without a connection: its ``Stay`` is under way, and ends with it
    caller: Tenant = field(default_factory=Tenant)  # whom it calls for, over its connection
    # What was handed from the connection's thread to the loop, which that thread counts, and how much
    # of it has ended, which the loop counts; and parts of calls, which are that thread's.
    handed: int = 0
    ended: int = 0
    parts: Parts = field(default_factory=Parts)


class Sessions:
    """Sessions by name.

    Args:
        clients_max: Most clients; one more is refused.
        on_lost: Told of each greeted client whose connection ended, in the event loop.
        on_call: Told what a greeted client's connection says, on the transport's thread.
    """

    def __init__(
        self,
        clients_max: int,
        on_lost: Callable[[Session], None],
        on_call: Callable[[Session, bytes], None],
    ) -> None:
        self._clients_max = clients_max
        self._on_lost = on_lost
        self._on_call = on_call
        self._loop = asyncio.get_running_loop()
        self._named = asyncio.Condition()
        self._sessions: dict[bytes, Session] = {}
        self._names: dict[Endpoint, bytes] = {}

    def __len__(self) -> int:
        """Return how many clients are connected and greeted."""
        return sum(session.greeted for session in self._sessions.values())

    def by_streams(self) -> int:
        """Return how many of them have no connection of a transport: their bytes go the slowest way."""
        return sum(s.greeted and s.endpoint is None for s in self._sessions.values())

    def on_connect(self, endpoint: Endpoint) -> None:
        """Take a new connection. From the transport's thread."""
        heard: deque[bytes] = deque()

        def hear(payload: bytes) -> None:
            session = self._sessions.get(self._names.get(endpoint, b""))
            if session is not None and session.greeted:
                self._on_call(session, payload)
                return
            if len(heard) >= _HEARD_MAX:
                return  # it is no client yet, and says more than a name
            heard.append(payload)
            if len(heard) == 1:  # else the loop is yet to take what was before
                self._post(self._take, endpoint, heard)

        endpoint.on_notification(hear)
        endpoint.on_lost(lambda lost: self._post(self._lose, lost))

    async def greet(self, client: bytes) -> Session:
        """Wait for the connection that bears a name, and count it as a client.

        Raises:
            TransferTimeoutError: No connection took that name.
            CapacityError: There are too many clients.
        """
        async with self._named:
            try:
                await asyncio.wait_for(
                    self._named.wait_for(lambda: client in self._sessions), _NAMING_TIMEOUT_S
                )
            except TimeoutError as error:
                raise TransferTimeoutError(
                    "no connection of the transport bears this name: connect it first"
                ) from error
        session = self._sessions[client]
        if not session.greeted:
            self._require_room()
        tenant = calling_tenant.get().name
        if session.greeted and session.tenant != tenant:
            raise StaleIncarnationError("this connection is not known here: connect again")
        session.tenant, session.caller = tenant, calling_tenant.get()
        # Last: from now on the connection's thread makes calls as its caller.
        session.greeted = True
        return session

    def _require_room(self) -> None:
        """Raise CapacityError if one more client is too many, of its tenant or of all."""
        caller = calling_tenant.get()
        if caller.clients_max is not None:
            own = sum(session.greeted for session in self.of_tenant(caller.name))
            if own >= caller.clients_max:
                raise CapacityError(
                    f"tenant {caller.name} has {own} clients connected here, all that it may: end one "
                    "first, or have tenants.clients_max raised"
                )
        if len(self) >= self._clients_max:
            raise CapacityError(f"{self._clients_max} clients are connected: end one first")

    def of_tenant(self, tenant: str) -> list[Session]:
        """Return the sessions of one tenant's clients."""
        return [session for session in self._sessions.values() if session.tenant == tenant]

    def get(self, client: bytes) -> Session:
        """Return a greeted session. Raises StaleIncarnationError: it has ended, connect again."""
        session = self._sessions.get(client)
        if (
            session is None
            or not session.greeted
            or session.tenant != calling_tenant.get().name  # a name of another tenant's client
        ):
            raise StaleIncarnationError("this connection is not known here: connect again")
        session.used_at = self._loop.time()
        return session

    def greet_stream(self, client: bytes) -> Session:
        """Count a client without a connection of a transport. Idempotent.

        Raises:
            CapacityError: There are too many clients.
            UsageError: It is no name, or a connection's.
        """
        known = self._sessions.get(client)
        tenant = calling_tenant.get().name
        taken = known is not None and (known.endpoint is not None or known.tenant != tenant)
        if len(client) != CLIENT_BYTES or taken:
            raise UsageError(f"{len(client)} bytes are no new name of a client: use random ones")
        if known is None:
            self._require_room()
        session = known or Session(client, None, greeted=True, tenant=tenant)
        session.used_at = self._loop.time()
        self._sessions[client] = session
        return session

    def is_alive(self, session: Session) -> bool:
        """Say whether a session has not ended. From any thread."""
        return self._sessions.get(session.client) is session

    def require_alive(self, session: Session) -> None:
        """Raise StaleIncarnationError if a session has ended: nothing may be granted to it any more."""
        if not self.is_alive(session):
            raise StaleIncarnationError("this connection has ended: connect again")

    async def stay(self, client: bytes) -> AsyncGenerator[None]:
        """Keep a client of streams, and end it with this generator; yields once, when it is kept.

        Raises:
            StaleIncarnationError: It is not known.
            UsageError: It has a connection, or stays already.
        """
        session = self.get(client)
        if session.endpoint is not None or session.stays:
            raise UsageError("this client stays already: a client of streams does, once")
        session.stays = True
        try:
            yield
            await asyncio.Event().wait()  # for the end of the call: it is cancelled
        finally:
            self.end(session)

    def end(self, session: Session) -> None:
        """Forget a client of streams that ends. One with a connection ends with that."""
        if session.endpoint is None and self._sessions.get(session.client) is session:
            del self._sessions[session.client]
            self._on_lost(session)

    def expire(self, idle_s: float) -> None:
        """Forget clients without a connection that do not stay and asked nothing for ``idle_s``."""
        before = self._loop.time() - idle_s
        for session in list(self._sessions.values()):
            if session.endpoint is None and not session.stays and session.used_at < before:
                del self._sessions[session.client]
                self._on_lost(session)

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            logger.debug("the loop is closed: the server is at its end")

    def _take(self, endpoint: Endpoint, heard: deque[bytes]) -> None:
        """Take what a connection said first: its name."""
        while heard:
            payload = heard.popleft()
            if endpoint not in self._names:
                self._name(endpoint, payload)
            else:
                logger.debug("a client that was not greeted may not call")

    def _name(self, endpoint: Endpoint, payload: bytes) -> None:
        """Give a connection its name: no name twice."""
        if payload in self._sessions or len(payload) != CLIENT_BYTES:
            logger.debug("a notification of %d bytes is no new name of a client", len(payload))
            return
        if not endpoint.alive():
            return
        self._names[endpoint] = payload
        self._sessions[payload] = Session(payload, endpoint)
        self._loop.create_task(self._tell())

    async def _tell(self) -> None:
        async with self._named:
            self._named.notify_all()

    def _lose(self, endpoint: Endpoint) -> None:
        name = self._names.pop(endpoint, None)
        if name is None:
            return
        session = self._sessions.pop(name)
        greeted, session.greeted = session.greeted, False
        if greeted:
            self._on_lost(session)
