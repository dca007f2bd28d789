"""crc32c.c against RFC 3720's vectors and the definition, a bit at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool._native import lib

crcs = st.integers(0, 2**32 - 1)


def crc32c(payload: bytes, crc: int = 0) -> int:
    return lib.kvp_crc32c(crc, payload, len(payload))


def slow_crc32c(payload: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in payload:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("payload", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_vectors(payload: bytes, crc: int) -> None:
    assert crc32c(payload) == crc


@settings(deadline=None)
@given(st.binary(max_size=700), crcs)
def test_definition(payload: bytes, start: int) -> None:
    assert crc32c(payload, start) == slow_crc32c(payload, start)


@settings(deadline=None)
@given(st.binary(max_size=9000), st.integers(0, 9000))
def test_in_pieces(payload: bytes, cut: int) -> None:
    first, second = payload[:cut], payload[cut:]
    assert crc32c(second, crc32c(first)) == crc32c(payload)
    joined = lib.kvp_crc32c_combine(crc32c(first), crc32c(second), len(second))
    assert joined == crc32c(payload)


@settings(deadline=None)
@given(crcs, crcs, st.integers(0, 2**63))
def test_combine_is_linear(a: int, b: int, size: int) -> None:
    assert lib.kvp_crc32c_combine(a, b, size) == lib.kvp_crc32c_combine(a, 0, size) ^ b
    assert lib.kvp_crc32c_combine(a, b, 0) == a ^ b


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300), st.integers(0, 2399))
def test_a_flipped_bit_shows(payload: bytes, bit: int) -> None:
    bit %= 8 * len(payload)
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    assert crc32c(bytes(damaged)) != crc32c(payload)
