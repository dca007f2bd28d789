"""Calls in the notifications of a transport's connection: what they look like, cut and joined.

Owns the bytes: ``docs/formats.md`` has them. A message is a msgpack array with its kind in front, cut
into notifications of at most NOTIFICATION_BYTES_MAX bytes, each with the message's number, its own
index and how many there are. Knows no connection. Who calls it: ``asking`` and the server's
``answering``.
"""

import struct
from typing import Annotated, Final

import msgspec

from kvpool.errors import CorruptionError
from kvpool.transfer.base import NOTIFICATION_BYTES_MAX

# Largest request. Beyond it a call of gRPC takes less than cutting it: 1.5 ms.
CALL_BYTES_MAX: Final = 8 << 10
# Largest answer: who holds each of as many names as a call may have takes more bytes than the names,
# where nodes' names are long and replicas many.
ANSWER_BYTES_MAX: Final = 256 << 10
# Calls of one connection that may be under way.
CALLS_MAX: Final = 64
# Longest time of one.
TIMEOUT_MAX_S: Final = 86_400.0
# In place of a call's number: nobody waits for its end.
UNANSWERED: Final = 0

# Message, index of the part, parts of the message.
_HEAD: Final = struct.Struct("<IHH")
_PIECE_BYTES: Final = NOTIFICATION_BYTES_MAX - _HEAD.size
# What may go around the bytes of a call or an answer.
_AROUND_BYTES_MAX: Final = 1024

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Client: make a call.

    Attributes:
        number: Of the call, new on this connection; UNANSWERED: no answer is wanted.
        method: Its path in gRPC.
        timeout_s: When the client gives up.
        request: As gRPC would carry it.
    """

    number: _Number
    method: Annotated[str, msgspec.Meta(max_length=256)]
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=TIMEOUT_MAX_S)]
    request: bytes


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Client: nobody waits for a call any more."""

    number: _Number


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Server: how a call ended.

    Attributes:
        number: Of the call.
        error: Class of ``kvpool.errors``; empty: it went well.
        reply: As gRPC would carry it, or the error's text in UTF-8.
    """

    number: _Number
    error: Annotated[str, msgspec.Meta(max_length=64)]
    reply: bytes


Message = Call | Cancel | Answer

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def cut(number: int, message: Message) -> list[bytes]:
    """Return the notifications that carry a message, in order."""
    whole = _encoder.encode(message)
    count = -(-len(whole) // _PIECE_BYTES)
    return [
        _HEAD.pack(number, index, count) + whole[index * _PIECE_BYTES : (index + 1) * _PIECE_BYTES]
        for index in range(count)
    ]


class Parts:
    """Messages that have come in part. One thread.

    At most CALLS_MAX are kept: with one more, the one that began first is let go.

    Args:
        bytes_max: Largest request or answer; a longer one is no message.
    """

    def __init__(self, bytes_max: int = CALL_BYTES_MAX) -> None:
        self._parts_max = (bytes_max + _AROUND_BYTES_MAX) // _PIECE_BYTES + 1
        self._begun: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        """Return how many messages have come in part."""
        return len(self._begun)

    def take(self, notification: bytes) -> Message | None:
        """Take what came next on the connection; return the message that it completes, if any.

        Raises:
            CorruptionError: It is no part of a message, or not the one that comes next of its own.
        """
        if len(notification) <= _HEAD.size:
            raise CorruptionError(f"{len(notification)} bytes are no part of a call")
        number, index, count = _HEAD.unpack_from(notification)
        piece = notification[_HEAD.size :]
        if count == 1 and index == 0:
            return _decoded(piece)
        pieces = self._begun.setdefault(number, [])
        if index != len(pieces) or not index < count <= self._parts_max:
            del self._begun[number]
            raise CorruptionError(f"part {index} of {count} does not follow {len(pieces)} parts")
        pieces.append(piece)
        if len(pieces) == count:
            return _decoded(b"".join(self._begun.pop(number)))
        if len(self._begun) > CALLS_MAX:
            del self._begun[next(iter(self._begun))]
        return None


def _decoded(whole: bytes) -> Message:
    try:
        message: Message = _decoder.decode(whole)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptionError(f"this is no call, and no answer to one: {error}") from error
    return message
