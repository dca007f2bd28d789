import hashlib
import struct

import numpy as np
import pytest

from kvpool.block import BlockHash
from kvpool.errors import UsageError
from kvpool.index.hashing import as_tokens, hash_chain

ROOT = BlockHash(bytes(range(32)))


def reference(tokens: list[int], block_tokens: int, extras: list[bytes] | None = None) -> bytes:
    parent, out = bytes(ROOT), b""
    for index in range(len(tokens) // block_tokens):
        block = tokens[index * block_tokens : (index + 1) * block_tokens]
        extra = extras[index] if extras else b""
        parent = hashlib.sha256(parent + struct.pack(f"<{block_tokens}I", *block) + extra).digest()
        out += parent
    return out


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 160, 165])
def test_hashes_equal_the_reference(count: int) -> None:
    tokens = [number * 7919 % (1 << 32) for number in range(count)]
    assert hash_chain(ROOT, tokens, 16) == reference(tokens, 16)


def test_extras_are_bound_to_their_block() -> None:
    tokens, extras = list(range(50)), [b"", b"image", b"x" * 100]
    assert hash_chain(ROOT, tokens, 16, extras) == reference(tokens, 16, extras)
    assert hash_chain(ROOT, tokens, 16, [b""] * 3) == hash_chain(ROOT, tokens, 16)


@pytest.mark.parametrize("extras", [[], [b"a"], [b"a"] * 3])
def test_one_extra_a_full_block_is_needed(extras: list[bytes]) -> None:
    with pytest.raises(UsageError, match="extras"):
        hash_chain(ROOT, list(range(32)), 16, extras)
    with pytest.raises(UsageError, match="extras"):
        hash_chain(ROOT, [], 16, [b"a"])


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(32, dtype=np.uint32),
        np.arange(32, dtype=np.int64),
        np.arange(64, dtype=np.uint32)[::2] // 2,
        tuple(range(32)),
        range(32),
    ],
)
def test_every_kind_of_sequence_hashes_alike(tokens: "np.ndarray | range") -> None:
    assert hash_chain(ROOT, tokens, 16) == reference(list(range(32)), 16)


@pytest.mark.parametrize(
    "tokens",
    [[-1], [1 << 32], [1 << 70], [1.0], ["a"], [[1, 2], [3, 4]], [[1], [2, 3]], [True], [None]],
)
def test_what_is_no_flat_sequence_of_uint32_is_refused(tokens: list[int]) -> None:
    with pytest.raises(UsageError):
        hash_chain(ROOT, tokens, 16)


def test_a_uint32_array_is_not_copied() -> None:
    tokens = np.arange(100, dtype=np.uint32)
    assert as_tokens(tokens) is tokens


@pytest.mark.parametrize("block_tokens", [0, -16])
def test_a_block_of_no_tokens_is_refused(block_tokens: int) -> None:
    with pytest.raises(UsageError, match="block_tokens"):
        hash_chain(ROOT, [1], block_tokens)


def test_a_short_root_is_refused() -> None:
    with pytest.raises(UsageError, match="root"):
        hash_chain(BlockHash(b"short"), [1] * 16, 16)
