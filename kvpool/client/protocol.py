"""What a pool's client and server tell each other. KV bytes travel through the transport.

Owns the messages, the methods, and the names of the sockets in a run directory. The order is:

1. ``Configure``: the first client's layout opens the server's arena; the answer says who the server
   is and which region its blocks lie in.
2. The client connects the host transport and sends 16 random bytes, the name of this connection, as
   its first notification.
3. ``Hello`` with that name: from here on the server keeps leases and stores under it, and gives all
   of them back when the connection is lost.
"""

from typing import Final

import msgspec

from kvpool.block import BlockLayout
from kvpool.client.rpc import Method
from kvpool.errors import UsageError

PROTOCOL_VERSION: Final = 1
# Bytes of a connection's name, the ``client`` of every message.
CLIENT_BYTES: Final = 16
# Sockets in a server's run directory.
CONTROL_SOCKET: Final = "control.sock"
TRANSPORT_SOCKET: Final = "transport.sock"


class ConfigureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Open the server's arena for a layout. The first one wins; another layout is refused."""

    version: int
    layout: dict[str, int | str]


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Server to client: its incarnation, and the region that its arena is registered under.

    Attributes:
        address: Where its transport listens; empty: at TRANSPORT_SOCKET in the run directory.
    """

    version: int
    server: bytes
    region: int
    address: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Client to server, once after its transport connected and named the connection ``client``."""

    version: int
    client: bytes


class MatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask how many leading hashes (32 bytes each, concatenated) are there."""

    hashes: bytes


class MatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """Leading blocks that are there."""

    blocks: int


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for a lease on the leading hashes. ``missing`` more were wanted, but not matched."""

    client: bytes
    hashes: bytes
    seconds: float
    missing: int = 0


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: its number, and the slots of the server's region that hold the leading blocks."""

    lease: int
    slots: list[int]
    generations: list[int]


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Say that a leased block did not verify at its reader: it leaves the pool.

    Attributes:
        lease: The lease it was read under; if that is over the report is ignored, because the slot
            may have been given to another block in good order.
        block: Index of the block among the lease's.
    """

    client: bytes
    lease: int
    block: int


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Give a lease back."""

    client: bytes
    lease: int


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the server to pull blocks from slots of the client's staging region.

    Attributes:
        hashes: Of the blocks to store, in chain order.
        parent: Hash of the block before the first one, or None.
        region, slots, generations: Where they lie at the client, one slot a block.
        crcs: Their CRC32C, little-endian uint32 [blocks, layers, kv_heads].
        timeout_s: When the server gives up.
        hold_s: Seconds to lease the blocks to the client, so that later blocks of the same chain do
            not push them out; 0 for none.
    """

    client: bytes
    hashes: bytes
    parent: bytes | None
    region: int
    slots: list[int]
    generations: list[int]
    crcs: bytes
    timeout_s: float
    hold_s: float = 0.0


class StoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """As ``kvpool.base.StoreResult``. The server no longer touches the client's slots.

    ``lease`` is the number of the lease asked for with ``hold_s``, or 0.
    """

    stored: int
    new: int
    refused: str
    lease: int = 0


class Done(msgspec.Struct, frozen=True):
    """Nothing to say."""


class StatsReply(msgspec.Struct, frozen=True, kw_only=True):
    """As ``kvpool.base.PoolStats``, with its ``extra`` apart."""

    stats: dict[str, int]
    extra: dict[str, int]


class TiersReply(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of each tier by name, fastest first, and ``stack``: what goes between them."""

    tiers: dict[str, dict[str, int]]


class EvictRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for up to ``blocks`` blocks to be evicted from DRAM."""

    blocks: int


class EvictReply(msgspec.Struct, frozen=True, kw_only=True):
    """How many went."""

    blocks: int


class VerifyReply(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks in DRAM that were read, and those that were bad and are gone."""

    checked: int
    bad: int


CONFIGURE = Method("Pool", "Configure", ConfigureRequest, Welcome)
HELLO = Method("Pool", "Hello", Hello, Done)
MATCH = Method("Pool", "Match", MatchRequest, MatchReply)
LEASE = Method("Pool", "Lease", LeaseRequest, LeaseReply)
REPORT = Method("Pool", "Report", ReportRequest, Done)
RELEASE = Method("Pool", "Release", ReleaseRequest, Done)
STORE = Method("Pool", "Store", StoreRequest, StoreReply)
STATS = Method("Pool", "Stats", Done, StatsReply)
TIERS = Method("Pool", "Tiers", Done, TiersReply)
EVICT = Method("Pool", "Evict", EvictRequest, EvictReply)
VERIFY = Method("Pool", "Verify", Done, VerifyReply)


def encode_layout(layout: BlockLayout) -> dict[str, int | str]:
    """Return the fields of a layout, as messages carry them."""
    return {name: getattr(layout, name) for name in BlockLayout.__slots__}


def decode_layout(fields: dict[str, int | str]) -> BlockLayout:
    """Return the layout that ``encode_layout`` was given. Raises UsageError if it is none."""
    try:
        return msgspec.convert(fields, BlockLayout, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"no block layout of this version of kvpool: {error}") from error


def require_version(version: int) -> None:
    """Raise UsageError unless the other side speaks this version."""
    if version != PROTOCOL_VERSION:
        raise UsageError(
            f"the client speaks version {version} of the protocol, the server {PROTOCOL_VERSION}: "
            "install one version of kvpool on both sides"
        )
