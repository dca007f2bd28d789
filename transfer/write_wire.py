"""What two endpoints tell each other about writes, whatever carries it.

Owns the messages, their limits, and how a typed error crosses. A write has a number at its writer;
its spans go in parts, each of which is answered. Every field of a peer is validated here or where it
is used. Who calls it: ``writes``, and the wire format of each transport, of which these are a part.
"""

from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool import errors
from kvpool.errors import CorruptionError, KVPoolError
from kvpool.transfer.base import NOTIFICATION_BYTES_MAX
from kvpool.transfer.stream_wire import pack_error

# Spans of one part: 896 bytes, so that it fits the smallest message of any transport.
ROWS_MAX: Final = 16
# Parts and notes of one connection that may be unanswered, each way.
PARTS_MAX: Final = 8
# One span: from where, to where.
ROW: Final = np.dtype(
    [
        *(("from_region", "<u4"), ("from_slot", "<u4")),
        *(("from_generation", "<u8"), ("from_offset", "<u8")),
        *(("region", "<u4"), ("slot", "<u4"), ("generation", "<u8"), ("offset", "<u8")),
        ("size", "<u8"),
    ]
)
# A structured array of ROW.
Rows = NDArray[np.void]
_ROW_BYTES: Final = 56
assert ROW.itemsize == _ROW_BYTES

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# Below 1e9 seconds, as every deadline.
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]
_Rows = Annotated[bytes, msgspec.Meta(min_length=_ROW_BYTES, max_length=_ROW_BYTES * ROWS_MAX)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class Part(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Writer: pull these spans, ``ROW`` each, within this time."""

    write: _Number
    timeout_ms: _Milliseconds
    rows: _Rows


class Note(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """Writer: every part has come; hand this to whoever listens."""

    write: _Number
    payload: Annotated[bytes, msgspec.Meta(min_length=1, max_length=NOTIFICATION_BYTES_MAX)]


class Took(msgspec.Struct, frozen=True, array_like=True, tag="took"):
    """Owner: one part or note of a write has ended; ``kind`` is an error's name, empty if it went well."""

    write: _Number
    kind: _Text
    reason: _Text


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Writer: nobody waits for this write any more; end what is under way of it."""

    write: _Number


WriteMessage = Part | Note | Took | Drop

_KINDS: Final = {
    kind.__name__: kind
    for kind in (
        errors.CancelledTransferError,
        errors.CapacityError,
        errors.ClosedError,
        errors.CorruptionError,
        errors.LeaseExpiredError,
        errors.PeerUnreachableError,
        errors.TransferTimeoutError,
        errors.UsageError,
    )
}


def rows_of(part: Part) -> Rows:
    """Return the spans of a part. Raises CorruptionError: its bytes are no whole spans."""
    if len(part.rows) % _ROW_BYTES:
        raise CorruptionError("the peer sent a part of a write that is no list of spans")
    return np.frombuffer(part.rows, dtype=ROW)


def took(write: int, error: KVPoolError | None = None) -> Took:
    """Return the answer to a part or a note."""
    kind, reason = ("", "") if error is None else pack_error(error)
    return Took(write, kind, reason)


def error_in(answer: Took) -> KVPoolError | None:
    """Return what a part failed with, None if it did not; an unknown kind means that it gave up."""
    if not answer.kind:
        return None
    kind = _KINDS.get(answer.kind, errors.CancelledTransferError)
    return kind(f"the peer did not take a write: {answer.reason}")
