"""The embedded pool: match, lease, load and store over one tier of this process.

Owns the order of every operation; composes the wings and holds no bytes itself. Who calls it: engines,
and a server that serves its blocks to other processes.
"""

import os
import threading
from collections.abc import Callable
from typing import Final, Self

import numpy as np

from kvpool.arena import Arena
from kvpool.base import BlockPool, Chain, Durability, Lease, Match, PoolStats, StoreResult, Tokens
from kvpool.block import (
    HASH_BYTES,
    BlockHash,
    BlockLayout,
    Incarnation,
    Namespace,
    new_incarnation,
)
from kvpool.clock import Clock, SystemClock
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.config import PoolConfig
from kvpool.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    CorruptionError,
    LayoutMismatchError,
    LeaseExpiredError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.events import EventSink
from kvpool.index.hashing import hash_chain
from kvpool.index.prefix import PrefixIndex
from kvpool.leases import LeasedBlocks, PoolLeases
from kvpool.memory import BlockView, Crcs, copy_blocks
from kvpool.operations import Look, Operations, run_into
from kvpool.reservation import Reservation
from kvpool.tiers.base import Tier
from kvpool.tiers.dram import DramTier
from kvpool.tiers.lease import LeaseId

# Bytes copied between two looks at deadline and cancel: some 2 ms at 4 GB/s.
BATCH_BYTES: Final = 8 << 20
# Loads and stores running or queued; one more is refused.
OPERATIONS_MAX: Final = 1024
# Writers of ``store_from`` at once, late ones included; one more is refused.
FILLS_MAX: Final = 64
# Arenas hand out whole pages.
_PAGE_BYTES: Final = 4096
# Longest wait of ``close`` for copies under way.
_CLOSE_TIMEOUT_S: Final = 4.0
# The client name of leases that this process takes for itself.
_LOCAL: Final = b""

# Writes blocks ``begin`` to ``begin + len(view)`` of its run into ``view``; returns the CRC32C of the
# leading ones that it wrote whole, uint32 [written, layers, kv_heads].
Fill = Callable[[BlockView, int], Crcs]


class PoolLease(Lease):
    """A lease of an embedded pool."""

    def __init__(self, pool: "Pool", lease_id: LeaseId, match: Match, seconds: float) -> None:
        self.pool = pool
        self.lease_id = lease_id
        self.chain = match.chain
        self.blocks = match.blocks
        self.seconds = seconds

    def close(self) -> None:
        """Give the right back. See ``Lease``."""
        self.pool.leases.release(_LOCAL, self.lease_id)


class Pool(BlockPool):
    """A pool over one tier in this process. Safe from any thread.

    Its parts have their own locks; ``_lock`` here guards only the set of writers under way. Copies
    run on ``copy_threads`` threads, writers of ``store_from`` on threads named ``kvpool-fill``.

    Args:
        tier: Where blocks are. This pool's from now on: ``close`` closes it.
        config: Limits of leases; ``dram_bytes`` is not looked at.
        clock: Decides when leases run out; None means the machine's clock.
        copy_threads: Loads and stores that copy at the same time.

    Attributes:
        leases: For a server: leases of clients by name, and what their readers report.
    """

    def __init__(
        self,
        tier: Tier,
        config: PoolConfig | None = None,
        *,
        clock: Clock | None = None,
        copy_threads: int = 2,
    ) -> None:
        self.layout = tier.layout
        self.tier = tier
        self.leases = PoolLeases(tier, config or PoolConfig(), clock or SystemClock())
        self._operations = Operations(copy_threads, OPERATIONS_MAX)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._fills: dict[Reservation, CompletionSource[StoreResult]] = {}

    @classmethod
    def open(
        cls,
        layout: BlockLayout,
        config: PoolConfig | None = None,
        *,
        incarnation: Incarnation | None = None,
        clock: Clock | None = None,
        events: EventSink | None = None,
        copy_threads: int = 2,
    ) -> Self:
        """Make a pool over a DRAM tier of ``config.dram_bytes``, taken and touched at once.

        Raises:
            ConfigError: ``dram_bytes`` does not hold one block.
            CapacityError: The machine does not give that much shared memory.
        """
        config = config or PoolConfig()
        slot_bytes = -(-layout.block_bytes // _PAGE_BYTES) * _PAGE_BYTES
        slot_count = config.dram_bytes // slot_bytes
        if slot_count == 0:
            raise ConfigError(
                f"pool.dram_bytes is {config.dram_bytes}: one block needs {slot_bytes}",
                key="pool.dram_bytes",
                size_bytes=slot_bytes,
            )
        arena = Arena(layout, slot_count, incarnation or new_incarnation())
        tier = DramTier(arena, PrefixIndex(slot_count), clock=clock, events=events)
        return cls(tier, config, clock=clock, copy_threads=copy_threads)

    def chain(self, namespace: Namespace, tokens: Tokens) -> Chain:
        """Hash the full blocks of ``tokens``. See ``BlockPool``."""
        return hash_tokens(self.layout, namespace, tokens)

    def match(self, chain: Chain) -> Match:
        """Count the leading blocks that are here. See ``BlockPool``."""
        return Match(chain, self.match_hashes(chain.hashes))

    def match_hashes(self, hashes: bytes) -> int:
        """Count the leading hashes (32 bytes each) whose blocks are here. A hint, not a use."""
        self._require_usable()
        return self.tier.match(hashes)

    def lease(self, match: Match, seconds: float) -> PoolLease:
        """Pin the matched blocks that are still here. See ``BlockPool``."""
        self._require_usable()
        wanted = match.chain.hashes[: match.blocks * HASH_BYTES]
        lease_id, slots = self.leases.grant(_LOCAL, wanted, seconds)
        self.leases.count_missing(len(match.chain) - match.blocks)
        return PoolLease(self, lease_id, Match(match.chain, len(slots)), seconds)

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        """Copy leased blocks out, verified, layer by layer. See ``BlockPool``."""
        self._require_usable()
        if not isinstance(lease, PoolLease) or lease.pool is not self:
            raise UsageError("the lease is of another pool")
        dest.layout.require_equal(self.layout)
        if not dest.writable:
            raise UsageError("the destination is read-only")
        require_within(first, len(dest), lease.blocks, "a lease")
        source: CompletionSource[int] = CompletionSource()
        self._operations.enter()
        try:
            held = self.leases.begin(lease.lease_id)
        except LeaseExpiredError:
            self._operations.leave()
            raise
        look = self._operations.look(source, deadline_s)

        def work() -> int:
            try:
                return self._copy_out(held, dest, first, source.advance, look)
            finally:
                self.leases.end(lease.lease_id)

        return self._operations.run(source, work)

    def store(
        self,
        chain: Chain,
        source: BlockView,
        *,
        first: int = 0,
        durability: Durability = "dram",
        deadline_s: float,
    ) -> Completion[StoreResult]:
        """Copy blocks in. See ``BlockPool``."""
        self._require_usable()
        source.layout.require_equal(self.layout)
        require_within(first, len(source), len(chain), "a chain")
        if durability != "dram":
            raise CapacityError(f"this pool has no {durability} tier: store with 'dram'")
        hashes = chain.hashes[first * HASH_BYTES : (first + len(source)) * HASH_BYTES]
        parent = chain.parent(first) if len(source) else None
        end: CompletionSource[StoreResult] = CompletionSource()
        self._operations.enter()
        look = self._operations.look(end, deadline_s)

        def work() -> StoreResult:
            look()
            reservation = self._reserve(hashes, parent)
            try:
                begin, view = reservation.begin, reservation.view
                crcs = _copy_in(view, source.take(begin, begin + len(view)), look)
                return reservation.finish(crcs)
            finally:
                reservation.settle()

        return self._operations.run(end, work)

    def store_from(
        self, hashes: bytes, parent: BlockHash | None, fill: Fill, *, deadline_s: float
    ) -> StoreResult:
        """Let a writer put blocks into the pool. Blocks until it has, at most ``deadline_s``.

        Args:
            hashes: Of the blocks, in chain order, 32 bytes each.
            parent: Hash of the block before the first one, or None.
            fill: Called once, on a thread of its own, with a view and the index of its first block;
                see ``Fill``. Not called if every block is here, or there is no room.
            deadline_s: Seconds from now. A ``fill`` that is later writes into quarantine: its slots
                return to use when it has returned, and never before.

        Raises:
            TransferTimeoutError: The deadline passed. Nothing was stored.
            ClosedError: The pool was closed. Nothing was stored.
            KVPoolError: Whatever ``fill`` raised. Nothing was stored.
        """
        self._require_usable()
        deadline = Deadline(deadline_s)
        reservation = self._reserve(hashes, parent)
        if not len(reservation.view):
            return reservation.finish(_no_crcs(self.layout))
        source: CompletionSource[StoreResult] = CompletionSource()
        if not self._admit(reservation, source):
            reservation.settle()
            self._require_usable()
            return StoreResult(0, 0, f"{FILLS_MAX} stores are under way: try later")

        def work() -> StoreResult:
            return reservation.finish(fill(reservation.view, reservation.begin))

        def settle() -> None:
            reservation.settle()
            with self._lock:
                self._fills.pop(reservation, None)

        threading.Thread(
            target=run_into, args=(source, work, settle), name="kvpool-fill", daemon=True
        ).start()
        try:
            return source.completion.wait(deadline.remaining_s())
        except TransferTimeoutError:
            # Either it is given up now, or its end was first and the result is there at once.
            if reservation.abandon():
                source.fail(TransferTimeoutError(f"not written within {deadline_s} s"))
            return source.completion.wait(_CLOSE_TIMEOUT_S)

    def stats(self) -> PoolStats:
        """Return counts. See ``BlockPool``."""
        self._require_usable()
        self.leases.expire()
        tier, leases = self.tier.stats(), self.leases.counts()
        return PoolStats(
            slots=tier.slots,
            free=tier.free,
            ready=tier.ready,
            reserved=tier.reserved,
            quarantined=tier.quarantined,
            leases=leases.leases,
            hits=leases.hits,
            misses=leases.misses,
            evictions=tier.evictions,
            corruptions=tier.corruptions,
            extra={"pins": tier.pins, "lease_bytes": leases.size_bytes},
        )

    def close(self) -> None:
        """End everything in flight with ClosedError and close the tier. See ``BlockPool``."""
        with self._lock:
            already, self._closed = self._closed, True
            fills = dict(self._fills)
        if already:
            return
        for reservation, source in fills.items():
            if reservation.abandon():
                source.fail(ClosedError("the pool was closed"))
        self._operations.close(_CLOSE_TIMEOUT_S)
        self.leases.clear()
        self.tier.close()

    def _require_usable(self) -> None:
        if self._closed:
            raise ClosedError("the pool is closed")
        if os.getpid() != self._process:
            raise UsageError("this pool is its parent process's: open one after the fork")

    def _admit(self, reservation: Reservation, source: CompletionSource[StoreResult]) -> bool:
        with self._lock:
            if self._closed or len(self._fills) >= FILLS_MAX:
                return False
            self._fills[reservation] = source
            return True

    def _reserve(self, hashes: bytes, parent: BlockHash | None) -> Reservation:
        self.leases.expire()
        return Reservation(self.tier, hashes, parent)

    def _copy_out(
        self,
        held: LeasedBlocks,
        dest: BlockView,
        first: int,
        advance: Callable[[int], None],
        look: Look,
    ) -> int:
        """Copy layer after layer; return how many leading blocks are whole and verified."""
        bad = [index - first for index in held.bad if first <= index < first + len(dest)]
        good = min(bad, default=len(dest))
        slots = held.slots[first : first + good]
        stored, crcs = self.tier.view(slots, writable=False), self.tier.crcs(slots)
        batch = max(1, BATCH_BYTES // self.layout.layer_bytes)
        look()
        for layer in range(self.layout.num_layers):
            layers = range(layer, layer + 1)
            begin = 0
            while begin < good:
                end = min(good, begin + batch)
                try:
                    copy_blocks(
                        dest.take(begin, end),
                        stored.take(begin, end),
                        layers=layers,
                        crcs=crcs[begin:end, layers.start : layers.stop],
                    )
                except CorruptionError as error:
                    assert isinstance(error.block, int)
                    good = begin + error.block
                    self.leases.drop_bad(held, first + good)
                begin = end
                look()
            if good == 0:
                break
            advance(layer + 1)
        return good


def hash_tokens(layout: BlockLayout, namespace: Namespace, tokens: Tokens) -> Chain:
    """Hash the full blocks of ``tokens``, as ``BlockPool.chain`` says, for a pool of ``layout``."""
    if namespace.block_tokens != layout.block_tokens:
        raise LayoutMismatchError(
            f"the namespace has blocks of {namespace.block_tokens} tokens, the pool of "
            f"{layout.block_tokens}"
        )
    return Chain(namespace, hash_chain(namespace.digest, tokens, layout.block_tokens))


def require_within(first: int, count: int, blocks: int, whole: str) -> None:
    """Raise UsageError unless blocks ``first`` to ``first + count`` are within ``blocks``."""
    if not 0 <= first <= first + count <= blocks:
        raise UsageError(f"blocks {first} to {first + count} of {whole} on {blocks} blocks")


def _no_crcs(layout: BlockLayout) -> Crcs:
    return np.empty((0, layout.num_layers, layout.kv_heads), dtype=np.uint32)


def _copy_in(dest: BlockView, source: BlockView, look: Look) -> Crcs:
    """Copy whole blocks, looking up between batches; return their checksums."""
    layout = dest.layout
    batch = max(1, BATCH_BYTES // layout.block_bytes)
    copied = [_no_crcs(layout)]
    for begin in range(0, len(dest), batch):
        look()
        end = min(len(dest), begin + batch)
        copied.append(copy_blocks(dest.take(begin, end), source.take(begin, end)))
    look()
    return np.concatenate(copied)
