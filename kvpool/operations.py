"""Operations: loads and stores under way in this process, and the threads that run them.

Owns the copying threads, the limit on what is queued, and how an operation ends early or when its
owner closes. Knows nothing of blocks. Who calls it: the pool.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    InternalError,
    KVPoolError,
    TransferTimeoutError,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Called between two copies; raises once the operation must end.
Look = Callable[[], None]


class Operations:
    """Runs operations on a few threads. Safe from any thread.

    One lock, ``_lock``, guards the count of operations; nothing is called under it. An operation that
    is alone runs in the thread that waits for it, if that comes first: handing it over and back takes
    as long as copying a megabyte.

    Args:
        threads: Operations that run at the same time, on threads named ``kvpool-copy``.
        operations_max: Running or queued; one more is refused.
    """

    def __init__(self, threads: int, operations_max: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvpool-copy")
        self._operations_max = operations_max
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._count = 0
        self._closed = False
        self._process = os.getpid()

    def enter(self) -> None:
        """Count one operation, which ``run`` or ``leave`` must follow.

        Raises:
            CapacityError: Too many are under way.
            ClosedError: ``close`` was called.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the pool is closed")
            if self._count >= self._operations_max:
                raise CapacityError(f"{self._count} loads and stores are under way: try later")
            self._count += 1

    def leave(self) -> None:
        """Count one operation less."""
        with self._ended:
            self._count -= 1
            self._ended.notify_all()

    def look(self, source: "CompletionSource[T]", deadline_s: float) -> Look:
        """Return what raises when ``source`` is cancelled, its time is over, or this was closed."""
        deadline = Deadline(deadline_s)
        source.bound(deadline_s)

        def look() -> None:
            if self._closed:
                raise ClosedError("the pool was closed")
            if source.cancel_requested:
                raise CancelledTransferError("cancelled by the caller")
            if deadline.passed():
                raise TransferTimeoutError(f"not complete within {deadline_s} s")

        return look

    def run(self, source: "CompletionSource[T]", work: Callable[[], T]) -> Completion[T]:
        """Run an operation that was entered, and end its completion with what comes of it."""
        begun = threading.Lock()

        def run() -> None:
            if begun.acquire(blocking=False):
                run_into(source, work, self.leave)

        def run_alone() -> None:
            if self._count == 1 and os.getpid() == self._process:
                run()

        source.offer(run_alone)
        try:
            self._threads.submit(run)
        except RuntimeError:  # closed since it was entered: work() ends at its first look
            run()
        return source.completion

    def close(self, timeout_s: float) -> None:
        """Refuse new operations and wait for those under way, which end at their next look."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False)
        with self._ended:
            self._ended.wait_for(lambda: self._count == 0, timeout_s)


def run_into(
    source: "CompletionSource[T]", work: Callable[[], T], before_end: Callable[[], None]
) -> None:
    """Run ``work`` here, then ``before_end``, then end ``source`` with the result or the error."""
    try:
        result = work()
    except KVPoolError as error:
        before_end()
        source.fail(error)
    except Exception as error:
        logger.exception("an operation of the pool failed")
        wrapped = InternalError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        before_end()
        source.fail(wrapped)
    except BaseException:  # Ctrl-C in a thread that waits for its own operation
        before_end()
        source.fail(CancelledTransferError("the thread that ran it was interrupted"))
        raise
    else:
        before_end()
        source.finish(result)
