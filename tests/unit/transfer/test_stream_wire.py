"""The messages of a stream: they fit a notification at their largest, and garbage is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import errors
from kvpool.block import BlockLayout
from kvpool.errors import CorruptionError, UsageError
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.transfer.base import NOTIFICATION_BYTES_MAX
from kvpool.transfer.stream_wire import (
    PAYLOAD_BYTES_MAX,
    REQUEST_BYTES_MAX,
    SLOTS_MAX,
    Abort,
    Ack,
    Announce,
    Done,
    End,
    Message,
    Open,
    Refuse,
    decode,
    encode,
    pack_error,
    pack_layout,
    slice_layout,
    unpack_error,
    unpack_layout,
)

LARGE = 2**63 - 1
LARGEST: list[Message] = [
    Open(LARGE, "r" * REQUEST_BYTES_MAX, 63, 2**31 - 1, (2**31 - 1,) * 5, "float8_e4m3"),
    Announce(LARGE, 2**31 - 1, 2**31 - 1, [2**32 - 1] * SLOTS_MAX, [LARGE] * SLOTS_MAX),
    End(LARGE, bytes(PAYLOAD_BYTES_MAX)),
    Abort(LARGE, *pack_error(errors.CancelledTransferError("\u20ac" * 10000))),
    Ack(LARGE, [2**32 - 1] * SLOTS_MAX, [LARGE] * SLOTS_MAX),
    Done(LARGE),
    Refuse(LARGE, *pack_error(errors.CorruptionError("x" * 10000))),
]


@pytest.mark.parametrize("message", LARGEST, ids=lambda message: type(message).__name__)
def test_the_largest_messages_fit(message: Message) -> None:
    payload = encode(message)
    assert len(payload) <= NOTIFICATION_BYTES_MAX
    assert decode(payload) == message


@pytest.mark.parametrize(
    "message",
    [
        Announce(1, 0, 0, [0] * (SLOTS_MAX + 1), [1]),
        Announce(1, 0, 0, [2**32], [1]),
        Announce(1, -1, 0, [0], [1]),
        Announce(-1, 0, 0, [0], [1]),
        Ack(1, [0], [-1]),
        End(1, bytes(PAYLOAD_BYTES_MAX + 1)),
    ],
)
def test_fields_out_of_range_are_refused(message: Message) -> None:
    with pytest.raises(CorruptionError):
        decode(encode(message))


def test_too_large_to_send() -> None:
    with pytest.raises(UsageError):
        encode(End(1, bytes(NOTIFICATION_BYTES_MAX)))


@given(st.binary(max_size=100))
def test_garbage_is_an_error_or_a_message(payload: bytes) -> None:
    try:
        decode(payload)
    except CorruptionError:
        pass


def test_errors_cross() -> None:
    for kind in (errors.TransferTimeoutError, errors.CorruptionError, errors.LayoutMismatchError):
        crossed = unpack_error("the peer", *pack_error(kind("why")))
        assert type(crossed) is kind
        assert "why" in str(crossed)
    for name in ("SystemExit", "UsageError", ""):
        assert type(unpack_error("the peer", name, "")) is errors.CancelledTransferError


def test_layouts_cross() -> None:
    mla = BlockLayout(
        num_layers=2, kv_heads=1, block_tokens=64, k_dim=576, v_dim=0, dtype="bfloat16"
    )
    for layout in (SMALL_LAYOUT, mla):
        sizes, dtype = pack_layout(layout)
        assert unpack_layout(Open(1, "r", 0, 1, sizes, dtype)) == layout
    with pytest.raises(UsageError):
        unpack_layout(Open(1, "r", 0, 1, (1, 1, 16, 4, 4), "float65"))
    with pytest.raises(UsageError):
        unpack_layout(Open(1, "r", 0, 1, (1, 1, 15, 4, 4), "float32"))


def test_a_slice_is_one_layer() -> None:
    assert slice_layout(SMALL_LAYOUT).num_layers == 1
    assert slice_layout(SMALL_LAYOUT).block_bytes == SMALL_LAYOUT.layer_bytes
