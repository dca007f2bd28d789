"""What the two sides of a layer stream tell each other, as notifications of at most 1 KiB.

Owns the messages, their limits and how a typed error crosses. A stream has a number at its sender;
only ``Open`` names the request, so that a late message of one attempt is never taken for another's.
Who calls it: ``layerwise`` and the two sides of a stream.
"""

from dataclasses import replace
from typing import Annotated, Final

import msgspec

from kvpool import errors
from kvpool.block import BlockLayout
from kvpool.errors import CorruptionError, KVPoolError, UsageError
from kvpool.transfer.base import NOTIFICATION_BYTES_MAX

# Slots in one announcement: 32 slot numbers and generations take at most 448 bytes.
SLOTS_MAX: Final = 32
# Bytes of what ``finish`` carries, and of a request's name in UTF-8.
PAYLOAD_BYTES_MAX: Final = 900
REQUEST_BYTES_MAX: Final = 256
_REASON_CHARACTERS_MAX: Final = 200

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Slots = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]], msgspec.Meta(max_length=32)
]
_Generations = Annotated[list[_Number], msgspec.Meta(max_length=32)]
_Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Sender: a stream begins. ``layout`` is the fields of a BlockLayout, dtype apart."""

    stream: _Number
    request: str
    region: _Number
    block_count: _Dimension
    layout: tuple[_Dimension, _Dimension, _Dimension, _Dimension, _Dimension]
    dtype: str


class Announce(msgspec.Struct, frozen=True, array_like=True, tag="layer"):
    """Sender: blocks from ``first_block`` on of one layer lie in these slots, one each."""

    stream: _Number
    layer: _Dimension
    first_block: _Dimension
    slots: _Slots
    generations: _Generations


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Sender: every layer of every block has been announced."""

    stream: _Number
    payload: Annotated[bytes, msgspec.Meta(max_length=PAYLOAD_BYTES_MAX)]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Sender: gives up."""

    stream: _Number
    kind: str
    reason: str


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """Receiver: no longer reads these slots."""

    stream: _Number
    slots: _Slots
    generations: _Generations


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Receiver: everything arrived."""

    stream: _Number


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """Receiver: gives up."""

    stream: _Number
    kind: str
    reason: str


Message = Open | Announce | End | Abort | Ack | Done | Refuse

_decoder: Final = msgspec.msgpack.Decoder(Message)
_KINDS: Final = {
    kind.__name__: kind
    for kind in (
        errors.CancelledTransferError,
        errors.CapacityError,
        errors.ClosedError,
        errors.CorruptionError,
        errors.LayoutMismatchError,
        errors.PeerUnreachableError,
        errors.TransferTimeoutError,
    )
}


def encode(message: Message) -> bytes:
    """Encode a message that fits a notification."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > NOTIFICATION_BYTES_MAX:
        raise UsageError(f"a message of {len(payload)} bytes: at most {NOTIFICATION_BYTES_MAX}")
    return payload


def decode(payload: bytes) -> Message:
    """Decode and validate a message. Raises CorruptionError."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptionError(f"the peer sent no message of a stream: {error}") from error


def pack_error(error: KVPoolError) -> tuple[str, str]:
    """Turn an error into (kind, reason)."""
    return type(error).__name__, str(error)[:_REASON_CHARACTERS_MAX].encode(
        "ascii", "replace"
    ).decode()


def unpack_error(who: str, kind: str, reason: str) -> KVPoolError:
    """Turn (kind, reason) back into an error; an unknown kind means that the peer gave up."""
    return _KINDS.get(kind, errors.CancelledTransferError)(f"{who}: {reason}")


def pack_layout(layout: BlockLayout) -> tuple[tuple[int, int, int, int, int], str]:
    """Return the fields of a layout for ``Open``."""
    sizes = (layout.num_layers, layout.kv_heads, layout.block_tokens, layout.k_dim, layout.v_dim)
    return sizes, layout.dtype


def unpack_layout(message: Open) -> BlockLayout:
    """Return the layout in an ``Open``. Raises UsageError if it is none."""
    layers, heads, tokens, k_dim, v_dim = message.layout
    return BlockLayout(
        num_layers=layers,
        kv_heads=heads,
        block_tokens=tokens,
        k_dim=k_dim,
        v_dim=v_dim,
        dtype=message.dtype,
    )


def slice_layout(layout: BlockLayout) -> BlockLayout:
    """Return the layout of one layer of ``layout``: what a slot of an outbox holds."""
    return replace(layout, num_layers=1)
