"""What a pool's client and server tell each other. KV bytes travel through the transport.

Owns the messages and methods. A client connects the host transport to the server first; its
incarnation there names it here, and when that connection is lost the server gives back its leases
and reservations.
"""

from typing import Final

import msgspec

from kvpool.client.rpc import Method

PROTOCOL_VERSION: Final = 1


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Client to server, once after the transport connected."""

    version: int
    client: bytes


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Server to client: who it is, and the layout its arena was opened for (None: not yet)."""

    version: int
    server: bytes
    layout: dict[str, int | str] | None
    region: int | None


class MatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask how many leading hashes (32 bytes each, concatenated) are there."""

    hashes: bytes


class MatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """Leading blocks that are there."""

    blocks: int


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for a lease on the leading hashes."""

    client: bytes
    hashes: bytes
    seconds: float


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: its number, and the slots of the server's region that hold the leading blocks."""

    lease: int
    region: int
    slots: list[int]
    generations: list[int]


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Give a lease back. ``bad`` are indices of blocks whose checksum differed at the reader."""

    client: bytes
    lease: int
    bad: list[int] = []


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the server to pull blocks from slots of the client's staging region.

    Attributes:
        hashes: Of the blocks to store, in chain order.
        parent: Hash of the block before the first one, or None.
        region, slots, generations: Where they lie at the client, one slot a block.
    """

    client: bytes
    hashes: bytes
    parent: bytes | None
    region: int
    slots: list[int]
    generations: list[int]
    timeout_s: float


class StoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """As ``kvpool.base.StoreResult``. The server no longer touches the client's slots."""

    stored: int
    new: int
    refused: str


class ConfigureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Open the server's arena for a layout. The first one wins; another layout is refused."""

    layout: dict[str, int | str]


class Done(msgspec.Struct, frozen=True):
    """Nothing to say."""


class StatsReply(msgspec.Struct, frozen=True, kw_only=True):
    """As ``kvpool.base.PoolStats``."""

    stats: dict[str, int]


HELLO = Method("Pool", "Hello", Hello, Welcome)
CONFIGURE = Method("Pool", "Configure", ConfigureRequest, Welcome)
MATCH = Method("Pool", "Match", MatchRequest, MatchReply)
LEASE = Method("Pool", "Lease", LeaseRequest, LeaseReply)
RELEASE = Method("Pool", "Release", ReleaseRequest, Done)
STORE = Method("Pool", "Store", StoreRequest, StoreReply)
STATS = Method("Pool", "Stats", Done, StatsReply)
