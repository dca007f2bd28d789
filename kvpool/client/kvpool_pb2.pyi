from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORED: _ClassVar[Kind]
    REMOVED: _ClassVar[Kind]
STORED: Kind
REMOVED: Kind

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Layout(_message.Message):
    __slots__ = ("num_layers", "kv_heads", "block_tokens", "k_dim", "v_dim", "dtype")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    K_DIM_FIELD_NUMBER: _ClassVar[int]
    V_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    kv_heads: int
    block_tokens: int
    k_dim: int
    v_dim: int
    dtype: str
    def __init__(self, num_layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., block_tokens: _Optional[int] = ..., k_dim: _Optional[int] = ..., v_dim: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("version", "layout")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    version: int
    layout: Layout
    def __init__(self, version: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "server", "node", "ways", "salt", "durable", "call_bytes_max")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    CALL_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    version: int
    server: bytes
    node: str
    ways: _containers.RepeatedCompositeFieldContainer[Way]
    salt: bytes
    durable: bool
    call_bytes_max: int
    def __init__(self, version: _Optional[int] = ..., server: _Optional[bytes] = ..., node: _Optional[str] = ..., ways: _Optional[_Iterable[_Union[Way, _Mapping]]] = ..., salt: _Optional[bytes] = ..., durable: _Optional[bool] = ..., call_bytes_max: _Optional[int] = ...) -> None: ...

class Way(_message.Message):
    __slots__ = ("kind", "address", "region")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    kind: str
    address: str
    region: int
    def __init__(self, kind: _Optional[str] = ..., address: _Optional[str] = ..., region: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("version", "client", "streams")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    version: int
    client: bytes
    streams: bool
    def __init__(self, version: _Optional[int] = ..., client: _Optional[bytes] = ..., streams: _Optional[bool] = ...) -> None: ...

class StayRequest(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: bytes
    def __init__(self, client: _Optional[bytes] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("client", "hashes", "seconds", "missing")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    client: bytes
    hashes: bytes
    seconds: float
    missing: int
    def __init__(self, client: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., seconds: _Optional[float] = ..., missing: _Optional[int] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease", "slots", "generations")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("client", "lease", "block")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    client: bytes
    lease: int
    block: int
    def __init__(self, client: _Optional[bytes] = ..., lease: _Optional[int] = ..., block: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("client", "lease")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    client: bytes
    lease: int
    def __init__(self, client: _Optional[bytes] = ..., lease: _Optional[int] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("client", "hashes", "ancestors", "region", "slots", "generations", "crcs", "timeout_s", "hold_s", "durable")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    ANCESTORS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CRCS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    client: bytes
    hashes: bytes
    ancestors: bytes
    region: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    crcs: bytes
    timeout_s: float
    hold_s: float
    durable: bool
    def __init__(self, client: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., ancestors: _Optional[bytes] = ..., region: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., crcs: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., hold_s: _Optional[float] = ..., durable: _Optional[bool] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("stored", "new", "refused", "lease")
    STORED_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    stored: int
    new: int
    refused: str
    lease: int
    def __init__(self, stored: _Optional[int] = ..., new: _Optional[int] = ..., refused: _Optional[str] = ..., lease: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("client", "lease", "first", "count")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    client: bytes
    lease: int
    first: int
    count: int
    def __init__(self, client: _Optional[bytes] = ..., lease: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("block", "offset", "payload", "crcs")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CRCS_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    payload: bytes
    crcs: bytes
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., crcs: _Optional[bytes] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: StoreRequest
    payload: Payload
    def __init__(self, header: _Optional[_Union[StoreRequest, _Mapping]] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("stats", "extra")
    class StatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    stats: _containers.ScalarMap[str, int]
    extra: _containers.ScalarMap[str, int]
    def __init__(self, stats: _Optional[_Mapping[str, int]] = ..., extra: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TiersReply(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    def __init__(self, tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("name", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    counts: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("checked", "bad", "ssd")
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    checked: int
    bad: int
    ssd: VerifiedDevice
    def __init__(self, checked: _Optional[int] = ..., bad: _Optional[int] = ..., ssd: _Optional[_Union[VerifiedDevice, _Mapping]] = ...) -> None: ...

class VerifiedDevice(_message.Message):
    __slots__ = ("checked", "bad", "unread")
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    checked: int
    bad: int
    unread: int
    def __init__(self, checked: _Optional[int] = ..., bad: _Optional[int] = ..., unread: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("node", "incarnation", "address", "heard")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: bytes
    address: str
    heard: bool
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., address: _Optional[str] = ..., heard: _Optional[bool] = ...) -> None: ...

class MembersReply(_message.Message):
    __slots__ = ("members", "ring", "node")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    ring: bytes
    node: str
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., ring: _Optional[bytes] = ..., node: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: bytes
    def __init__(self, names: _Optional[bytes] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("holders", "sets", "ring")
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedScalarFieldContainer[int]
    sets: _containers.RepeatedCompositeFieldContainer[NodeSet]
    ring: bytes
    def __init__(self, holders: _Optional[_Iterable[int]] = ..., sets: _Optional[_Iterable[_Union[NodeSet, _Mapping]]] = ..., ring: _Optional[bytes] = ...) -> None: ...

class NodeSet(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("version", "node", "incarnation", "began", "kind", "names", "leaving")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    version: int
    node: str
    incarnation: bytes
    began: int
    kind: Kind
    names: bytes
    leaving: bool
    def __init__(self, version: _Optional[int] = ..., node: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., began: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., names: _Optional[bytes] = ..., leaving: _Optional[bool] = ...) -> None: ...

class AnnounceReply(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    def __init__(self, incarnation: _Optional[bytes] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("kind", "node", "names")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    node: str
    names: bytes
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., node: _Optional[str] = ..., names: _Optional[bytes] = ...) -> None: ...
