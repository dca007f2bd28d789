"""Network namespaces of processes, by system calls alone: a process that does this starts quickly.

As a program: ``keep DEVICE ADDRESS BITS`` holds a namespace for as long as its stdin is open, ``run
PID COMMAND...`` runs a command in another process's.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from typing import Final

_CLONE_NEWNS: Final = 0x20000
_CLONE_NEWNET: Final = 0x40000000
_MS_PRIVATE_REC: Final = 0x44000
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_SIOCSIFNETMASK: Final = 0x891C
_IFF_UP: Final = 1


def enter_namespace() -> None:
    """Move this process into a network namespace of its own, and show its devices in /sys.

    Raises:
        OSError: Not as root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _require(libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET))
    _require(libc.mount(b"none", b"/", None, _MS_PRIVATE_REC, None))
    # libucp finds its devices there.
    _require(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "a network namespace needs root")


def _keep(device: str, address: str, bits: str) -> None:
    enter_namespace()
    print("in", flush=True)
    sys.stdin.readline()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        mask = socket.inet_ntoa(struct.pack("!I", -1 << (32 - int(bits)) & 0xFFFFFFFF))
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, mask)):
            told = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(any_socket, request, struct.pack("16s16s8x", device.encode(), told))
        for name in ("lo", device):
            up = struct.pack("16sH22x", name.encode(), _IFF_UP)
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, up)
    print("up", flush=True)
    sys.stdin.read()


def _run(pid: str, command: list[str]) -> None:
    libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
    for kind, flag in (("net", _CLONE_NEWNET), ("mnt", _CLONE_NEWNS)):
        with open(f"/proc/{pid}/ns/{kind}", "rb") as space:
            _require(libc.setns(space.fileno(), flag))
    os.chdir(folder)
    os.execv(command[0], command)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        _keep(*sys.argv[2:])
    else:
        _run(sys.argv[2], sys.argv[3:])
