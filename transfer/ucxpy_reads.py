"""Reads over ucxx: what a caller asks for, cut into asks, and answers copied out verified.

Owns the reads of one connection and the memory that answers come into. A window is another's until
its answer has come or its connection is closed, also when the read that wanted it has ended long
before; a read's destination is only written by a copy on the thread of the loop, so nothing touches
it once the read has ended. Who calls it: the ucxx endpoint, on that thread but for ``submit``.
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.block import BlockLayout
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    CorruptionError,
    KVPoolError,
    LeaseExpiredError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import BlockView, Crcs, Span, copy_blocks
from kvpool.transfer.base import RemoteSlots
from kvpool.transfer.bounds import require_deadline
from kvpool.transfer.progress import ProgressLoop
from kvpool.transfer.pull import require_dest, require_slots, require_spans
from kvpool.transfer.ucx_reads import PeerRegion
from kvpool.transfer.ucxpy_library import Bytes
from kvpool.transfer.ucxpy_wire import ASKED_MAX, ASKS_MAX, Answer, Ask, answer_bytes
from kvpool.transfer.writes import Cancellable

# Reads of one connection that may be queued.
READS_MAX: Final = 1024


class Job(Protocol):
    """What one read wants, item by item: slots or spans."""

    sizes: Sequence[int]  # bytes of each item
    crc_count: int  # checksums of each item in an answer
    slots: tuple[int, ...]

    def ask(self, number: int, tag: int, begin: int, end: int) -> Ask:
        """Ask for a run of items."""
        ...

    def take(self, begin: int, end: int, good: int, crc: int, answer: Answer) -> int:
        """Copy the ``good`` leading items out of an answer; return how many are verified."""
        ...

    def result(self, good: int) -> int:
        """Turn the number of leading good items into the result, or raise."""
        ...


class BlockJob:
    """Whole slots into a view. Raises as ``Endpoint.read_blocks``."""

    def __init__(
        self,
        region: PeerRegion,
        dest: BlockView,
        source: RemoteSlots,
        layout: BlockLayout,
        dest_layer: int | None,
        crcs: Crcs | None,
        sums: Crcs | None = None,
    ) -> None:
        require_slots(source, region.descriptor.slot_count)
        if (region.descriptor.slot_bytes, region.crc_count) != (
            layout.block_bytes,
            layout.crc_count,
        ):
            raise UsageError(
                f"slots of {region.descriptor.slot_bytes} bytes and {region.crc_count} checksums do"
                f" not hold {layout.block_bytes} bytes and {layout.crc_count} checksums"
            )
        self._dest = require_dest(dest, source, layout, dest_layer, crcs, sums)
        self._source = source
        self._layout = layout
        self._crcs = crcs
        self._sums = sums
        self.sizes: Sequence[int] = [layout.block_bytes] * len(dest)
        self.crc_count = layout.crc_count
        self.slots = source.slots

    def ask(self, number: int, tag: int, begin: int, end: int) -> Ask:
        """Ask for a run of slots."""
        source = self._source
        return _ask(
            number,
            tag,
            [source.region] * (end - begin),
            source.slots[begin:end],
            source.generations[begin:end],
        )

    def take(self, begin: int, end: int, good: int, crc: int, answer: Answer) -> int:
        """Copy blocks out, each summed: to what the caller said, else to what the owner did."""
        if good == 0:
            return 0
        layout = self._layout
        told = answer.crcs[:good].reshape(good, layout.num_layers, layout.kv_heads)
        payload = Span.of(answer.payload[: good * layout.block_bytes])
        expected = told if self._crcs is None else self._crcs[begin : begin + good]
        if self._sums is not None:
            self._sums[begin : begin + good] = expected
            expected = self._sums[begin : begin + good]  # the peer cannot change these
        try:
            copy_blocks(
                self._dest.take(begin, begin + good),
                BlockView.of_buffer(layout, payload),
                crcs=expected,
            )
        except CorruptionError as error:
            return int(str(error.block))
        return good

    def result(self, good: int) -> int:
        """Return the leading blocks."""
        return good


class SpanJob:
    """Flat bytes, all or an error. Raises as ``Endpoint.read_spans``."""

    def __init__(
        self, pairs: Sequence[tuple[Span, RemoteSlots, int]], regions: Sequence[PeerRegion]
    ) -> None:
        descriptors = [region.descriptor for region in regions]
        require_spans(pairs, [(each.slot_count, each.slot_bytes) for each in descriptors])
        self._pairs = list(pairs)
        self.sizes: Sequence[int] = [span.size for span, _, _ in pairs]
        self.crc_count = 0
        self.slots = tuple(source.slots[0] for _, source, _ in pairs)

    def ask(self, number: int, tag: int, begin: int, end: int) -> Ask:
        """Ask for a run of spans."""
        some = self._pairs[begin:end]
        return _ask(
            number,
            tag,
            [source.region for _, source, _ in some],
            [source.slots[0] for _, source, _ in some],
            [source.generations[0] for _, source, _ in some],
            [offset for _, _, offset in some],
            [span.size for span, _, _ in some],
        )

    def take(self, begin: int, end: int, good: int, crc: int, answer: Answer) -> int:
        """Copy bytes out once they sum to what their owner sent."""
        if good < end - begin:
            return good
        payload = answer.payload[: sum(self.sizes[begin:end])]
        if crc32c(payload) != crc:
            raise CorruptionError("bytes were changed on their way: read them again")
        at = 0
        for span, _, _ in self._pairs[begin:end]:
            span.view()[:] = payload[at : at + span.size].data
            at += span.size
        return good

    def result(self, good: int) -> int:
        """Return all bytes. Raises LeaseExpiredError."""
        if good < len(self.slots):
            raise LeaseExpiredError(
                f"slot {self.slots[good]} is in another life: match and lease again"
            )
        return sum(self.sizes)


def new_window(size: int) -> Bytes:
    """Return zeroed memory at the begin of a page; each page is taken when it is first touched."""
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


def crc32c(data: Bytes) -> int:
    """Return the CRC-32C of some bytes."""
    return int(lib.kvp_crc32c(0, ffi.from_buffer("uint8_t[]", data), data.size))


def _ask(
    number: int,
    tag: int,
    regions: list[int],
    slots: Sequence[int],
    generations: Sequence[int],
    begins: Sequence[int] = (),
    sizes: Sequence[int] = (),
) -> Ask:
    lives: NDArray[np.uint64] = np.array(generations, dtype="<u8")
    name = tag.to_bytes(8, "little")
    return Ask(number, name, regions, list(slots), lives.tobytes(), list(begins), list(sizes))


class _Read:
    """One read under way. The loop's thread alone, but for its completion."""

    def __init__(self, job: Job, deadline_s: float) -> None:
        self.job: Job | None = job  # None: it has ended
        self.deadline = Deadline(deadline_s)
        self.source: CompletionSource[int] = CompletionSource()
        self.asked = 0  # leading items that were asked for
        self.open = 0  # asks that have not been answered
        self.good = len(job.slots)  # leading items that may still be whole

    def end(self, error: KVPoolError | None) -> None:
        job, self.job = self.job, None
        if job is None:
            return
        try:
            if error is not None:
                raise type(error)(str(error))
            result = job.result(self.good)
        except KVPoolError as failure:
            self.source.fail(failure.with_traceback(None))
        else:
            self.source.finish(result)


class UcxxReads:
    """The reads of one connection.

    Args:
        loop: Its thread.
        window_bytes: Size of each of the ``ASKS_MAX`` windows; taken when first used.
        new_tag: Names an ask among all of the worker.
        send: Sends an ask, after it has had its window filled by what comes under its tag:
            (ask, window, tag, told of the end).
        lose: Told that the peer did not keep to the protocol.

    ``_lock`` guards ``_count`` and ``_refused``. Nothing is called under it.
    """

    def __init__(
        self,
        loop: ProgressLoop,
        window_bytes: int,
        new_tag: Callable[[], int],
        send: Callable[[Ask, Bytes, int, Callable[[Exception | None], None]], None],
        lose: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._window_bytes = window_bytes
        self._new_tag = new_tag
        self._send = send
        self._lose = lose
        self._lock = threading.Lock()
        self._count = 0
        self._refused: KVPoolError | None = None
        self._queue: deque[_Read] = deque()
        self._reads: set[_Read] = set()
        self._free: list[Bytes] = []
        self._windows = 0  # that exist
        self._number = 0

    def submit(self, job: Job, deadline_s: float) -> Completion[int]:
        """Queue a read. Safe from any thread; does not wait.

        Raises:
            UsageError: The deadline is not a finite number.
            CapacityError: Too many reads, or an item is larger than a window.
            ClosedError: The transport is closed.
            KVPoolError: What the reads were ended with.
        """
        require_deadline(deadline_s)
        largest = answer_bytes(1, job.crc_count, max(job.sizes))
        if largest > self._window_bytes:
            raise CapacityError(
                f"{largest} bytes for one block do not fit a window of {self._window_bytes}: open"
                " the transport with a larger window_bytes"
            )
        read = _Read(job, deadline_s)
        read.source.completion = Cancellable(
            lambda: self._loop.post(lambda: self._end(read, CancelledTransferError("cancelled")))
        )
        with self._lock:
            if self._refused is not None:
                raise type(self._refused)(str(self._refused))
            if self._count >= READS_MAX:
                raise CapacityError(f"{READS_MAX} reads are queued: wait for one to end")
            self._count += 1
        if not self._loop.post(lambda: self._begin(read)):
            raise ClosedError("the transport is closed")
        return read.source.completion

    def refuse(self, error: KVPoolError) -> None:
        """Refuse reads from now on, and end those under way soon. Safe from any thread."""
        with self._lock:
            self._refused = error
        if not self._loop.post(self.end_all):
            self.end_all()  # the thread is gone: nobody copies any more

    def end_all(self) -> None:
        """End every read with what refuses them."""
        error = self._refused
        assert error is not None
        for read in list(self._reads):
            self._end(read, error)

    def counts(self) -> tuple[int, int]:
        """Return the windows that wait to be used, and those that an answer may still come into."""
        return len(self._free), self._windows - len(self._free)

    # ---- on the loop's thread ----------------------------------------------------------------

    def _begin(self, read: _Read) -> None:
        self._reads.add(read)
        if self._refused is not None:
            self._end(read, self._refused)
        elif read.deadline.passed():
            self._end(read, TransferTimeoutError("the deadline of the read passed"))
        else:
            late = TransferTimeoutError("the deadline of the read passed")
            self._loop.call_later(read.deadline.remaining_s(), lambda: self._end(read, late))
            self._queue.append(read)
            self._pump()

    def _end(self, read: _Read, error: KVPoolError | None) -> None:
        if read not in self._reads:
            return
        self._reads.discard(read)
        with self._lock:
            self._count -= 1
        read.end(error)

    def _pump(self) -> None:
        """Ask for what windows there are."""
        while self._queue and (self._free or self._windows < ASKS_MAX):
            read = self._queue[0]
            job = read.job
            if job is None or read.asked >= read.good:
                self._queue.popleft()
                continue
            begin = read.asked
            end = self._fit(job, begin, read.good)
            if not self._free:
                self._windows += 1
                self._free.append(new_window(self._window_bytes))
            window = self._free.pop()
            read.asked = end
            read.open += 1
            self._number += 1
            tag = self._new_tag()
            self._ask(read, job.ask(self._number, tag, begin, end), window, tag, begin, end)

    def _fit(self, job: Job, begin: int, stop: int) -> int:
        """Return up to which item one window holds the answer."""
        end, size = begin, 0
        while end < stop and end - begin < ASKED_MAX:
            size += job.sizes[end]
            if answer_bytes(end + 1 - begin, job.crc_count, size) > self._window_bytes:
                break
            end += 1
        return end

    def _ask(self, read: _Read, ask: Ask, window: Bytes, tag: int, begin: int, end: int) -> None:
        def answered(error: Exception | None) -> None:
            self._free.append(window)
            read.open -= 1
            if error is not None:  # the connection is closed; its end says why
                return
            job = read.job
            if job is not None:
                self._answered(
                    read, job, Answer(window, end - begin, job.crc_count), ask, begin, end
                )
            self._pump()

        self._send(ask, window, tag, answered)

    def _answered(
        self, read: _Read, job: Job, answer: Answer, ask: Ask, begin: int, end: int
    ) -> None:
        number, good, crc = answer.head()
        if number != ask.number or good > end - begin:
            self._lose("its answer is to another question")
            return
        if read.deadline.passed():
            self._end(read, TransferTimeoutError("the deadline of the read passed"))
            return
        try:
            good = job.take(begin, end, good, crc, answer)
        except KVPoolError as error:
            self._end(read, error)
            return
        if begin + good < end:
            read.good = min(read.good, begin + good)
        if read.open == 0 and read.asked >= read.good:
            self._end(read, None)
