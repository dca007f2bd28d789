"""The transport contract: bytes between registered regions of different processes.

A transport connects two processes; an endpoint is one connection. Bytes are *pulled* by their
receiver where both share a host, and small notifications travel both ways. Nobody ever writes into
another process's arena through this contract: a write asks the arena's owner to take the bytes.
Every implementation and wrapper passes ``kvpool.testing.transport_suite``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from kvpool.arena import Arena
from kvpool.block import BlockLayout, Incarnation
from kvpool.completion import Completion
from kvpool.memory import BlockView, Crcs, Span

# Largest batch: flat spans, or slots of blocks.
SPANS_MAX: Final = 65536
# Largest notification, in bytes. It fits a record of the shared ring.
NOTIFICATION_BYTES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """Names a registered region to a peer.

    Attributes:
        incarnation: Of the owner; a transfer to another run of it is refused.
        region: Number of the region at its owner.
        slot_count, slot_bytes: Its geometry.
    """

    incarnation: Incarnation
    region: int
    slot_count: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteSlots:
    """Slots of a peer's region, each in one life.

    Attributes:
        region: Number of the region at its owner.
        slots: Slot numbers.
        generations: The life each slot must be in when it is read, before and after.
    """

    region: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """Flat bytes inside one slot of a registered region, in one life of the slot.

    Attributes:
        region: Number of the region at its owner.
        slot, generation: Which slot, and the life it must be in.
        offset, size: Bytes of the slot.
    """

    region: int
    slot: int
    generation: int
    offset: int
    size: int


class Endpoint(ABC):
    """One connection to one peer process. Safe from any thread."""

    peer: Incarnation

    @abstractmethod
    def regions(self) -> tuple[RegionDescriptor, ...]:
        """Return the peer's regions that are known here, by number. They only ever grow."""

    @abstractmethod
    def wait_region(self, region: int, timeout_s: float) -> RegionDescriptor:
        """Wait until the peer has told of region number ``region``, and return it.

        Raises:
            TransferTimeoutError: Not within ``timeout_s``.
            PeerUnreachableError, ClosedError: The endpoint was lost or closed first.
        """

    @abstractmethod
    def read_spans(
        self, pairs: Sequence[tuple[Span, RemoteSlots, int]], deadline_s: float
    ) -> Completion[int]:
        """Pull flat bytes: each (destination, one remote slot, offset in the slot).

        Returns:
            A completion of the bytes copied; all or a typed error. Per-slot generations are checked
            before and after.

        Raises:
            UsageError: An empty batch, or of more than SPANS_MAX, zero length, a span past its
                slot's end, an unknown region, overlapping destinations, a number that is negative,
                a fraction or too large. Raised before anything moves. That the destinations are
                mapped, and writable, is the caller's promise: addresses are taken as they are.
            ClosedError: The endpoint is closed.
        """

    @abstractmethod
    def read_blocks(
        self,
        dest: BlockView,
        source: RemoteSlots,
        *,
        source_layout: BlockLayout,
        dest_layer: int | None,
        deadline_s: float,
        crcs: Crcs | None = None,
        sums: Crcs | None = None,
    ) -> Completion[int]:
        """Pull blocks in canonical order from a peer's slots into a view, CRC32C checked.

        Args:
            dest: As many blocks as ``source`` has slots. No two rows may overlap, and where its
                owner says a size (``Held``) all lie inside; else that they are mapped is the
                caller's promise.
            source: One slot a block, at most SPANS_MAX.
            source_layout: What one slot holds: all layers, or one (``num_layers`` 1).
            dest_layer: With a one-layer source: the layer of ``dest`` to write. None: all layers.
            deadline_s: Seconds from now.
            crcs: What each (layer, head) must sum to, uint32 [blocks, layers, kv_heads] of
                ``source_layout``, if the caller has been told; None means what the owner's slots
                say. An owner that keeps these with the block hands them in.
            sums: Where to write, before the completion is done, what each (layer, head) of the blocks
                that arrived summed to: uint32, shaped as ``crcs``, writable and contiguous. The rest
                of it is undefined.

        Returns:
            A completion of the number of leading blocks that arrived whole and verified. Fewer than
            asked means that the next one was stale or corrupt at the owner. The completion is done
            only when nothing will touch ``dest`` any more.
        """

    @abstractmethod
    def write_spans(
        self, pairs: Sequence[tuple[SlotSpan, SlotSpan]], deadline_s: float, note: bytes = b""
    ) -> Completion[int]:
        """Bring flat bytes into slots of the peer's: each (span here, span of the same size there).

        The owner of the memory moves the bytes: it is asked to, and pulls them from here by the way
        that reads take, into slots that it holds reserved in just these lives, of regions that it
        registered as ``writable``. Until they have come it keeps the slots from other use.

        Args:
            pairs: At most SPANS_MAX. What is written from is a ready slot of a region that is
                registered here; it stays in its life until the completion is done. No byte over
                there is named twice.
            deadline_s: Seconds from now.
            note: Handed to the peer's ``on_notification`` once every byte is in its place; at most
                NOTIFICATION_BYTES_MAX. Empty: none.

        Returns:
            A completion of the bytes written; all, in place and the note on its way to its
            callback, or a typed error, and then the slots there hold any part of them:
            LeaseExpiredError (a slot here or there is in another life, or not reserved),
            CapacityError (the peer has too much to do, or a slot is being written already),
            UsageError (the peer's region is not writable). A cancel ends it when the peer has
            stopped pulling, or at the deadline. After TransferTimeoutError the peer may pull yet, and
            refuses other writes into those slots until it does not.

        Raises:
            UsageError: As ``read_spans``; a region that is not registered here, or not known to be
                the peer's; spans of different sizes. Raised before anything moves.
            CapacityError: Too many writes are under way.
            ClosedError: The endpoint is closed.
        """

    @abstractmethod
    def notify(self, payload: bytes) -> bool:
        """Send a small message, after everything this thread wrote before. Never blocks.

        No callback of the endpoint runs inside this call: callers may hold locks that theirs take.

        Returns:
            False if the peer has not read enough of the earlier ones: try again later.

        Raises:
            UsageError: Empty, or larger than NOTIFICATION_BYTES_MAX.
            PeerUnreachableError: The peer is dead.
            ClosedError: The endpoint is closed.
        """

    @abstractmethod
    def on_notification(self, callback: Callable[[bytes], None]) -> None:
        """Call back for each message, in order, from the transport's progress thread.

        Messages that came before the first callback was set are kept for it. It must not block.
        """

    @abstractmethod
    def on_lost(self, callback: Callable[["Endpoint"], None]) -> None:
        """Call back once when the peer is dead or the endpoint closed; at once if it is already."""

    @abstractmethod
    def alive(self) -> bool:
        """Say whether the peer is not known to be dead and the endpoint is open."""

    @abstractmethod
    def close(self) -> None:
        """End the connection. Idempotent, bounded. Reads in flight end with ClosedError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Transport(ABC):
    """One process's way to its peers. Owns one progress thread. Safe from any thread."""

    incarnation: Incarnation

    @abstractmethod
    def register(self, arena: Arena, *, writable: bool = False) -> RegionDescriptor:
        """Let peers read the READY slots of an arena, from now until the transport is closed.

        At any time: peers that are connected already are told of the new region. The memory stays
        until both the arena and the transport are closed.

        Args:
            arena: Of this transport's incarnation.
            writable: Whether peers may have bytes brought into its reserved slots, too. Whoever
                reserved a slot and told a peer of it commits it when the peer's note has come, and
                not before; a slot that is released meanwhile is quarantined until nothing moves.

        Raises:
            UsageError: Too many regions, or an arena of another incarnation than the transport's.
            ClosedError: The transport is closed.
        """

    @abstractmethod
    def listen(self, address: str, on_connect: Callable[[Endpoint], None]) -> str:
        """Accept peers at ``address`` and hand each endpoint to ``on_connect``.

        Returns the address to tell peers. ``on_connect`` runs on the progress thread.
        """

    @abstractmethod
    def connect(
        self, address: str, timeout_s: float, expected: Incarnation | None = None
    ) -> Endpoint:
        """Connect to a listening peer.

        Raises:
            PeerUnreachableError: Nobody answers there, or another user's process.
            TransferTimeoutError: No hello within ``timeout_s``.
            StaleIncarnationError: The peer is another run than ``expected``.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all endpoints and the progress thread. Idempotent, bounded to 5 s.

        Raises UsageError, and closes nothing: called from a callback of this transport.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
