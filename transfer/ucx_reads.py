"""The reader's side of reads over UCX: asks, windows of the inbox, copies out of them, and ends.

Owns one connection's part of the inbox, cut into windows. The owner of the bytes puts them into a
window and answers; then they are copied to their place, verified, by the copy threads. A window that
was asked into is not used again before its answer has come, whatever became of its read: the peer
may still write there. A completion ends as soon as nothing here touches its destination, answer or
not. Who calls it: the UCX endpoint.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    KVPoolError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import Span
from kvpool.transfer.engine import CopyEngine
from kvpool.transfer.ucx_cuts import Cut, Job
from kvpool.transfer.ucx_wire import ASKS_MAX, Answer, Ask

# Reads of one connection that may be queued.
READS_MAX: Final = 1024
# Windows start at multiples of this.
_WINDOW_ALIGNMENT: Final = 64


def window_bytes(inbox_bytes: int) -> int:
    """Return the size of one window of an inbox part: as many as asks may be unanswered."""
    size = inbox_bytes // ASKS_MAX
    return size - size % _WINDOW_ALIGNMENT


class _Reading(Completion[int]):
    """A completion whose cancel is looked at soon, not only when the next answer comes."""

    def __init__(self, stir: Callable[[], object]) -> None:
        super().__init__()
        self._stir = stir

    def cancel(self) -> None:
        super().cancel()
        self._stir()


class _Read:
    """One read. Guarded by the lock of ``Reads``, except ``job``, ``source`` and ``deadline``."""

    def __init__(self, job: Job, deadline: Deadline, stir: Callable[[], object]) -> None:
        self.job = job
        self.deadline = deadline
        self.source: CompletionSource[int] = CompletionSource()
        self.source.completion = _Reading(stir)
        self.next_cut = 0
        self.asked: dict[int, Cut] = {}  # by the number of the ask
        self.copying = 0
        self.good = job.count
        self.stop: KVPoolError | None = None

    def wants(self) -> bool:
        """Say whether something is left to ask for that a result could need."""
        cuts = self.job.cuts
        return (
            self.stop is None
            and self.next_cut < len(cuts)
            and cuts[self.next_cut].first < self.good
        )

    def refresh(self) -> None:
        """Note a cancel or a passed deadline."""
        if self.stop is None and self.source.cancel_requested:
            self.stop = CancelledTransferError("cancelled by the caller")
        if self.stop is None and self.deadline.passed():
            self.stop = TransferTimeoutError("the deadline of the read passed")

    def found(self, cut: Cut, good: int) -> None:
        """Note that of the items of a cut only the ``good`` leading ones are whole."""
        if good < len(cut.slots):
            self.good = min(self.good, cut.first + good)

    def over(self) -> bool:
        """Say whether nothing touches its destination now, nor will."""
        if self.copying:
            return False
        if self.stop is not None:
            return True
        return not self.wants() and all(cut.first >= self.good for cut in self.asked.values())

    def end(self) -> None:
        """End the completion. Outside the lock: callbacks run here."""
        if self.stop is not None:
            self.source.fail(self.stop)
            return
        try:
            self.source.finish(self.job.result(self.good))
        except KVPoolError as error:
            self.source.fail(error)


class _Copy:
    """The copy of one answered window: what a copy thread runs. See ``engine.Pull``."""

    def __init__(self, read: _Read, cut: Cut, good: int, window: Span) -> None:
        self.batches = [(0, 1)]
        self.read, self.cut, self.good = read, cut, good
        self._window = window

    def copy(self, begin: int, end: int) -> int:
        """Copy, unless the read has stopped meanwhile."""
        if self.read.stop is None:
            self.good = self.read.job.copy(self.cut, self.good, self._window)
        return end - begin

    def result(self, good: int) -> int:
        """Return how many leading items are whole."""
        return self.good


class Reads:
    """The reads of one connection. Safe from any thread.

    One condition guards everything. ``ask`` is called under it; no callback of a user is.

    Args:
        inbox: This connection's part.
        ask: Sends an ask to the peer; never blocks.
        copies: Runs the copies; reads end there by their owner, which is this object.
        post, call_later: Of the engine.
    """

    def __init__(
        self,
        inbox: Span,
        ask: Callable[[Ask], None],
        copies: CopyEngine,
        post: Callable[[Callable[[], None]], object],
        call_later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.window_bytes = window_bytes(inbox.size)
        self._inbox = inbox
        self._ask = ask
        self._copies = copies
        self._call_later = call_later
        self._stir = partial(post, self._sweep)
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._free = [index * self.window_bytes for index in range(ASKS_MAX)]
        # Of each unanswered ask: where its window begins, and who asked, None if that has ended.
        self._asked: dict[int, tuple[int, _Read | None]] = {}
        self._reads: dict[int, _Read] = {}
        self._armed_at: float | None = None
        self._ended: KVPoolError | None = None

    def submit(self, job: Job, deadline_s: float) -> Completion[int]:
        """Start a read.

        Raises:
            UsageError: The deadline is not a finite number.
            CapacityError: READS_MAX reads are queued.
            KVPoolError: What the reads were ended with.
        """
        if not math.isfinite(deadline_s):
            raise UsageError(f"a deadline of {deadline_s} s: every read needs a finite one")
        read = _Read(job, Deadline(deadline_s), self._stir)
        with self._changed:
            if self._ended is not None:
                raise type(self._ended)(str(self._ended))
            if len(self._reads) >= READS_MAX:
                raise CapacityError(f"{READS_MAX} reads are queued: wait for one to end")
            self._reads[id(read)] = read
            read.refresh()
            self._start()
            self._arm(read.deadline.at)
            over = self._take_over([read])
        _end(over)
        return read.source.completion

    def answered(self, answer: Answer) -> bool:
        """Take an answer of the peer. False if it answers nothing. On the engine's thread."""
        copy: _Copy | None = None
        with self._changed:
            begin, read = self._asked.pop(answer.number, (-1, None))
            if begin < 0:
                return False
            cut = None if read is None else read.asked.pop(answer.number)
            sound = cut is None or answer.good <= len(cut.slots)
            if sound and read is not None and cut is not None:
                read.found(cut, answer.good)
                if read.stop is None and cut.first < read.good:
                    window = self._inbox.part(begin, self.window_bytes)
                    copy = _Copy(read, cut, answer.good, window)
                    read.copying += 1
            if copy is None:
                self._free.append(begin)
                self._start()
            over = self._take_over([] if read is None else [read])
        _end(over)
        if copy is not None:
            self._run(copy, begin)
        return sound

    def end(self, error: KVPoolError) -> None:
        """End every read with an error like ``error``, those to come too; copies first."""
        with self._changed:
            self._ended = error
            reads = list(self._reads.values())
            for read in reads:
                if read.stop is None:
                    # One exception object each: several threads will raise them.
                    read.stop = type(error)(str(error))
            over = self._take_over(reads)
        _end(over)
        self._copies.end_reads(self, error)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no read is left, nor a copy. False if one is after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reads, timeout_s)

    def counts(self) -> tuple[int, int]:
        """Return how many windows are free, and how many are owed: asked into by ended reads."""
        with self._changed:
            owed = sum(read is None for _, read in self._asked.values())
            return len(self._free), owed

    # ---- inside: with the condition held, unless it says otherwise -------------------------------

    def _start(self) -> None:
        """Ask for as much as there are windows, the oldest read first."""
        for read in self._reads.values():
            while self._free and read.wants():
                cut, number = read.job.cuts[read.next_cut], next(self._numbers)
                begin = self._free.pop()
                read.next_cut += 1
                read.asked[number] = cut
                self._asked[number] = (begin, read)
                self._ask(
                    Ask(
                        number=number,
                        region=cut.region,
                        at=begin,
                        offset=cut.offset,
                        size=cut.size,
                        first_crc=cut.first_crc,
                        crc_count=cut.crc_count,
                        slots=list(cut.slots),
                        generations=list(cut.generations),
                    )
                )
            if not self._free:
                return

    def _take_over(self, reads: list[_Read]) -> list[_Read]:
        """Remove those of ``reads`` that are over; their windows stay owed by the peer."""
        over = [read for read in reads if id(read) in self._reads and read.over()]
        for read in over:
            del self._reads[id(read)]
            for number in read.asked:
                self._asked[number] = (self._asked[number][0], None)
        if over:
            self._changed.notify_all()
        return over

    def _arm(self, at: float) -> None:
        """See to it that deadlines are looked at when the one at ``at`` has passed."""
        if self._armed_at is None or at < self._armed_at:
            self._armed_at = at
            self._call_later(max(0.0, at - time.monotonic()), partial(self._on_time, at))

    def _on_time(self, at: float) -> None:
        """Look, if this timer is still the one that was armed. Not with the condition held."""
        with self._changed:
            if self._armed_at != at:
                return
            self._armed_at = None
        self._sweep()

    def _sweep(self) -> None:
        """Look at cancels and deadlines. On the engine's thread, not with the condition held."""
        with self._changed:
            reads = list(self._reads.values())
            for read in reads:
                read.refresh()
            over = self._take_over(reads)
            self._start()
            going = [read.deadline.at for read in reads if read.stop is None]
            if going:
                self._arm(min(going))
        _end(over)

    def _run(self, copy: _Copy, begin: int) -> None:
        """Hand a copy to the copy threads. Not with the condition held."""
        try:
            done = self._copies.submit(copy, self, copy.read.deadline.remaining_s())
        except KVPoolError as error:
            self._copied(copy, begin, error)
            return

        def ended() -> None:
            try:
                done.result()
                self._copied(copy, begin, None)
            except KVPoolError as error:
                self._copied(copy, begin, error)

        done.add_done_callback(ended)

    def _copied(self, copy: _Copy, begin: int, error: KVPoolError | None) -> None:
        """Count a copy as over: the window is free. Not with the condition held."""
        read = copy.read
        with self._changed:
            self._free.append(begin)
            read.copying -= 1
            if error is None:
                read.found(copy.cut, copy.good)
            elif read.stop is None:
                read.stop = error
            self._start()
            over = self._take_over([read])
        _end(over)


def _end(reads: list[_Read]) -> None:
    """End completions, with no lock held."""
    for read in reads:
        read.end()
