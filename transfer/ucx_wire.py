"""What two UCX endpoints tell each other, as notes: notifications, regions, writes.

Owns the messages and their limits. Asks and answers of reads are the C engine's own
(``native/src/ucx_wire.h``). Every field of a peer is validated here or where it is used. Who
calls it: the UCX endpoint.
"""

from typing import Annotated, Final

import msgspec

from kvpool.errors import CorruptionError, FormatVersionError
from kvpool.transfer.endpoint import REGIONS_MAX
from kvpool.transfer.ucx_connection import NOTE_BYTES_MAX
from kvpool.transfer.write_wire import WriteMessage

PROTOCOL_VERSION: Final = 3
# Windows of an inbox, and so asks that may be unanswered on one connection (KVP_ASKS_MAX).
ASKS_MAX: Final = 8
# A put or note that has not ended after this long closes the connection: the peer does not read.
PUT_TIMEOUT_S: Final = 15.0

# The first byte of a note.
_NOTIFICATION: Final = b"\0"
_MESSAGE: Final = b"\1"

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**48)]
_Region = Annotated[int, msgspec.Meta(ge=0, lt=REGIONS_MAX)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="region"):
    """Owner: one more region that may be read."""

    region: _Region
    slot_count: _Size
    slot_bytes: _Size
    crc_count: _Small


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Either side, once: every region that there was at the start has been told of."""

    version: _Small


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Either side: so many notifications have been handed on since the start."""

    count: _Number


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """Either side: the connection is closed; nothing follows."""


Message = Offer | Welcome | Taken | Bye | WriteMessage

_decoder: Final = msgspec.msgpack.Decoder(Message)
_encoder: Final = msgspec.msgpack.Encoder()


def frame(payload: bytes) -> bytes:
    """Return the note that carries a notification."""
    return _NOTIFICATION + payload


def encode(message: Message) -> bytes:
    """Return the note that carries a message."""
    note = _MESSAGE + _encoder.encode(message)
    assert len(note) <= NOTE_BYTES_MAX
    return note


def decode(note: bytes) -> "bytes | Message":
    """Return a notification's payload, or a message.

    Raises:
        CorruptionError: It is neither, or a field is out of its range.
        FormatVersionError: A welcome of another version.
    """
    if note[:1] == _NOTIFICATION and len(note) > 1:
        return note[1:]
    if note[:1] != _MESSAGE:
        raise CorruptionError("the peer sent a note that is neither notification nor message")
    try:
        message: Message = _decoder.decode(note[1:])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptionError(f"the peer sent no valid message: {error}") from error
    if isinstance(message, Welcome) and message.version != PROTOCOL_VERSION:
        raise FormatVersionError(
            f"the peer speaks version {message.version} of the UCX protocol, this process"
            f" {PROTOCOL_VERSION}: run the same kvpool on both sides"
        )
    return message
