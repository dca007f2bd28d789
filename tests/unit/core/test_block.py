import hashlib
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from kvpool.block import (
    DTYPE_BYTES,
    BlockHash,
    BlockLayout,
    Namespace,
    Part,
    new_incarnation,
    sha256,
)
from kvpool.errors import LayoutMismatchError, UsageError

LAYOUT = BlockLayout(num_layers=3, kv_heads=2, block_tokens=16, k_dim=8, v_dim=4, dtype="bfloat16")
NAMESPACE = Namespace(
    model="m", weights="w", compute_dtype="float32", kv_dtype="float32", block_tokens=16
)
BLOCK = BlockHash(bytes(32))


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 1000])
def test_sha256_equals_the_standard_library(size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    assert sha256(payload) == hashlib.sha256(payload).digest()


def test_sizes_of_a_layout_follow_from_its_shape() -> None:
    assert (LAYOUT.k_row_bytes, LAYOUT.v_row_bytes) == (16, 8)
    assert LAYOUT.head_bytes == 16 * (16 + 8)
    assert LAYOUT.layer_bytes == 2 * LAYOUT.head_bytes
    assert LAYOUT.block_bytes == 3 * LAYOUT.layer_bytes
    assert LAYOUT.crc_count == 6
    assert LAYOUT.part() == Part(layer_begin=0, layer_end=3, head_begin=0, head_end=2)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_layout_of_every_dtype(dtype: str) -> None:
    assert replace(LAYOUT, dtype=dtype).k_row_bytes == 8 * DTYPE_BYTES[dtype]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int4"},
        {"block_tokens": 0},
        {"block_tokens": 17},
        {"block_tokens": -16},
        {"num_layers": 0},
        {"kv_heads": -1},
        {"k_dim": 0},
        {"v_dim": -1},
    ],
)
def test_an_impossible_layout_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        replace(LAYOUT, **change)  # type: ignore[arg-type]  # one of them is a text


def test_latent_attention_has_no_v() -> None:
    assert replace(LAYOUT, v_dim=0).head_bytes == 16 * 16


def test_a_mismatch_names_the_fields() -> None:
    LAYOUT.require_equal(replace(LAYOUT))
    with pytest.raises(LayoutMismatchError, match="num_layers 3 != 4, dtype 'bfloat16' != 'uint8'"):
        LAYOUT.require_equal(replace(LAYOUT, num_layers=4, dtype="uint8"))


def test_every_field_of_a_namespace_changes_its_digest() -> None:
    digests = {NAMESPACE.digest}
    for field in fields(Namespace):
        value = 32 if field.name == "block_tokens" else "other"
        changed = replace(NAMESPACE, **{field.name: value})  # type: ignore[arg-type]  # either
        digests.add(changed.digest)
    assert len(digests) == 1 + len(fields(Namespace))
    assert replace(NAMESPACE).digest == NAMESPACE.digest


def test_texts_of_a_namespace_do_not_run_together() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    digests = {replace(NAMESPACE, model=model, weights=weights).digest for model, weights in pairs}
    assert len(digests) == 4


def test_a_digest_does_not_change_between_releases() -> None:
    # A changed digest loses every stored block: it needs another version in the encoding.
    assert NAMESPACE.digest.hex() == (
        "65eec84020d6ace48c5d1c87d73e233dfa6a230fd4299d979134c646dd1bb3c7"
    )


@pytest.mark.parametrize("block_tokens", [0, 8, 17, -16])
def test_a_namespace_of_odd_blocks_is_refused(block_tokens: int) -> None:
    with pytest.raises(UsageError):
        replace(NAMESPACE, block_tokens=block_tokens)


def test_parts_of_a_block_have_keys_of_their_own() -> None:
    whole = LAYOUT.part()
    parts = [
        whole,
        replace(whole, group=1),
        replace(whole, layer_begin=1),
        replace(whole, layer_end=2),
        replace(whole, head_begin=1),
        replace(whole, head_end=1),
    ]
    keys = {part.key(BLOCK) for part in parts}
    assert len(keys) == len(parts)
    assert whole.key(BlockHash(bytes(31) + b"\1")) not in keys


def test_an_empty_part_is_refused() -> None:
    for begin, end in pairwise([1, 1, 0]):
        with pytest.raises(UsageError):
            Part(layer_begin=begin, layer_end=end, head_begin=0, head_end=1)
        with pytest.raises(UsageError):
            Part(layer_begin=0, layer_end=1, head_begin=begin, head_end=end)


def test_incarnations_differ() -> None:
    assert len({new_incarnation() for _ in range(100)}) == 100
