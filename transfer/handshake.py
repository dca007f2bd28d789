"""Sockets of the host transport: who the peer is, and messages with file descriptors.

Owns the calls on AF_UNIX SOCK_SEQPACKET sockets: one message is one packet. Nothing here blocks
longer than the socket's own timeout. Who calls it: the host transport and its endpoints.
"""

import contextlib
import errno
import logging
import os
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvpool.completion import Deadline
from kvpool.errors import CorruptionError, PeerUnreachableError, TransferTimeoutError, UsageError
from kvpool.transfer.descriptor import MESSAGE_BYTES_MAX, Message, encode
from kvpool.transfer.endpoint import REGIONS_MAX

logger = logging.getLogger(__name__)

# A ring and every region.
FDS_MAX: Final = 1 + REGIONS_MAX
# Path of a unix socket, from <sys/un.h>: 108 bytes with the terminating zero.
PATH_BYTES_MAX: Final = 107
_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


def peer_pid(sock: socket.socket) -> int:
    """Return the pid of a connected peer of our own uid.

    Raises:
        PeerUnreachableError: It is another user's process, or lives where we cannot name it.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise PeerUnreachableError(f"the process at the other end belongs to uid {uid}, not to us")
    if pid <= 0:
        raise PeerUnreachableError("the process at the other end is in another pid namespace")
    return int(pid)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when ``pid`` dies; None where the kernel has none.

    Raises:
        PeerUnreachableError: It is dead already.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise PeerUnreachableError(f"process {pid} is dead") from error
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            raise PeerUnreachableError(f"cannot watch process {pid}: {error}") from error
        logger.warning("no pidfd here (%s): a dead peer is seen by its socket only", error)
        return None


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors. Raises OSError as the socket does."""
    socket.send_fds(sock, [encode(message)], list(fds), socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one packet and its descriptors, which are the caller's to close; b"" at the end.

    Raises:
        CorruptionError: It was too long, or had too many descriptors. None of them is left open.
    """
    payload, fds, flags, _ = socket.recv_fds(
        sock, MESSAGE_BYTES_MAX + 1, FDS_MAX, socket.MSG_CMSG_CLOEXEC
    )
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(payload) > MESSAGE_BYTES_MAX:
        close_all(fds)
        raise CorruptionError("the peer sent a packet beyond the limits")
    return payload, fds


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that a peer sent."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def listen(path: str) -> socket.socket:
    """Bind and listen at ``path``, mode 0600, replacing a dead socket there.

    Raises:
        UsageError: The path is too long, its folder is not ours alone, or somebody listens there.
    """
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise UsageError(f"{path} is longer than {PATH_BYTES_MAX} bytes: use a shorter folder")
    folder = Path(path).parent
    try:
        status = folder.stat()
    except OSError as error:
        raise UsageError(f"make the folder {folder} first, mode 0700: {error}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UsageError(f"others can write to {folder}: use a folder of your own, mode 0700")
    _remove_dead(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen at {path}: {error}") from error
    return sock


def _remove_dead(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"{path} exists and is no socket: choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{path} is in use: {error}") from error
    raise UsageError(f"somebody listens at {path} already")


def connect(path: str, deadline: Deadline) -> socket.socket:
    """Connect to ``path``, blocking until ``deadline``.

    Raises:
        PeerUnreachableError: Nobody listens there.
        TransferTimeoutError: Its queue of connections stayed full.
    """
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise UsageError(f"{path} is longer than {PATH_BYTES_MAX} bytes")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # A blocking connect() waits while the listener's queue is full; a non-blocking one fails.
        _set_send_timeout(sock, max(deadline.remaining_s(), 0.001))
        sock.connect(path)
    except (BlockingIOError, TimeoutError) as error:
        sock.close()
        raise TransferTimeoutError(f"{path} did not accept in time") from error
    except OSError as error:
        sock.close()
        raise PeerUnreachableError(f"nobody answers at {path}: {error}") from error
    return sock


def _set_send_timeout(sock: socket.socket, seconds: float) -> None:
    """Bound connect() and send() of a blocking unix socket (SO_SNDTIMEO)."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
