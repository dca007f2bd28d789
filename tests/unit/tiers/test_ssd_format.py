import random

import pytest

from kvpool.errors import CorruptionError, FormatVersionError
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.tiers.ssd_format import (
    SUPERBLOCK_BYTES,
    Geometry,
    Superblock,
    decode_superblock,
    whole_copies,
)
from tests.conftest import Count

BITS = 8 * 2 * SUPERBLOCK_BYTES


@pytest.fixture
def copies() -> tuple[Superblock, Superblock]:
    made = Superblock(store_id=bytes(range(16)), geometry=Geometry.plan(SMALL_LAYOUT, 100))
    opened = made.opened()
    return opened.closed(0x12345678, 1 << 20), opened  # by where they lie


def test_every_flipped_bit_of_the_superblock_leaves_the_other_copy(
    copies: tuple[Superblock, Superblock], count: Count
) -> None:
    """In memory, so that it can be every bit, with --soak; a store on a disk has a test of its own."""
    raw = bytearray(b"".join(copy.encode() for copy in copies))
    assert [copy.offset for copy in copies] == [0, SUPERBLOCK_BYTES]
    for bit in random.Random(1).sample(range(BITS), count(2000, BITS)):
        raw[bit // 8] ^= 1 << bit % 8
        damaged = bit // 8 // SUPERBLOCK_BYTES
        assert whole_copies(bytes(raw)) == {1 - damaged}, bit
        assert decode_superblock(bytes(raw), "store") == copies[1 - damaged], bit
        raw[bit // 8] ^= 1 << bit % 8
    assert decode_superblock(bytes(raw), "store") == copies[0]


def test_two_damaged_copies_are_no_superblock(copies: tuple[Superblock, Superblock]) -> None:
    raw = bytearray(b"".join(copy.encode() for copy in copies))
    for at in (100, SUPERBLOCK_BYTES + 100):
        raw[at] ^= 1
    with pytest.raises(CorruptionError, match="remove the folder"):
        decode_superblock(bytes(raw), "store")
    for at in (8, SUPERBLOCK_BYTES + 8):  # the version
        raw[at] ^= 2
    with pytest.raises(FormatVersionError, match="has version 3"):
        decode_superblock(bytes(raw), "store")
