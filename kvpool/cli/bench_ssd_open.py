"""Rows of opening an SSD tier of a million blocks: how long, and how much memory a block keeps.

The index of such a store is written, closed and opened again, and its blocks are taken into a ledger, as
the tier does after an orderly close; there are no slots to it. Who calls it: ``bench_tiers``.
"""

import ctypes
import gc
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.arena import Slots
from kvpool.block import HASH_BYTES
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_reference import BENCH_FOLDER
from kvpool.errors import InternalError
from kvpool.tiers.ledger import NO_PARENT, Ledger, Listing
from kvpool.tiers.ssd_index import SsdIndex, checksum_of, read_index

_BLOCKS: Final = 1_000_000
_BLOCKS_QUICK: Final = 20_000
_CHAIN: Final = 100  # blocks of one prompt
_GOAL_BYTES: Final = 150.0
_TIMEOUT_S: Final = 120.0
_STATUS: Final = Path("/proc/self/status")


def cases(quick: bool) -> list[Case]:
    """Return the rows."""
    blocks = _BLOCKS_QUICK if quick else _BLOCKS
    return [
        Case(
            name="tiers.ssd.open.1000000",
            unit="s",
            reference="reading the same LMDB file, and no more",
            open=partial(_open, blocks, _Open),
            lower_is_better=True,
        ),
        Case(
            name="tiers.ssd.resident.1000000",
            unit="B",
            reference="the goal: 150 bytes a block",
            open=partial(_open, blocks, _Resident),
            lower_is_better=True,
        ),
    ]


@contextmanager
def _open(
    blocks: int, sides: "Callable[[_Store], Sides]", timer: Timer
) -> Generator[Sides, None, None]:
    BENCH_FOLDER.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="open-", dir=BENCH_FOLDER))
    try:
        yield sides(_Store(folder, blocks, timer))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Store:
    """An index of made-up chains."""

    def __init__(self, folder: Path, blocks: int, timer: Timer) -> None:
        self.folder = folder / "index"
        self.blocks = blocks
        self.timer = timer
        keys = np.random.default_rng(1).integers(0, 256, (blocks, HASH_BYTES), dtype=np.uint8)
        parents = np.zeros_like(keys)
        parents[1:] = keys[:-1]
        parents[::_CHAIN] = np.frombuffer(NO_PARENT, dtype=np.uint8)
        slots = Slots(np.arange(blocks, dtype=np.uint32), np.arange(1, blocks + 1, dtype=np.uint64))
        index = SsdIndex(self.folder, blocks, None)
        index.write_all(Listing(slots, keys.tobytes(), parents.tobytes()))
        self._checksum = index.close(_TIMEOUT_S)
        if self._checksum is None:
            raise InternalError(f"the index {self.folder} could not be written")

    def ledger(self) -> Ledger:
        """Open the index and fill a ledger from it."""
        index = SsdIndex(self.folder, self.blocks, self._checksum)
        ledger = Ledger(self.blocks, 1 << 40)
        if index.found is None or not ledger.restore(index.found).all():
            raise InternalError("the index was not believed")
        index.close(_TIMEOUT_S)
        return ledger


class _Open:
    ceiling: float | None = None

    def __init__(self, store: _Store) -> None:
        self._store = store

    def value(self) -> float:
        began = self._store.timer()
        self._store.ledger()
        return self._store.timer() - began

    def reference(self) -> float:
        began = self._store.timer()
        checksum_of(self._store.folder)
        read_index(self._store.folder)
        return self._store.timer() - began


class _Resident:
    ceiling: float | None = None

    def __init__(self, store: _Store) -> None:
        self._store = store

    def value(self) -> float:
        before = _own_bytes()
        ledger = self._store.ledger()
        grown = _own_bytes() - before
        if ledger.counts().ready != self._store.blocks:
            raise InternalError("the ledger lacks blocks")
        return grown / self._store.blocks

    def reference(self) -> float:
        return _GOAL_BYTES


def _own_bytes() -> int:
    """Return how much memory this process has that is no file's, with what is free given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in _STATUS.read_text().splitlines():
        name, _, size = line.partition(":")
        if name == "RssAnon":
            return int(size.removesuffix("kB")) << 10
    raise InternalError(f"{_STATUS} does not say RssAnon")
