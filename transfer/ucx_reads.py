"""Reads over UCX: what a caller asks for, checked and described to the C engine, and how it ends.

Owns the completions of one connection's reads. The asks, the windows of the inbox and the verified
copies out of them are in C (``native/src/ucx_reads.c``, ``ucx_answers.c``): no Python runs while
bytes move. Who calls it: the UCX endpoint.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.block import BlockLayout
from kvpool.completion import Completion, CompletionSource
from kvpool.errors import (
    CancelledTransferError,
    CorruptionError,
    KVPoolError,
    LeaseExpiredError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import BlockView, Crcs, Span
from kvpool.transfer.base import RegionDescriptor, RemoteSlots
from kvpool.transfer.bounds import Numbers, require_deadline
from kvpool.transfer.forked import in_child
from kvpool.transfer.pull import require_dest, require_slots, require_spans
from kvpool.transfer.ucx_connection import error_of

if TYPE_CHECKING:
    from kvpool._native import CData

# KV heads of a layout that can be read: an answer carries the checksums of a layer of a block
# (KVP_ASK_CRCS_MAX in native/src/ucx_wire.h).
HEADS_MAX: Final = 1024
# Told of a read's end on the engine's thread: its status, the library's code, the leading good slots.
Ended = Callable[[int, int, int], None]


class ReadEngine(Protocol):
    """What reads ask of the engine."""

    def read(self, connection_id: int, job: "CData", deadline_s: float, ended: Ended) -> int:
        """Start a read; return its name. Everything that ``job`` points to stays until ``ended``."""
        ...

    def cancel_read(self, read: int) -> None:
        """End a read soon."""
        ...

    def end_reads(self, connection_id: int) -> None:
        """End a connection's reads soon, and refuse new ones."""
        ...

    def windows(self, connection_id: int) -> tuple[int, int]:
        """Return the windows of its inbox part that are free, and those that are owed."""
        ...


@dataclass(frozen=True, slots=True)
class PeerRegion:
    """A region as its owner told of it."""

    descriptor: RegionDescriptor
    crc_count: int


@dataclass(frozen=True, slots=True)
class Job:
    """A read, as the C engine takes it.

    Attributes:
        native: The ``kvp_ucx_job``.
        kept: What it points to.
        slots: Which slots it reads, for an error.
        size: Bytes of a read of flat bytes, which is the result; 0: the result counts blocks.
    """

    native: "CData"
    kept: object
    slots: tuple[int, ...]
    size: int = 0


def block_job(
    region: PeerRegion,
    dest: BlockView,
    source: RemoteSlots,
    source_layout: BlockLayout,
    dest_layer: int | None,
    crcs: Crcs | None,
    sums: Crcs | None = None,
) -> Job:
    """Describe a read of blocks in canonical order into a view.

    Raises:
        UsageError, LayoutMismatchError: The input does not fit.
    """
    slot_bytes = region.descriptor.slot_bytes
    slots, generations = require_slots(source, region.descriptor.slot_count)
    if (slot_bytes, region.crc_count) != (source_layout.block_bytes, source_layout.crc_count):
        raise UsageError(
            f"slots of {slot_bytes} bytes and {region.crc_count} checksums do not hold"
            f" {source_layout.block_bytes} bytes and {source_layout.crc_count} checksums"
        )
    if source_layout.kv_heads > HEADS_MAX:
        raise UsageError(
            f"blocks of {source_layout.kv_heads} KV heads: over UCX at most {HEADS_MAX}, so let"
            " several parts hold them"
        )
    dest = require_dest(dest, source, source_layout, dest_layer, crcs, sums)
    layout = source_layout
    shape = ffi.new(
        "kvp_shape *",
        (layout.kv_heads, layout.block_tokens, layout.k_row_bytes, layout.v_row_bytes),
    )
    view = dest.native()
    expected = None if crcs is None else np.ascontiguousarray(crcs, dtype=np.uint32)
    kept = [
        *_slot_arrays([source.region] * len(source.slots), slots, generations),
        ffi.from_buffer("uint64_t[]", dest.block_ids),
    ]
    regions, slot_numbers, lives, blocks = kept
    native = ffi.new(
        "kvp_ucx_job *",
        {
            "count": len(source.slots),
            "regions": regions,
            "slots": slot_numbers,
            "generations": lives,
            "shape": shape,
            "dest": view,
            "dest_blocks": blocks,
            "layers": layout.num_layers,
            "crcs": ffi.NULL if expected is None else ffi.from_buffer("uint32_t[]", expected),
            "sums": ffi.NULL if sums is None else ffi.from_buffer("uint32_t[]", sums),
        },
    )
    return Job(native, (kept, shape, view, expected, sums, dest), source.slots)


def span_job(pairs: Sequence[tuple[Span, RemoteSlots, int]], regions: Sequence[PeerRegion]) -> Job:
    """Describe a read of flat bytes, all or an error.

    Raises:
        UsageError: The input does not fit.
    """
    descriptors = [region.descriptor for region in regions]
    table = require_spans(pairs, [(each.slot_count, each.slot_bytes) for each in descriptors])
    kept = [
        *_slot_arrays([each.region for _, each, _ in pairs], table.slots, table.generations),
        ffi.from_buffer(table.rows),
    ]
    native = ffi.new(
        "kvp_ucx_job *",
        {
            "count": len(pairs),
            "regions": kept[0],
            "slots": kept[1],
            "generations": kept[2],
            "spans": ffi.cast("kvp_ucx_span *", kept[3]),
        },
    )
    slots = tuple(each.slots[0] for _, each, _ in pairs)
    return Job(native, (kept, list(pairs)), slots, int(table.rows[:, 1].sum()))


def _slot_arrays(regions: Sequence[int], slots: Numbers, generations: Numbers) -> "list[CData]":
    arrays: list[tuple[str, NDArray[np.generic]]] = [
        ("uint32_t[]", np.array(regions, dtype=np.uint32)),
        ("uint32_t[]", slots.astype(np.uint32)),
        ("uint64_t[]", np.ascontiguousarray(generations)),
    ]
    return [ffi.from_buffer(kind, array) for kind, array in arrays]


class _Reading(Completion[int]):
    """A completion whose cancel is acted upon soon."""

    def __init__(self, engine: ReadEngine) -> None:
        super().__init__()
        self._engine = engine
        self.read: int | None = None  # set once the engine has it

    def cancel(self) -> None:
        super().cancel()
        if (read := self.read) is not None:
            self._engine.cancel_read(read)


class Reads:
    """The reads of one connection. Safe from any thread.

    Args:
        engine: Of the connection.
        connection_id: The engine's number of it.
        lose: Told that the connection is lost, before a read that was lost with it ends.

    One condition guards the two fields that change. Nothing is called under it.
    """

    def __init__(
        self, engine: ReadEngine, connection_id: int, lose: Callable[[KVPoolError], object]
    ) -> None:
        self._engine = engine
        self._lose = lose
        self._connection_id = connection_id
        self._changed = threading.Condition()
        self._count = 0
        self._ended: KVPoolError | None = None

    def submit(self, job: Job, deadline_s: float) -> Completion[int]:
        """Start a read.

        Raises:
            UsageError: The deadline is none: see ``require_deadline``.
            CapacityError: Too many reads are in flight, or one layer of a block is larger than a
                window of the inbox.
            KVPoolError: What the reads were ended with.
        """
        require_deadline(deadline_s)
        source: CompletionSource[int] = CompletionSource()
        reading = source.completion = _Reading(self._engine)
        with self._changed:
            if self._ended is not None:
                raise type(self._ended)(str(self._ended))
            self._count += 1

        def ended(status: int, code: int, good: int) -> None:
            if status in (lib.KVP_PEER, lib.KVP_INVALID):
                self._lose(error_of(status, code, "the connection ended"))
            error = self._error(job, status, code, good)
            with self._changed:
                self._count -= 1
                self._changed.notify_all()
            if error is None:
                source.finish(job.size or good)
            else:
                source.fail(error)

        try:
            name = self._engine.read(self._connection_id, job.native, max(0.0, deadline_s), ended)
        except KVPoolError as error:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()
                if self._ended is not None:
                    raise type(self._ended)(str(self._ended)) from error
            raise
        reading.read = name
        if source.cancel_requested:
            reading.cancel()
        return reading

    def _error(self, job: Job, status: int, code: int, good: int) -> KVPoolError | None:
        """Return what a read failed with, None if it did not."""
        if status == lib.KVP_OK:
            return None
        if status == lib.KVP_TIMEOUT:
            return TransferTimeoutError("the deadline of the read passed")
        if status == lib.KVP_CANCELLED:
            return CancelledTransferError("cancelled by the caller")
        if status == lib.KVP_STALE:
            return LeaseExpiredError(
                f"slot {job.slots[good]} is in another life: match and lease again"
            )
        if status == lib.KVP_CORRUPT:
            return CorruptionError("bytes were changed on their way: read them again")
        with self._changed:
            why = self._ended
        # One exception object each: several threads will raise them.
        return error_of(status, code, "read") if why is None else type(why)(str(why))

    def end(self, error: KVPoolError) -> None:
        """End every read with an error like ``error``, those to come too."""
        with self._changed:
            self._ended = error
        self._engine.end_reads(self._connection_id)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no read is left. False if one is after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout_s)

    def after_fork(self) -> None:
        """Be ended in a child; see ``forked``. What was under way never ends there."""
        self._changed = threading.Condition()
        self._count = 0
        self._ended = in_child()

    def counts(self) -> tuple[int, int]:
        """Return how many windows are free, and how many are owed: asked into by ended reads."""
        return self._engine.windows(self._connection_id)
