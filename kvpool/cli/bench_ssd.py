"""Rows of the SSD tier: durable writes and reads against a C loop of the same transfers.

One operation moves 64 MiB between the caller's memory and the disk, checksums computed or compared; a
sample is four of them. The store is full, so each write evicts. The reference moves as many slots of
the same size at the same depth, with one fdatasync a write, in files that a store made; both lie below
``build/bench``, so it is that disk which is measured. Who calls it: ``bench_tiers``.
"""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.arena import Slots
from kvpool.block import BlockHash, BlockLayout, sha256
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_reference import BENCH_FOLDER, compiled
from kvpool.errors import InternalError
from kvpool.memory import BlockView, Span
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_format import segment_file, slot_bytes

_OPERATION_BYTES: Final = 64 << 20
_OPERATIONS: Final = 4
_OPERATIONS_QUICK: Final = 1
_DEPTH: Final = 16
_TIMEOUT_S: Final = 120.0
_ALIGN_BYTES: Final = 4096
# 16 tokens of 8 KV heads of 128 bfloat16 numbers: 64 KiB a layer.
_LAYERS: Final = {"2MiB": 32, "256KiB": 4}


def cases(quick: bool) -> list[Case]:
    """Return the rows."""
    return [
        Case(
            name=f"tiers.ssd.{job}.{size}",
            unit="GB/s",
            reference=f"C loop of the same transfers, depth {_DEPTH}",
            open=partial(_open, job, layers, _OPERATIONS_QUICK if quick else _OPERATIONS),
        )
        for job in ("read", "write")
        for size, layers in _LAYERS.items()
    ]


@contextmanager
def _open(job: str, layers: int, turns: int, timer: Timer) -> Generator[Sides, None, None]:
    layout = BlockLayout(
        num_layers=layers, kv_heads=8, block_tokens=16, k_dim=128, v_dim=128, dtype="bfloat16"
    )
    BENCH_FOLDER.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="ssd-", dir=BENCH_FOLDER))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        yield _Bench(layout, folder, turns, timer, undo, writes=job == "write")


class _Bench:
    """A full store, a twin of its files for the reference, and memory for an operation."""

    ceiling: float | None = None

    def __init__(
        self,
        layout: BlockLayout,
        folder: Path,
        turns: int,
        timer: Timer,
        undo: ExitStack,
        *,
        writes: bool,
    ) -> None:
        self._layout = layout
        self._timer = timer
        self._turns = turns
        self._writes = writes
        self._blocks = _OPERATION_BYTES // layout.block_bytes
        self._slot_bytes = slot_bytes(layout)
        self._count = 0
        self._chains: list[bytes] = []
        slots = turns * self._blocks
        span = Span.of(np.ones(self._blocks * self._slot_bytes + _ALIGN_BYTES, dtype=np.uint8))
        room = span.part(-span.address % _ALIGN_BYTES, self._blocks * self._slot_bytes)
        room.view()[:] = np.random.default_rng(0).bytes(room.size)
        ids = np.arange(self._blocks, dtype=np.uint64)
        self._memory = BlockView.canonical(layout, room.address, self._slot_bytes, ids, room)
        self._run = ctypes.CDLL(str(compiled("ssd"))).reference_ssd
        self._twin = self._open_twin(folder / "twin", slots, undo)
        self._tier = SsdTier(
            folder / "store", layout, slots, threads=_DEPTH, staging_slots=1, timeout_s=_TIMEOUT_S
        )
        undo.callback(self._tier.close)
        self._write()
        self._reference_writes()  # so that no extent is written for the first time

    def _open_twin(self, folder: Path, slots: int, undo: ExitStack) -> int:
        """Have a store make its files, and open its one segment as the tier does."""
        SsdTier(folder, self._layout, slots, threads=1, staging_slots=1).close()
        fd = os.open(folder / segment_file(0), os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        return fd

    def value(self) -> float:
        """Write or read everything once through the tier; return GB/s."""
        return self._write() if self._writes else self._read()

    def reference(self) -> float:
        """Do the same with the loop."""
        return self._reference_writes() if self._writes else self._loop(writes=False)

    def _reference_writes(self) -> float:
        return self._loop(writes=True)

    def _write(self) -> float:
        took_s = 0.0
        self._chains = []
        for _ in range(self._turns):
            self._count += 1
            keys = chain_of(self._count, self._blocks)
            began = self._timer()
            stored = self._tier.write(keys, None, self._memory, deadline_s=_TIMEOUT_S)
            took_s += self._timer() - began
            if stored != self._blocks:
                raise InternalError(f"{stored} of {self._blocks} blocks were written")
            self._chains.append(keys)
        return self._rate(took_s)

    def _read(self) -> float:
        took_s = 0.0
        for keys in self._chains:
            slots: Slots = self._tier.pin(keys)
            began = self._timer()
            good, _ = self._tier.read(slots, self._memory, deadline_s=_TIMEOUT_S)
            took_s += self._timer() - began
            self._tier.unpin(slots)
            if good != self._blocks:
                raise InternalError(f"{good} of {self._blocks} blocks were read")
        return self._rate(took_s)

    def _loop(self, *, writes: bool) -> float:
        fds: NDArray[np.int32] = np.full(self._blocks, self._twin, dtype=np.int32)
        memory = self._memory.base + np.arange(self._blocks, dtype=np.uintp) * self._slot_bytes
        took_s = 0.0
        for turn in range(self._turns):
            slots = np.arange(turn * self._blocks, (turn + 1) * self._blocks, dtype=np.int64)
            offsets = slots * self._slot_bytes
            began = self._timer()
            status = self._run(
                ctypes.c_int(writes),
                fds.ctypes.data_as(ctypes.c_void_p),
                offsets.ctypes.data_as(ctypes.c_void_p),
                memory.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_size_t(self._blocks),
                ctypes.c_size_t(self._slot_bytes),
                ctypes.c_size_t(_DEPTH),
                fds.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_size_t(1),
            )
            took_s += self._timer() - began
            if status:
                raise InternalError("the reference loop failed")
        return self._rate(took_s)

    def _rate(self, took_s: float) -> float:
        return self._turns * self._blocks * self._layout.block_bytes / took_s / 1e9


def chain_of(number: int, count: int) -> bytes:
    """Return the keys of a made-up chain."""
    names = (number.to_bytes(8, "little") + at.to_bytes(8, "little") for at in range(count))
    return b"".join(BlockHash(sha256(name)) for name in names)
