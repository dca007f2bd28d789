from pathlib import Path

import pytest

from kvpool.config import (
    PoolConfig,
    RuntimeConfig,
    ServerConfig,
    TransferConfig,
    parse_size,
)
from kvpool.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5KiB", 1536),
        (" 2TB ", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "1.5B", "8G", "8gib", "GiB", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, key="pool.dram_bytes")
    assert caught.value.key == "pool.dram_bytes"
    assert "pool.dram_bytes" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: PoolConfig(dram_bytes=0), "pool.dram_bytes"),
        (lambda: PoolConfig(lease_seconds_max=-1.0), "pool.lease_seconds_max"),
        (lambda: TransferConfig(match_timeout_s=0.0), "transfer.match_timeout_s"),
        (lambda: TransferConfig(backoff_max_s=0.1), "transfer.backoff_max_s"),
        (lambda: ServerConfig(run_dir=Path("/" + "x" * 100)), "server.run_dir"),
        (lambda: RuntimeConfig(block_tokens=24), "runtime.block_tokens"),
        (lambda: RuntimeConfig(device="cuda"), "runtime.device"),
        (lambda: RuntimeConfig(dtype="int3"), "runtime.dtype"),
        (lambda: RuntimeConfig(chunk_tokens=0), "runtime.chunk_tokens"),
    ],
)
def test_a_wrong_setting_is_named(make: object, key: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key


def test_defaults_are_valid() -> None:
    assert ServerConfig(run_dir=Path("/tmp/x")).pool.dram_bytes == 1 << 30
    assert RuntimeConfig().dtype == "float32"
    assert TransferConfig().match_timeout_s == 0.25


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError):
        PoolConfig(dram_gb=1)  # type: ignore[call-arg]
