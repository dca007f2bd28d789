"""What a pool's client and server tell each other. KV bytes travel through a transport.

Owns the methods, the version, and the names of the sockets in a run directory; the messages and their
order are in ``kvpool.proto``, from which ``kvpool_pb2.py`` is made. Who calls it: both sides.
"""

from typing import Final

from kvpool.block import BlockLayout
from kvpool.client.kvpool_pb2 import (
    REMOVED,
    STORED,
    AnnounceReply,
    AnnounceRequest,
    Change,
    ConfigureRequest,
    Done,
    EvictReply,
    EvictRequest,
    HelloRequest,
    Kind,
    Layout,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
    MatchReply,
    MatchRequest,
    Member,
    MembersReply,
    NodeSet,
    Payload,
    ReadRequest,
    ReleaseRequest,
    ReportRequest,
    StatsReply,
    StayRequest,
    StoreReply,
    StoreRequest,
    Tier,
    TiersReply,
    VerifyReply,
    Way,
    Welcome,
    WriteRequest,
)
from kvpool.client.rpc import Method
from kvpool.errors import UsageError

__all__ = [
    "REMOVED",
    "STORED",
    "AnnounceReply",
    "AnnounceRequest",
    "Change",
    "ConfigureRequest",
    "Done",
    "EvictReply",
    "EvictRequest",
    "HelloRequest",
    "Kind",
    "Layout",
    "LeaseReply",
    "LeaseRequest",
    "LookupReply",
    "LookupRequest",
    "MatchReply",
    "MatchRequest",
    "Member",
    "MembersReply",
    "NodeSet",
    "Payload",
    "ReadRequest",
    "ReleaseRequest",
    "ReportRequest",
    "StatsReply",
    "StayRequest",
    "StoreReply",
    "StoreRequest",
    "Tier",
    "TiersReply",
    "VerifyReply",
    "Way",
    "Welcome",
    "WriteRequest",
]

# 1 was msgspec structs between processes of one host. 3: a store may leave its checksums to the slots.
PROTOCOL_VERSION: Final = 3
# The oldest version that is still spoken.
PROTOCOL_VERSION_MIN: Final = 2
SLOT_SUMS_VERSION: Final = 3
# Bytes of a connection's name, the ``client`` of every message.
CLIENT_BYTES: Final = 16
# Longest that a client may ask the server to work on one batch of a store.
STORE_TIMEOUT_MAX_S: Final = 600.0
# In place of a lease's number: all that a client of streams has.
EVERY_LEASE: Final = 0
# Sockets in a server's run directory.
CONTROL_SOCKET: Final = "control.sock"
TRANSPORT_SOCKET: Final = "transport.sock"
# Most payload bytes of one message of Read and Write.
PAYLOAD_BYTES_MAX: Final = 1 << 20

_POOL: Final = "v1.Pool"
_DIRECTORY: Final = "v1.Directory"

CONFIGURE = Method(_POOL, "Configure", ConfigureRequest, Welcome)
HELLO = Method(_POOL, "Hello", HelloRequest, Done)
STAY = Method(_POOL, "Stay", StayRequest, Done, streams=True)
MATCH = Method(_POOL, "Match", MatchRequest, MatchReply)
LEASE = Method(_POOL, "Lease", LeaseRequest, LeaseReply)
REPORT = Method(_POOL, "Report", ReportRequest, Done)
RELEASE = Method(_POOL, "Release", ReleaseRequest, Done)
STORE = Method(_POOL, "Store", StoreRequest, StoreReply)
READ = Method(_POOL, "Read", ReadRequest, Payload, streams=True)
WRITE = Method(_POOL, "Write", WriteRequest, StoreReply, takes=True)
STATS = Method(_POOL, "Stats", Done, StatsReply)
TIERS = Method(_POOL, "Tiers", Done, TiersReply)
EVICT = Method(_POOL, "Evict", EvictRequest, EvictReply)
VERIFY = Method(_POOL, "Verify", Done, VerifyReply)

MEMBERS = Method(_DIRECTORY, "Members", Done, MembersReply)
LOOKUP = Method(_DIRECTORY, "Lookup", LookupRequest, LookupReply)
ANNOUNCE = Method(_DIRECTORY, "Announce", AnnounceRequest, AnnounceReply)
WATCH = Method(_DIRECTORY, "Watch", Done, Change, streams=True)


def encode_layout(layout: BlockLayout) -> Layout:
    """Return a layout as messages carry it."""
    return Layout(**{name: getattr(layout, name) for name in BlockLayout.__slots__})


def decode_layout(message: Layout) -> BlockLayout:
    """Return the layout that ``encode_layout`` was given. Raises UsageError if it is none."""
    return BlockLayout(
        num_layers=message.num_layers,
        kv_heads=message.kv_heads,
        block_tokens=message.block_tokens,
        k_dim=message.k_dim,
        v_dim=message.v_dim,
        dtype=message.dtype,
    )


def spoken_version(version: int) -> int:
    """Return the version to speak with a side that can speak up to ``version``.

    Raises:
        UsageError: It is too old.
    """
    if version < PROTOCOL_VERSION_MIN:
        raise UsageError(
            f"the other side speaks version {version} of the protocol, this one "
            f"{PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}: bring it up to date"
        )
    return min(version, PROTOCOL_VERSION)
