"""What two host transports tell each other over their unix socket, as bytes.

Owns the messages of the handshake and of regions registered later, and their limits. File
descriptors travel beside them. Every field of a peer is validated here or by the C core that maps
its memory. Who calls it: the host transport.
"""

from typing import Annotated, Final

import msgspec

from kvpool.arena import Arena
from kvpool.block import INCARNATION_BYTES
from kvpool.errors import CorruptionError, FormatVersionError
from kvpool.transfer.endpoint import REGIONS_MAX
from kvpool.transfer.write_wire import WriteMessage

PROTOCOL_MAGIC: Final = "kvpool-host"
PROTOCOL_VERSION: Final = 2
# Largest message: a hello with 64 regions is under 3 KiB.
MESSAGE_BYTES_MAX: Final = 16384

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**48)]


class RegionOffer(msgspec.Struct, frozen=True, kw_only=True, tag="region"):
    """One region of the sender; its memfd travels with the message."""

    region: Annotated[int, msgspec.Meta(ge=0, lt=REGIONS_MAX)]
    slot_count: _Count
    slot_bytes: _Count

    @classmethod
    def of(cls, region: int, arena: Arena) -> "RegionOffer":
        """Describe an arena as region number ``region``."""
        return cls(region=region, slot_count=arena.slot_count, slot_bytes=arena.layout.block_bytes)


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of either side. With it: the memfd of its ring, then of each region."""

    magic: Annotated[str, msgspec.Meta(max_length=32)]
    version: int
    incarnation: Annotated[
        bytes, msgspec.Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)
    ]
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    record_count: _Count
    record_bytes: _Count
    regions: Annotated[list[RegionOffer], msgspec.Meta(max_length=REGIONS_MAX)]


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """Instead of a hello: why this side will not talk."""

    reason: Annotated[str, msgspec.Meta(max_length=512)]


Message = Hello | RegionOffer | Refusal | WriteMessage

# Those of a connection's beginning are maps, those of writes are arrays: the first byte says which.
_decoder: Final = msgspec.msgpack.Decoder(Hello | RegionOffer | Refusal)
_write_decoder: Final = msgspec.msgpack.Decoder(WriteMessage)
_ARRAYS: Final = range(0x90, 0xA0)


def encode(message: Message) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(message)


def decode(payload: bytes) -> Message:
    """Decode and validate a message.

    Raises:
        CorruptionError: It is none, or a field is out of its range.
        FormatVersionError: A hello of another version or protocol.
    """
    if len(payload) > MESSAGE_BYTES_MAX:
        raise CorruptionError(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
    try:
        if payload[:1] and payload[0] in _ARRAYS:
            said: WriteMessage = _write_decoder.decode(payload)
            return said
        message: Hello | RegionOffer | Refusal = _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptionError(f"the peer sent no valid message: {error}") from error
    if isinstance(message, Hello):
        spoken = (message.magic, message.version)
        if spoken != (PROTOCOL_MAGIC, PROTOCOL_VERSION):
            raise FormatVersionError(
                f"the peer speaks {message.magic!r} version {message.version}, this process "
                f"{PROTOCOL_MAGIC!r} version {PROTOCOL_VERSION}: run the same kvpool on both sides"
            )
    return message
