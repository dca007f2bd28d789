"""A server with an SSD tier: what it had before it was killed, it has after; and its operator's view."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.cli.main import main
from kvpool.client.connect import connect
from kvpool.testing.blocks import view_of
from tests.faults.pool_client import LAYOUT, PATIENT, blocks_of, chain_of, store
from tests.server_process import WAIT_S, ServerProcess, until

DRAM_BYTES = 64 * LAYOUT.block_bytes


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("r") / "d"


def tiers(
    run_dir: Path, capsys: pytest.CaptureFixture[str], *action: str
) -> dict[str, dict[str, int]]:
    capsys.readouterr()
    assert main(["tier", *action, "--run-dir", str(run_dir), "--json"]) == 0
    found: dict[str, dict[str, int]] = json.loads(capsys.readouterr().out)
    return found


def test_what_was_flushed_outlives_a_kill(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--ssd", str(tmp_path / "ssd"), "--ssd-bytes", str(256 * LAYOUT.block_bytes)]
    with ServerProcess(run_dir, DRAM_BYTES, *flags) as server:
        with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
            blocks = store(pool, 1)
            until(
                lambda: tiers(run_dir, capsys, "stat")["stack"]["flushed"] == blocks,
                "every block is on the disk",
            )
            assert tiers(run_dir, capsys, "ls")["ssd"]["ready"] == blocks
            assert tiers(run_dir, capsys, "verify") == {"dram": {"checked": blocks, "bad": 0}}
            assert tiers(run_dir, capsys, "evict", "--blocks", "3") == {"dram": {"evicted": 3}}
            assert pool.match(chain_of(pool, 1)).blocks == blocks
        server.signal(signal.SIGKILL)
        server.kill()
    with (
        ServerProcess(run_dir, DRAM_BYTES, *flags),
        connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool,
    ):
        assert pool.match(chain_of(pool, 1)).blocks == blocks
        with pool.lease(pool.match(chain_of(pool, 1)), WAIT_S) as lease:
            out = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
            assert pool.load(lease, view_of(LAYOUT, out), deadline_s=WAIT_S).wait(WAIT_S) == blocks
        np.testing.assert_array_equal(out, blocks_of(1))
        counts = tiers(run_dir, capsys, "stat")
        assert counts["stack"]["promoted"] == blocks == counts["dram"]["ready"]


def test_the_metrics_tell_of_every_tier(run_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ["--ssd", str(tmp_path / "ssd"), "--ssd-bytes", str(256 * LAYOUT.block_bytes)]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def shown() -> str:
        with direct.open(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as reply:
            text: str = reply.read().decode()
        return text

    with (
        ServerProcess(run_dir, DRAM_BYTES, *flags, "--metrics-port", str(port)),
        connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool,
    ):
        blocks = store(pool, 1)
        wanted = [
            f'kvpool_tiers_slot_count{{state="ready",tier="{tier}"}} {blocks}.0'
            for tier in ("dram", "ssd")
        ]
        wanted.append(f'kvpool_tiers_flush_blocks_total{{outcome="flushed"}} {blocks}.0')
        wanted.append("kvpool_tiers_backlog_bytes 0.0")
        wanted.append('kvpool_tiers_missed_blocks_total{reason="mismatch",tier="dram"} 0.0')
        until(lambda: all(line in shown() for line in wanted), "the counts of both tiers")


@pytest.mark.parametrize(
    "flags",
    [["--ssd", "somewhere"], ["--ssd-bytes", "1GiB"], ["--ssd", "x", "--ssd-bytes", "none"]],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kvpool.server.main", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 2 and "--ssd" in ended.stderr
