"""What two ucxx endpoints tell each other, as messages, and how an answer lies in memory.

Owns the messages, their limits, and the layout of a window. Every field of a peer is validated here
or where it is used. Who calls it: the ucxx transport and its endpoint.
"""

from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.block import INCARNATION_BYTES
from kvpool.errors import CorruptionError, FormatVersionError
from kvpool.transfer.endpoint import REGIONS_MAX
from kvpool.transfer.ucx_wire import Bye, Offer, Taken
from kvpool.transfer.write_wire import WriteMessage

PROTOCOL_MAGIC: Final = "kvpool-ucxx"
PROTOCOL_VERSION: Final = 2
# Asks of one connection that may be unanswered, and slots or spans that one names.
ASKS_MAX: Final = 4
ASKED_MAX: Final = 4096
# Largest message: an ask, or a hello with all regions.
MESSAGE_BYTES_MAX: Final = 256 << 10
# An answer is a head, the checksums, and the bytes, which begin at a line of the cache.
_HEAD = np.dtype([("ask", "<u8"), ("good", "<u4"), ("crc", "<u4")])
_LINE: Final = 64

# The first byte of a message.
_NOTIFICATION: Final = b"\0"
_MESSAGE: Final = b"\1"

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# A generation or a tag is any uint64; msgspec bounds only what fits an int64.
_Word = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
_Slot = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Region = Annotated[int, msgspec.Meta(ge=0, lt=REGIONS_MAX)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Either side, first: who it is, and every region that it has now."""

    magic: Annotated[str, msgspec.Meta(max_length=32)]
    version: int
    incarnation: Annotated[
        bytes, msgspec.Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)
    ]
    regions: Annotated[list[Offer], msgspec.Meta(max_length=REGIONS_MAX)]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Reader: send these under ``tag``. Whole slots of one region, or a span of each slot.

    ``generations`` are little-endian uint64, one after another. ``begins`` and ``sizes`` are empty
    for whole slots.
    """

    number: _Number
    tag: _Word
    regions: Annotated[list[_Region], msgspec.Meta(min_length=1, max_length=ASKED_MAX)]
    slots: Annotated[list[_Slot], msgspec.Meta(min_length=1, max_length=ASKED_MAX)]
    generations: bytes
    begins: Annotated[list[_Number], msgspec.Meta(max_length=ASKED_MAX)]
    sizes: Annotated[list[_Number], msgspec.Meta(max_length=ASKED_MAX)]


Message = Hello | Offer | Taken | Bye | Ask | WriteMessage

_decoder: Final = msgspec.msgpack.Decoder(Message)
_encoder: Final = msgspec.msgpack.Encoder()


def frame(payload: bytes) -> bytes:
    """Return the message that carries a notification."""
    return _NOTIFICATION + payload


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return _MESSAGE + _encoder.encode(message)


def decode(received: bytes) -> "bytes | Message":
    """Return a notification's payload, or a message.

    Raises:
        CorruptionError: It is neither, or a field is out of its range.
        FormatVersionError: A hello of another version or protocol.
    """
    if len(received) > MESSAGE_BYTES_MAX:
        raise CorruptionError(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
    if received[:1] == _NOTIFICATION and len(received) > 1:
        return received[1:]
    if received[:1] != _MESSAGE:
        raise CorruptionError("the peer sent neither notification nor message")
    try:
        message: Message = _decoder.decode(received[1:])
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


class Answer:
    """An answer in a window: its head, checksums and bytes.

    Args:
        window: The memory.
        count: Slots or spans that were asked for.
        crc_count: Checksums of each; 0 for spans, whose bytes have one together, in the head.
    """

    def __init__(self, window: NDArray[np.uint8], count: int, crc_count: int) -> None:
        self.begin = answer_bytes(count, crc_count, 0)
        self._head = window[: _HEAD.itemsize].view(_HEAD)
        crcs = window[_LINE : _LINE + 4 * count * crc_count]
        self.crcs: NDArray[np.uint32] = crcs.view(np.uint32).reshape(count, crc_count)
        self.payload = window[self.begin :]

    def write_head(self, ask: int, good: int, crc: int) -> None:
        """Say what this answers, how many are good, and what the bytes of spans sum to."""
        self._head[0] = (ask, good, crc)

    def head(self) -> tuple[int, int, int]:
        """Return what ``write_head`` wrote. A peer may have written anything."""
        ask, good, crc = self._head[0].tolist()
        return ask, good, crc


def answer_bytes(count: int, crc_count: int, payload_bytes: int) -> int:
    """Return how large an answer is."""
    crcs = 4 * count * crc_count
    return _LINE + -(-crcs // _LINE) * _LINE + payload_bytes
