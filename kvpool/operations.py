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

from kvpool.bell import Bell
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
    as long as copying a megabyte. So it is not handed over, either, before somebody adds a callback,
    or waits and may not run it, or nobody has asked for it for 2 ms.

    An operation that waits for a device has a thread to itself: no copy is queued behind it, and it never
    runs in the thread that waits for it, where Ctrl-C would end it between what the device has done and
    what is known of that.

    Args:
        threads: Operations that run at the same time.
        operations_max: Running or queued; one more is refused.
        device_max: Operations besides that wait for a device; one more is refused.
        name: Of the threads.
    """

    def __init__(
        self,
        threads: int,
        operations_max: int,
        *,
        device_max: int = 0,
        name: str = "kvpool-copy",
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._device_threads = ThreadPoolExecutor(
            max(1, device_max), thread_name_prefix=f"{name}-device"
        )
        self._operations_max = operations_max
        self._device_max = device_max
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._count = 0
        self._device_count = 0
        self._closed = False
        self._process = os.getpid()
        # Of the one operation that is alone and that nobody has begun.
        self._late: Callable[[], None] | None = None
        self._bell = Bell(self._start_late, f"{name}-late")

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
        with self._lock:
            self._count -= 1
            if self._closed:
                self._ended.notify_all()

    def enter_device(self) -> None:
        """Count one operation that waits for a device, which ``run_device`` must follow.

        Raises as ``enter``.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the pool is closed")
            if self._device_count >= self._device_max:
                raise CapacityError(f"{self._device_count} stores wait for the device: try later")
            self._device_count += 1

    def _leave_device(self) -> None:
        with self._lock:
            self._device_count -= 1
            if self._closed:
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

        def start() -> None:
            if begun.locked() or os.getpid() != self._process:
                return
            try:
                self._threads.submit(run)
            except RuntimeError:  # closed since it was entered: work() ends at its first look
                run()

        def run_alone() -> None:
            alone = self._count == 1 and os.getpid() == self._process
            if alone and begun.acquire(blocking=False):
                self._late = None  # this one, or none: nothing else is under way
                self._bell.hush()
                run_into(source, work, self.leave)

        source.offer(run_alone, start)
        if self._count == 1:
            with self._lock:
                self._late = start
            self._bell.ring()
        else:
            self._start_late()
            start()
        if self._closed:  # whoever closed it may have looked for it before
            start()
        return source.completion

    def run_device(self, source: "CompletionSource[T]", work: Callable[[], T]) -> Completion[T]:
        """Run an operation that was entered by ``enter_device``, and end its completion."""

        def run() -> None:
            run_into(source, work, self._leave_device)

        try:
            self._device_threads.submit(run)
        except RuntimeError:  # closed since it was entered: work() ends at its first look
            run()
        return source.completion

    def close(self, timeout_s: float) -> None:
        """Refuse new operations and wait for those under way, which end at their next look."""
        with self._lock:
            self._closed = True
        self._start_late()
        self._threads.shutdown(wait=False)
        self._device_threads.shutdown(wait=False)
        self._bell.close(timeout_s)
        with self._ended:
            self._ended.wait_for(lambda: self._count == self._device_count == 0, timeout_s)

    def _start_late(self) -> None:
        with self._lock:
            start, self._late = self._late, None
        if start is not None:
            start()


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
