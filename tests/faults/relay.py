"""A socket between a client and its server that a test can cut."""

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_PIECE: Final = 1 << 16


class Relay:
    """Carries the connections of one unix socket to another, from construction to the end of its ``with``.

    ``_lock`` guards the sockets.

    Args:
        path: Where it listens.
        target: Where it connects to.
        hold_s: How long it keeps each new connection waiting.
    """

    def __init__(self, path: Path, target: Path, hold_s: float = 0.0) -> None:
        self._target = str(target)
        self._hold_s = hold_s
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._sockets = [self._server]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """End every connection there is now; new ones are carried."""
        with self._lock:
            ended, self._open = self._open, []
        for one in ended:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return  # closed
            time.sleep(self._hold_s)
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            with self._lock:
                self._open += [near, far]
                for source, dest in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._carry, args=(source, dest))
                    self._threads.append(thread)
                    thread.start()
                self._sockets += [near, far]

    def _carry(self, source: socket.socket, dest: socket.socket) -> None:
        with suppress(OSError):
            while said := source.recv(_PIECE):
                dest.sendall(said)
        for one in (source, dest):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()
