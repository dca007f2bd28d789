"""Completions: work in flight, its layers as they become ready, and its end.

Owns the state of one operation and the lock around it. Never runs work itself: whoever starts the
operation drives it through a ``CompletionSource``. Who calls it: transfer, pool, client, engines.
"""
# pyright: reportPrivateUsage=false
# A completion and its source are two sides of one state.

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from typing import Final, Generic, TypeVar

from kvpool.errors import CancelledTransferError, TransferTimeoutError, UsageError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Eleven days. Of a longer wait, or an endless one, so much is waited: locks, sockets and epoll count
# in numbers that end not far behind it.
LONGEST_S: Final = 1e6


class Completion(Generic[T]):
    """The reader's side of one operation. Safe from any thread; also awaitable.

    The buffers of an operation belong to it until ``done()``: not at a timeout of ``wait``, and not
    at ``cancel``, but when the completion is done may they be used again.
    """

    def __init__(self) -> None:
        # Taken as it is, not through the condition, whose ``with`` runs Python: Ctrl-C there leaves the
        # lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._layers_ready = 0
        self._cancel_requested = False
        self._callbacks: list[Callable[[], object]] = []
        self._runner: Callable[[], object] | None = None
        self._starter: Callable[[], object] | None = None
        self._limit_s = math.inf

    def done(self) -> bool:
        """Say whether it has ended, well or not. Never blocks."""
        return self._done

    def layers_ready(self) -> int:
        """Return how many leading layers have arrived. Never blocks."""
        return self._layers_ready

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        """Wait until ``layer`` (0-based) has arrived or the operation ended.

        Returns:
            True if the layer has arrived.

        Raises:
            TransferTimeoutError: ``timeout_s`` passed. The operation goes on.
        """
        self._start()
        within_s = Deadline(timeout_s).remaining_s()
        with self._lock:
            if not self._changed.wait_for(
                lambda: self._layers_ready > layer or self._done, within_s
            ):
                raise TransferTimeoutError(f"layer {layer} did not arrive within {timeout_s} s")
            return self._layers_ready > layer

    def wait(self, timeout_s: float) -> T:
        """Wait for the end and return the result, or raise the operation's error.

        An operation that nobody has begun may run in this thread, if its own deadline comes first;
        callbacks are then called here, too.

        Raises:
            TransferTimeoutError: ``timeout_s`` passed. The operation goes on and keeps its buffers.
        """
        runner = self._runner
        if runner is not None and timeout_s >= self._limit_s and not self._callbacks:
            runner()
        if not self._done:
            self._start()
            within_s = Deadline(timeout_s).remaining_s()
            with self._lock:
                if not self._changed.wait_for(lambda: self._done, within_s):
                    raise TransferTimeoutError(f"not complete within {timeout_s} s")
        return self.result()

    def result(self) -> T:
        """Return the result of a done operation, or raise its error.

        Raises:
            TransferTimeoutError: It is not done. Use ``wait`` to block.
        """
        with self._lock:
            if not self._done:
                raise TransferTimeoutError("not complete yet")
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]  # done without error: it is a T

    def cancel(self) -> None:
        """Ask for an early end. Idempotent, never blocks, harmless once done.

        The completion then ends with CancelledTransferError, or with its result if that came first.
        """
        self._cancel_requested = True

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once when done, from the thread that ends it; at once if done already."""
        with self._lock:
            waiting = not self._done
            if waiting:
                self._callbacks.append(callback)
        if waiting:
            self._start()
        else:
            callback()

    def _start(self) -> None:
        """Have the operation begun now, if its owner waits for somebody to ask for it."""
        starter = self._starter
        if starter is not None:
            starter()

    def __await__(self) -> Generator[object, None, T]:
        """Await the end in asyncio; raises as ``result`` does."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not ended.done():
                ended.set_result(None)

        def wake() -> None:
            # A loop that closed meanwhile has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell)

        self.add_done_callback(wake)
        yield from ended
        return self.result()


class CompletionSource(Generic[T]):
    """The worker's side: advances and ends one completion. The first end wins, later ones are lost.

    Args:
        completion: The reader's side, nobody else's yet; None makes one.
    """

    def __init__(self, completion: Completion[T] | None = None) -> None:
        self.completion: Completion[T] = Completion() if completion is None else completion

    @property
    def cancel_requested(self) -> bool:
        """Whether the reader has asked for an early end."""
        return self.completion._cancel_requested

    def bound(self, limit_s: float) -> None:
        """Say that the operation ends itself within ``limit_s``: not known before."""
        self.completion._limit_s = limit_s

    def offer(
        self, runner: Callable[[], object], starter: Callable[[], object] | None = None
    ) -> None:
        """Say what whoever wants the operation's end calls first, any number of times.

        Args:
            runner: Called by a waiter whose patience is no shorter than ``bound``: runs the operation
                in its thread if nobody else does, and returns at once if it may not.
            starter: Called, behind that, by a waiter and by who adds a callback: has a thread begin
                the operation if nobody has. Returns at once.
        """
        self.completion._runner = runner
        self.completion._starter = starter

    def advance(self, layers_ready: int) -> None:
        """Say that the leading ``layers_ready`` layers have arrived. Never goes back."""
        target = self.completion
        with target._lock:
            if not target._done and layers_ready > target._layers_ready:
                target._layers_ready = layers_ready
                target._changed.notify_all()

    def finish(self, result: T) -> bool:
        """End well. Returns False if it had ended already."""
        return self._end(result, None)

    def fail(self, error: BaseException) -> bool:
        """End with an error. Returns False if it had ended already."""
        return self._end(None, error)

    def cancelled(self) -> bool:
        """End with CancelledTransferError."""
        return self.fail(CancelledTransferError("cancelled by the caller"))

    def _end(self, result: T | None, error: BaseException | None) -> bool:
        target = self.completion
        with target._lock:
            if target._done:
                return False
            target._result, target._error, target._done = result, error, True
            target._runner = target._starter = None
            callbacks, target._callbacks = target._callbacks, []
            target._changed.notify_all()
        for callback in callbacks:
            try:
                callback()
            except Exception:
                # It ran in the wrong thread for anybody to catch; the others are owed their call.
                logger.exception("a callback of a completion failed")
        return True


class Deadline:
    """A point in monotonic time that an operation must not pass: ``LONGEST_S`` from now at most.

    Raises:
        UsageError: ``seconds`` is no number.
    """

    def __init__(self, seconds: float) -> None:
        try:
            left_s = min(seconds + 0.0, LONGEST_S)
        except (TypeError, OverflowError) as error:
            raise UsageError(f"{seconds!r} is no number of seconds") from error
        if math.isnan(left_s):
            raise UsageError("NaN is no number of seconds")
        self.at = time.monotonic() + left_s

    def remaining_s(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self.at - time.monotonic())

    def passed(self) -> bool:
        """Say whether it is over."""
        return time.monotonic() >= self.at
