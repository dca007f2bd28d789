"""A client's way to its server: one gRPC channel, and one connection of a transport where there is one.

Owns how a connection is made, and by which way. Knows nothing of blocks, and keeps nothing up. Who
calls it: the keeper of the link.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.block import BlockLayout, Incarnation
from kvpool.client import protocol
from kvpool.client.access import OPEN, ClientAccess
from kvpool.client.asking import LinkCaller
from kvpool.client.rpc import Stayed
from kvpool.client.staging import Staging
from kvpool.client.ways import Ways
from kvpool.completion import Deadline
from kvpool.errors import (
    ClosedError,
    KVPoolError,
    PeerUnreachableError,
    UnavailableError,
)
from kvpool.transfer.base import Endpoint
from kvpool.transfer.choice import TransportKind

logger = logging.getLogger(__name__)

# What is left of the time for the hello, and for streams, when no other way answered in time.
_HELLO_SHARE: Final = 0.25
# The way of bytes that needs no transport, and is the slowest.
STREAMS: Final = "streams"


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
        way: What bytes take: ``host``, ``ucx`` or ``streams``.
        late: Better ways that the server offers and that did not answer, though they may later.
    """

    caller: LinkCaller
    endpoint: Endpoint | None
    staging: Staging | None
    client: bytes
    welcome: protocol.Welcome
    region: int
    stayed: Stayed | None
    way: str
    late: tuple[TransportKind, ...]

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

    @property
    def slots_tell_sums(self) -> bool:
        """Say whether the server knows a store's checksums from the slots that it pulls."""
        return self.welcome.version >= protocol.SLOT_SUMS_VERSION

    def close(self) -> None:
        """Close both. Idempotent."""
        if self.endpoint is not None:
            self.endpoint.close()
        self.caller.close()


@dataclass(frozen=True, slots=True)
class _Found:
    """What a way led to; of streams alone that is nothing."""

    endpoint: Endpoint | None = None
    staging: Staging | None = None
    region: int = 0
    way: str = STREAMS
    late: tuple[TransportKind, ...] = ()


def open_link(
    place: Place,
    layout: BlockLayout,
    ways: Ways,
    timeout_s: float,
    only: Sequence[TransportKind] | None = None,
) -> Link:
    """Connect to a server, by the first of its ways that works from here; else through streams.

    Args:
        place: Where it is.
        layout: Of the blocks that it should keep.
        ways: Of this process.
        timeout_s: Longest time.
        only: By one of these ways or not at all; None: by whichever works.

    Raises:
        LayoutMismatchError, UsageError: The server keeps blocks of another layout, or is of another
            version of kvpool, or does not let this client in.
        PeerUnreachableError: Nobody listens there.
        TransferTimeoutError: It did not answer within ``timeout_s``.
    """
    deadline = Deadline(timeout_s)
    caller = LinkCaller(place.target, place.access)
    found = _Found()
    try:
        configure = protocol.ConfigureRequest(
            version=protocol.PROTOCOL_VERSION, layout=protocol.encode_layout(layout)
        )
        welcome = caller.call(protocol.CONFIGURE, configure, deadline.remaining_s())
        version = protocol.spoken_version(welcome.version)
        client = os.urandom(protocol.CLIENT_BYTES)
        found = _connect(welcome, ways, deadline, only)
        endpoint = found.endpoint
        if endpoint is not None and not endpoint.notify(client):
            raise PeerUnreachableError("the server took no notification: connect again")
        hello = protocol.HelloRequest(version=version, client=client, streams=endpoint is None)
        caller.call(protocol.HELLO, hello, deadline.remaining_s())
        stay = protocol.StayRequest(client=client)
        stayed = caller.stay(protocol.STAY, stay) if endpoint is None else None
        if endpoint is not None:
            caller.use(endpoint, welcome.call_bytes_max)
    except BaseException:
        if found.endpoint is not None:
            found.endpoint.close()
        caller.close()
        raise
    return Link(
        caller=caller,
        endpoint=endpoint,
        staging=found.staging,
        client=client,
        welcome=welcome,
        region=found.region,
        stayed=stayed,
        way=found.way,
        late=found.late,
    )


def _connect(
    welcome: protocol.Welcome,
    ways: Ways,
    deadline: Deadline,
    only: Sequence[TransportKind] | None,
) -> _Found:
    """Connect by the first way that works; if none does, it is streams.

    Raises what the last one raised if the caller handed a transport in or named ways, and ClosedError.
    """
    failed: KVPoolError | None = None
    late: list[TransportKind] = []
    offered: list[tuple[TransportKind, protocol.Way]] = [
        (kind, way)
        for kind in ways.kinds
        if only is None or kind in only
        for way in welcome.ways
        if way.kind == kind
    ]
    kept_s = _HELLO_SHARE * deadline.remaining_s()
    for number, (kind, way) in enumerate(offered):
        if kind == "host" and not ways.given and not os.path.exists(way.address):
            continue  # another host's
        try:
            own = ways.way(kind)
            # What is left is shared among the ways that are left, so that one cannot have it all.
            wait_s = max(0.0, deadline.remaining_s() - kept_s) / (len(offered) - number)
            expected = Incarnation(welcome.server)
            endpoint = own.transport.connect(way.address, wait_s, expected)
            return _Found(endpoint, own.staging, way.region, kind, tuple(late))
        except ClosedError:
            raise
        except KVPoolError as error:
            logger.debug("no way %s to %s: %s", way.kind, way.address, error)
            failed = error
            if isinstance(error, UnavailableError) and not ways.given:
                late.append(kind)
    if failed is not None and (ways.given or only is not None):
        raise failed
    if only is not None:
        raise PeerUnreachableError(f"the server offers no way of {', '.join(only)} from here")
    return _Found(late=tuple(late))
