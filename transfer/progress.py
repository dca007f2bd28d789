"""The progress thread of a transport: watches file descriptors, runs posted calls and timers.

Owns one thread and the selector that it sleeps on. Knows nothing of peers. Who calls it: the
transports; every callback of an endpoint runs here.
"""

import heapq
import itertools
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvpool.errors import UsageError

logger = logging.getLogger(__name__)

Call = Callable[[], None]

# Longest sleep with timers: epoll refuses more than 24 days, and this is none it would notice.
_SLEEP_S: Final = 3600.0


class ProgressLoop:
    """One named thread that sleeps until a descriptor, a posted call or a timer needs it.

    ``watch``, ``unwatch`` and ``call_later`` are for the loop's own thread; ``post`` is for any
    thread and is how others get there. A callback that raises is logged; the loop goes on.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # guards _posted, _closing, and writes to _wake_fd
        self._posted: deque[Call] = deque()
        self._closing = False
        self._timers: list[tuple[float, int, Call]] = []
        self._order = itertools.count()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def on_thread(self) -> bool:
        """Say whether the caller is the loop's own thread."""
        return threading.current_thread() is self._thread

    def post(self, call: Call) -> bool:
        """Run ``call`` soon on the loop's thread, in the order of posting. Never blocks.

        Returns False, and does not run it, if the loop is closed.
        """
        with self._lock:
            if self._closing:
                return False
            self._posted.append(call)
            if len(self._posted) == 1:
                os.eventfd_write(self._wake_fd, 1)
            return True

    def run(self, call: Call, timeout_s: float) -> bool:
        """Run ``call`` on the loop's thread and wait for it. False if it was not run in time."""
        if self.on_thread():
            call()
            return True
        ran = threading.Event()

        def run_and_tell() -> None:
            try:
                call()
            finally:
                ran.set()

        return self.post(run_and_tell) and ran.wait(timeout_s)

    def watch(self, fd: int, events: int, call: Call) -> None:
        """Call back while ``fd`` is ready (level-triggered); again with other events to change."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, call)
        else:
            self._selector.register(fd, events, call)

    def unwatch(self, fd: int) -> None:
        """Stop watching. Do it before closing ``fd``. Harmless if it was not watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def call_later(self, seconds: float, call: Call) -> None:
        """Run ``call`` once after ``seconds``. A closed loop drops it."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), call))

    def after_fork(self) -> None:
        """Be closed in a child, which has no such thread; see ``forked``."""
        self._lock = threading.Lock()
        self._closing = True

    def close(self, timeout_s: float = 5.0) -> None:
        """Run what was posted, then end the thread. Idempotent. Not from the loop's own thread."""
        if self.on_thread():
            raise UsageError("a transport cannot be closed from its own callback: use a thread")
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("%s did not end within %s s", self._thread.name, timeout_s)

    def _run(self) -> None:
        try:
            while True:
                for ready, _ in self._selector.select(self._sleep_s()):
                    # An earlier callback of this round may have unwatched it, or reused the number.
                    now = self._selector.get_map().get(ready.fd)
                    if now is not None and now.data is ready.data:
                        self._guard(ready.data)
                while self._timers and self._timers[0][0] <= time.monotonic():
                    self._guard(heapq.heappop(self._timers)[2])
                if self._run_posted():
                    return
        finally:
            self._selector.close()
            with self._lock:
                self._closing = True
                os.close(self._wake_fd)

    def _sleep_s(self) -> float | None:
        if not self._timers:
            return None
        return min(_SLEEP_S, max(0.0, self._timers[0][0] - time.monotonic()))

    def _run_posted(self) -> bool:
        """Run what is posted now; True if the loop is to end."""
        with self._lock:
            calls, self._posted = self._posted, deque()
            closing = self._closing
        for call in calls:
            self._guard(call)
        return closing

    def _woken(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass

    def _guard(self, call: Call) -> None:
        try:
            call()
        except Exception:
            logger.exception("a callback of %s failed", self._thread.name)
