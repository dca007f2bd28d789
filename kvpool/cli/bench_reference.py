"""The C references in ``benchmarks/reference``: compiled when a benchmark needs them, and kept.

Owns the compiling (gcc or cc, -O3, into ``build/reference``), the choice between two ways to copy,
and how much memory a benchmark goes round. Needs a checkout: an installed package carries no
references. Who calls it: the subjects of ``kvpool bench``.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.cli.bench import Timer
from kvpool.errors import UsageError

_ROOT: Final = Path(__file__).resolve().parents[2]
_SOURCES: Final = _ROOT / "benchmarks" / "reference"
_NATIVE: Final = _ROOT / "native"
# What a program may include of the engine.
_HEADERS: Final = sorted((_NATIVE / "src").glob("*.h"))
_BUILT: Final = _ROOT / "build" / "reference"
# Where a benchmark of a disk puts its files.
BENCH_FOLDER: Final = _ROOT / "build" / "bench"
_CPUS: Final = Path("/sys/devices/system/cpu")
_ROTATE_BYTES_MIN: Final = 128 << 20
# Samples of each way to copy before the quicker one is chosen; the best is the ceiling.
_TRIES: Final = 7
_Addresses = NDArray[np.uintp]


def compiled(name: str, built: Path = _BUILT) -> Path:
    """Compile ``benchmarks/reference/NAME.c`` unless that was done; return the shared library.

    Raises UsageError where that cannot be done.
    """
    return _built(name, (_SOURCES / f"{name}.c",), ["-fPIC", "-shared", "-pthread"], ".so", built)


def program(name: str, natives: Sequence[str], built: Path = _BUILT) -> Path:
    """Compile a reference that is a program, with sources of ``native/src``; else as ``compiled``."""
    sources = (_SOURCES / f"{name}.c", *(_NATIVE / "src" / f"{each}.c" for each in natives))
    flags = ["-std=gnu11", f"-I{_NATIVE / 'include'}", "-pthread", "-ldl"]
    return _built(name, sources, flags, "", built)


def _built(
    name: str, sources: Sequence[Path], flags: Sequence[str], suffix: str, built: Path
) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not all(source.exists() for source in sources) or compiler is None:
        raise UsageError("references are compiled from a checkout of kvpool: get one, and gcc")
    texts = b"".join(source.read_bytes() for source in (*sources, *_HEADERS) if source.exists())
    digest = hashlib.sha256(texts + " ".join(flags).encode()).hexdigest()[:16]
    out = built / f"{name}-{digest}{suffix}"
    if not out.exists():
        built.mkdir(parents=True, exist_ok=True)
        fresh = built / f"{name}-{digest}.{os.getpid()}"
        done = subprocess.run(
            [compiler, "-O3", "-o", str(fresh), *map(str, sources), *flags],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UsageError(f"{sources[0]} does not compile: {done.stderr}")
        fresh.replace(out)  # whole or not at all, whoever else compiles it now
    return out


def rotate_bytes(cpus: Path = _CPUS) -> int:
    """Return how many bytes a benchmark must go round: at least four times all L3 caches."""
    caches: dict[str, int] = {}
    for folder in cpus.glob("cpu[0-9]*/cache/index*"):
        if (folder / "level").read_text().strip() == "3":
            shared = (folder / "shared_cpu_list").read_text().strip()
            caches[shared] = int((folder / "size").read_text().strip().removesuffix("K")) << 10
    wanted = max(_ROTATE_BYTES_MIN, 4 * sum(caches.values()))
    return -(-wanted // _ROTATE_BYTES_MIN) * _ROTATE_BYTES_MIN


class Spans:
    """Addresses of spans of one size: from where, and to where."""

    def __init__(self, dest: Sequence[int], source: Sequence[int], size: int) -> None:
        self.dest: _Addresses = np.array(dest, dtype=np.uintp)
        self.source: _Addresses = np.array(source, dtype=np.uintp)
        self.sizes: _Addresses = np.full(len(dest), size, dtype=np.uintp)
        self.total = size * len(dest)


class CopyReference:
    """Copies spans in C, with threads, in whichever way is quicker on this machine.

    Args:
        threads: That copy together.
        timer: What the time is taken with.

    Attributes:
        ceiling: GB/s of the best sample while choosing.
    """

    def __init__(self, threads: int, timer: Timer) -> None:
        self._copy = ctypes.CDLL(str(compiled("copy"))).reference_copy
        self._threads = threads
        self._timer = timer
        self._stream = 0
        self.ceiling = 0.0

    def choose(self, turns: Sequence[Spans]) -> None:
        """Try both ways on these spans, in alternation, and keep the quicker."""
        best = [0.0, 0.0]
        for _ in range(_TRIES):
            for self._stream in (0, 1):
                best[self._stream] = max(best[self._stream], self.rate(turns))
        self._stream = best.index(max(best))
        self.ceiling = max(best)

    def rate(self, turns: Sequence[Spans]) -> float:
        """Copy the spans once; return GB/s, 0 if this CPU cannot copy in the way that was asked."""
        took_s = 0.0
        for spans in turns:
            began = self._timer()
            status = self._copy(
                spans.dest.ctypes.data_as(ctypes.c_void_p),
                spans.source.ctypes.data_as(ctypes.c_void_p),
                spans.sizes.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_size_t(len(spans.sizes)),
                ctypes.c_size_t(self._threads),
                ctypes.c_int(self._stream),
            )
            took_s += self._timer() - began
            if status:
                return 0.0
        return sum(spans.total for spans in turns) / took_s / 1e9
