"""A server with an SSD tier: what it had before it was killed, it has after; and its operator's view."""

import json
import os
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
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, PATIENT, blocks_of, chain_of, store
from tests.server_process import WAIT_S, ServerProcess
from tests.waiting import until

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
            sound = {"checked": blocks, "bad": 0}
            assert tiers(run_dir, capsys, "verify") == {
                "dram": sound,
                "ssd": {**sound, "unread": 0},
            }
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


def served_again(run_dir: Path, flags: list[str], numbers: range) -> None:
    """Start a server on the same folder: every chain is there, and right."""
    with (
        ServerProcess(run_dir, DRAM_BYTES, *flags),
        connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool,
    ):
        for number in numbers:
            with pool.lease(pool.match(chain_of(pool, number)), WAIT_S) as lease:
                out = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
                load = pool.load(lease, view_of(LAYOUT, out), deadline_s=WAIT_S)
                assert load.wait(WAIT_S) == CHAIN_BLOCKS
            np.testing.assert_array_equal(out, blocks_of(number))


def test_sigterm_writes_what_waits_for_the_disk(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget of a byte a second: behind its first write nothing goes down but at the end."""
    config = tmp_path / "pool.toml"
    config.write_text("[node]\nstop_timeout_s = 100\n[pool.ssd]\nflush_bytes_s = 1\n")
    flags = ["--ssd", str(tmp_path / "ssd"), "--ssd-bytes", str(256 * LAYOUT.block_bytes)]
    flags += ["--config", str(config)]
    with ServerProcess(run_dir, DRAM_BYTES, *flags) as server:
        with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
            for number in range(3):
                assert store(pool, number) == CHAIN_BLOCKS
            counts = tiers(run_dir, capsys, "stat")["stack"]
            assert counts["backlog"] >= 2 * CHAIN_BLOCKS, counts
        server.signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
    served_again(run_dir, flags, range(3))


# A server whose disk, below it, hangs from SIGUSR1 on, and is well again with SIGUSR2.
HANGING = """
import ctypes, signal, sys
from kvpool.server.main import main
fault = ctypes.CDLL(None).disk_fault
signal.signal(signal.SIGUSR1, lambda *_: fault(1, -1, 0, b"segment"))
signal.signal(signal.SIGUSR2, lambda *_: fault(1, 0, 0, b"segment"))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("back", [True, False])
def test_sigterm_waits_for_a_disk_that_hangs_and_not_beyond_its_limit(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], back: bool
) -> None:
    library = tmp_path / "disk.so"
    source = Path(__file__).with_name("disk.c")
    subprocess.run(
        ["gcc", "-o", library, source, "-shared", "-fPIC", "-ldl", "-pthread"], check=True
    )
    config = tmp_path / "pool.toml"
    config.write_text(f"[node]\nstop_timeout_s = {100 if back else 6}\n")
    flags = ["--ssd", str(tmp_path / "ssd"), "--ssd-bytes", str(256 * LAYOUT.block_bytes)]
    flags += ["--config", str(config), "--dram", str(DRAM_BYTES), "--run-dir", str(run_dir)]
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, *flags],
        env={**os.environ, "LD_PRELOAD": str(library)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            assert server.stdout.readline().startswith("kvpool-server ready")
            with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
                assert store(pool, 0) == CHAIN_BLOCKS
                until(
                    lambda: tiers(run_dir, capsys, "stat")["stack"]["flushed"] == CHAIN_BLOCKS,
                    "the first chain is on the disk",
                )
                server.send_signal(signal.SIGUSR1)
                for number in (1, 2):
                    assert store(pool, number) == CHAIN_BLOCKS
                assert tiers(run_dir, capsys, "stat")["stack"]["backlog"] == 2 * CHAIN_BLOCKS
                server.send_signal(signal.SIGTERM)
                # Nobody is served any more: what was stored is not thrown away yet.
                until(lambda: not (run_dir / "control.sock").exists(), "it stops")
                if back:
                    server.send_signal(signal.SIGUSR2)
            # In order, or at the limit of its time: as the disk lets its threads go.
            assert server.wait(WAIT_S) in ((0,) if back else (0, 1))
            said = server.stderr.read()
        finally:
            server.kill()
    lost = f"{2 * CHAIN_BLOCKS} blocks were not written to {tmp_path / 'ssd'} in time"
    assert (lost in said) is not back, said
    served_again(run_dir, flags[:6], range(3 if back else 1))


def test_a_byte_that_turned_on_the_disk_is_found_and_said(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvpool tier verify` looks at the SSD, too, while the server runs; its exit status says it."""
    flags = ["--ssd", str(tmp_path / "ssd"), "--ssd-bytes", str(256 * LAYOUT.block_bytes)]
    with ServerProcess(run_dir, DRAM_BYTES, *flags):
        with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
            blocks = store(pool, 2)
        until(
            lambda: tiers(run_dir, capsys, "stat")["stack"]["flushed"] == blocks,
            "every block is on the disk",
        )
        with (tmp_path / "ssd" / "segment-0000.kvp").open("r+b") as file:
            file.seek(4096)  # the payload of the first block
            byte = file.read(1)[0]
            file.seek(4096)
            file.write(bytes([byte ^ 64]))
        command = ["tier", "verify", "--run-dir", str(run_dir)]
        capsys.readouterr()
        assert main([*command, "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["dram"]["bad"] == 0
        assert found["ssd"] == {"checked": blocks, "bad": 1, "unread": 0}
        assert tiers(run_dir, capsys, "ls")["ssd"]["ready"] == blocks - 1
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert "unread" in shown and "bad" in shown


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
