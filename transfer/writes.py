"""Writes of one connection, both sides: bytes brought into a peer's slots, by that peer's own reads.

Owns what is asked of the peer and its end, and what the peer asks for. A write is cut into parts; the
peer claims the slots of a part, pulls its bytes as any read does, and answers. So no process ever
writes into another's memory, and a write has the checks, the deadlines and the quarantine of reads:
docs/decisions/0023-writes.md. Who calls it: every endpoint, on its transport's progress thread but for
``submit`` and ``refuse``.
"""

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    CorruptionError,
    KVPoolError,
    TransferTimeoutError,
)
from kvpool.memory import Span
from kvpool.transfer.base import RemoteSlots
from kvpool.transfer.bounds import require_deadline
from kvpool.transfer.calls import weakly
from kvpool.transfer.forked import in_child
from kvpool.transfer.registered import Registered
from kvpool.transfer.write_wire import (
    PARTS_MAX,
    ROWS_MAX,
    Drop,
    Note,
    Part,
    Rows,
    Took,
    WriteMessage,
    error_in,
    rows_of,
    took,
)

# Writes of one connection that may be queued.
WRITES_MAX: Final = 1024


class WriteLink(Protocol):
    """What writes ask of their endpoint."""

    def say_write(self, message: WriteMessage) -> None:
        """Tell the peer, in order. On the progress thread; lost with the peer."""
        ...

    def post(self, call: Callable[[], None]) -> bool:
        """Run ``call`` soon on the progress thread. False if that has ended."""
        ...

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Run ``call`` after ``seconds``. On the progress thread."""
        ...

    def read_spans(
        self, pairs: Sequence[tuple[Span, RemoteSlots, int]], deadline_s: float
    ) -> Completion[int]:
        """Pull bytes of the peer's."""
        ...

    def take_note(self, payload: bytes) -> None:
        """Hand a note to the endpoint's callback. Raises CapacityError: too many wait for one."""
        ...


class Cancellable(Completion[int]):
    """A completion whose cancel is acted upon soon."""

    def __init__(self, cancelled: Callable[[], object]) -> None:
        super().__init__()
        self._cancelled = cancelled

    def cancel(self) -> None:
        """Ask for an early end; it comes soon."""
        super().cancel()
        self._cancelled()


class _Write:
    """One write of ours. The progress thread alone, but for its completion."""

    def __init__(self, number: int, rows: Rows, note: bytes, deadline_s: float) -> None:
        self.number = number
        self.rows = rows
        self.note = note
        self.deadline = Deadline(deadline_s)
        self.source: CompletionSource[int] = CompletionSource()
        self.sent = 0  # leading rows that the peer was asked for
        self.open = 0  # parts and notes that it has not answered
        self.stop: KVPoolError | None = None

    def wants(self) -> bool:
        """Say whether something is left to ask for."""
        return self.stop is None and self.sent < len(self.rows)


class Writes:
    """What this side writes. One lock guards ``_count`` and ``_refused``; nothing is called under it."""

    def __init__(self, link: WriteLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._count = 0
        self._refused: KVPoolError | None = None
        self._numbers = itertools.count()
        # The progress thread alone.
        self._writes: dict[int, _Write] = {}
        self._queue: deque[_Write] = deque()
        self._open = 0  # of all writes, those that have ended, too
        self._wake_at = math.inf

    def submit(self, rows: Rows, note: bytes, deadline_s: float) -> Completion[int]:
        """Queue a write whose spans are checked. Safe from any thread; does not wait.

        Raises:
            UsageError: The deadline is none.
            CapacityError: WRITES_MAX are queued.
            KVPoolError: What ended the endpoint.
        """
        require_deadline(deadline_s)
        write = _Write(next(self._numbers), rows, note, deadline_s)
        # Whoever keeps a completion keeps no endpoint by it.
        this = weakref.ref(self)

        def cancelled() -> None:
            if (writes := this()) is not None:
                writes._link.post(lambda: writes._cancel(write))

        write.source.completion = Cancellable(cancelled)
        with self._lock:
            if self._refused is not None:
                raise type(self._refused)(str(self._refused))
            if self._count >= WRITES_MAX:
                raise CapacityError(f"{WRITES_MAX} writes are queued: wait for one to end")
            self._count += 1
        if not self._link.post(lambda: self._begin(write)):
            raise ClosedError("the transport is closed")
        return write.source.completion

    def refuse(self, error: KVPoolError) -> None:
        """Refuse writes from now on, and end those under way soon. Safe from any thread."""
        with self._lock:
            self._refused = error
        if not self._link.post(self._end_all):
            self._end_all()  # the thread is gone

    def after_fork(self) -> None:
        """Be ended in a child; see ``forked``. What was under way never ends there."""
        self._lock = threading.Lock()
        self._refused = in_child()
        self._writes = {}

    # ---- on the progress thread --------------------------------------------------------------

    def take(self, answer: Took) -> None:
        """Take the peer's answer to a part or a note. Raises CorruptionError: it was asked nothing."""
        if self._open == 0:
            raise CorruptionError("the peer answered a write that nobody asked for")
        self._open -= 1
        write = self._writes.get(answer.write)
        if write is not None:  # else it is late, and its write has ended
            if write.open == 0:
                raise CorruptionError("the peer answered a write more often than it was asked")
            write.open -= 1
            write.stop = write.stop or error_in(answer)
            self._settle(write)
        self._pump()

    def _begin(self, write: _Write) -> None:
        self._writes[write.number] = write
        if self._refused is not None:
            self._end(write, self._refused)
        elif write.source.cancel_requested:
            self._end(write, CancelledTransferError("cancelled by the caller"))
        elif write.deadline.passed():
            self._end(write, TransferTimeoutError("the deadline of the write passed"))
        else:
            self._queue.append(write)
            self._wake_for(write)
            self._pump()

    def _pump(self) -> None:
        """Ask for what may be asked for."""
        while self._queue and self._open < PARTS_MAX:
            write = self._queue[0]
            if write.wants():
                rows = write.rows[write.sent : write.sent + ROWS_MAX]
                write.sent += len(rows)
                timeout_ms = math.ceil(write.deadline.remaining_s() * 1000)
                self._ask(write, Part(write.number, timeout_ms, rows.tobytes()))
            else:
                self._queue.popleft()

    def _ask(self, write: _Write, message: Part | Note) -> None:
        write.open += 1
        self._open += 1
        self._link.say_write(message)

    def _settle(self, write: _Write) -> None:
        """End a write of which nothing is under way, or take its last step."""
        if write.open or write.wants():
            return
        if write.stop is not None:
            self._end(write, write.stop)
        elif write.note:
            payload, write.note = write.note, b""
            self._ask(write, Note(write.number, payload))
        else:
            self._end(write, None)

    def _cancel(self, write: _Write) -> None:
        if write.number in self._writes and write.stop is None:
            write.stop = CancelledTransferError("cancelled by the caller")
            if write.open:
                self._link.say_write(Drop(write.number))  # it ends with the last answer
            self._settle(write)

    def _end(self, write: _Write, error: KVPoolError | None) -> None:
        del self._writes[write.number]
        with self._lock:
            self._count -= 1
        if error is None:
            write.source.finish(int(write.rows["size"].sum()))
        else:
            # One exception object each: several threads will raise them.
            write.stop = type(error)(str(error))
            write.source.fail(write.stop)

    def _end_all(self) -> None:
        error = self._refused
        assert error is not None
        for write in list(self._writes.values()):
            self._end(write, error)
        self._queue.clear()

    def _wake_for(self, write: _Write) -> None:
        if write.deadline.at < self._wake_at:
            self._wake_at = write.deadline.at
            self._link.call_later(write.deadline.remaining_s(), weakly(self._look))

    def _look(self) -> None:
        """End the writes whose deadline has passed, and wake for the next one."""
        self._wake_at = math.inf
        for write in list(self._writes.values()):
            if write.deadline.passed():
                if write.open:
                    self._link.say_write(Drop(write.number))
                self._end(write, TransferTimeoutError("the deadline of the write passed"))
        if self._writes:
            self._wake_for(min(self._writes.values(), key=lambda write: write.deadline.at))
        self._pump()


class Takes:
    """What the peer writes here: pulled on its behalf. The progress thread alone.

    Args:
        link: Whose peer it is.
        ours: What the transport has registered.
    """

    def __init__(self, link: WriteLink, ours: Registered) -> None:
        self._link = link
        self._ours = ours
        self._numbers = itertools.count()
        self._pulls: dict[int, tuple[int, Rows, Completion[int]]] = {}

    def part(self, part: Part) -> None:
        """Pull what the peer names. Raises CorruptionError: it may not ask for so much at once."""
        if len(self._pulls) >= PARTS_MAX:
            raise CorruptionError("the peer has more parts of writes open than it may")
        rows = rows_of(part)
        try:
            pull = self._pull(rows, part)
        except KVPoolError as error:
            self._link.say_write(took(part.write, error))
            return
        number = next(self._numbers)
        self._pulls[number] = (part.write, rows, pull)

        def ended() -> None:
            if not self._link.post(lambda: self._finish(number)):
                self._finish(number)  # the thread is gone: nobody pulls any more

        pull.add_done_callback(ended)

    def drop(self, message: Drop) -> None:
        """End what is under way of a write that nobody waits for."""
        for write, _, pull in list(self._pulls.values()):
            if write == message.write:
                pull.cancel()

    def note(self, note: Note) -> None:
        """Hand a note on."""
        try:
            self._link.take_note(note.payload)
        except CapacityError as error:
            self._link.say_write(took(note.write, error))
        else:
            self._link.say_write(took(note.write))

    def _pull(self, rows: Rows, part: Part) -> Completion[int]:
        spans = self._ours.claim(rows, (id(self), part.write))
        try:
            sources = rows[["from_region", "from_slot", "from_generation", "from_offset"]].tolist()
            pairs = [
                (span, RemoteSlots(region, (slot,), (life,)), offset)
                for span, (region, slot, life, offset) in zip(spans, sources, strict=True)
            ]
            return self._link.read_spans(pairs, part.timeout_ms / 1000)
        except BaseException:
            self._ours.give_back(rows)
            raise

    def _finish(self, number: int) -> None:
        write, rows, pull = self._pulls.pop(number)
        self._ours.give_back(rows)
        try:
            pull.result()
        except KVPoolError as error:
            self._link.say_write(took(write, error))
        else:
            self._link.say_write(took(write))
