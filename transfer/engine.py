"""The copy engine: a bounded queue of reads, and a few threads that run them batch by batch.

Owns when a read runs, and how it ends: result, deadline, cancel, lost endpoint. A completion ends
only when no thread is in the read's buffers any more. Knows nothing of peers or layouts: what a
batch does is its read's (``transfer/pull.py``). Who calls it: the endpoints.
"""

import logging
import threading
import time
import traceback
import weakref
from typing import Final, Protocol

from kvpool.bell import Bell
from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    InternalError,
    KVPoolError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import Crew
from kvpool.transfer.bounds import require_deadline

logger = logging.getLogger(__name__)

# How often queued reads are looked at for deadlines and cancels while others are copied.
_SWEEP_S: Final = 0.002
# An idle thread looks up this often; work and close wake it at once.
_IDLE_S: Final = 60.0


class Pull(Protocol):
    """What one read does, in batches that may run in parallel and in any order."""

    batches: list[tuple[int, int]]  # (begin, end) of items, ascending, together all of them

    def copy(self, begin: int, end: int) -> int:
        """Copy the items of one batch; return the leading ones that are whole and verified."""
        ...

    def result(self, good: int) -> int:
        """Turn the number of leading good items into the completion's result, or raise."""
        ...


class _Helped(Completion[int]):
    """A completion whose waiter copies too, instead of sleeping while others do.

    Two threads less have to be woken: of a pull of 32 MiB, which takes 2.5 ms, that was a third. It
    keeps no read alive: whoever keeps a completion would keep the memory of a dead peer.
    """

    def __init__(self, engine: "CopyEngine", read: "_Read") -> None:
        super().__init__()
        self._engine = engine
        self._read = weakref.ref(read)

    def wait(self, timeout_s: float) -> int:
        """Wait as any completion does; may last one batch longer, a few milliseconds.

        The callbacks of the read may then run here: hold no lock that one of them takes.
        """
        deadline = Deadline(timeout_s)
        while not deadline.passed() and self._engine.help(self._read):
            pass
        return super().wait(deadline.remaining_s())

    def _start(self) -> None:
        if not self._done:
            self._engine.begin(self._read)


class _Read:
    """One submitted read. Guarded by the engine's lock, except ``pull`` and ``deadline``."""

    def __init__(self, pull: Pull, owner: object, deadline_s: float, engine: "CopyEngine") -> None:
        self.pull = pull
        self.owner = owner
        self.deadline = Deadline(deadline_s)
        self.source = CompletionSource(_Helped(engine, self))
        self.next_batch = 0
        self.active = 0
        self.good = pull.batches[-1][1]
        self.stop: KVPoolError | None = None

    def refresh(self) -> None:
        """Note a cancel or a passed deadline."""
        if self.stop is None and self.source.cancel_requested:
            self.stop = CancelledTransferError("cancelled by the caller")
        if self.stop is None and self.deadline.passed():
            self.stop = TransferTimeoutError("the deadline of the read passed")

    def claimable(self) -> bool:
        """Say whether a batch is left that a result could need."""
        batches = self.pull.batches
        return (
            self.stop is None
            and self.next_batch < len(batches)
            and batches[self.next_batch][0] < self.good
        )

    def claim(self) -> int:
        """Take the next batch, which is to be copied now."""
        self.active += 1
        self.next_batch += 1
        return self.next_batch - 1

    def over(self) -> bool:
        """Say whether nobody touches its buffers now, nor will."""
        return self.active == 0 and not self.claimable()

    def end(self) -> None:
        """End the completion. Outside the engine's lock: callbacks run here.

        Its error comes without a traceback: whoever keeps the error would keep the frames in it, and
        with them the memory of a dead peer, until a garbage collection.
        """
        if self.stop is not None:
            self.source.fail(self.stop.with_traceback(None))
            return
        try:
            result = self.pull.result(self.good)
        except KVPoolError as error:
            self.source.fail(error.with_traceback(None))
        else:
            self.source.finish(result)


def _end_all(reads: list[_Read]) -> None:
    """End reads, and keep none: a thread that sleeps with one in a variable keeps it alive."""
    while reads:
        reads.pop().end()


class CopyEngine:
    """A few named threads that copy without the GIL. Safe from any thread.

    Attributes:
        reads_max: Reads that may be queued.
        crew: As many threads in C, the caller of a copy included, that share one large copy.

    One read is spread over the threads. ``submit`` never waits: beyond ``reads_max`` it refuses.
    One lock, ``_lock``, guards everything; no callback runs under it. A read of one batch that is
    alone wakes no thread: whoever waits for it copies, and a thread does if nobody has for 2 ms, or at
    once if a callback is added.
    """

    def __init__(self, name: str, *, threads: int = 2, reads_max: int = 1024) -> None:
        self.reads_max = reads_max
        self.crew = Crew(max(1, threads))
        self._lock = threading.RLock()
        self._changed = threading.Condition(
            self._lock
        )  # for the threads: there is work, or the end
        self._ended = threading.Condition(self._lock)  # a read is over
        self._reads: dict[int, _Read] = {}
        self._sweep_at = 0.0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        self._bell = Bell(self._wake, f"{name}-late")
        for thread in self._threads:
            thread.start()

    def submit(self, pull: Pull, owner: object, deadline_s: float) -> Completion[int]:
        """Queue a read of one owner (an endpoint).

        Raises:
            UsageError: The deadline is not a finite number, or there is nothing to read.
            CapacityError: ``reads_max`` reads are queued. Try again when one has ended.
            ClosedError: The engine is closed.
        """
        require_deadline(deadline_s)
        if not pull.batches:
            raise UsageError("a read of nothing")
        read = _Read(pull, owner, deadline_s, self)
        with self._changed:
            if self._closed:
                raise ClosedError("the transport is closed")
            if len(self._reads) >= self.reads_max:
                raise CapacityError(f"{self.reads_max} reads are queued: wait for one to end")
            self._reads[id(read)] = read
            alone = len(self._reads) == len(pull.batches) == 1
            if not alone:
                self._changed.notify_all()
        if alone:
            self._bell.ring()
        return read.source.completion

    def begin(self, wanted: "weakref.ref[_Read]") -> None:
        """Have a thread begin a read whose first batch nobody has taken yet."""
        read = wanted()
        with self._changed:
            if read is not None and id(read) in self._reads and read.next_batch == 0:
                self._changed.notify()

    def help(self, wanted: "weakref.ref[_Read]") -> bool:
        """Copy one batch of a read on the caller's thread. False if there is none to take."""
        read = wanted()
        if read is None:
            return False
        ended: list[_Read] = []
        with self._changed:
            if id(read) not in self._reads or not read.claimable():
                return False
            read.refresh()
            if read.claimable():
                batch = read.claim()
                if len(self._reads) == 1:
                    self._bell.hush()  # it was rung for this one
            else:
                batch, ended = -1, self._take_over()
        _end_all(ended)
        if batch >= 0:
            self._copy(read, batch)
        return batch >= 0

    def end_reads(self, owner: object, error: KVPoolError) -> None:
        """End every read of ``owner`` with an error like ``error``, as soon as no copy runs in it."""
        with self._changed:
            for read in self._reads.values():
                if read.owner is owner and read.stop is None:
                    # One exception object each: several threads will raise them.
                    read.stop = type(error)(str(error))
            ended = self._take_over()
        _end_all(ended)

    def drain(self, owner: object, timeout_s: float) -> bool:
        """Wait until no read of ``owner`` is left. False if one is after ``timeout_s``."""
        with self._ended:
            return self._ended.wait_for(
                lambda: all(read.owner is not owner for read in self._reads.values()), timeout_s
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """End every read with ClosedError, and the threads. Idempotent, bounded."""
        with self._changed:
            self._closed = True
            for read in self._reads.values():
                if read.stop is None:
                    read.stop = ClosedError("the transport was closed")
            ended = self._take_over()
            self._changed.notify_all()
        _end_all(ended)
        deadline = Deadline(timeout_s)
        self._bell.close(timeout_s)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining_s())
                if thread.is_alive():
                    logger.error("%s did not end within %s s", thread.name, timeout_s)

    def after_fork(self) -> None:
        """Be closed in a child; see ``forked``. What was under way there never ends."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._reads = {}
        self._threads = []
        self._closed = True

    def _wake(self) -> None:
        """Have the threads look for reads that nobody copies."""
        with self._changed:
            self._changed.notify_all()

    def _take_over(self) -> list[_Read]:
        """Remove the reads that are over. Under the lock; the caller ends them outside it."""
        ended = [read for read in self._reads.values() if read.over()]
        for read in ended:
            del self._reads[id(read)]
        if ended:
            self._ended.notify_all()
        return ended

    def _sweep(self) -> list[_Read]:
        if time.monotonic() < self._sweep_at:
            return []
        self._sweep_at = time.monotonic() + _SWEEP_S
        for read in self._reads.values():
            read.refresh()
        return self._take_over()

    def _claimable(self) -> _Read | None:
        for read in self._reads.values():
            read.refresh()
            if read.claimable():
                return read
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                ended = self._sweep()
                read = self._claimable()
                if read is None:
                    ended += self._take_over()
                    if not ended:
                        if self._closed:
                            return
                        self._changed.wait(_IDLE_S)
                        continue
                batch = read.claim() if read is not None else 0
            _end_all(ended)
            if read is not None:
                self._copy(read, batch)
            del read  # an idle thread keeps no peer's memory mapped

    def _copy(self, read: _Read, batch: int) -> None:
        begin, end = read.pull.batches[batch]
        failure: KVPoolError | None = None
        good = 0
        try:
            good = read.pull.copy(begin, end)
        except KVPoolError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  # logged below
            # As text, not as an exception: whoever keeps the record would keep the read.
            logger.error("a copy failed: %s", traceback.format_exc())
            failure = InternalError(f"a copy failed: {error!r}")
            failure.__cause__ = error.with_traceback(None)
        with self._changed:
            read.active -= 1
            if failure is not None and read.stop is None:
                read.stop = failure
            if begin + good < end:
                read.good = min(read.good, begin + good)
            if read.claimable():  # what has been copied whole is a result, however late
                read.refresh()
            over = read.over() and self._reads.pop(id(read), None) is not None
            if over:
                self._ended.notify_all()
        if over:
            read.end()
