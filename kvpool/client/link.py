"""A client's way to its server: one gRPC channel and one transport connection, kept up.

Owns the connection of a run directory, the thread that makes it again after a loss, and the pauses
that a silent or dead server is given. Knows nothing of blocks. Who calls it: the remote pool.
"""

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from kvpool.block import BlockLayout, Incarnation
from kvpool.client import protocol
from kvpool.client.breaker import Breaker
from kvpool.client.rpc import Caller, Method, Reply, Request
from kvpool.clock import Clock
from kvpool.completion import Deadline
from kvpool.errors import (
    ClosedError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.transfer.base import Endpoint, Transport
from kvpool.transfer.choice import TransportKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One connection to one run of the server. Ends with that run, or when it falls silent.

    Attributes:
        caller: Control messages.
        endpoint: Bytes, and who is alive.
        client: The name of this connection at the server.
        region: The server's region that its blocks lie in.
    """

    caller: Caller
    endpoint: Endpoint
    client: bytes
    region: int

    def close(self) -> None:
        """Close both. Idempotent."""
        self.endpoint.close()
        self.caller.close()


def transport_kind(run_dir: Path, layout: BlockLayout, timeout_s: float) -> TransportKind:
    """Ask the server of a run directory which transport it has. Raises as ``open_link``."""
    with contextlib.closing(_caller(run_dir)) as caller:
        welcome = _configure(caller, layout, timeout_s)
    return "ucx" if welcome.address.startswith("ucx://") else "host"


def _caller(run_dir: Path) -> Caller:
    return Caller(f"unix:{run_dir.absolute()}/{protocol.CONTROL_SOCKET}")


def _configure(caller: Caller, layout: BlockLayout, timeout_s: float) -> protocol.Welcome:
    configure = protocol.ConfigureRequest(
        version=protocol.PROTOCOL_VERSION, layout=protocol.encode_layout(layout)
    )
    return caller.call(protocol.CONFIGURE, configure, timeout_s)


def open_link(run_dir: Path, layout: BlockLayout, transport: Transport, timeout_s: float) -> Link:
    """Connect to the server of a run directory.

    Raises:
        LayoutMismatchError, UsageError: The server keeps blocks of another layout, or is of another
            version of kvpool.
        PeerUnreachableError: Nobody listens there.
        TransferTimeoutError: It did not answer within ``timeout_s``.
    """
    deadline = Deadline(timeout_s)
    caller = _caller(run_dir)
    endpoint: Endpoint | None = None
    try:
        welcome = _configure(caller, layout, deadline.remaining_s())
        endpoint = transport.connect(
            welcome.address or str(run_dir / protocol.TRANSPORT_SOCKET),
            deadline.remaining_s(),
            Incarnation(welcome.server),
        )
        client = os.urandom(protocol.CLIENT_BYTES)
        if not endpoint.notify(client):
            raise PeerUnreachableError("the server took no notification: connect again")
        hello = protocol.Hello(version=protocol.PROTOCOL_VERSION, client=client)
        caller.call(protocol.HELLO, hello, deadline.remaining_s())
    except BaseException:
        if endpoint is not None:
            endpoint.close()
        caller.close()
        raise
    return Link(caller, endpoint, client, welcome.region)


class LinkKeeper:
    """Holds the link, and one thread that makes a new one after a loss. Safe from any thread.

    One condition guards the links and ``_closed``. Nothing is called under it.

    Args:
        run_dir, layout, transport: As for ``open_link``.
        clock: Of the pauses between tries.
        attempt_s: Longest time of one try.
        backoff_min_s, backoff_max_s: The pauses.
    """

    def __init__(
        self,
        run_dir: Path,
        layout: BlockLayout,
        transport: Transport,
        clock: Clock,
        *,
        attempt_s: float,
        backoff_min_s: float,
        backoff_max_s: float,
    ) -> None:
        self._run_dir = run_dir
        self._layout = layout
        self._transport = transport
        self._attempt_s = attempt_s
        self._retry = Breaker(clock, min_s=backoff_min_s, max_s=backoff_max_s)  # of a dead server
        self._silence = Breaker(clock, min_s=backoff_min_s, max_s=backoff_max_s)
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._dead: list[Link] = []  # lost, to be closed by the thread
        self._closed = False
        self._thread = threading.Thread(target=self._keep, name="kvpool-link", daemon=True)
        self.losses = 0

    def open(self, timeout_s: float) -> None:
        """Make the first link, and start to keep it. Raises as ``open_link``."""
        self._adopt(open_link(self._run_dir, self._layout, self._transport, timeout_s))
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
                    f"no server in {self._run_dir}: recompute; a new one is looked for"
                )
            return self._link

    def ask(
        self,
        method: Method[Request, Reply],
        request: Request,
        timeout_s: float,
        link: Link | None = None,
    ) -> Reply:
        """Make one short request on ``link``, or on the link there is.

        Raises:
            TransferTimeoutError: No answer within ``timeout_s``. The server is given a pause.
            PeerUnreachableError: It is being given a pause, or there is none, or it was lost.
            ClosedError: The keeper is closed.
            KVPoolError: What the server answered.
        """
        link = link or self.link()
        if not self._silence.allows():
            raise PeerUnreachableError("the server did not answer lately: it is asked again soon")
        try:
            reply = link.caller.call(method, request, timeout_s)
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
                raise TransferTimeoutError(f"no server in {self._run_dir} within {timeout_s} s")

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
                self._changed.notify_all()
        if closed:
            link.close()
            return
        # At once if it is lost already. From the progress thread: closing may not be done there.
        link.endpoint.on_lost(lambda _: self._lost(link))

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
                link = open_link(self._run_dir, self._layout, self._transport, self._attempt_s)
            except ClosedError:
                return  # the transport was closed: nobody can connect any more
            except UsageError as error:
                logger.warning("the server in %s cannot be used: %s", self._run_dir, error)
            except KVPoolError as error:
                logger.debug("no server in %s yet: %s", self._run_dir, error)
            else:
                logger.info("connected to the server in %s again", self._run_dir)
                self._retry.succeeded()
                self._adopt(link)
                continue
            pause_s = self._retry.failed()
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause_s):
                    return
