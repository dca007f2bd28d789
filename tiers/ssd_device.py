"""The threads of an SSD store, which read and write slots: the Python face of ``native/src/ssd.c``.

Owns the arrays that go to C and the reading of what comes back. Every call ends by its deadline; what
the kernel has not let go of by then is its own, and said. Who calls it: the SSD tier, fsck.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.arena import SlotNumbers, Slots
from kvpool.block import HASH_BYTES
from kvpool.completion import Deadline
from kvpool.errors import CapacityError, InternalError
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.ledger import Listing
from kvpool.tiers.ssd_files import forget_in_forks
from kvpool.tiers.ssd_format import Geometry
from kvpool.tiers.tokens import TokenRows

if TYPE_CHECKING:
    from kvpool._native import CData

Results = NDArray[np.uint8]  # one of lib.KVP_SLOT_* for each slot

# Slots of one durable write: what one intent names, with room for those that are late, or bad.
WRITE_SLOTS_MAX: Final = lib.KVP_SSD_INTENT_SLOTS - 256 - 32
INTENT_BYTES: Final = 2 * lib.KVP_SSD_INTENT_BYTES


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one call.

    Attributes:
        results: For each slot.
        durable: Of a write or erasure: everything that is DONE is durable, too.
        timed_out: The deadline came first.
        blocked: The kernel still has something of a call before, that this one may not overtake.
        error: The first errno, 0 if there was none.
    """

    results: Results
    durable: bool
    timed_out: bool
    blocked: bool
    error: int

    def are(self, result: int) -> NDArray[np.bool_]:
        """Say which slots had one result."""
        matching: NDArray[np.bool_] = self.results == result
        return matching

    def whole(self) -> bool:
        """Say whether all slots are done, and durable if they were written."""
        return self.durable and not self.results.any()  # DONE is 0

    def leading(self) -> int:
        """Count the leading slots that are done."""
        wrong = np.flatnonzero(self.results != lib.KVP_SLOT_DONE)
        return int(wrong[0]) if len(wrong) else len(self.results)


class SsdDevice:
    """The threads of one store. Safe from any thread; one write or erasure at a time.

    Ended when its last user is gone: ``close`` and calls under way.

    Args:
        geometry, store_id: Of the store.
        segments, intent, lock: Descriptors, which are duplicated.
        threads: How many jobs are in the kernel at once; each has a buffer of one slot.
        close_timeout_s: How long the end waits for the kernel before it leaves threads to it, unless
            ``end_by`` says until when.

    Raises:
        CapacityError: No memory, threads or descriptors for it.
    """

    def __init__(
        self,
        geometry: Geometry,
        store_id: bytes,
        segments: Sequence[int],
        intent: int,
        lock: int,
        *,
        threads: int,
        close_timeout_s: float = 5.0,
    ) -> None:
        layout = geometry.layout
        native = ffi.new(
            "kvp_ssd_geometry *",
            {
                "shape": (
                    layout.kv_heads,
                    layout.block_tokens,
                    layout.k_row_bytes,
                    layout.v_row_bytes,
                ),
                "layers": layout.num_layers,
                "header_bytes": geometry.header_bytes,
                "slot_bytes": geometry.slot_bytes,
                "slot_count": geometry.slot_count,
                "segment_slots": geometry.segment_slots,
                "store_id": store_id,
                "threads": threads,
            },
        )
        out = ffi.new("kvp_ssd **")
        fds = ffi.new("int[]", list(segments))
        status = lib.kvp_ssd_open(native, fds, len(segments), intent, lock, out)
        if status == lib.KVP_SYSTEM:
            raise CapacityError(
                f"no memory, threads or descriptors for {threads} threads of an SSD tier "
                f"(errno {ffi.errno}): ask for fewer, or raise ulimit -n and -u",
                tier="ssd",
            )
        if status != lib.KVP_OK:
            raise InternalError(f"kvp_ssd_open answered {status}")
        self._layout = layout
        self._end = end = _End(close_timeout_s)
        self._device: CData = ffi.gc(
            out[0], lambda device: lib.kvp_ssd_close(device, _ns(end.remaining_s()))
        )
        forget_in_forks(self)

    def end_by(self, deadline: Deadline) -> None:
        """Have the end wait for the kernel no longer than that."""
        self._end.deadline = deadline

    def forget(self) -> None:
        """In a forked child: close the descriptors. Nothing else may be called any more."""
        lib.kvp_ssd_forget(self._device)

    def stop(self) -> None:
        """Have all calls, now and later, give up as at their deadline."""
        lib.kvp_ssd_stop(self._device)

    def read(
        self,
        slots: Slots,
        keys: bytes,
        dest: BlockView,
        timeout_s: float,
        tokens: TokenRows | None = None,
    ) -> tuple[Outcome, Crcs]:
        """Read blocks into a view, verified; their checksums, uint32 [slots, layers, kv_heads].

        ``tokens`` are filled in.
        """
        shape = (len(slots), self._layout.num_layers, self._layout.kv_heads)
        crcs = np.zeros(shape, dtype=np.uint32)
        results, error = unbegun(len(slots)), ffi.new("int *")
        status = lib.kvp_ssd_read(
            self._device,
            *slots.native(),
            keys,
            len(slots),
            dest.native(),
            ffi.from_buffer("uint64_t[]", dest.block_ids),
            _ns(timeout_s),
            ffi.from_buffer("uint32_t[]", crcs, require_writable=True),
            *_rows(tokens, writable=True),
            _bytes(results),
            error,
        )
        return _outcome(status, results, error[0]), crcs

    def write(
        self,
        slots: Slots,
        keys: bytes,
        parents: bytes,
        source: BlockView,
        crcs: Crcs | None,
        timeout_s: float,
        also: SlotNumbers,
        tokens: TokenRows | None = None,
        *,
        results: Results | None = None,
    ) -> Outcome:
        """Write blocks durably.

        Args:
            slots: Where to; at most ``WRITE_SLOTS_MAX``.
            keys: Of the blocks, 32 bytes each, concatenated.
            parents: As many.
            source: Where they are, in any order; not kept beyond the call.
            crcs: What each (layer, head) must sum to, or None.
            timeout_s: For everything.
            also: More slots for an intent to name, if there has to be one (``named``): those that
                late writes are still at, always, and any.
            tokens: What the headers say of the blocks' tokens, or None.
            results: From ``unbegun``, of as many slots: filled in even if this does not return, for
                Ctrl-C comes when C has done. None: nobody wants to know then.
        """
        numbers = np.concatenate([slots.indices, also]).astype(np.uint32)
        results = unbegun(len(slots)) if results is None else results
        error = ffi.new("int *")
        expected = None if crcs is None else np.ascontiguousarray(crcs, dtype=np.uint32)
        status = lib.kvp_ssd_write(
            self._device,
            ffi.from_buffer("uint32_t[]", numbers),
            slots.native()[1],
            keys,
            parents,
            len(slots),
            len(also),
            source.native(),
            ffi.from_buffer("uint64_t[]", source.block_ids),
            ffi.NULL if expected is None else ffi.from_buffer("uint32_t[]", expected),
            *_rows(tokens, writable=False),
            _ns(timeout_s),
            _bytes(results),
            error,
        )
        return _outcome(status, results, error[0])

    def named(self, slots: SlotNumbers) -> bool:
        """Say whether a write of these slots needs no new intent. For whoever may write."""
        run = np.ascontiguousarray(slots, dtype=np.uint32)
        return lib.kvp_ssd_named(self._device, ffi.from_buffer("uint32_t[]", run), len(run))

    def erase(self, slots: SlotNumbers, timeout_s: float) -> Outcome:
        """Erase headers durably."""
        results, error = unbegun(len(slots)), ffi.new("int *")
        run = np.ascontiguousarray(slots, dtype=np.uint32)
        status = lib.kvp_ssd_erase(
            self._device,
            ffi.from_buffer("uint32_t[]", run),
            len(run),
            _ns(timeout_s),
            _bytes(results),
            error,
        )
        return _outcome(status, results, error[0])

    def scan(
        self,
        slots: SlotNumbers,
        *,
        whole: bool,
        timeout_s: float,
        tokens: TokenRows | None = None,
    ) -> tuple[Outcome, Listing]:
        """Look at headers, and at payloads too if ``whole``; the blocks of those that are DONE.

        ``tokens`` are filled in.
        """
        run = np.ascontiguousarray(slots, dtype=np.uint32)
        keys = np.zeros((len(run), HASH_BYTES), dtype=np.uint8)
        parents = np.zeros((len(run), HASH_BYTES), dtype=np.uint8)
        generations = np.zeros(len(run), dtype=np.uint64)
        results, error = unbegun(len(run)), ffi.new("int *")
        status = lib.kvp_ssd_scan(
            self._device,
            ffi.from_buffer("uint32_t[]", run),
            len(run),
            whole,
            _ns(timeout_s),
            _bytes(keys),
            _bytes(parents),
            ffi.from_buffer("uint64_t[]", generations, require_writable=True),
            *_rows(tokens, writable=True),
            _bytes(results),
            error,
        )
        listing = Listing(Slots(run, generations), keys.tobytes(), parents.tobytes())
        outcome = _outcome(status, results, error[0])
        return outcome, listing.take(outcome.are(lib.KVP_SLOT_DONE))

    def settled(self) -> Slots:
        """Take the slots whose late writes have ended since."""
        slots = np.empty(1024, dtype=np.uint32)
        generations = np.empty(1024, dtype=np.uint64)
        count = lib.kvp_ssd_settled(
            self._device,
            len(slots),
            ffi.from_buffer("uint32_t[]", slots, require_writable=True),
            ffi.from_buffer("uint64_t[]", generations, require_writable=True),
        )
        return Slots(slots[:count], generations[:count])

    def late(self) -> int:
        """Return how many threads the kernel holds for calls that have given up."""
        return lib.kvp_ssd_late(self._device)


class _End:
    """How long the end of a device may take: known to its destructor, which outlives it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.deadline: Deadline | None = None

    def remaining_s(self) -> float:
        return self._timeout_s if self.deadline is None else self.deadline.remaining_s()


def intent_slots(copies: bytes, store_id: bytes) -> SlotNumbers:
    """Return the slots that the intents of a store name, each once."""
    size = lib.KVP_SSD_INTENT_BYTES
    named = np.zeros(0, dtype=np.uint32)
    for at in range(0, len(copies), size):
        copy = copies[at : at + size]
        slots = np.empty(lib.KVP_SSD_INTENT_SLOTS, dtype=np.uint32)
        buffer = ffi.from_buffer("uint32_t[]", slots, require_writable=True)
        count = lib.kvp_ssd_intent_slots(copy, len(copy), store_id, len(slots), buffer)
        named = np.union1d(named, slots[:count])
    return named


def _outcome(status: int, results: Results, error: int) -> Outcome:
    if status in (lib.KVP_INVALID, lib.KVP_FULL):
        raise InternalError(f"the SSD core answered {status}")
    return Outcome(
        results=results,
        durable=status == lib.KVP_OK,
        timed_out=status == lib.KVP_TIMEOUT,
        blocked=status == lib.KVP_BUSY,
        error=error,
    )


def _ns(seconds: float) -> int:
    # A year is for ever, and far from where C's clock would wrap.
    return int(min(max(seconds, 0.0), 3.2e7) * 1e9)


def unbegun(count: int) -> Results:
    """Return results of slots that nothing was done at."""
    return np.full(count, lib.KVP_SLOT_SKIPPED, dtype=np.uint8)


def _rows(tokens: TokenRows | None, *, writable: bool) -> "tuple[CData, CData]":
    if tokens is None:
        return ffi.NULL, ffi.NULL
    values, known = tokens.values, tokens.known
    if not writable:
        values, known = np.ascontiguousarray(values, np.uint32), np.ascontiguousarray(known)
    return (
        ffi.from_buffer("uint32_t[]", values, require_writable=writable),
        ffi.from_buffer("bool[]", known, require_writable=writable),
    )


def _bytes(array: NDArray[np.uint8]) -> "CData":
    return ffi.from_buffer("uint8_t[]", array, require_writable=True)
