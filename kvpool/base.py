"""The Pool contract: match, lease, load, store. What engines are written against.

Owns the values that pass between an engine and a pool, and the abstract ``BlockPool``. The embedded
pool (``kvpool.pool``), the client of a server (``kvpool.client``) and the fake used in tests pass
one suite, ``kvpool.testing.pool_suite``. ``docs/api.md`` explains it for people.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from kvpool.block import HASH_BYTES, BlockHash, BlockLayout, Namespace
from kvpool.completion import Completion, Deadline
from kvpool.errors import UsageError
from kvpool.memory import BlockView

Tokens = Sequence[int] | NDArray[np.uint32]
Durability = Literal["dram", "ssd"]


@dataclass(frozen=True, slots=True)
class Chain:
    """The block hashes of a prompt, in order, 32 bytes each.

    Attributes:
        namespace: What the chain is rooted in.
        hashes: Concatenated hashes of the full blocks.
        tokens: Of the full blocks, uint32 [blocks * block_tokens], if the chain was made of tokens.
            An embedded pool compares them with those a block was stored with: a block of other
            tokens that has the same hash is a miss.
    """

    namespace: Namespace
    hashes: bytes
    tokens: NDArray[np.uint32] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.hashes) % HASH_BYTES:
            raise UsageError(f"{len(self.hashes)} bytes are not whole hashes of {HASH_BYTES}")
        if self.tokens is not None and self.tokens.size != len(self) * self.namespace.block_tokens:
            raise UsageError(
                f"{self.tokens.size} tokens for {len(self)} blocks of "
                f"{self.namespace.block_tokens}: leave out those of a partial block"
            )

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def __getitem__(self, index: int) -> BlockHash:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return BlockHash(self.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def block_tokens(self, first: int, count: int) -> NDArray[np.uint32] | None:
        """Return the tokens of blocks from ``first`` on, uint32 [count, block_tokens], if known."""
        if self.tokens is None:
            return None
        return self.tokens.reshape(-1, self.namespace.block_tokens)[first : first + count]

    def parent(self, index: int) -> BlockHash | None:
        """Return the hash of the block before ``index``, None for the first."""
        return self[index - 1] if index else None


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a chain a pool seems to hold. A hint: nothing is held, it may be stale at once.

    Attributes:
        chain: What was asked for.
        blocks: Leading blocks that were there.
    """

    chain: Chain
    blocks: int


class Lease(ABC):
    """A right to load the leading ``blocks`` of a chain until ``close`` or its time runs out.

    Close it as soon as the load is done: leased blocks cannot be evicted.
    """

    chain: Chain
    blocks: int
    seconds: float

    @abstractmethod
    def close(self) -> None:
        """Give the right back. Idempotent, never raises. Loads in flight end first on their own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of a store.

    Attributes:
        stored: Leading blocks of the request that the pool holds now.
        new: How many of them it did not hold before.
        refused: Why it stopped short, for a person; ``""`` if it did not.
    """

    stored: int
    new: int
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts of a pool's first tier, and what is out."""

    slots: int
    free: int
    ready: int
    reserved: int
    quarantined: int
    leases: int
    hits: int
    misses: int
    evictions: int
    corruptions: int
    extra: dict[str, int] = field(default_factory=dict)


OwnLease = TypeVar("OwnLease", bound=Lease)


class BlockPool(ABC):
    """A pool of KV blocks of one layout. Safe from any thread.

    ``match`` never blocks on a peer for longer than ``match_timeout_s``; no call waits without a
    deadline. A method that can give part of what was asked returns how much; only what the caller
    must act on differently is an exception.
    """

    layout: BlockLayout

    @abstractmethod
    def chain(self, namespace: Namespace, tokens: Tokens) -> Chain:
        """Hash the full blocks of ``tokens``. Pure; linear; microseconds per thousand tokens.

        Raises:
            LayoutMismatchError: The namespace has other ``block_tokens`` than the pool's layout.
            UsageError: A token is not within uint32.
        """

    @abstractmethod
    def match(self, chain: Chain) -> Match:
        """Say how many leading blocks are there. Touches nothing, holds nothing: a hint.

        A dead or silent server is a match of 0 blocks, and is counted.
        """

    @abstractmethod
    def lease(self, match: Match, seconds: float) -> Lease:
        """Ask for the right to load the matched blocks for ``seconds``.

        Returns:
            A lease on the leading blocks that can be guaranteed: perhaps fewer, perhaps 0.

        Raises:
            CapacityError: The byte quota of leases is used up.
            PeerUnreachableError: The server is gone. Recompute.
            ClosedError: The pool is closed.
        """

    @abstractmethod
    def load(
        self, lease: Lease, dest: BlockView, *, first: int = 0, deadline_s: float
    ) -> Completion[int]:
        """Copy leased blocks out, verified, layer by layer.

        Args:
            lease: A live lease of this pool.
            dest: Where to; block i of it receives block ``first + i`` of the chain.
            first: Index of the first block to load.
            deadline_s: Seconds from now until the load gives up.

        Returns:
            A completion of the number of leading blocks (of ``dest``) delivered whole and verified.
            ``layers_ready`` and ``wait_layer`` tell of layers as they arrive; what they announce is
            final only if the result is all of ``dest``. The completion is done only when nothing
            will write to ``dest`` any more. Errors: TransferTimeoutError, PeerUnreachableError,
            CancelledTransferError.

        Raises:
            UsageError, LayoutMismatchError: ``dest`` does not fit. Nothing was done.
            LeaseExpiredError: The lease is closed or over.
        """

    @abstractmethod
    def store(
        self,
        chain: Chain,
        source: BlockView,
        *,
        first: int = 0,
        durability: Durability = "dram",
        deadline_s: float,
    ) -> Completion[StoreResult]:
        """Copy blocks in. Never waits for room: it evicts at once or stops short.

        Args:
            chain: The chain that the blocks belong to.
            source: Block i of it is block ``first + i`` of the chain. It must not change until the
                completion is done.
            first: Index of the first block to store. Its parent need not be in the pool.
            durability: ``"dram"`` is a cache: kept until evicted. ``"ssd"`` needs an SSD tier.
            deadline_s: Seconds from now until the store gives up.

        Returns:
            A completion of what was stored. A full pool whose blocks are all leased is a result
            with ``refused`` set, not an error.

        Raises:
            UsageError, LayoutMismatchError: Source and chain do not fit. Nothing was done.
            CapacityError: ``durability`` cannot be given here, or too much waits to be durable.
        """

    @abstractmethod
    def stats(self) -> PoolStats:
        """Return counts. For a remote pool one bounded request; raises PeerUnreachableError."""

    @abstractmethod
    def close(self) -> None:
        """Close every lease and release what this object owns. Idempotent, bounded to 5 s."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def require_loadable(
    layout: BlockLayout, lease: OwnLease | None, dest: BlockView, first: int, deadline_s: float
) -> OwnLease:
    """Raise unless a pool can begin to load: what every implementation checks first.

    Args:
        layout: The pool's.
        lease: What ``load`` was called with; None if it is another pool's.
        dest: As ``load`` takes it.
        first: As ``load`` takes it.
        deadline_s: As ``load`` takes it.

    Returns:
        The lease.

    Raises:
        UsageError, LayoutMismatchError: It does not fit.
    """
    Deadline(deadline_s)
    if lease is None:
        raise UsageError("the lease is of another pool: lease from the pool that loads")
    layout.require_equal(dest.layout)
    if not dest.writable:
        raise UsageError("the destination is read-only")
    _require_within(first, len(dest), lease.blocks, "a lease")
    return lease


def require_storable(
    layout: BlockLayout,
    chain: Chain,
    source: BlockView,
    first: int,
    durability: Durability,
    deadline_s: float,
) -> None:
    """Raise unless a pool can begin to store: what every implementation checks first.

    Args:
        layout: The pool's.
        chain: As ``store`` takes it.
        source: As ``store`` takes it.
        first: As ``store`` takes it.
        durability: As ``store`` takes it.
        deadline_s: As ``store`` takes it.

    Raises:
        UsageError, LayoutMismatchError: They do not fit.
    """
    Deadline(deadline_s)
    if durability not in get_args(Durability):
        raise UsageError(f"durability {durability!r} is not one of {get_args(Durability)}")
    layout.require_equal(source.layout)
    _require_within(first, len(source), len(chain), "a chain")


def _require_within(first: int, count: int, blocks: int, whole: str) -> None:
    if not 0 <= first <= first + count <= blocks:
        raise UsageError(f"blocks {first} to {first + count} of {whole} on {blocks} blocks")
