"""The simplest pool that keeps the contract: a dictionary of bytes, no threads, no shared memory.

For tests of code that uses a pool. Every operation ends before its call returns.
"""

import itertools
import math
import threading

import numpy as np

from kvpool.base import (
    BlockPool,
    Chain,
    Durability,
    Lease,
    Match,
    PoolStats,
    StoreResult,
    Tokens,
    require_loadable,
    require_storable,
)
from kvpool.block import BlockHash, BlockLayout, Namespace
from kvpool.clock import Clock, SystemClock
from kvpool.completion import Completion, CompletionSource
from kvpool.errors import (
    CapacityError,
    ClosedError,
    LeaseExpiredError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.pool import hash_tokens


class FakeLease(Lease):
    """A lease of a fake pool. The pool counts it until ``ends_at``."""

    def __init__(self, pool: "FakePool", match: Match, seconds: float, ends_at: float) -> None:
        self.pool = pool
        self.chain = match.chain
        self.blocks = match.blocks
        self.seconds = seconds
        self.ends_at = ends_at

    def close(self) -> None:
        """Give the right back."""
        with self.pool.lock:
            self.ends_at = -math.inf


class FakePool(BlockPool):
    """A pool of at most ``slot_count`` blocks. Safe from any thread: ``lock`` is around every call.

    Evicts the block stored or leased longest ago that no lease holds and whose children are gone.
    """

    def __init__(self, layout: BlockLayout, slot_count: int, clock: Clock | None = None) -> None:
        self.layout = layout
        self.lock = threading.RLock()
        self._slot_count = slot_count
        self._clock: Clock = clock or SystemClock()
        self._blocks: dict[BlockHash, bytes] = {}  # in order of last use
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._leases: list[FakeLease] = []
        self._closed = False
        self._hits = self._misses = self._evictions = 0

    def chain(self, namespace: Namespace, tokens: Tokens) -> Chain:
        """Hash the full blocks."""
        return hash_tokens(self.layout, namespace, tokens)

    def match(self, chain: Chain) -> Match:
        """Count the leading blocks."""
        with self.lock:
            keys = [chain[index] for index in range(len(chain))]
            return Match(chain, len(list(itertools.takewhile(self._blocks.__contains__, keys))))

    def lease(self, match: Match, seconds: float) -> FakeLease:
        """Keep the blocks from eviction."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"a lease of {seconds} s")
        with self.lock:
            self._require_open()
            blocks = min(match.blocks, self.match(match.chain).blocks)
            for index in range(blocks):
                self._use(match.chain[index])
            self._hits += blocks
            self._misses += len(match.chain) - blocks
            ends_at = self._clock.now() + seconds
            lease = FakeLease(self, Match(match.chain, blocks), seconds, ends_at)
            self._leases.append(lease)
            return lease

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        """Copy at once."""
        own = lease if isinstance(lease, FakeLease) and lease.pool is self else None
        require_loadable(self.layout, own, dest, first, deadline_s)
        source: CompletionSource[int] = CompletionSource()
        with self.lock:
            self._require_open()
            if lease not in self._live():
                raise LeaseExpiredError("the lease is over")
            if deadline_s <= 0:
                source.fail(TransferTimeoutError("no time"))
                return source.completion
            for index in range(len(dest)):
                block = self._view(bytearray(self._blocks[lease.chain[first + index]]))
                copy_blocks(dest.take(index, index + 1), block)
        source.advance(self.layout.num_layers)
        source.finish(len(dest))
        return source.completion

    def store(
        self,
        chain: Chain,
        source: BlockView,
        *,
        first: int = 0,
        durability: Durability = "dram",
        deadline_s: float,
    ) -> Completion[StoreResult]:
        """Copy at once."""
        require_storable(self.layout, chain, source, first, durability, deadline_s)
        if durability != "dram":
            raise CapacityError("there is no ssd tier: store with 'dram'")
        end: CompletionSource[StoreResult] = CompletionSource()
        with self.lock:
            self._require_open()
            if deadline_s <= 0:
                end.fail(TransferTimeoutError("no time"))
            else:
                end.finish(self._store(chain, source, first))
        return end.completion

    def stats(self) -> PoolStats:
        """Count."""
        with self.lock:
            self._require_open()
            return PoolStats(
                slots=self._slot_count,
                free=self._slot_count - len(self._blocks),
                ready=len(self._blocks),
                reserved=0,
                quarantined=0,
                leases=len(self._live()),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                corruptions=0,
            )

    def close(self) -> None:
        """Forget everything."""
        with self.lock:
            self._closed = True
            self._blocks.clear()

    def _store(self, chain: Chain, source: BlockView, first: int) -> StoreResult:
        wanted = {chain[first + index] for index in range(len(source))}
        new = 0
        for index in range(len(source)):
            key = chain[first + index]
            if key in self._blocks:
                self._use(key)
                continue
            if len(self._blocks) == self._slot_count and not self._evict(wanted):
                return StoreResult(index, new, "every block is leased")
            room = bytearray(self.layout.block_bytes)
            copy_blocks(self._view(room), source.take(index, index + 1))
            self._blocks[key] = bytes(room)
            self._parents[key] = chain.parent(first + index)
            new += 1
        return StoreResult(len(source), new)

    def _evict(self, wanted: set[BlockHash]) -> bool:
        held = {lease.chain[index] for lease in self._live() for index in range(lease.blocks)}
        parents = {self._parents[key] for key in self._blocks}
        for key in self._blocks:
            if key not in held | wanted and key not in parents:
                del self._blocks[key], self._parents[key]
                self._evictions += 1
                return True
        return False

    def _use(self, key: BlockHash) -> None:
        self._blocks[key] = self._blocks.pop(key)

    def _live(self) -> list[FakeLease]:
        now = self._clock.now()
        self._leases = [lease for lease in self._leases if lease.ends_at > now]
        return self._leases

    def _view(self, block: bytearray) -> BlockView:
        return BlockView.of_buffer(self.layout, Span.of(np.frombuffer(block, dtype=np.uint8)))

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool is closed")
