"""Rows of the DRAM tier: loads and stores of an embedded pool against a plain copy of the spans.

One operation moves 32 MiB (a prompt of 256 to 2,048 tokens), with CRC32C on, with the pool's two
threads; a sample goes once round the memory, at least four times the L3 cache. The reference copies
the same bytes between the same caller's buffer and the pool's own arena: a load's from the very slots,
a store's into slots that lie between those that the pool uses (docs/decisions/0024-copy-speed.md says
why no other memory will do).
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np

from kvpool.arena import Slots
from kvpool.base import Chain
from kvpool.block import BlockLayout, Namespace
from kvpool.cli import bench_ssd, bench_ssd_open, bench_stack
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_reference import CopyReference, Spans, rotate_bytes
from kvpool.config import PoolConfig
from kvpool.errors import InternalError
from kvpool.memory import BlockView, Span
from kvpool.pool import Pool

_OPERATION_BYTES: Final = 32 << 20
_THREADS: Final = 2
_TIMEOUT_S: Final = 30.0
_ALIGN_BYTES: Final = 4096
# 16 tokens of 8 KV heads of 128 bfloat16 numbers: 64 KiB a layer.
_LAYERS: Final = {"2MiB": 32, "256KiB": 4}


def cases(quick: bool) -> list[Case]:
    """Return the rows of this subject."""
    dram = [
        Case(
            name=f"tiers.dram.{job}.{size}",
            unit="GB/s",
            reference=f"C copy of the same spans, {_THREADS} threads",
            open=partial(_open, job, layers),
        )
        for job in ("load", "store")
        for size, layers in _LAYERS.items()
    ]
    return dram + bench_ssd.cases(quick) + bench_ssd_open.cases(quick) + bench_stack.cases()


@contextmanager
def _open(job: str, layers: int, timer: Timer) -> Generator[Sides, None, None]:
    layout = BlockLayout(
        num_layers=layers, kv_heads=8, block_tokens=16, k_dim=128, v_dim=128, dtype="bfloat16"
    )
    size = rotate_bytes()
    slots = size // layout.block_bytes
    with Pool.open(layout, PoolConfig(dram_bytes=3 * size), copy_threads=_THREADS) as pool:
        bench = _Bench(pool, slots, timer)
        yield _Loads(bench) if job == "load" else _Stores(bench)


def aligned_room(size: int) -> Span:
    """Return touched memory that begins on a page, as a caller's KV cache does."""
    span = Span.of(np.ones(size + _ALIGN_BYTES, dtype=np.uint8))
    return span.part(-span.address % _ALIGN_BYTES, size)


class _Bench:
    """A pool full of blocks, a caller's buffer to rotate over, and slots for the reference's stores."""

    def __init__(self, pool: Pool, slots: int, timer: Timer) -> None:
        self._pool = pool
        self._timer = timer
        self._layout = pool.layout
        self._blocks = _OPERATION_BYTES // self._layout.block_bytes
        self._prompt = 0
        room = aligned_room(slots * self._layout.block_bytes)
        room.view()[:] = np.random.default_rng(0).bytes(room.size)
        self._buffer = BlockView.of_buffer(self._layout, room)
        self._slots = self._between(slots)
        self._turns = range(slots // self._blocks)
        self._chains: list[Chain] = []
        self.store()
        self.reference = CopyReference(_THREADS, timer)

    def _between(self, count: int) -> BlockView:
        """Keep every third slot of the pool, which then has twice ``count`` to itself."""
        tier = self._pool.tier
        taken = Slots.of(tier.reserve_run(3 * count))
        if len(taken) != 3 * count:
            raise InternalError(f"a pool of {3 * count} slots gave {len(taken)}")
        third = np.arange(len(taken)) % 3 == 2
        others = Slots(taken.indices[~third], taken.generations[~third])
        tier.settle_run(others)
        tier.abort_run(others)
        return tier.view(Slots(taken.indices[third], taken.generations[third]), writable=True)

    def _part(self, turn: int) -> BlockView:
        return self._buffer.take(turn * self._blocks, (turn + 1) * self._blocks)

    def store(self) -> float:
        """Store the whole buffer under new chains, one operation a turn; return GB/s."""
        self._chains = []
        took_s = 0.0
        for turn in self._turns:
            self._prompt += 1
            namespace = Namespace(
                model="bench",
                weights=str(self._prompt),
                compute_dtype="bfloat16",
                kv_dtype="bfloat16",
                block_tokens=self._layout.block_tokens,
            )
            tokens = range(self._blocks * self._layout.block_tokens)
            chain, source = self._pool.chain(namespace, tokens), self._part(turn)
            began = self._timer()
            done = self._pool.store(chain, source, deadline_s=_TIMEOUT_S).wait(_TIMEOUT_S)
            took_s += self._timer() - began
            if done.new != self._blocks:
                raise InternalError(f"stored {done.new} of {self._blocks} blocks: {done.refused}")
            self._chains.append(chain)
        return self._buffer_bytes / took_s / 1e9

    def load(self) -> float:
        """Load what was stored last, one operation a turn; return GB/s."""
        took_s = 0.0
        for turn, chain in zip(self._turns, self._chains, strict=True):
            dest = self._part(turn)
            with self._pool.lease(self._pool.match(chain), _TIMEOUT_S) as lease:
                began = self._timer()
                good = self._pool.load(lease, dest, deadline_s=_TIMEOUT_S).wait(_TIMEOUT_S)
                took_s += self._timer() - began
            if good != self._blocks:
                raise InternalError(f"loaded {good} of {self._blocks} blocks")
        return self._buffer_bytes / took_s / 1e9

    def _lie(self, chain: Chain) -> BlockView:
        """Return where the blocks of a chain lie; they stay there while nothing is stored."""
        slots = self._pool.tier.pin(chain.hashes)
        try:
            return self._pool.tier.view(slots, writable=False)
        finally:
            self._pool.tier.unpin(slots)

    @property
    def _buffer_bytes(self) -> int:
        return len(self._buffer) * self._layout.block_bytes

    def spans(self, *, load: bool) -> list[Spans]:
        """Return each turn's blocks as spans: a load's from their slots, a store's to others."""
        turns: list[Spans] = []
        for turn, chain in zip(self._turns, self._chains, strict=True):
            at = range(turn * self._blocks, (turn + 1) * self._blocks)
            lie = self._lie(chain) if load else self._slots.take(at.start, at.stop)
            slots = [lie.base + index * lie.block_stride for index in lie.block_ids.tolist()]
            buffer = [self._buffer.base + index * self._layout.block_bytes for index in at]
            dest, source = (buffer, slots) if load else (slots, buffer)
            turns.append(Spans(dest, source, self._layout.block_bytes))
        return turns


class _Copies:
    """Knows the reference."""

    def __init__(self, bench: _Bench, *, load: bool) -> None:
        self._bench = bench
        self._spans = bench.spans(load=load)
        bench.reference.choose(self._spans)
        self.ceiling: float | None = bench.reference.ceiling

    def reference(self) -> float:
        return self._bench.reference.rate(self._spans)


class _Loads(_Copies):
    def __init__(self, bench: _Bench) -> None:
        super().__init__(bench, load=True)

    def value(self) -> float:
        return self._bench.load()


class _Stores(_Copies):
    def __init__(self, bench: _Bench) -> None:
        super().__init__(bench, load=False)

    def value(self) -> float:
        return self._bench.store()
