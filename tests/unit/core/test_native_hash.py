"""hash.c against hashlib."""

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool._native import ffi, lib


def sha256(payload: bytes) -> bytes:
    digest = ffi.new("uint8_t[32]")
    lib.kvp_sha256(payload, len(payload), digest)
    return bytes(ffi.buffer(digest))


@settings(deadline=None)
@given(st.binary(max_size=300) | st.integers(0, 20_000).map(lambda size: b"\xa5" * size))
def test_sha256(payload: bytes) -> None:
    assert sha256(payload) == hashlib.sha256(payload).digest()


@settings(deadline=None)
@given(
    root=st.binary(min_size=32, max_size=32),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=100),
    block_tokens=st.integers(1, 40),
    extras=st.lists(st.binary(max_size=90), min_size=100, max_size=100) | st.none(),
)
def test_chain(
    root: bytes, tokens: list[int], block_tokens: int, extras: list[bytes] | None
) -> None:
    count = len(tokens) // block_tokens
    array = np.array(tokens, dtype=np.uint32)
    out = np.zeros(32 * count, dtype=np.uint8)
    used = (extras or [])[:count]
    ends = np.cumsum([len(extra) for extra in used], dtype=np.uint64)
    joined = b"".join(used)
    status = lib.kvp_hash_chain(
        root,
        ffi.from_buffer("uint32_t[]", array),
        len(tokens),
        block_tokens,
        ffi.NULL if extras is None else ffi.from_buffer("uint8_t[]", joined),
        ffi.NULL if extras is None else ffi.from_buffer("size_t[]", ends),
        ffi.from_buffer("uint8_t[]", out, require_writable=True),
    )
    assert status == lib.KVP_OK

    expected = b""
    parent = root
    for i in range(count):
        block = array[i * block_tokens : (i + 1) * block_tokens].astype("<u4").tobytes()
        parent = hashlib.sha256(parent + block + (used[i] if used else b"")).digest()
        expected += parent
    assert out.tobytes() == expected


def test_chain_refuses_blocks_of_nothing() -> None:
    tokens = ffi.new("uint32_t[4]")
    out = ffi.new("uint8_t[32]")
    status = lib.kvp_hash_chain(bytes(32), tokens, 4, 0, ffi.NULL, ffi.NULL, out)
    assert status == lib.KVP_INVALID
