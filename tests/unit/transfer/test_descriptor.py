"""The messages of the handshake: what is written is read, and nothing else is."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.arena import Arena
from kvpool.block import new_incarnation
from kvpool.errors import CorruptionError, FormatVersionError
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.transfer.descriptor import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Hello,
    Refusal,
    RegionOffer,
    decode,
    encode,
)
from kvpool.transfer.endpoint import REGIONS_MAX
from kvpool.transfer.write_wire import Drop, Part


def hello(**changes: object) -> Hello:
    valid = Hello(
        magic="kvpool-host",
        version=PROTOCOL_VERSION,
        incarnation=bytes(16),
        pid=1,
        record_count=1024,
        record_bytes=1024,
        regions=[],
    )
    return msgspec.structs.replace(valid, **changes)


def test_messages_are_read_as_they_were_written() -> None:
    offers = [
        RegionOffer(region=number, slot_count=2**40, slot_bytes=2**40)
        for number in range(REGIONS_MAX)
    ]
    largest = hello(regions=offers, incarnation=new_incarnation())
    for message in (largest, offers[0], Refusal(reason="x" * 512), Drop(7), Part(1, 2, bytes(56))):
        payload = encode(message)
        assert decode(payload) == message
        assert len(payload) <= MESSAGE_BYTES_MAX


def test_an_offer_describes_an_arena() -> None:
    arena = Arena(SMALL_LAYOUT, 3, new_incarnation())
    offer = RegionOffer.of(5, arena)
    assert (offer.region, offer.slot_count) == (5, 3)
    assert offer.slot_bytes == SMALL_LAYOUT.block_bytes
    arena.close()


@pytest.mark.parametrize(
    "changes", [{"version": PROTOCOL_VERSION - 1}, {"version": 0}, {"magic": "other"}]
)
def test_another_version_is_told_apart(changes: dict[str, object]) -> None:
    with pytest.raises(FormatVersionError):
        decode(encode(hello(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"incarnation": bytes(15)},
        {"incarnation": bytes(17)},
        {"pid": 0},
        {"pid": -1},
        {"record_count": 0},
        {"record_bytes": 2**60},
        {"magic": "x" * 33},
        {"regions": [RegionOffer(region=REGIONS_MAX, slot_count=1, slot_bytes=1)]},
        {"regions": [RegionOffer(region=0, slot_count=0, slot_bytes=1)]},
        {"regions": [RegionOffer(region=0, slot_count=1, slot_bytes=1)] * (REGIONS_MAX + 1)},
    ],
)
def test_fields_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptionError):
        decode(encode(hello(**changes)))


@given(st.binary(max_size=200))
def test_garbage_is_an_error_or_a_message(payload: bytes) -> None:
    try:
        decode(payload)
    except CorruptionError:
        pass


def test_too_long() -> None:
    with pytest.raises(CorruptionError):
        decode(bytes(MESSAGE_BYTES_MAX + 1))
    with pytest.raises(CorruptionError):
        decode(b"\x91" * MESSAGE_BYTES_MAX)  # nested arrays, as deep as fit
