"""Rows inside real engines: the same vLLM and prompts without a cache and with kvpool.

Each engine is a process of its own, in the environment that ``make env-vllm`` makes; the one that is
not measured waits for a line and does nothing. Who calls it: ``kvpool bench engines``.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_peers import said
from kvpool.cli.bench_ucx import Child
from kvpool.errors import UsageError

_ROOT: Final = Path(__file__).resolve().parents[2]
_JOB: Final = _ROOT / "benchmarks" / "engines" / "job.py"
_HOME: Final = _ROOT / ".venv-vllm"
_DRAM_BYTES: Final = 1 << 30
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
            open=_open,
            lower_is_better=True,
            one_process=False,
        ),
    ]


@contextmanager
def _open(timer: Timer) -> Generator[Sides, None, None]:
    del timer  # the engines measure themselves
    with ExitStack() as stack:
        yield _Engines(_kvpool(stack), _nothing(stack))


class _Engines:
    ceiling: float | None = None

    def __init__(self, ours: Child, other: Child) -> None:
        self._ours = ours
        self._other = other
        for engine in (ours, other):
            said(engine, "")
            self._ask(engine)  # cold: what is computed now is stored

    def value(self) -> float:
        return self._ask(self._ours)

    def reference(self) -> float:
        return self._ask(self._other)

    def _ask(self, engine: Child) -> float:
        return float(said(engine, "again")) * 1e3


def interpreter(home: Path, how: str) -> Path:
    """Return the Python of an environment. Raises UsageError, saying how it is made, without one."""
    python = home / "bin" / "python"
    if not python.exists():
        raise UsageError(f"there is no {python}: in the checkout, {how}")
    return python


def _kvpool(stack: ExitStack) -> Child:
    python = interpreter(_HOME, "make env-vllm")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-")))
    run_dir = folder / "run"
    server = _start(
        stack,
        *(sys.executable, "-m", "kvpool.server.main", "--die-with", str(os.getpid())),
        *("--run-dir", str(run_dir), "--dram", str(_DRAM_BYTES)),
    )
    _wait(server, lambda: (run_dir / "control.sock").exists(), "kvpool-server")
    return Child(stack, python, _JOB, "kvpool", run_dir)


def _nothing(stack: ExitStack) -> Child:
    return Child(stack, interpreter(_HOME, "make env-vllm"), _JOB, "none", "-")


def _start(stack: ExitStack, *command: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
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
