"""The row of DRAM over SSD: how much a background flush takes from loads that hit DRAM.

One operation loads 32 MiB from DRAM, and a sample goes eight times round the memory. Before a sample of kvpool
new blocks are stored, more than the flusher can write meanwhile, and it is well into them; before one of
the reference it has nothing left to do. Nothing but that differs. Both lie below ``build/bench``. Who
calls it: ``bench_tiers``.
"""

import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.base import Chain
from kvpool.block import BlockLayout, Namespace
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_reference import BENCH_FOLDER, rotate_bytes
from kvpool.config import PoolConfig, SsdConfig
from kvpool.errors import InternalError
from kvpool.memory import BlockView, Span
from kvpool.pool import Pool
from kvpool.tiers.stack import StackTier

_OPERATION_BYTES: Final = 32 << 20
# Blocks that wait to be written when a sample begins: at 4 GB/s for an eighth of a second.
_BACKLOG_BYTES: Final = 512 << 20
# Times round the memory: longer than some writes of the flusher, so that it takes its share.
_ROUNDS: Final = 8
_THREADS: Final = 2
_TIMEOUT_S: Final = 120.0
_ALIGN_BYTES: Final = 4096
# 16 tokens of 8 KV heads of 128 bfloat16 numbers in 32 layers: 2 MiB.
_LAYOUT: Final = BlockLayout(
    num_layers=32, kv_heads=8, block_tokens=16, k_dim=128, v_dim=128, dtype="bfloat16"
)


def cases() -> list[Case]:
    """Return the row."""
    return [
        Case(
            name="tiers.stack.load_under_flush",
            unit="GB/s",
            reference="the same loads with nothing to flush",
            open=_open,
        )
    ]


@contextmanager
def _open(timer: Timer) -> Generator[Sides, None, None]:
    BENCH_FOLDER.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="stack-", dir=BENCH_FOLDER))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        loaded = rotate_bytes()
        config = PoolConfig(
            dram_bytes=loaded + 2 * _BACKLOG_BYTES,
            ssd=SsdConfig(
                folder=folder / "store",
                capacity_bytes=2 * (loaded + 2 * _BACKLOG_BYTES),
                backlog_bytes_max=2 * _BACKLOG_BYTES,
            ),
        )
        pool = undo.enter_context(Pool.open(_LAYOUT, config, copy_threads=_THREADS))
        yield _Loads(pool, loaded, timer)


class _Loads:
    """A pool whose DRAM has what is loaded, and new blocks now and then."""

    ceiling: float | None = None

    def __init__(self, pool: Pool, loaded_bytes: int, timer: Timer) -> None:
        self._pool = pool
        self._timer = timer
        self._number = 0
        self._blocks = _OPERATION_BYTES // _LAYOUT.block_bytes
        room = _room(loaded_bytes)
        room.view()[:] = np.random.default_rng(0).bytes(room.size)
        self._buffer = BlockView.of_buffer(_LAYOUT, room)
        self._chains = [self._store(part) for part in self._parts()]
        self._rest()

    def value(self) -> float:
        """Load everything once while the flusher writes; return GB/s."""
        for _ in range(_BACKLOG_BYTES // _OPERATION_BYTES):
            self._store(self._buffer.take(0, self._blocks))
        before = self._flushed()
        deadline = time.monotonic() + _TIMEOUT_S
        while self._flushed() == before:
            if time.monotonic() > deadline:
                raise InternalError("the flusher writes nothing")
            time.sleep(0.001)
        speed = self._load()
        if self._stack().counts().flush.backlog == 0:
            raise InternalError("the flusher was done before the loads were")
        self._rest()
        return speed

    def reference(self) -> float:
        """Load everything once; return GB/s."""
        return self._load()

    def _load(self) -> float:
        took_s = 0.0
        for chain, dest in _ROUNDS * list(zip(self._chains, self._parts(), strict=True)):
            with self._pool.lease(self._pool.match(chain), _TIMEOUT_S) as lease:
                began = self._timer()
                good = self._pool.load(lease, dest, deadline_s=_TIMEOUT_S).wait(_TIMEOUT_S)
                took_s += self._timer() - began
            if good != self._blocks:
                raise InternalError(f"loaded {good} of {self._blocks} blocks")
        return _ROUNDS * len(self._buffer) * _LAYOUT.block_bytes / took_s / 1e9

    def _parts(self) -> Iterator[BlockView]:
        for begin in range(0, len(self._buffer), self._blocks):
            yield self._buffer.take(begin, begin + self._blocks)

    def _store(self, source: BlockView) -> Chain:
        self._number += 1
        namespace = Namespace(
            model="bench",
            weights=str(self._number),
            compute_dtype="bfloat16",
            kv_dtype="bfloat16",
            block_tokens=_LAYOUT.block_tokens,
        )
        chain = self._pool.chain(namespace, range(len(source) * _LAYOUT.block_tokens))
        done = self._pool.store(chain, source, deadline_s=_TIMEOUT_S).wait(_TIMEOUT_S)
        if done.new != len(source):
            raise InternalError(f"stored {done.new} of {len(source)} blocks: {done.refused}")
        return chain

    def _rest(self) -> None:
        if not self._stack().flusher.wait_idle(_TIMEOUT_S):
            raise InternalError("the flusher does not come to rest")

    def _flushed(self) -> int:
        return self._stack().counts().flush.flushed

    def _stack(self) -> StackTier:
        tier = self._pool.tier
        if not isinstance(tier, StackTier):
            raise InternalError("the pool has no SSD tier")
        return tier


def _room(size: int) -> Span:
    """Return touched memory that begins on a page, as a caller's KV cache does."""
    span = Span.of(np.ones(size + _ALIGN_BYTES, dtype=np.uint8))
    return span.part(-span.address % _ALIGN_BYTES, size)
