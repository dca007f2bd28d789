"""A client's way to its server: one gRPC channel and one transport connection, kept up.

Owns the connection of a run directory, the thread that makes it again after a loss, and the pauses
that a silent or dead server is given. Knows nothing of blocks. Who calls it: the remote pool.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpool.block import BlockLayout, Incarnation
from kvpool.client import protocol
from kvpool.client.access import OPEN, ClientAccess
from kvpool.client.asking import FAR_BYTES_MAX, LinkCaller
from kvpool.client.breaker import Breaker
from kvpool.client.call_wire import CALL_BYTES_MAX
from kvpool.client.life import wait_alive
from kvpool.client.rpc import Method, Reply, Request, Stayed
from kvpool.client.staging import Staging
from kvpool.client.ways import Ways
from kvpool.clock import Clock
from kvpool.completion import Deadline
from kvpool.errors import (
    ClosedError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.transfer.base import Endpoint
from kvpool.transfer.choice import TransportKind
from kvpool.transfer.host_endpoint import HostEndpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is asked.

    Attributes:
        target: ``unix:PATH`` or ``HOST:PORT`` of its control plane.
        access: How a client shows who it is.
    """

    target: str
    access: ClientAccess = OPEN

    @classmethod
    def of_run_dir(cls, run_dir: Path) -> "Place":
        """Return the place of the server that runs in a folder of this host."""
        return cls(f"unix:{run_dir.absolute()}/{protocol.CONTROL_SOCKET}")

    def __str__(self) -> str:
        """Name it for a person: a run directory, or an address."""
        return self.target.removeprefix("unix:").removesuffix(f"/{protocol.CONTROL_SOCKET}")


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One connection to one run of the server. Ends with that run, or when it falls silent.

    Attributes:
        caller: Control messages.
        endpoint: Bytes, and who is alive. None: bytes go through ``caller``, in streams.
        staging: Where batches of stores are held out to the server; None without an endpoint.
        client: The name of this connection at the server.
        welcome: What the server said of itself.
        region: The server's region that its blocks lie in.
        stayed: Says who is alive without an endpoint, at both ends; None with one.
    """

    caller: LinkCaller
    endpoint: Endpoint | None
    staging: Staging | None
    client: bytes
    welcome: protocol.Welcome
    region: int
    stayed: Stayed | None

    def alive(self) -> bool:
        """Say whether the server is not known to be gone."""
        one = self.endpoint or self.stayed
        return one is None or one.alive()

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call back once it is, on a thread that must not be kept; at once if it is already."""
        if self.endpoint is not None:
            self.endpoint.on_lost(lambda _: callback())
        elif self.stayed is not None:
            self.stayed.on_end(callback)

    def close(self) -> None:
        """Close both. Idempotent."""
        if self.endpoint is not None:
            self.endpoint.close()
        self.caller.close()


def open_link(place: Place, layout: BlockLayout, ways: Ways, timeout_s: float) -> Link:
    """Connect to a server, by the first of its ways that works from here; else through streams.

    Raises:
        LayoutMismatchError, UsageError: The server keeps blocks of another layout, or is of another
            version of kvpool, or does not let this client in.
        PeerUnreachableError: Nobody listens there.
        TransferTimeoutError: It did not answer within ``timeout_s``.
    """
    deadline = Deadline(timeout_s)
    caller = LinkCaller(place.target, place.access)
    endpoint: Endpoint | None = None
    try:
        configure = protocol.ConfigureRequest(
            version=protocol.PROTOCOL_VERSION, layout=protocol.encode_layout(layout)
        )
        welcome = caller.call(protocol.CONFIGURE, configure, deadline.remaining_s())
        version = protocol.spoken_version(welcome.version)
        client = os.urandom(protocol.CLIENT_BYTES)
        staging, region = None, 0
        found = _connect(welcome, ways, deadline)
        if found is not None:
            endpoint, staging, region = found
            if not endpoint.notify(client):
                raise PeerUnreachableError("the server took no notification: connect again")
        hello = protocol.HelloRequest(version=version, client=client, streams=endpoint is None)
        caller.call(protocol.HELLO, hello, deadline.remaining_s())
        stay = protocol.StayRequest(client=client)
        stayed = caller.stay(protocol.STAY, stay) if endpoint is None else None
        if endpoint is not None:
            most = CALL_BYTES_MAX if isinstance(endpoint, HostEndpoint) else FAR_BYTES_MAX
            caller.use(endpoint, min(most, welcome.call_bytes_max))
    except BaseException:
        if endpoint is not None:
            endpoint.close()
        caller.close()
        raise
    return Link(caller, endpoint, staging, client, welcome, region, stayed)


def _connect(
    welcome: protocol.Welcome, ways: Ways, deadline: Deadline
) -> tuple[Endpoint, Staging, int] | None:
    """Connect by the first way that works; None if none does.

    Raises what the last one raised if the caller handed a transport in, and ClosedError.
    """
    failed: KVPoolError | None = None
    offered: list[tuple[TransportKind, protocol.Way]] = [
        (kind, way) for kind in ways.kinds for way in welcome.ways if way.kind == kind
    ]
    for number, (kind, way) in enumerate(offered):
        if kind == "host" and not ways.given and not os.path.exists(way.address):
            continue  # another host's
        try:
            own = ways.way(kind)
            # What is left is shared among the ways that are left, so that one cannot have it all.
            wait_s = deadline.remaining_s() / (len(offered) - number)
            expected = Incarnation(welcome.server)
            return own.transport.connect(way.address, wait_s, expected), own.staging, way.region
        except ClosedError:
            raise
        except KVPoolError as error:
            logger.debug("no way %s to %s: %s", way.kind, way.address, error)
            failed = error
    if ways.given and failed is not None:
        raise failed
    return None


class LinkKeeper:
    """Holds the link, and one thread that makes a new one after a loss. Safe from any thread.

    One condition guards the links and ``_closed``. Nothing is called under it.

    Args:
        place, layout, ways: As for ``open_link``.
        clock: Of the pauses between tries.
        attempt_s: Longest time of one try.
        backoff_min_s, backoff_max_s: The pauses.
    """

    def __init__(
        self,
        place: Place,
        layout: BlockLayout,
        ways: Ways,
        clock: Clock,
        *,
        attempt_s: float,
        backoff_min_s: float,
        backoff_max_s: float,
    ) -> None:
        self.place = place
        self._layout = layout
        self._ways = ways
        self._attempt_s = attempt_s
        self._retry = Breaker(clock, min_s=backoff_min_s, max_s=backoff_max_s)  # of a dead server
        self._silence = Breaker(clock, min_s=backoff_min_s, max_s=backoff_max_s)
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._dead: list[Link] = []  # lost, to be closed by the thread
        self._welcome: protocol.Welcome | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._keep, name="kvpool-link", daemon=True)
        self.losses = 0

    def open(self, timeout_s: float) -> None:
        """Make the first link, and start to keep it. Raises as ``open_link``."""
        self._adopt(open_link(self.place, self._layout, self._ways, timeout_s))
        self._thread.start()

    def welcome(self) -> protocol.Welcome:
        """Return what the server said last of itself. Raises PeerUnreachableError before it did."""
        with self._changed:
            if self._welcome is None:
                raise PeerUnreachableError(f"no server at {self.place} yet: recompute, or wait")
            return self._welcome

    def start(self) -> None:
        """Look for the first link in the background."""
        self._thread.start()

    def link(self) -> Link:
        """Return the link. Never waits.

        Raises:
            PeerUnreachableError: There is none now; a new one is being tried for.
            ClosedError: The keeper is closed.
        """
        with self._changed:
            if self._closed:
                raise ClosedError("the pool is closed: connect again")
            if self._link is None:
                raise PeerUnreachableError(
                    f"no server at {self.place}: recompute; a new one is looked for"
                )
            return self._link

    def ask(
        self,
        method: Method[Request, Reply],
        request: Request,
        timeout_s: float,
        link: Link | None = None,
        *,
        silent_s: float | None = None,
    ) -> Reply:
        """Make one short request on ``link``, or on the link there is.

        Args:
            method: What to ask.
            request: With what.
            timeout_s: Longest wait for the answer.
            link: On which connection; None: the one there is.
            silent_s: Longest wait for any sign of life: a server that does not even answer an empty
                match by then is given up. None: ``timeout_s``.

        Raises:
            TransferTimeoutError: No answer in time. The server is given a pause.
            PeerUnreachableError: It is being given a pause, or there is none, or it was lost.
            ClosedError: The keeper is closed.
            KVPoolError: What the server answered.
        """
        link = link or self.link()
        if not self._silence.allows():
            raise PeerUnreachableError("the server did not answer lately: it is asked again soon")
        try:
            asked = link.caller.ask(method, request, timeout_s)
            if silent_s is not None:
                wait_alive(link.caller, asked, silent_s)
            reply = asked.reply()
        except TransferTimeoutError:
            self._silence.failed()
            raise
        except (PeerUnreachableError, ClosedError) as error:
            self.lose(link)
            if self._closed:
                raise ClosedError("the pool was closed: connect again") from error
            raise PeerUnreachableError(f"the server was lost, recompute: {error}") from error
        except KVPoolError:
            self._silence.succeeded()  # it answered
            raise
        self._silence.succeeded()
        return reply

    def usable(self) -> bool:
        """Say whether there is a server, as far as is known, and it answered lately."""
        with self._changed:
            linked = self._link is not None
        return linked and not self._silence.open()

    def note_silence(self) -> None:
        """Give the server a pause: it did not answer somebody in time."""
        self._silence.failed()

    def lose(self, link: Link) -> None:
        """Give a link up: its path is closed first, a new one is made second. Idempotent."""
        with self._changed:
            if self._link is link:
                self._link = None
                self.losses += 1
                self._changed.notify_all()
        link.close()

    def wait_linked(self, timeout_s: float) -> None:
        """Wait for a link. Raises TransferTimeoutError after ``timeout_s``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._link is not None, timeout_s):
                raise TransferTimeoutError(f"no server at {self.place} within {timeout_s} s")

    def close(self, timeout_s: float) -> None:
        """Close the link and end the thread. Idempotent, bounded."""
        with self._changed:
            self._closed = True
            links = [*self._dead, *([self._link] if self._link else [])]
            self._link, self._dead = None, []
            self._changed.notify_all()
        for link in links:
            link.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _adopt(self, link: Link) -> None:
        with self._changed:
            closed = self._closed
            if not closed:
                self._link = link
                self._welcome = link.welcome
                self._changed.notify_all()
        if closed:
            link.close()
            return
        # At once if it is lost already. From a thread of the way: closing may not be done there.
        link.on_lost(lambda: self._lost(link))

    def _lost(self, link: Link) -> None:
        with self._changed:
            if self._link is link:
                self._link = None
                self.losses += 1
                self._dead.append(link)
                self._changed.notify_all()

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._link is None)
                if self._closed:
                    return
                dead, self._dead = self._dead, []
            for link in dead:
                link.close()
            try:
                link = open_link(self.place, self._layout, self._ways, self._attempt_s)
            except ClosedError:
                return  # the transport was closed: nobody can connect any more
            except UsageError as error:
                logger.warning("the server at %s cannot be used: %s", self.place, error)
            except KVPoolError as error:
                logger.debug("no server at %s yet: %s", self.place, error)
            except Exception:  # whatever went wrong: who looks for the server goes on
                logger.exception("no server at %s yet", self.place)
            else:
                logger.info("connected to the server at %s again", self.place)
                self._retry.succeeded()
                self._adopt(link)
                continue
            pause_s = self._retry.failed()
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause_s):
                    return
