"""Rows inside real engines: the same vLLM and prompts without a cache, with kvpool, with LMCache.

Each engine is a process of its own, in the environment that ``make env-vllm`` or ``make env-lmcache``
makes; the one that is not measured waits for a line and does nothing. Who calls it: ``kvpool bench engines``.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_peers import said
from kvpool.cli.bench_ucx import Child
from kvpool.errors import UsageError

_ROOT: Final = Path(__file__).resolve().parents[2]
_JOB: Final = _ROOT / "benchmarks" / "engines" / "job.py"
_HOME: Final = _ROOT / ".venv-vllm"
_LMCACHE: Final = _ROOT / ".venv-lmcache"
_DRAM_BYTES: Final = 2 << 30
# Of the job: how many prompts, and tokens of each that a cache can have.
_PROMPTS: Final = 4
_TOKENS: Final = {"ttft": 512, "reload": 1024}
_HITS: Final = 1.0
# Stores go on in the background: so often an engine is asked until it finds all of them.
_ROUNDS_MAX: Final = 20
_START_S: Final = 120.0
_STOP_S: Final = 10.0


def cases(quick: bool) -> list[Case]:
    """Return the rows."""
    del quick  # an engine's start is what takes time
    return [
        Case(
            name="engines.vllm.ttft",
            unit="ms",
            reference="the same engine without a cache",
            open=partial(
                _open, _Reader(_kvpool, "ttft", _ms, _HITS), _Reader(_nothing, "ttft", _ms)
            ),
            lower_is_better=True,
            one_process=False,
        ),
        Case(
            name="engines.vllm.reload",
            unit="GB/s",
            reference="LMCache's server in the same engine",
            open=partial(
                _open,
                _Reader(_kvpool, "reload", _gb_s, _HITS),
                _Reader(_lmcache, "reload", _gb_s, _HITS),
            ),
            one_process=False,
        ),
        Case(
            name="engines.vllm.hung",
            unit="ms",
            reference="the same engine without a cache; the server of the other is stopped",
            open=partial(
                _open, _Reader(_kvpool, "reload", _ms, hung=True), _Reader(_nothing, "reload", _ms)
            ),
            lower_is_better=True,
            one_process=False,
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a job said: how long its prompts took together, and what of them was not computed."""

    seconds: float
    cached_tokens: int
    cached_bytes: int


def _ms(answer: _Answer) -> float:
    """Return the time to first token, the mean of the prompts."""
    return answer.seconds * 1e3 / _PROMPTS


def _gb_s(answer: _Answer) -> float:
    return answer.cached_bytes / answer.seconds / 1e9


@dataclass(frozen=True, slots=True)
class _Reader:
    """One side of a row.

    Attributes:
        start: Starts the engine of a job.
        job: Of ``benchmarks/engines/job.py``.
        figure: What is taken from an answer.
        hits: Share of the job's tokens that are in the cache when it is measured.
        hung: Whether the server is stopped once the engine is ready.
    """

    start: Callable[[ExitStack, str], "_Started"]
    job: str
    figure: Callable[[_Answer], float]
    hits: float = 0.0
    hung: bool = False


@dataclass(frozen=True, slots=True)
class _Started:
    """An engine, and the server that it uses."""

    engine: Child
    server: "subprocess.Popen[bytes] | None"


@contextmanager
def _open(ours: _Reader, other: _Reader, timer: Timer) -> Generator[Sides, None, None]:
    del timer  # the engines measure themselves
    with ExitStack() as stack:
        yield _Engines(_Engine(stack, ours), _Engine(stack, other))


class _Engine:
    """An engine that is ready, and warm: what is computed the first time is stored."""

    def __init__(self, stack: ExitStack, reader: _Reader) -> None:
        self._reader = reader
        started = reader.start(stack, reader.job)
        self._child = started.engine
        said(self._child, "")
        if reader.hung and started.server is not None:
            started.server.send_signal(signal.SIGSTOP)
        for _ in range(_ROUNDS_MAX):
            if self.ask().cached_tokens >= reader.hits * _PROMPTS * _TOKENS[reader.job]:
                return
        raise UsageError(f"{reader.job}: the engine does not find what it has stored")

    def ask(self) -> _Answer:
        seconds, tokens, size_bytes = said(self._child, "again").split()
        return _Answer(float(seconds), int(tokens), int(size_bytes))

    def figure(self) -> float:
        answer = self.ask()
        if answer.cached_tokens < self._reader.hits * _PROMPTS * _TOKENS[self._reader.job]:
            raise UsageError(f"{self._reader.job}: the engine lost what it had stored")
        return self._reader.figure(answer)


class _Engines:
    ceiling: float | None = None

    def __init__(self, ours: _Engine, other: _Engine) -> None:
        self.value = ours.figure
        self.reference = other.figure


def interpreter(home: Path, how: str) -> Path:
    """Return the Python of an environment. Raises UsageError, saying how it is made, without one."""
    python = home / "bin" / "python"
    if not python.exists():
        raise UsageError(f"there is no {python}: in the checkout, {how}")
    return python


def _kvpool(stack: ExitStack, job: str) -> _Started:
    python = interpreter(_HOME, "make env-vllm")
    run_dir, server = _server(stack)
    return _Started(Child(stack, python, _JOB, "kvpool", job, run_dir), server)


def _server(stack: ExitStack) -> "tuple[Path, subprocess.Popen[bytes]]":
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-")))
    run_dir = folder / "run"
    server = _start(
        stack,
        *(sys.executable, "-m", "kvpool.server.main", "--die-with", str(os.getpid())),
        *("--run-dir", str(run_dir), "--dram", str(_DRAM_BYTES)),
    )
    _wait(server, lambda: (run_dir / "control.sock").exists(), "kvpool-server")
    return run_dir, server


def _lmcache(stack: ExitStack, job: str) -> _Started:
    """Start LMCache's server with its own defaults, and an engine on it."""
    python = interpreter(_LMCACHE, "make env-lmcache")
    port, web = _free_port(), _free_port()
    gigabytes = str(_DRAM_BYTES >> 30)
    server = _start(
        stack,
        *(str(python.with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--http-port", str(web), "--eviction-policy", "LRU"),
        *("--l1-size-gb", gigabytes, "--l1-init-size-gb", gigabytes),
        *("--supported-transfer-mode", "auto"),
    )
    _wait(server, partial(_listens, port), "LMCache's server")
    return _Started(Child(stack, python, _JOB, "lmcache", job, port), server)


def _nothing(stack: ExitStack, job: str) -> _Started:
    python = interpreter(_HOME, "make env-vllm")
    return _Started(Child(stack, python, _JOB, "none", job, "-"), None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _start(stack: ExitStack, *command: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)  # it may be stopped
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)


def _wait(process: "subprocess.Popen[bytes]", ready: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + _START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > give_up:
            raise UsageError(f"{what} did not start: run it by hand to see why")
        time.sleep(0.1)
