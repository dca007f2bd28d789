"""The C references in ``benchmarks/reference``, compiled when a benchmark needs them.

Owns the compiling (gcc or cc, -O3) and the choice between two ways to copy. Needs a checkout: an
installed package carries no references. Who calls it: the subjects of ``kvpool bench``.
"""

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import UsageError

_FOLDER: Final = Path(__file__).resolve().parents[2] / "benchmarks" / "reference"
_Addresses = NDArray[np.uintp]


class CopyReference:
    """Copies spans in C, with threads, in whichever way is quicker on this machine."""

    def __init__(self, library: Path) -> None:
        self._copy = ctypes.CDLL(str(library)).reference_copy
        self._stream = 0

    def choose(self, spans: "Spans", threads: int) -> None:
        """Try both ways on these spans, best of three, and keep the quicker."""
        best: dict[int, float] = {}
        for stream in (0, 1, 0, 1, 0, 1):
            self._stream = stream
            rate = self.rate(spans, threads)
            best[stream] = max(rate, best.get(stream, 0.0))
        self._stream = max(best, key=lambda stream: best[stream])

    def rate(self, spans: "Spans", threads: int) -> float:
        """Copy the spans once; return GB/s, 0 if this CPU cannot copy in the way that was asked."""
        began = time.perf_counter()
        status = self._copy(
            spans.dest.ctypes.data_as(ctypes.c_void_p),
            spans.source.ctypes.data_as(ctypes.c_void_p),
            spans.sizes.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(spans.sizes)),
            ctypes.c_size_t(threads),
            ctypes.c_int(self._stream),
        )
        took_s = time.perf_counter() - began
        return 0.0 if status else int(spans.sizes.sum()) / took_s / 1e9


class Spans:
    """Addresses of spans of one size: from where, and to where."""

    def __init__(self, dest: Sequence[int], source: Sequence[int], size: int) -> None:
        self.dest: _Addresses = np.array(dest, dtype=np.uintp)
        self.source: _Addresses = np.array(source, dtype=np.uintp)
        self.sizes: _Addresses = np.full(len(dest), size, dtype=np.uintp)


@contextmanager
def copy_reference() -> Generator[CopyReference, None, None]:
    """Compile and load the reference copy. Raises UsageError where that cannot be done."""
    source = _FOLDER / "copy.c"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not source.exists() or compiler is None:
        raise UsageError("references are compiled from a checkout of kvpool: get one, and gcc")
    with tempfile.TemporaryDirectory(prefix="kvpool-") as folder:
        library = Path(folder) / "copy.so"
        command = [compiler, "-O3", "-fPIC", "-shared", "-pthread", "-o", str(library), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"{source} does not compile: {done.stderr}")
        yield CopyReference(library)
