"""kvpool-serve as a program: how it stops, and what it says of wrong arguments."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve_process import START_S, WAIT_S, ServeProcess, alive, stopped
from tests.tiny_model import tiny_model
from tests.waiting import until


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvpool.integration.serve", *flags],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


def test_ctrl_c_in_mid_stream_ends_everything(tiny: Path) -> None:
    before = shared_memory()
    with ServeProcess(model=tiny) as server:
        pids = server.pids()
        assert set(pids) == {"pool", "p0", "d0"}
        with server.stream("abc " * 20, max_tokens=200) as events:
            next(events)
            # As a terminal does it: to the whole group of the launcher.
            os.killpg(server.process.pid, signal.SIGINT)
            code = server.process.wait(WAIT_S)
        assert code == 0
        assert not [name for name, pid in pids.items() if alive(pid)]
        assert not server.run_dir.exists()
        log = server.log.read_text()
    assert shared_memory() == before
    assert "Traceback" not in log


def test_sigterm_ends_a_worker_that_is_stopped(tiny: Path) -> None:
    with ServeProcess(model=tiny) as server:
        pids = server.pids()
        with stopped(pids["d0"]):
            server.process.terminate()
            assert server.process.wait(WAIT_S) == 0
        assert not [name for name, pid in pids.items() if alive(pid)]
        assert not server.run_dir.exists()


def test_a_killed_launcher_leaves_no_process(tiny: Path) -> None:
    with ServeProcess(model=tiny) as server:
        pids = server.pids()
        server.process.kill()
        until(lambda: not any(alive(pid) for pid in pids.values()), "the children are gone")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield int(holder.getsockname()[1])


def test_a_port_in_use_is_one_line(taken_port: int, tiny: Path) -> None:
    done = command("--port", str(taken_port), "--model", str(tiny))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(taken_port) in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--block-tokens", "17"), "block_tokens"),
        (("--dram", "lots"), "--dram"),
        (("--dtype", "int3"), "dtype"),
        (("--dtype", "uint8"), "float32, bfloat16, float16"),
        (("--host", ""), "--host"),
        (("--trace-dir", "/proc/none"), "--trace-dir"),
        (("--threads", "0"), "--threads"),
        (("--prefill", "0"), "--prefill"),
        (("--decode", "65"), "--decode"),
        (("--port", "70000"), "port"),
    ],
)
def test_wrong_arguments_are_one_line(flags: tuple[str, ...], says: str) -> None:
    done = command(*flags)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr


@pytest.mark.parametrize("flag", ["--dram", "--kv-bytes"])
def test_memory_without_room_for_a_block_is_said_before_anything_starts(
    tiny: Path, flag: str
) -> None:
    done = command("--port", "0", "--model", str(tiny), flag, "1KiB")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert flag in done.stderr


def test_a_run_dir_is_used_again_after_a_kill_and_never_shared(tiny: Path, tmp_path: Path) -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="kvpr-", dir="/tmp"))  # a socket's path must be short
    flags = ("--run-dir", str(run_dir))
    with ServeProcess(*flags, model=tiny) as server:
        pids = server.pids()
        refused = command("--port", "0", "--model", str(tiny), *flags)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "another kvpool-serve runs" in refused.stderr
        assert server.complete("abc", max_tokens=2), "the one that runs is not disturbed"
        server.process.kill()
        until(lambda: not any(alive(pid) for pid in pids.values()), "the children are gone")
    assert any(run_dir.iterdir()), "a killed one cannot clean up"
    with ServeProcess(*flags, model=tiny) as server:
        server.complete("abc", max_tokens=2)
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(WAIT_S) == 0
    assert not run_dir.exists()
    run_dir.mkdir()
    (run_dir / "mine").touch()
    refused = command("--port", "0", "--model", str(tiny), *flags)
    assert (refused.returncode, "mine" in refused.stderr) == (2, True)
    (run_dir / "mine").unlink()
    run_dir.rmdir()


def test_a_folder_without_a_model_is_said_once(tmp_path: Path) -> None:
    done = command("--port", "0", "--model", str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "config.json" in done.stderr


def test_help_teaches() -> None:
    done = command("--help")
    assert done.returncode == 0
    for flag in (
        "--model",
        "--device",
        "--dtype",
        "--block-tokens",
        "--dram",
        "--port",
        "--prefill",
        "--decode",
    ):
        assert flag in done.stdout
    assert "examples:" in done.stdout
