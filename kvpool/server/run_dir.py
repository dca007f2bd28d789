"""The run directory of a server: a private folder with its sockets, one live server at a time.

Owns the folder's mode, the lock that says a server is alive in it (on the folder itself, so that no
file is left), and the removal of what a killed server left. Who calls it: the server's main.
"""

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from kvpool.client.protocol import CONTROL_SOCKET, TRANSPORT_SOCKET
from kvpool.errors import UsageError

logger = logging.getLogger(__name__)


class RunDir:
    """A locked run directory, from construction to the end of its ``with``.

    Args:
        path: The folder; made with mode 0700 if it is not there. None makes a fresh one.

    Attributes:
        path: The folder, absolute.

    Raises:
        UsageError: It is not a folder of this user alone, or a server is running in it. Nothing was
            changed.
    """

    def __init__(self, path: Path | None) -> None:
        self._made = True
        if path is None:
            self.path = Path(tempfile.mkdtemp(prefix="kvpool-"))
        else:
            self.path = path.absolute()
            self._made = self._make()
        self._fd = self._lock()
        self._ending = threading.Lock()
        self._ended = False
        try:
            self._remove_sockets()
        except BaseException:
            os.close(self._fd)
            raise

    def _make(self) -> bool:
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            return False
        except OSError as error:
            raise UsageError(
                f"cannot make the run directory {self.path}: {error.strerror}; choose one (--run-dir, "
                "node.run_dir) in a folder that is there and this user may write to"
            ) from error
        return True

    def _lock(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be a run directory: {error}") from error
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise UsageError(
                    f"others can enter {self.path}: say chmod 700 {self.path}, or choose a folder "
                    "of your own"
                )
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise UsageError(
                f"a kvpool-server is running in {self.path}: stop it, or choose another --run-dir"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _remove_sockets(self) -> None:
        """Remove the sockets of this server, or of a killed one. Raises UsageError for other files."""
        for name in (CONTROL_SOCKET, TRANSPORT_SOCKET):
            path = self.path / name
            try:
                if not stat.S_ISSOCK(path.lstat().st_mode):
                    raise UsageError(f"{path} is in the way and is no socket: move it")
                path.unlink()
            except FileNotFoundError:
                continue

    def close(self) -> None:
        """Remove the sockets, and the folder if it was made here; then let go. Idempotent.

        Safe from any thread: once it has let go, the sockets may be another server's.
        """
        with self._ending:
            if self._ended:
                return
            self._ended = True
            self._remove_sockets()
            if self._made:
                with contextlib.suppress(OSError):  # somebody put a file there: it stays
                    self.path.rmdir()
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
