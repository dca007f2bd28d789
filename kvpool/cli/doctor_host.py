"""What a host says of itself: plain values, gathered once by asking it.

Owns every call of the doctor that is no plain look into a file: limits, sockets, the kernel, other
processes. Judges nothing. Who calls it: ``kvpool doctor``; tests make a ``Host`` by hand, with a
folder in place of the file system's root.
"""

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpool._native import ffi, lib
from kvpool.arena import Arena
from kvpool.block import BlockLayout, new_incarnation
from kvpool.cli.doctor_ucx import UcxLibrary, attempt
from kvpool.config import PoolConfig
from kvpool.errors import KVPoolError
from kvpool.transfer.ucx_library import LIBRARY_FOLDERS, choose_library

_TIMEOUT_S: Final = 20.0
_TORCH_TIMEOUT_S: Final = 120.0
# More than these are not tried: each costs about a second.
_OTHERS_MAX: Final = 8
_SIOCGIFADDR: Final = 0x8915
_LAYOUT: Final = BlockLayout(num_layers=1, kv_heads=1, block_tokens=16, k_dim=16, v_dim=16)
_TORCH: Final = (
    "import torch; print('CUDA', torch.version.cuda, 'with', torch.cuda.device_count(), 'devices')"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What was found. A refusal is the reason in words, empty where there is none.

    Attributes:
        root: Where ``proc``, ``sys`` and ``dev`` are.
        dram_bytes: The arena that is wanted.
        bind: Address that UCX is to bind to.
        release, machine: As ``uname`` has them.
        python: Version.
        cpus: How many this process may run on.
        installed: Distribution, in lower case with dashes -> version.
        requires: kvpool's requirements, as its metadata has them.
        memlock_bytes, descriptors: Soft limits of this process; None is without limit.
        shared_bytes: Size of ``/dev/shm``; 0 if there is none.
        addresses: Network device -> its addresses.
        arena_refusal, pidfd_refusal, io_uring_refusal, bind_refusal: Of what was tried.
        chosen: The UCX library that kvpool loads.
        others: Further ones of this host.
        gpus: As nvidia-smi names them, one a card.
        torch_cuda: What torch says of CUDA; empty if it was not asked.
    """

    root: Path
    dram_bytes: int = PoolConfig().dram_bytes
    bind: str = "127.0.0.1"
    release: str = ""
    machine: str = "x86_64"
    python: tuple[int, ...] = (3, 11, 0)
    cpus: int = 1
    installed: Mapping[str, str] = field(default_factory=dict[str, str])
    requires: tuple[str, ...] = ()
    memlock_bytes: int | None = None
    descriptors: int | None = None
    shared_bytes: int = 0
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    arena_refusal: str = ""
    pidfd_refusal: str = ""
    io_uring_refusal: str = ""
    bind_refusal: str = ""
    chosen: UcxLibrary
    others: tuple[UcxLibrary, ...] = ()
    gpus: tuple[str, ...] = ()
    torch_cuda: str = ""

    def read(self, name: str) -> str:
        """Return the text of a file below the root; empty if it cannot be read."""
        try:
            return (self.root / name).read_text(errors="replace")
        except OSError:
            return ""


def examine(*, dram_bytes: int, bind: str, library: str | None, ask_torch: bool) -> Host:
    """Ask this host. Takes seconds; leaves nothing behind.

    Args:
        dram_bytes: The arena that is wanted; it is not taken.
        bind: Address to try.
        library: Path of libucp, instead of the one that would be found.
        ask_torch: Whether to start a process that imports torch.
    """
    chosen = chosen_library(library)
    return Host(
        root=Path("/"),
        dram_bytes=dram_bytes,
        bind=bind,
        release=platform.release(),
        machine=platform.machine(),
        python=tuple(sys.version_info[:3]),
        cpus=len(os.sched_getaffinity(0)),
        installed=_installed(),
        requires=tuple(importlib.metadata.requires("kvpool") or ()),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        descriptors=_limit(resource.RLIMIT_NOFILE),
        shared_bytes=_size(Path("/dev/shm")),
        addresses=addresses(Path("/")),
        arena_refusal=_refusal(_open_arena),
        pidfd_refusal=_refusal(lambda: os.close(os.pidfd_open(os.getpid()))),
        io_uring_refusal=_refusal(_open_io_uring),
        bind_refusal=_refusal(lambda: _bind(bind)),
        chosen=chosen,
        others=tuple(map(attempt, other_libraries(Path("/"), chosen.path))),
        gpus=tuple(said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")),
        torch_cuda=" ".join(_torch()) if ask_torch else "",
    )


def chosen_library(explicit: str | None) -> UcxLibrary:
    """Try the UCX library that kvpool loads, and say why it is this one."""
    choice = choose_library(explicit)
    return attempt(choice.path, choice.why)


def other_libraries(root: Path, chosen: str) -> list[str]:
    """List the libucp in the usual folders, each once and without the chosen one."""
    seen = {Path(chosen).resolve()}
    found: list[str] = []
    for folder in LIBRARY_FOLDERS:
        for path in sorted(root.glob(f"{folder}/libucp.so.0")):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                found.append(str(path))
    return found[:_OTHERS_MAX]


def addresses(root: Path) -> dict[str, tuple[str, ...]]:
    """Map each network device to its addresses, loopback too; link-local ones are left out."""
    found: dict[str, list[str]] = {}
    for device in sorted((root / "sys/class/net").glob("*")):
        found[device.name] = list(_ipv4(device.name))
    table = root / "proc/net/if_inet6"
    for line in table.read_text().splitlines() if table.is_file() else ():
        digits, _, _, _, _, device_name = line.split()
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        if not address.startswith("fe80:"):
            found.setdefault(device_name, []).append(address)
    return {name: tuple(some) for name, some in found.items()}


def _ipv4(device: str) -> Iterator[str]:
    """Yield a device's first IPv4 address, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            reply = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
        except OSError:
            return
        yield socket.inet_ntoa(reply[20:24])


def _installed() -> dict[str, str]:
    found = importlib.metadata.distributions()
    return {re.sub(r"[-_.]+", "-", one.name).lower(): one.version for one in found}


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _size(folder: Path) -> int:
    try:
        room = os.statvfs(folder)
    except OSError:
        return 0
    return room.f_frsize * room.f_blocks


def _refusal(action: Callable[[], None]) -> str:
    try:
        action()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    except KVPoolError as error:
        return str(error)
    return ""


def _open_arena() -> None:
    arena = Arena(_LAYOUT, 1, new_incarnation())
    arena.close()


def _open_io_uring() -> None:
    if lib.kvp_probe_io_uring() != lib.KVP_OK:
        raise OSError(ffi.errno, os.strerror(ffi.errno))


def _bind(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.bind((host, 0))


def said(command: str, *arguments: str, timeout_s: float = _TIMEOUT_S) -> list[str]:
    """Return the lines that a program prints; none if it is missing, fails or is too slow."""
    program = shutil.which(command)
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _torch() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return ["torch is not installed"]
    lines = said(sys.executable, "-P", "-c", _TORCH, timeout_s=_TORCH_TIMEOUT_S)
    return lines[-1:] or ["torch cannot be imported"]
