"""Rows of the DRAM tier: loads and stores of an embedded pool against a plain copy of the spans.

Every sample moves 16 blocks, with CRC32C on. Buffers rotate over 128 MiB, four times a usual L3
cache. The pool copies one operation on one thread, so the reference has one.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np

from kvpool.base import Chain
from kvpool.block import BlockLayout, Namespace
from kvpool.cli.bench import Case, Sides
from kvpool.cli.bench_reference import CopyReference, Spans, copy_reference
from kvpool.config import PoolConfig
from kvpool.memory import BlockView, Span
from kvpool.pool import Pool

_ROTATE_BYTES: Final = 128 << 20
_BLOCKS: Final = 16
_TIMEOUT_S: Final = 30.0
# 16 tokens of 8 KV heads of 128 bfloat16 numbers: 64 KiB a layer.
_LAYERS: Final = {"2MiB": 32, "256KiB": 4}


def cases(quick: bool) -> list[Case]:
    """Return the rows of this subject."""
    return [
        Case(
            name=f"tiers.dram.{job}.{size}",
            unit="GB/s",
            reference="C copy of the same spans, 1 thread",
            open=partial(_open, job, layers),
        )
        for job in ("load", "store")
        for size, layers in _LAYERS.items()
    ]


@contextmanager
def _open(job: str, layers: int) -> Generator[Sides, None, None]:
    layout = BlockLayout(
        num_layers=layers, kv_heads=8, block_tokens=16, k_dim=128, v_dim=128, dtype="bfloat16"
    )
    config = PoolConfig(dram_bytes=2 * _ROTATE_BYTES)
    with copy_reference() as reference, Pool.open(layout, config) as pool:
        bench = _Bench(pool, reference)
        yield _Loads(bench) if job == "load" else _Stores(bench)


class _Bench:
    """A pool full of blocks, and a buffer to rotate over."""

    def __init__(self, pool: Pool, reference: CopyReference) -> None:
        self.pool = pool
        self.reference = reference
        self.layout = pool.layout
        self.turns = _ROTATE_BYTES // (_BLOCKS * self.layout.block_bytes)
        buffer = np.random.default_rng(0).integers(0, 256, _ROTATE_BYTES, dtype=np.uint8)
        self.view = BlockView.of_buffer(self.layout, Span.of(buffer))
        self._prompt = 0
        self.chains = [self.store(turn)[0] for turn in range(self.turns)]
        # The reference copies to and from memory that lies like the pool's.
        other = np.ones(_ROTATE_BYTES, dtype=np.uint8)
        self._other = BlockView.of_buffer(self.layout, Span.of(other))
        reference.choose(self.spans(0), 1)

    def part(self, turn: int) -> BlockView:
        """Return the blocks of a turn."""
        begin = turn % self.turns * _BLOCKS
        return self.view.take(begin, begin + _BLOCKS)

    def store(self, turn: int) -> tuple[Chain, float]:
        """Store the blocks of a turn under a new chain; return it and GB/s."""
        self._prompt += 1
        namespace = Namespace(
            model="bench",
            weights=str(self._prompt),
            compute_dtype="bfloat16",
            kv_dtype="bfloat16",
            block_tokens=self.layout.block_tokens,
        )
        chain = self.pool.chain(namespace, range(_BLOCKS * self.layout.block_tokens))
        source = self.part(turn)
        began = time.perf_counter()
        done = self.pool.store(chain, source, deadline_s=_TIMEOUT_S)
        done.wait(_TIMEOUT_S)
        return chain, self.rate(began)

    def load(self, turn: int) -> float:
        """Load the blocks of a turn; return GB/s."""
        match = self.pool.match(self.chains[turn % self.turns])
        with self.pool.lease(match, _TIMEOUT_S) as lease:
            dest = self.part(turn)
            began = time.perf_counter()
            self.pool.load(lease, dest, deadline_s=_TIMEOUT_S).wait(_TIMEOUT_S)
            return self.rate(began)

    def spans(self, turn: int) -> Spans:
        """Return a turn's blocks as spans, from one buffer to another."""
        at = [turn % self.turns * _BLOCKS + block for block in range(_BLOCKS)]
        stride = self.layout.block_bytes
        dest = [self._other.base + index * stride for index in at]
        return Spans(dest, [self.view.base + index * stride for index in at], stride)

    def rate(self, began: float) -> float:
        """Return the GB/s of one turn that began then."""
        return _BLOCKS * self.layout.block_bytes / (time.perf_counter() - began) / 1e9


class _Turns:
    """Rotates, and knows the reference."""

    def __init__(self, bench: _Bench) -> None:
        self._bench = bench
        self._turn = 0

    def next(self) -> int:
        self._turn += 1
        return self._turn

    def reference(self) -> float:
        return self._bench.reference.rate(self._bench.spans(self.next()), 1)


class _Loads(_Turns):
    def value(self) -> float:
        return self._bench.load(self.next())


class _Stores(_Turns):
    def value(self) -> float:
        return self._bench.store(self.next())[1]
