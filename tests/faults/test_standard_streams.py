"""Nobody has to read what a daemon says: pipes that are full, descriptors that are closed, full disks."""

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from kvpool.client.connect import connect
from kvpool.errors import KVPoolError
from tests.conftest import Count
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, PATIENT, store
from tests.serve_process import START_S, alive, children
from tests.server_process import WAIT_S
from tests.tiny_model import tiny_model
from tests.waiting import until

DRAM_BYTES = 64 * LAYOUT.block_bytes
# Runs a command with descriptors closed that a parent in Python would open for it.
CLOSED = ("/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")


def fill(descriptor: int) -> None:
    """Write until nothing fits in any more."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, b"x" * 512)
    os.set_blocking(descriptor, True)


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    fill(writer)
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def full_socket() -> Iterator[int]:
    """What a journal that stands still is."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fill(theirs.fileno())
        yield theirs.fileno()


@contextlib.contextmanager
def stopped_terminal() -> Iterator[int]:
    """What Ctrl-S makes of one."""
    ours, theirs = pty.openpty()
    fill(theirs)
    termios.tcflow(theirs, termios.TCOOFF)
    try:
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)


@contextlib.contextmanager
def left_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    with open("/dev/full", "wb") as file:
        yield file.fileno()


def nothing() -> contextlib.AbstractContextManager[None]:
    """None: closed."""
    return contextlib.nullcontext()


Sink = Callable[[], contextlib.AbstractContextManager[int | None]]
SINKS: list[Sink] = [full_pipe, full_socket, stopped_terminal, left_pipe, full_disk, nothing]


@contextlib.contextmanager
def started(sink: Sink, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python with both of its streams going to a sink."""
    with (
        sink() as descriptor,
        subprocess.Popen(
            [*(CLOSED if descriptor is None else ()), sys.executable, *arguments],
            stdout=descriptor,
            stderr=descriptor,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


SAYS = """
import logging, os, sys
from kvpool.standard_streams import never_wait_for_readers
never_wait_for_readers()
never_wait_for_readers()  # again is no harm
logging.basicConfig(level=logging.INFO)
file = open(sys.argv[1], "wb")
for number in range(2000):
    print("to standard output, and longer than nothing", number, flush=True)
    logging.info("to standard error, %s", number)
for descriptor in (1, 2):  # as a library in C does
    try:
        os.write(descriptor, b"past Python" * 100)
    except OSError:
        pass
assert file.fileno() > 2, file.fileno()
file.close()
assert os.stat(sys.argv[1]).st_size == 0
"""


@pytest.mark.parametrize("sink", SINKS)
def test_a_process_ends_well_whatever_becomes_of_its_output(sink: Sink, tmp_path: Path) -> None:
    with started(sink, "-c", SAYS, str(tmp_path / "file")) as process:
        assert process.wait(WAIT_S) == 0


def test_what_is_read_is_whole_and_says_what_was_lost() -> None:
    says = (
        "import sys\n"
        "from kvpool.standard_streams import never_wait_for_readers\n"
        "never_wait_for_readers()\n"
        "print('first \\u00e4', file=sys.stderr)\n"
        "sys.stdin.readline()\n"
        "for number in range(3): print('lost', file=sys.stderr)\n"
        "print('go on', flush=True)\n"
        "sys.stdin.readline()\n"
        "print('last', file=sys.stderr)\n"
    )
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-X", "utf8", "-c", says],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writer,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert os.read(reader, 100).decode() == "first \u00e4\n"
        fill(writer)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"go on\n"
        while set(os.read(reader, 1 << 16)) == {ord("x")} and pending(reader):
            pass
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
        os.close(writer)
        with open(reader) as rest:
            assert rest.read() == "(3 pieces of output were lost here: nobody took them)\nlast\n"


def test_what_fits_in_part_is_lost_too() -> None:
    says = (
        "import sys\n"
        "from kvpool.standard_streams import never_wait_for_readers\n"
        "never_wait_for_readers()\n"
        "sys.stderr.buffer.raw.write(b'y' * (1 << 20))\n"
        "print('go on', flush=True)\n"
        "sys.stdin.readline()\n"
        "print('last', file=sys.stderr)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", says],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == b"go on\n"
        while set(os.read(process.stderr.fileno(), 1 << 16)) <= {ord("y")} and pending(
            process.stderr.fileno()
        ):
            pass
        os.set_blocking(process.stderr.fileno(), True)
        process.stdin.write(b"\n")
        process.stdin.close()
        assert b" of output were lost here: nobody took them)\nlast\n" in process.stderr.read()
        assert process.wait(WAIT_S) == 0


def pending(reader: int) -> bool:
    os.set_blocking(reader, False)
    try:
        return bool(os.read(reader, 1 << 16))
    except BlockingIOError:
        return False
    finally:
        os.set_blocking(reader, True)


@pytest.mark.parametrize("sink", [full_pipe, full_disk, nothing])
def test_a_server_serves_and_ends(
    sink: Sink, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    run_dir = tmp_path_factory.mktemp("r") / "d"
    config = tmp_path / "pool.toml"
    config.write_text('[node]\nlog_level = "debug"\n')
    ssd = ["--ssd", str(tmp_path / "ssd"), "--ssd-bytes", str(256 * LAYOUT.block_bytes)]
    flags = ["--run-dir", str(run_dir), "--dram", str(DRAM_BYTES), "--config", str(config), *ssd]
    with started(sink, "-m", "kvpool.server.main", *flags) as process:

        def serves() -> bool:
            assert process.poll() is None
            try:
                with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
                    return store(pool, 1) == CHAIN_BLOCKS
            except KVPoolError:
                return False

        until(serves, "it serves")
        for descriptor in (1, 2):
            # No file of its own, above all none of the SSD tier.
            assert os.readlink(f"/proc/{process.pid}/fd/{descriptor}").startswith(("pipe:", "/dev"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_a_worker_that_cannot_start_ends(tmp_path: Path) -> None:
    flags = ["--model", str(tmp_path / "none"), "--run-dir", str(tmp_path), "--name", "w0"]
    with started(full_pipe, "-m", "kvpool.integration.runtime.decode", *flags) as process:
        assert process.wait(WAIT_S) in (1, 2)


def test_kvpool_serve_and_its_workers_serve_and_end(
    tmp_path_factory: pytest.TempPathFactory, count: Count
) -> None:
    folder = tmp_path_factory.mktemp("s")
    model = tiny_model(folder / "m")
    for number, sink in enumerate((full_pipe, nothing)[: count(1, 2)]):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        flags = ["--port", str(port), "--run-dir", str(folder / f"d{number}"), "--dram", "64MiB"]
        flags += ["--model", str(model), "--die-with", str(os.getpid())]
        with started(sink, "-m", "kvpool.integration.serve", *flags) as process:
            serve_and_end(process, f"http://127.0.0.1:{port}")


def serve_and_end(process: subprocess.Popen[bytes], url: str) -> None:
    with httpx.Client(timeout=START_S, trust_env=False, base_url=url) as http:

        def healthy() -> bool:
            assert process.poll() is None
            try:
                return http.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        until(healthy, "it serves")
        body = {"prompt": "abc " * 20, "max_tokens": 4}
        assert http.post("/v1/completions", json=body).status_code == 200
        workers = children(process.pid)
        assert len(workers) >= 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert not [pid for pid in workers if alive(pid)]
