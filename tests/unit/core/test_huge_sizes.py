"""Shapes and counts whose bytes no number of the formats holds: each is refused, and by its type."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpool.arena import Arena
from kvpool.block import DTYPE_BYTES, BlockLayout, new_incarnation
from kvpool.config import PoolConfig, SsdConfig, parse_size
from kvpool.errors import CapacityError, ConfigError, KVPoolError, UsageError
from kvpool.pool import Pool
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.tiers.ssd_files import SsdFiles
from kvpool.tiers.ssd_format import STORE_ID_BYTES, Geometry, Superblock, decode_superblock

# Around each power of two: where a product of a few comes round.
_AROUND = st.builds(lambda bits, more: (1 << bits) + more, st.integers(0, 70), st.integers(-1, 1))
DIMENSIONS = _AROUND.filter(lambda size: size > 0)
LIMIT = 1 << 63


@given(
    num_layers=DIMENSIONS,
    kv_heads=DIMENSIONS,
    tokens=DIMENSIONS,
    k_dim=DIMENSIONS,
    v_dim=DIMENSIONS,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    slots=DIMENSIONS,
)
@example(1 << 31, 1 << 30, 1, 1 << 4, 1 << 4, "uint8", 1)  # 2^70 bytes: comes round to 0
@example(1 << 20, 1, 1, 1 << 20, 1, "uint8", 1 << 60)
@example(1, 1, 1, 1 << 32, 1, "uint8", 1)
@example(1 << 31, 4, 1, 1, 1, "uint8", 1)  # more checksums than a header counts
def test_whatever_is_made_fits_the_formats(
    num_layers: int, kv_heads: int, tokens: int, k_dim: int, v_dim: int, dtype: str, slots: int
) -> None:
    try:
        layout = BlockLayout(
            num_layers=num_layers,
            kv_heads=kv_heads,
            block_tokens=16 * tokens,
            k_dim=k_dim,
            v_dim=v_dim,
            dtype=dtype,
        )
    except UsageError:
        exact = num_layers * kv_heads * 16 * tokens * (k_dim + v_dim) * DTYPE_BYTES[dtype]
        longest = max(num_layers, kv_heads, 16 * tokens, k_dim, v_dim, num_layers * kv_heads)
        assert exact >= LIMIT or longest >= 1 << 32
        return
    assert layout.block_bytes < LIMIT and layout.crc_count < 1 << 32
    try:
        geometry = Geometry.plan(layout, slots)
    except ConfigError:
        assert slots * layout.block_bytes + slots * 8192 >= LIMIT or slots > (1 << 31) - 2
    else:
        assert sum(map(geometry.segment_bytes, {0, geometry.segment_count - 1})) < LIMIT
        superblock = Superblock(store_id=bytes(STORE_ID_BYTES), geometry=geometry)
        assert decode_superblock(superblock.encode(), "a store") == superblock
    if slots * layout.block_bytes > 1 << 50:  # so much is taken nowhere
        with pytest.raises(CapacityError, match="ask for less"):
            Arena(layout, slots, new_incarnation())


@pytest.mark.parametrize("size", [1 << 45, 1 << 62, 1 << 63, 1 << 64, 1 << 90])
def test_a_pool_of_more_than_there_is_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        Pool.open(SMALL_LAYOUT, PoolConfig(dram_bytes=size))
    ssd = SsdConfig(folder=tmp_path / "store", capacity_bytes=size)
    with pytest.raises((CapacityError, ConfigError)):
        Pool.open(SMALL_LAYOUT, PoolConfig(dram_bytes=1 << 20, ssd=ssd))
    assert not list(tmp_path.rglob("segment-*"))


def test_a_store_of_too_many_slots_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fewer bytes"):
        SsdFiles(tmp_path, Geometry.plan(SMALL_LAYOUT, 1 << 31))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "TiB", "1" + "0" * 308 + "TiB"])
def test_a_size_beyond_all_numbers_is_refused(text: str) -> None:
    with pytest.raises(KVPoolError, match="whole bytes"):
        parse_size(text)
