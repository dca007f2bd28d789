"""Batch put over TCP: the engine against a plain C loop of ucp_put_nbx and a flush, in pairs.

Run it in an environment where kvpool is installed: ``python benchmarks/transfer_put.py``. Both
sides are two processes on this host, with the same library, settings, spans and memory; the pairs
alternate in ABBA order. The engine's time is from ``put`` to the end of ``wait`` in Python, and
includes the note; the reference's is taken in C. One JSON object a line.
"""

import argparse
import json
import mmap
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool.completion import Completion
from kvpool.memory import Span
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_engine import UcxEngine
from kvpool.transfer.ucx_library import find_library

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parent / "native"
# Both sides rotate through this much, several times a cache of 32 MiB.
MEMORY_BYTES = 256 << 20
JOBS = {"transfer.tcp.write.64KiB": (64 << 10, 256), "transfer.tcp.write.1MiB": (1 << 20, 64)}


def memory() -> Span:
    """Return touched, page-aligned memory."""
    array = np.frombuffer(mmap.mmap(-1, MEMORY_BYTES), dtype=np.uint8)
    array[:: mmap.PAGESIZE] = 1
    return Span.of(array)


def serve() -> None:
    """Be the engine's receiver until stdin ends."""
    with UcxEngine(inbox=memory(), endpoint_max=1) as transport:
        print(
            transport.listen(lambda endpoint: endpoint.on_notification(lambda note: None)),
            flush=True,
        )
        sys.stdin.read()


def start(*command: str | Path) -> subprocess.Popen[str]:
    """Start a child that speaks in lines."""
    return subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(child: subprocess.Popen[str]) -> str:
    """Read the child's next line; a dead child has none."""
    assert child.stdout is not None
    text = child.stdout.readline()
    if not text:
        raise SystemExit("a child ended")
    return text.strip()


def build(folder: Path) -> Path:
    """Compile the reference."""
    program = folder / "ucx_put"
    sources = [HERE / "reference" / "ucx_put.c", NATIVE / "src" / "ucx_load.c"]
    flags = ["-std=gnu11", "-O3", f"-I{NATIVE / 'include'}"]
    subprocess.run(["cc", *flags, *sources, "-o", program, "-lpthread", "-ldl"], check=True)
    return program


def tables(source: Span, size: int, count: int) -> list[NDArray[np.uint64]]:
    """Return the batches that rotate through the memory."""
    starts = np.arange(0, MEMORY_BYTES, size, dtype=np.uint64)
    rows = np.stack(
        [starts + np.uint64(source.address), np.full_like(starts, size), starts], axis=1
    )
    return [rows[i : i + count] for i in range(0, len(rows), count)]


class Race:
    """One job, run by either side in turn. Keeps what each run took, in seconds."""

    def __init__(
        self,
        endpoint: UcxConnection,
        reference: subprocess.Popen[str],
        batches: list[NDArray[np.uint64]],
        repeat: int,
        depth: int,
    ) -> None:
        self.depth = depth
        self.batches = batches
        self.repeat = repeat
        self.spent: list[float] = []
        self.reference_spent: list[float] = []
        self._endpoint = endpoint
        self._reference = reference
        self._turn = 0

    def ours(self) -> float:
        """Put ``repeat`` batches through the engine, ``depth`` of them in flight."""
        begin = time.perf_counter()
        flying: deque[Completion[int]] = deque()
        for _ in range(self.repeat):
            if len(flying) == self.depth:
                flying.popleft().wait(20)
            batch = self.batches[self._turn % len(self.batches)]
            self._turn += 1
            flying.append(self._endpoint.put(batch, 20, b"arrived"))
        while flying:
            flying.popleft().wait(20)
        self.spent.append(time.perf_counter() - begin)
        return self.spent[-1]

    def theirs(self) -> float:
        """Have the reference put as much."""
        assert self._reference.stdin is not None
        total = 0.0
        for _ in range(self.repeat):
            rows = self.batches[0]
            self._reference.stdin.write(f"{rows[0][1]} {len(rows)}\n")
            self._reference.stdin.flush()
            total += float(line(self._reference))
        self.reference_spent.append(total)
        return total

    def pairs(self, count: int) -> list[float]:
        """Return ratios of speed, ours / theirs, of pairs in ABBA order."""
        self.spent, self.reference_spent = [], []
        for i in range(count):
            for side in (self.ours, self.theirs) if i % 2 == 0 else (self.theirs, self.ours):
                side()
        return [two / one for one, two in zip(self.spent, self.reference_spent, strict=True)]

    def result(self, name: str, count: int) -> dict[str, object]:
        """Warm up, race ``count`` pairs, and sum them up."""
        self.pairs(2)
        ratios = self.pairs(count)
        moved = int(self.batches[0][:, 1].sum()) * self.repeat
        speeds = [moved / seconds / 1e9 for seconds in self.reference_spent]
        low, high = np.percentile(speeds, [10, 90])
        return {
            "name": name,
            "value": round(moved / statistics.median(self.spent) / 1e9, 3),
            "unit": "GB/s",
            "reference": "C loop of ucp_put_nbx + flush",
            "reference_value": round(statistics.median(speeds), 3),
            "ratio": round(statistics.median(ratios), 3),
            "low": round(low_bound(ratios), 3),
            "pairs": len(ratios),
            "spread": round(float(high - low) / statistics.median(speeds), 3),
        }


def low_bound(ratios: list[float]) -> float:
    """Return the lower 90 % bound of the median, by resampling with a fixed seed."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[100]


def main() -> None:
    """Measure every job and print it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--pairs", type=int, default=31)
    arguments.add_argument("--repeat", type=int, default=4, help="batches in one half of a pair")
    arguments.add_argument("--depth", type=int, default=1, help="our batches in flight")
    arguments.add_argument("--poll", action="store_true", help="the reference never sleeps")
    chosen = arguments.parse_args()
    if chosen.serve:
        serve()
        return
    library = find_library()
    with tempfile.TemporaryDirectory() as folder, UcxEngine(endpoint_max=1) as transport:
        program = build(Path(folder))
        reference_server = start(program, library, "serve", str(MEMORY_BYTES))
        mode = "poll" if chosen.poll else "send"
        reference = start(program, library, mode, line(reference_server), str(MEMORY_BYTES))
        server = start(sys.executable, __file__, "--serve")
        endpoint = transport.connect("127.0.0.1", int(line(server)), 20)
        source = memory()
        for name, (size, count) in JOBS.items():
            race = Race(
                endpoint, reference, tables(source, size, count), chosen.repeat, chosen.depth
            )
            print(json.dumps(race.result(name, chosen.pairs)), flush=True)
        for child in (reference, reference_server, server):
            assert child.stdin is not None
            child.stdin.close()
            child.wait(20)


if __name__ == "__main__":
    main()
