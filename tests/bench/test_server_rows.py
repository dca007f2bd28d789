"""The rows against Mooncake's store: their names, what is said without it, and kvpool's own side."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.block import BlockLayout
from kvpool.cli import bench, bench_peers
from kvpool.cli.bench_server_ring import Prompts, Servers
from kvpool.config import TransferConfig
from kvpool.errors import InternalError, UsageError

LAYOUT = BlockLayout(num_layers=4, kv_heads=2, block_tokens=16, k_dim=32, v_dim=32)
BLOCKS = 8


def test_the_names_are_stable() -> None:
    moves = [f"{way}.{job}" for job in ("256KiB", "2MiB", "1x1MiB") for way in ("put", "get")]
    assert [case.name for case in bench.cases_of("server", True)] == [
        *(f"server.{move}" for move in moves),
        *(f"server.tcp.{move}" for move in moves),
        *(f"server.process.{move}" for move in moves),
        "server.exists.10000",
        "server.lookup.131072",
    ]


def test_what_mooncake_lacks_is_said_with_the_command(tmp_path: Path) -> None:
    """A stand-in for its interpreter: a program that wants one variable, or fails."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ -n "$LD_LIBRARY_PATH" ] || { echo "ImportError: libibverbs.so.1" >&2; exit 1; }\n'
    )
    python.chmod(0o755)
    libraries = tmp_path / "lib"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LD_LIBRARY_PATH", raising=False)
        with pytest.raises(UsageError, match=rf"libibverbs.*get_libraries.sh {libraries}"):
            bench_peers.environment(python, libraries)
        libraries.mkdir()
        told = bench_peers.environment(python, libraries)
    assert told["LD_LIBRARY_PATH"] == str(libraries)


def test_our_side_moves_all_it_says_and_compares_it() -> None:
    size = 4 * BLOCKS * LAYOUT.block_bytes
    with ExitStack() as stack:
        pool = Servers(stack, 2, 2 * size).connect(stack, LAYOUT, TransferConfig())
        prompts = Prompts(pool, size, BLOCKS, time.perf_counter)
        assert prompts.put() > 0
        assert prompts.get() > 0
        assert pool.stats().hits == size // LAYOUT.block_bytes
        prompts.source.view()[0] ^= 1
        with pytest.raises(InternalError, match="other bytes"):
            prompts.get()
