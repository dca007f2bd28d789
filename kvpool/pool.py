"""The embedded pool: match, lease, load and store over the tiers of this process.

Owns the order of every operation; composes the wings and holds no bytes itself. Who calls it: engines,
and a server that serves its blocks to other processes.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final, Self

import numpy as np

from kvpool.arena import Arena
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
from kvpool.block import (
    HASH_BYTES,
    BlockLayout,
    Incarnation,
    Namespace,
    new_incarnation,
)
from kvpool.clock import Clock, SystemClock
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.config import PoolConfig, SsdConfig
from kvpool.errors import (
    ClosedError,
    ConfigError,
    CorruptionError,
    LayoutMismatchError,
    UnavailableError,
    UsageError,
)
from kvpool.events import EventSink
from kvpool.index.hashing import as_tokens, hash_chain
from kvpool.leases import LeasedBlocks, PoolLeases
from kvpool.memory import BlockView, Crcs, Crew, copy_blocks
from kvpool.operations import Look, Operations
from kvpool.reservation import Reservation
from kvpool.tiers.base import Tier
from kvpool.tiers.dram import DramTier
from kvpool.tiers.eviction import EvictionPolicy
from kvpool.tiers.flusher import FlushLimits
from kvpool.tiers.lease import LeaseId
from kvpool.tiers.stack import StackTier

# Bytes copied between two looks at deadline and cancel, and between two words of layers that are
# ready: 2 to 8 ms. Each call from Python costs 60 to 95 us after a copy has emptied the caches of all
# else: 6 % of 16 MiB.
BATCH_BYTES: Final = 32 << 20
# Loads and stores running or queued; one more is refused.
OPERATIONS_MAX: Final = 1024
# Stores under way that must be durable: a thread each, which mostly waits for its turn at the disk.
DURABLE_STORES_MAX: Final = 64
# Arenas hand out whole pages.
_PAGE_BYTES: Final = 4096
# Longest wait of ``close`` for copies under way.
_CLOSE_TIMEOUT_S: Final = 1.0
# Longest wait for a disk in what has no deadline of its own, which is closing it.
_SSD_TIMEOUT_S: Final = 3.0
# The client name of leases that this process takes for itself.
_LOCAL: Final = b""


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

    Its parts have their own locks, and it has none. Copies run on ``copy_threads`` threads, which
    help each other: a load that is alone uses them all.

    Args:
        tier: Where blocks are. This pool's from now on: ``close`` closes it.
        config: Limits of leases; ``dram_bytes`` is not looked at.
        clock: Decides when leases run out; None means the machine's clock.
        copy_threads: Loads and stores that copy at the same time, and threads that one of them
            is spread over.

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
        ssd = config.ssd if config is not None else None
        self._promote_timeout_s = ssd.promote_timeout_s if ssd is not None else 0.0
        self._operations = Operations(copy_threads, OPERATIONS_MAX, device_max=DURABLE_STORES_MAX)
        self._process = os.getpid()
        self._crew = Crew(copy_threads)
        self._closed = False

    @classmethod
    def open(
        cls,
        layout: BlockLayout,
        config: PoolConfig | None = None,
        *,
        incarnation: Incarnation | None = None,
        clock: Clock | None = None,
        events: EventSink | None = None,
        policy: Callable[[int], EvictionPolicy] | None = None,
        copy_threads: int = 2,
    ) -> Self:
        """Make a pool over a DRAM tier of ``config.dram_bytes``, taken and touched at once.

        With ``config.ssd`` there is an SSD tier below it, and what it holds is found at once.

        Args:
            layout: Of the blocks.
            config: Sizes and limits.
            incarnation: This run of this process; None means another one.
            clock: Decides when leases run out; None means the machine's clock.
            events: Told of what leaves the pool; None means nobody.
            policy: Makes who decides what leaves DRAM, for so many blocks, such as ``ReusePolicy``;
                None means least recently used, kept in C, which costs no Python for each block.
            copy_threads: Threads that copy.

        Raises:
            ConfigError: ``dram_bytes`` or the SSD's capacity does not hold one block, the SSD
                tier's folder was made with another size or layout, or there is no such NUMA node.
            CapacityError: The machine does not give that much shared memory, or room on the disk.
            UnavailableError: Another process has the SSD tier's folder, or the disk failed.
            FormatVersionError, CorruptionError: The folder cannot be read by this version, or at all.
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
        arena = Arena(
            layout,
            slot_count,
            incarnation or new_incarnation(),
            numa_node=config.numa_node,
            locked=config.locked,
        )
        chosen = None if policy is None else policy(slot_count)
        dram = DramTier(arena, policy=chosen, clock=clock, events=events)
        tier: Tier = dram
        if config.ssd is not None:
            try:
                tier = _stacked(dram, config.ssd, events)
            except BaseException:
                dram.close()
                raise
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

    def lease(self, match: Match, seconds: float, *, recompute_s: float | None = None) -> PoolLease:
        """Pin the matched blocks that are still here. See ``BlockPool``.

        Blocks that are on a slower tier alone are brought up first, within ``recompute_s``: seconds
        that it would take to compute all of them. What would come later is left out of the lease.
        None means the configuration's ``promote_timeout_s``.
        """
        self._require_usable()
        wanted = match.chain.hashes[: match.blocks * HASH_BYTES]
        self.promote(wanted, recompute_s)
        tokens = match.chain.block_tokens(0, match.blocks)
        lease_id, slots = self.leases.grant(_LOCAL, wanted, seconds, tokens)
        self.leases.count_missing(len(match.chain) - match.blocks)
        return PoolLease(self, lease_id, Match(match.chain, len(slots)), seconds)

    def promote(self, hashes: bytes, recompute_s: float | None = None) -> None:
        """Bring leading blocks up to where a lease can pin them, as ``lease`` does. May wait."""
        wait_s = self._promote_timeout_s if recompute_s is None else recompute_s
        self.tier.promote(hashes, wait_s=wait_s)

    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        """Copy leased blocks out, verified, layer by layer. See ``BlockPool``."""
        self._require_usable()
        own = lease if isinstance(lease, PoolLease) and lease.pool is self else None
        leased = require_loadable(self.layout, own, dest, first, deadline_s)
        source: CompletionSource[int] = CompletionSource()
        look = self._operations.look(source, deadline_s)
        self._operations.enter()
        try:
            held = self.leases.begin(leased.lease_id)
        except BaseException:
            self._operations.leave()
            raise

        def work() -> int:
            try:
                return self._copy_out(held, dest, first, source.advance, look)
            finally:
                self.leases.end(leased.lease_id)

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
        require_storable(self.layout, chain, source, first, durability, deadline_s)
        hashes = chain.hashes[first * HASH_BYTES : (first + len(source)) * HASH_BYTES]
        parent = chain.parent(first) if len(source) else None
        tokens = chain.block_tokens(first, len(source))
        end: CompletionSource[StoreResult] = CompletionSource()
        deadline, look = Deadline(deadline_s), self._operations.look(end, deadline_s)

        def work() -> StoreResult:
            look()
            self.leases.expire()
            reservation = Reservation(self.tier, hashes, parent, tokens)
            try:
                begin, view = reservation.begin, reservation.view
                crcs = self._copy_in(view, source.take(begin, begin + len(view)), look)
                return reservation.finish(crcs)
            finally:
                reservation.settle()

        if durability != "ssd":
            self._operations.enter()
            return self._operations.run(end, work)
        room = ExitStack()
        room.enter_context(self.tier.durable_room(len(source) * self.layout.block_bytes))
        try:
            self._operations.enter_device()
        except BaseException:
            room.close()
            raise

        def keep() -> StoreResult:
            with room:
                return self._keep(chain.hashes, first, work(), deadline)

        return self._operations.run_device(end, keep)

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
            extra={
                "pins": tier.pins,
                "lease_bytes": leases.size_bytes,
                "mismatches": tier.mismatches,
            },
        )

    def close(self) -> None:
        """End everything in flight with ClosedError and close the tier. See ``BlockPool``."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:  # what is under way, and the tier, are its parent's
            return
        self._operations.close(_CLOSE_TIMEOUT_S)
        self.leases.clear()
        self.tier.close()

    def _require_usable(self) -> None:
        if self._closed:
            raise ClosedError("the pool is closed")
        if os.getpid() != self._process:
            raise UsageError("this pool is its parent process's: open one after the fork")

    def _keep(
        self, hashes: bytes, first: int, result: StoreResult, deadline: Deadline
    ) -> StoreResult:
        """Make durable what was stored, with its ancestors; say how much of it is."""
        refused = result.refused
        chain = hashes[: (first + result.stored) * HASH_BYTES]
        try:
            durable = self.tier.make_durable(chain, deadline_s=deadline.remaining_s())
        except UnavailableError as error:
            durable, refused = 0, str(error)
        stored = max(0, durable - first)
        if stored < result.stored and not refused:
            refused = "a block, or one above it, is in no tier any more: store the whole chain"
        return StoreResult(stored, min(result.new, stored), refused)

    def _copy_out(
        self,
        held: LeasedBlocks,
        dest: BlockView,
        first: int,
        advance: Callable[[int], None],
        look: Look,
    ) -> int:
        """Copy a few layers at a time; return how many leading blocks are whole and verified."""
        bad = [index - first for index in held.bad if first <= index < first + len(dest)]
        good = min(bad, default=len(dest))
        slots = held.slots[first : first + good]
        stored, crcs = self.tier.view(slots, writable=False), self.tier.crcs(slots)
        look()
        for layers, blocks in batches(self.layout, good):
            end = min(blocks.stop, good)
            if blocks.start >= end:
                continue
            try:
                copy_blocks(
                    dest.take(blocks.start, end),
                    stored.take(blocks.start, end),
                    layers=layers,
                    crcs=crcs[blocks.start : end, layers.start : layers.stop],
                    crew=self._crew,
                )
            except CorruptionError as error:
                assert isinstance(error.block, int)
                end = good = blocks.start + error.block
                self.leases.drop_bad(held, first + good)
            look()
            if end == good > 0:
                advance(layers.stop)
        return good

    def _copy_in(self, dest: BlockView, source: BlockView, look: Look) -> Crcs:
        """Copy whole blocks, looking up between batches; return their checksums."""
        layout = self.layout
        count = max(1, BATCH_BYTES // layout.block_bytes)
        copied: list[Crcs] = []
        for begin in range(0, len(dest), count):
            look()
            end = min(len(dest), begin + count)
            copied.append(
                copy_blocks(dest.take(begin, end), source.take(begin, end), crew=self._crew)
            )
        look()
        if len(copied) == 1:
            return copied[0]
        none = np.empty((0, layout.num_layers, layout.kv_heads), dtype=np.uint32)
        return np.concatenate([none, *copied])


def _stacked(dram: DramTier, config: SsdConfig, events: EventSink | None) -> StackTier:
    """Open the SSD tier and put DRAM on top of it."""
    # Imported here: `import kvpool` does not load LMDB.
    from kvpool.tiers.ssd import WRITE_BYTES, SsdTier

    layout = dram.layout
    slot_count = SsdTier.slots_in(layout, config.capacity_bytes)
    if slot_count == 0:
        raise ConfigError(
            f"pool.ssd.capacity_bytes is {config.capacity_bytes}: a block needs "
            f"{layout.block_bytes} and its header",
            key="pool.ssd.capacity_bytes",
        )
    dram_bytes = dram.arena.slot_count * layout.block_bytes
    limits = FlushLimits(
        bytes_s=config.flush_bytes_s,
        batch_bytes=WRITE_BYTES,
        timeout_s=config.flush_timeout_s,
        backlog_bytes_max=config.backlog_bytes_max,
        high_bytes=int(config.high_share * dram_bytes),
        low_bytes=int(config.low_share * dram_bytes),
    )
    ssd = SsdTier(config.folder, layout, slot_count, timeout_s=_SSD_TIMEOUT_S, events=events)
    return StackTier(dram, ssd, limits, durable_bytes_max=config.durable_bytes_max)


def batches(layout: BlockLayout, count: int) -> Iterator[tuple[range, range]]:
    """Cut ``count`` blocks into (layers, blocks) to be copied at once, in the order of layers.

    As many layers as make up ``BATCH_BYTES``; if one layer of all blocks is more, several batches
    of blocks for each layer.
    """
    if count == 0:
        return
    blocks_max = max(1, BATCH_BYTES // layout.layer_bytes)
    layers_max = max(1, BATCH_BYTES // (count * layout.layer_bytes))
    for layer in range(0, layout.num_layers, layers_max):
        layers = range(layer, min(layer + layers_max, layout.num_layers))
        for begin in range(0, count, blocks_max):
            yield layers, range(begin, min(begin + blocks_max, count))


def hash_tokens(layout: BlockLayout, namespace: Namespace, tokens: Tokens) -> Chain:
    """Hash the full blocks of ``tokens``, as ``BlockPool.chain`` says, for a pool of ``layout``."""
    if namespace.block_tokens != layout.block_tokens:
        raise LayoutMismatchError(
            f"the namespace has blocks of {namespace.block_tokens} tokens, the pool of "
            f"{layout.block_tokens}"
        )
    array = as_tokens(tokens)
    whole = array[: array.size // layout.block_tokens * layout.block_tokens]
    if isinstance(tokens, np.ndarray):
        whole = whole.copy()  # the caller's, who may write to it
    return Chain(namespace, hash_chain(namespace.digest, whole, layout.block_tokens), whole)
