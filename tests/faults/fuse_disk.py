"""A file system that fails on command, in the kernel's own way: a folder passed through over FUSE.

python -m tests.faults.fuse_disk MOUNTED BACKING

Speaks the kernel's protocol over /dev/fuse itself, because no wheel brings libfuse. It is a process of
its own, told by lines on stdin (``read 5``: every read of a segment fails with errno 5; ``write hang``;
``sync 0``: well again), each of which it answers with ``done``; ``hanging`` with how many calls hang. It
ends with its stdin.
"""

import ctypes
import errno
import os
import stat
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

HANG = "hang"
FAULTY = "segment"  # part of the names of files that fail
THREADS = 8
WRITE_BYTES = 128 << 10

_HEAD = struct.Struct("<IIQQIIII")
_REPLY = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_TRANSFER = struct.Struct("<QQIIQII")  # fh, offset, size, flags
_SETATTR_SIZE = 1 << 3
_MINOR = 31
_INIT_FLAGS = 1 << 0 | 1 << 5 | 1 << 15  # ASYNC_READ, BIG_WRITES, ASYNC_DIO
_SECOND = 1


class FuseDisk:
    """Serves one mounted folder. ``_changed`` guards the faults and the count of hanging calls."""

    def __init__(self, device: int, backing: Path) -> None:
        self._device = device
        self._paths: dict[int, Path] = {1: backing}
        self._numbers: dict[Path, int] = {backing: 1}
        self._changed = threading.Condition()
        self._faults: dict[str, str] = {}
        self._hanging = 0
        self._handlers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup,
            3: lambda node, _: struct.pack("<QII", _SECOND, 0, 0) + self._attr(node),
            4: self._setattr,
            9: self._mkdir,
            10: self._unlink,
            11: self._rmdir,
            14: self._open,
            15: self._read,
            16: self._write,
            17: lambda _, __: struct.pack(
                "<5Q4I24x", 1 << 20, 1 << 20, 1 << 20, 9999, 9999, 4096, 255, 4096, 0
            ),
            18: self._release,
            20: self._sync,
            25: lambda _, __: b"",
            26: lambda _, __: struct.pack(
                "<IIIIHHIIHHI28x", 7, _MINOR, 0, _INIT_FLAGS, 64, 48, WRITE_BYTES, 1, 0, 0, 0
            ),
            27: lambda _, __: bytes(16),
            28: self._readdir,
            29: lambda _, __: b"",
            30: lambda _, __: b"",
            35: self._create,
            43: self._allocate,
        }

    def tell(self, line: str) -> str:
        """Do what a line says; return the answer."""
        if line == "hanging":
            return str(self._hanging)
        operation, fault = line.split()
        with self._changed:
            self._faults[operation] = fault
            self._changed.notify_all()
        return "done"

    def serve(self) -> None:
        """Answer the kernel until it is unmounted."""
        while True:
            try:
                request = os.read(self._device, WRITE_BYTES + (64 << 10))
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return
            _, code, unique, node, *_ = _HEAD.unpack_from(request)
            if code in (2, 36, 42):  # forgotten nodes, interrupts: no answer is wanted
                continue
            reply, status = b"", 0
            try:
                handler = self._handlers.get(code)
                if handler is None:
                    raise OSError(errno.ENOSYS, "not served")
                reply = handler(node, request[_HEAD.size :])
            except OSError as error:
                status = -(error.errno or errno.EIO)
            head = _REPLY.pack(_REPLY.size + len(reply), status, unique)
            try:
                os.write(self._device, head + reply)
            except OSError:  # it was interrupted meanwhile
                continue

    def _fail(self, operation: str, fd: int) -> None:
        """Hang or fail if that was asked for."""
        if FAULTY not in os.readlink(f"/proc/self/fd/{fd}"):
            return
        with self._changed:
            if self._faults.get(operation) == HANG:
                self._hanging += 1
                self._changed.wait_for(lambda: self._faults.get(operation) != HANG)
                self._hanging -= 1
            code = int(self._faults.get(operation, "0"))
        if code:
            raise OSError(code, "asked for")

    def _child(self, node: int, name: bytes) -> Path:
        return self._paths[node] / name.rstrip(b"\0").decode()

    def _unlink(self, node: int, body: bytes) -> bytes:
        self._child(node, body).unlink()
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        self._child(node, body).rmdir()
        return b""

    def _attr(self, node: int) -> bytes:
        info = self._paths[node].lstat()
        times = [int(at) for at in (info.st_atime, info.st_mtime, info.st_ctime)]
        return _ATTR.pack(
            node, info.st_size, info.st_blocks, *times, 0, 0, 0, info.st_mode, info.st_nlink,
            info.st_uid, info.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def _entry(self, path: Path) -> bytes:
        path.lstat()
        with self._changed:
            node = self._numbers.setdefault(path, len(self._numbers) + 1)
            self._paths[node] = path
        return struct.pack("<QQQQII", node, 0, _SECOND, _SECOND, 0, 0) + self._attr(node)

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._child(node, body))

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & _SETATTR_SIZE:
            os.truncate(self._paths[node], size)
        return struct.pack("<QII", _SECOND, 0, 0) + self._attr(node)

    def _mkdir(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body[8:])
        path.mkdir(struct.unpack_from("<I", body)[0] & 0o777)
        return self._entry(path)

    def _open(self, node: int, body: bytes) -> bytes:
        flags: int = struct.unpack_from("<I", body)[0] & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL)
        return struct.pack("<QII", os.open(self._paths[node], flags), 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self._child(node, body[16:])
        fd = os.open(path, (flags & ~os.O_DIRECT) | os.O_CREAT, stat.S_IMODE(mode))
        return self._entry(path) + struct.pack("<QII", fd, 0, 0)

    def _release(self, _: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _read(self, _: int, body: bytes) -> bytes:
        fd, offset, size, *_rest = _TRANSFER.unpack_from(body)
        self._fail("read", fd)
        return os.pread(fd, size, offset)

    def _write(self, _: int, body: bytes) -> bytes:
        fd, offset, size, *_rest = _TRANSFER.unpack_from(body)
        self._fail("write", fd)
        written = os.pwrite(fd, body[_TRANSFER.size : _TRANSFER.size + size], offset)
        return struct.pack("<II", written, 0)

    def _sync(self, _: int, body: bytes) -> bytes:
        (fd,) = struct.unpack_from("<Q", body)
        self._fail("sync", fd)
        os.fdatasync(fd)
        return b""

    def _allocate(self, _: int, body: bytes) -> bytes:
        fd, offset, length = struct.unpack_from("<QQQ", body)
        os.posix_fallocate(fd, offset, length)
        return b""

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_rest = _TRANSFER.unpack_from(body)
        out = b""
        for at, name in enumerate(sorted(os.listdir(self._paths[node]))[offset:], offset + 1):
            raw = name.encode()
            one = struct.pack("<QQII", 1, at, len(raw), 0) + raw
            one += bytes(-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out


def main() -> None:
    """Mount, serve, and unmount when stdin ends."""
    mounted, backing = sys.argv[1:3]
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"kvpool", mounted.encode(), b"fuse", 0, options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    disk = FuseDisk(device, Path(backing))
    for _ in range(THREADS):
        threading.Thread(target=disk.serve, daemon=True).start()
    try:
        print("mounted", flush=True)
        for line in sys.stdin:
            print(disk.tell(line.strip()), flush=True)
    finally:
        libc.umount2(mounted.encode(), 2)  # MNT_DETACH: whatever is still open


if __name__ == "__main__":
    main()
