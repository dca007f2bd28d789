"""Rows against other transfer engines: the same job over the same memory, each in its own environment.

A peer is never installed beside kvpool: it runs ``benchmarks/peers/job.py`` with the interpreter of
``build/peers/NAME``, which whoever measures makes once. Who calls it: ``kvpool bench peers``.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_transfer import pulls
from kvpool.cli.bench_ucx import Child, Reader, Scale, Writer, sampled
from kvpool.errors import UsageError

_ROOT: Final = Path(__file__).resolve().parents[2]
_JOB: Final = _ROOT / "benchmarks" / "peers" / "job.py"
_HOMES: Final = _ROOT / "build" / "peers"
_PACKAGES: Final = {
    "nixl": "nixl",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "ucxx": "ucxx-cu12",
}
_TITLES: Final = {
    "nixl": "NIXL, UCX",
    "mooncake": "Mooncake's transfer engine",
    "ucxx": "ucxx, asyncio",
}
# Where ``make env`` puts ucxx beside all of kvpool.
_UCXX_PYTHON: Final = Path(sys.prefix) / "ucxx" / "bin" / "python"
# What Mooncake's wheel expects of the system, and how it comes to where the system has none.
_GET_LIBRARIES: Final = _ROOT / "benchmarks" / "peers" / "get_libraries.sh"
_LIBRARIES: Final = _HOMES / "lib"
_IMPORT_S: Final = 60.0
_SIZE: Final = 1 << 20
_LAYERS: Final = 16  # of 64 KiB: blocks of 1 MiB
_STRIDE: Final = 37
_SAID: Final = "kvpool:"  # as in bench_ucxx_peer
# Lines that an engine may say for itself before ours.
_CHATTER_MAX: Final = 10_000


def cases(quick: bool) -> list[Case]:
    """Return the rows."""
    scale = Scale.of(quick)
    return [
        _case("peers.nixl.tcp.write.1MiB", "nixl", "write", "tcp", _ours_write, scale),
        _case("peers.nixl.tcp.read.1MiB", "nixl", "read", "tcp", _ours_read, scale),
        _case("peers.mooncake.tcp.write.1MiB", "mooncake", "write", "tcp", _ours_write, scale),
        _case("peers.nixl.host.read.1MiB", "nixl", "read", "all", _ours_pull, scale),
        _case("peers.ucxx.tcp.write.1MiB", "ucxx", "write", "tcp", _ours_write, scale),
        _case("peers.ucxx.tcp.read.1MiB", "ucxx", "read", "tcp", _ours_read, scale),
        Case(
            name="peers.ucxx.transport.read.1MiB",
            unit="GB/s",
            reference="kvpool's transport over ucxx (transfer/ucxpy.py), the same read",
            open=partial(_open_ucxx_transport, scale),
            one_process=False,
        ),
    ]


_Ours = Callable[[ExitStack, Scale, Timer], Callable[[], float]]


def _case(name: str, peer: str, way: str, tls: str, ours: _Ours, scale: Scale) -> Case:
    return Case(
        name=name,
        unit="GB/s",
        reference=f"{_TITLES[peer]} over {tls}",
        open=partial(_open, peer, way, tls, ours, scale),
        one_process=False,
    )


@contextmanager
def _open(
    peer: str, way: str, tls: str, ours: _Ours, scale: Scale, timer: Timer
) -> Generator[Sides, None, None]:
    python = interpreter(peer)
    with ExitStack() as stack:
        other = _Peer(stack, python, peer, way, tls, scale)
        yield _Both(ours(stack, scale, timer), other, scale.rounds)


@contextmanager
def _open_ucxx_transport(scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    if not _UCXX_PYTHON.exists():
        raise UsageError("ucxx is not installed beside kvpool: make env")
    with ExitStack() as stack:
        yield _Both(_ours_read(stack, scale, timer), UcxxTransportReads(stack, scale), scale.rounds)


class UcxxTransportReads:
    """Reads through kvpool's own transport over ucxx, in two processes that have it."""

    def __init__(self, stack: ExitStack, scale: Scale) -> None:
        self._owner = _ucxx_child(stack, "blocks", scale)
        self._mover = _ucxx_child(stack, "read", scale)
        said(self._mover, said(self._owner, ""))

    def halt(self) -> None:
        """Stop both processes."""
        self._owner.halt()
        self._mover.halt()

    def go_on(self) -> None:
        """Let both run."""
        self._owner.go_on()
        self._mover.go_on()

    def rate(self) -> float:
        """Read one operation's bytes; GB/s."""
        return float(said(self._mover, "read"))


def _ucxx_child(stack: ExitStack, role: str, scale: Scale) -> Child:
    module = "kvpool.cli.bench_ucxx_peer"
    sizes = (scale.memory_bytes, scale.operation_bytes)
    return Child(stack, _UCXX_PYTHON, "-m", module, role, *sizes, _LAYERS)


class _Other(Protocol):
    def halt(self) -> None: ...
    def go_on(self) -> None: ...
    def rate(self) -> float: ...


class _Both:
    ceiling: float | None = None

    def __init__(self, ours: Callable[[], float], other: _Other, rounds: int) -> None:
        self._ours = ours
        self._other = other
        self._rounds = rounds

    def value(self) -> float:
        # Engines that poll would take the CPU from ours. Theirs finds ours asleep.
        self._other.halt()
        try:
            return sampled(self._ours, self._rounds)
        finally:
            self._other.go_on()

    def reference(self) -> float:
        return sampled(self._other.rate, self._rounds)


def interpreter(peer: str, homes: Path = _HOMES) -> Path:
    """Return the Python in which a peer is installed.

    Raises UsageError, with the commands that install it, if there is none.
    """
    home = homes / peer
    python = home / "bin" / "python"
    if not python.exists():
        raise UsageError(
            f"{_TITLES[peer]} is not installed. In the checkout: python3 -m venv {home} &&"
            f" {home}/bin/pip install {_PACKAGES[peer]} numpy"
        )
    return python


def environment(python: Path, libraries: Path = _LIBRARIES) -> dict[str, str]:
    """Return the environment in which Mooncake's wheel can be imported.

    The system's libraries are taken if they are there, else those in ``libraries``.

    Raises:
        UsageError: It cannot be imported with either; the message says what to run.
    """
    told = dict(os.environ)
    error = _import_error(python, told)
    if error and libraries.is_dir():
        told["LD_LIBRARY_PATH"] = str(libraries)
        error = _import_error(python, told)
    if error:
        raise UsageError(
            f"Mooncake cannot be imported ({error}). It wants the system's libibverbs: install it, or"
            f" in the checkout: {_GET_LIBRARIES} {libraries}"
        )
    return told


def _import_error(python: Path, told: dict[str, str]) -> str:
    done = subprocess.run(
        [str(python), "-c", "import mooncake.store"],
        env=told,
        capture_output=True,
        text=True,
        timeout=_IMPORT_S,
        check=False,
    )
    return (done.stderr.strip().splitlines() or ["?"])[-1] if done.returncode else ""


class _Peer:
    """Two processes of a peer's engine."""

    def __init__(
        self, stack: ExitStack, python: Path, peer: str, way: str, tls: str, scale: Scale
    ) -> None:
        # Told to the peer alone, in the environment that it is given.
        told = environment(python) if peer == "mooncake" else dict(os.environ)
        told["UCX_TLS"] = tls
        size = scale.memory_bytes
        self._owner = owner = Child(stack, python, _JOB, peer, "serve", size, environment=told)
        where = said(owner, "")
        self._mover = Child(stack, python, _JOB, peer, "move", size, where, environment=told)
        said(self._mover, "")
        self._count = scale.operation_bytes // _SIZE
        self._question = f"{way} {_SIZE} {self._count} {_STRIDE}"

    def halt(self) -> None:
        """Stop both processes."""
        self._owner.halt()
        self._mover.halt()

    def go_on(self) -> None:
        """Let both run."""
        self._owner.go_on()
        self._mover.go_on()

    def rate(self) -> float:
        """Move one operation's bytes; GB/s."""
        return self._count * _SIZE / float(said(self._mover, self._question)) / 1e9


def said(child: Child, question: str) -> str:
    """Return a job's next answer, whatever its engine prints before."""
    answer = child.ask(question)
    for _ in range(_CHATTER_MAX):
        if answer.startswith(_SAID):
            return answer.removeprefix(_SAID)
        answer = child.ask()
    raise UsageError("the peer's engine talks and does not answer: run it by hand")


def _ours_write(stack: ExitStack, scale: Scale, timer: Timer) -> Callable[[], float]:
    return partial(Writer(stack, _SIZE, scale, timer).rate, scale.operation_bytes // _SIZE)


def _ours_read(stack: ExitStack, scale: Scale, timer: Timer) -> Callable[[], float]:
    return Reader.over_ucx(stack, _LAYERS, scale, timer).rate


def _ours_pull(stack: ExitStack, scale: Scale, timer: Timer) -> Callable[[], float]:
    return stack.enter_context(pulls(_LAYERS, 1, timer)).value
