"""The server as a process: its folder, its flags, its end."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.cli.main import main
from kvpool.client.connect import connect
from kvpool.completion import Deadline
from kvpool.errors import PeerUnreachableError
from kvpool.transfer import handshake
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, PATIENT, chain_of, store
from tests.server_process import WAIT_S, ServerProcess
from tests.waiting import until

DRAM_BYTES = 64 * LAYOUT.block_bytes
SOCKETS = ["control.sock", "transport.sock"]


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("r")  # short: the path of a socket has little room
    yield folder / "d"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to refuse."""
    return subprocess.run(
        [sys.executable, "-m", "kvpool.server.main", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(run_dir: Path, number: signal.Signals) -> None:
    with ServerProcess(run_dir, DRAM_BYTES) as server:
        assert names(run_dir) == SOCKETS
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
            store(pool, 1)
            lease = pool.lease(pool.match(chain_of(pool, 1)), 60)
            assert lease.blocks
            server.signal(number)
            assert server.process.wait(WAIT_S) == 0
        assert not run_dir.exists(), "it made the folder, so it removes it"


def test_a_folder_that_was_there_stays(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "mine").touch()
    with ServerProcess(run_dir, DRAM_BYTES) as server:
        assert server.stop() == 0
    assert names(run_dir) == ["mine"]


def test_a_fresh_folder_is_made_said_and_removed() -> None:
    command = [sys.executable, "-m", "kvpool.server.main", "--die-with", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        folder = Path(server.stdout.readline().removeprefix("kvpool-server ready in ").strip())
        assert names(folder) == SOCKETS
        server.send_signal(signal.SIGINT)
        assert server.wait(WAIT_S) == 0
    assert not folder.exists()


@pytest.mark.parametrize("module", ["server.main", "integration.runtime.decode"])
def test_who_starts_after_its_launcher_died_ends(run_dir: Path, module: str) -> None:
    worker = () if module == "server.main" else ("--model", str(run_dir), "--name", "w0")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", f"kvpool.{module}", "--die-with", "1", *worker),
            *("--run-dir", str(run_dir)),
        ],
        check=False,
        capture_output=True,
        timeout=WAIT_S,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")


def test_what_a_killed_server_left_is_replaced(run_dir: Path) -> None:
    with ServerProcess(run_dir, DRAM_BYTES) as first:
        first.kill()
        assert names(run_dir) == SOCKETS
        with pytest.raises(PeerUnreachableError):
            connect(run_dir, LAYOUT, WAIT_S)
        with (
            ServerProcess(run_dir, DRAM_BYTES),
            connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool,
        ):
            assert store(pool, 1)


def test_a_live_server_is_not_replaced(run_dir: Path) -> None:
    with ServerProcess(run_dir, DRAM_BYTES):
        refused = run("--run-dir", str(run_dir))
        assert refused.returncode == 2
        assert "is running in" in refused.stderr
        assert "--run-dir" in refused.stderr
        with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
            assert store(pool, 1), "the one that runs is not disturbed"


def test_folders_and_flags_that_are_refused(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o755)
    refused = run("--run-dir", str(run_dir))
    assert (refused.returncode, "chmod 700" in refused.stderr) == (2, True)
    run_dir.chmod(0o700)
    (run_dir / "control.sock").write_text("not a socket")
    refused = run("--run-dir", str(run_dir))
    assert (refused.returncode, "is no socket" in refused.stderr) == (2, True)
    assert (run_dir / "control.sock").read_text() == "not a socket"
    for flags, said in (
        (["--run-dir", str(run_dir / "no" / "such")], "cannot make"),
        (["--run-dir", "/" + "x" * 100], "shorter"),
        (["--dram", "lots"], "--dram"),
        (["--metrics-port", "99999"], "--metrics-port"),
        (["--trace", "/no/such/file"], "cannot write the trace"),
    ):
        refused = run(*flags)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
        assert "Traceback" not in refused.stderr


def test_it_ends_with_the_process_that_started_it(run_dir: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.server_process import ServerProcess\n"
        "server = ServerProcess(Path(sys.argv[1]), 1 << 20)\n"
        "print(server.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()
    until(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid), "it has ended")
    assert not run_dir.exists()


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1].startswith("Z")
    except FileNotFoundError:
        return True


def test_metrics_and_trace(run_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trace = tmp_path / "trace"
    flags = ["--metrics-port", str(port), "--trace", str(trace)]
    with ServerProcess(run_dir, DRAM_BYTES, *flags):
        with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
            store(pool, 1)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as reply:
            shown = reply.read().decode()
        assert 'kvpool_server_request_seconds_count{method="store",outcome="ok"} 1.0' in shown
        until(lambda: b'"event":"PeerLost"' in trace.read_bytes(), "the client's end is traced")


def test_the_command_line_shows_what_a_server_holds(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ServerProcess(run_dir, DRAM_BYTES):
        assert main(["stat", "--run-dir", str(run_dir), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["server"]
        assert shown["slots"] == 0, "no layout is known yet"
        with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
            blocks = store(pool, 1)
            assert main(["stat", "--run-dir", str(run_dir)]) == 0
            lines = capsys.readouterr().out.splitlines()[1:]
            hashes = chain_of(pool, 1).hashes
            asked = [arg for at in range(2) for arg in ("--hash", hashes[at * 32 :][:32].hex())]
            assert main(["match", "--run-dir", str(run_dir), "--json", *asked]) == 0
            found = json.loads(capsys.readouterr().out)
            assert found == {"blocks": 2, "nodes": [{"node": "server", "blocks": 2}]}
            assert main(["nodes", "--run-dir", str(run_dir)]) == 0
            titles, row = capsys.readouterr().out.splitlines()
            assert titles.split()[:3] == ["node", "address", "state"]
            assert row.split()[2:5] == ["up", "64", str(blocks)]
            assert (
                main(["top", "--run-dir", str(run_dir), "--times", "2", "--interval", "0.01"]) == 0
            )
            assert len(capsys.readouterr().out.splitlines()) == 4
        shown = dict(line.split() for line in lines)
        assert (shown["slots"], shown["ready"], shown["clients"]) == ("64", str(blocks), "1")


def test_nobody_need_read_what_it_logs(run_dir: Path) -> None:
    """Its standard error is a pipe here, which is full long before the last of these is refused."""
    with ServerProcess(run_dir, DRAM_BYTES) as server:
        path = str(run_dir / SOCKETS[1])
        for _ in range(1500):
            with handshake.connect(path, Deadline(WAIT_S)) as stranger:
                stranger.send(b"no hello, and as long as it can be to be quoted" * 4)
        with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
            assert store(pool, 1) == CHAIN_BLOCKS
        server.signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
        assert server.process.stderr is not None
        assert server.process.stderr.readline().startswith("kvpool-server WARNING refused process")


def test_it_ends_in_time_while_the_arena_is_opened(run_dir: Path) -> None:
    """Opening takes a second per GiB; a signal does not wait for more than the stop time."""
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with ServerProcess(run_dir, min(free_bytes // 4, 2 << 30)) as server:
        with pytest.raises(PeerUnreachableError):
            # Ends the server while the first client waits for the arena.
            signal.signal(signal.SIGALRM, lambda *_: server.signal(signal.SIGTERM))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            connect(run_dir, LAYOUT, WAIT_S).close()
            raise PeerUnreachableError("the arena was there sooner than the signal")
        server.process.wait(WAIT_S)
    assert not run_dir.exists()
