"""Checks of memory and of what the kernel allows: is there room for an arena, and is it fast. Pure.

Who calls it: ``kvpool doctor``.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from kvpool.cli.doctor_host import Host
from kvpool.cli.doctor_report import Check, size
from kvpool.config import ServerConfig

# Above this a limit of cgroup v1 means that there is none.
_UNLIMITED: Final = 1 << 60
# A client of a server: its socket, its process (pidfd), two rings, a gRPC stream, and what is in
# transit; 8 are ample.
_DESCRIPTORS_PER_CLIENT: Final = 8
_DESCRIPTORS: Final = ServerConfig(run_dir=Path()).clients_max * _DESCRIPTORS_PER_CLIENT
_HUGE: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


def dram(host: Host) -> Check:
    """Look for room for the DRAM tier, under the host's memory and its cgroups' limits."""
    rooms = list(_rooms(host))
    if not rooms:
        return Check(
            name="memory.dram",
            status="warn",
            found="/proc/meminfo says nothing of available memory",
            remedy=f"mount /proc, or see to it yourself that {size(host.dram_bytes)} are free",
        )
    room, where = min(rooms)
    found = f"{size(room)} {where}; the arena wanted has {size(host.dram_bytes)}"
    if room >= host.dram_bytes:
        return Check(name="memory.dram", status="ok", found=found)
    return Check(
        name="memory.dram",
        status="lack",
        essential=True,
        found=found,
        remedy="choose a smaller --dram, or raise the limit: an arena is taken whole at the start",
    )


def _rooms(host: Host) -> Iterator[tuple[int, str]]:
    available = _kib(host.read("proc/meminfo"), "MemAvailable")
    if available is not None:
        yield available, "available"
    memberships = [line.split(":", 2) for line in host.read("proc/self/cgroup").splitlines()]
    first = next((path for _, names, path in memberships if "memory" in names.split(",")), None)
    second = next((path for number, _, path in memberships if number == "0"), None)
    if first is not None:
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        yield from _limits(host, "sys/fs/cgroup/memory", first, files)
    elif second is not None:
        files = ("memory.max", "memory.current", "inactive_file")
        yield from _limits(host, "sys/fs/cgroup", second, files)


def _limits(
    host: Host, mount: str, path: str, files: tuple[str, str, str]
) -> Iterator[tuple[int, str]]:
    """Yield the room that each group above this process leaves; a page cache counts as room."""
    limit_file, usage_file, cache_key = files
    own = PurePosixPath(path.lstrip("/"))
    for group in (own, *own.parents):
        folder = f"{mount}/{group}"
        limit = host.read(f"{folder}/{limit_file}").strip()
        if not limit.isdecimal() or int(limit) >= _UNLIMITED:
            continue
        usage = host.read(f"{folder}/{usage_file}").strip()
        cached = re.search(
            rf"^{cache_key} (\d+)$", host.read(f"{folder}/memory.stat"), re.MULTILINE
        )
        used = (int(usage) if usage.isdecimal() else 0) - (int(cached[1]) if cached else 0)
        room = max(int(limit) - max(used, 0), 0)
        yield room, f"left under the cgroup's limit of {size(int(limit))}"


def _kib(text: str, key: str) -> int | None:
    found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) << 10 if found else None


def hugepages(host: Host) -> Check:
    """Look whether arenas get huge pages: for memfds the setting for shared memory decides."""
    chosen = re.search(r"\[(\w+)\]", host.read(_HUGE))
    reserved = re.search(
        r"^HugePages_Total:\s+([1-9]\d*)$", host.read("proc/meminfo"), re.MULTILINE
    )
    found = f"shmem_enabled is {chosen[1]}" if chosen else "no transparent huge pages in the kernel"
    if reserved:
        found += f"; {reserved[1]} static huge pages are reserved, which kvpool does not use"
    if chosen and chosen[1] in ("always", "within_size", "advise", "force"):
        return Check(name="memory.hugepages", status="ok", found=f"{found}: arenas use huge pages")
    return Check(
        name="memory.hugepages",
        status="warn",
        found=f"{found}: arenas use small pages, and take longer to make",
        remedy=f"as root: echo advise > /{_HUGE}"
        if chosen
        else "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE, where start times matter",
    )


def shared(host: Host) -> Check:
    """Say which limits of shared memory do not matter, since people look for them."""
    strict = host.read("proc/sys/vm/overcommit_memory").strip() == "2"
    there = (
        f"/dev/shm has {size(host.shared_bytes)}" if host.shared_bytes else "there is no /dev/shm"
    )
    found = f"{there}; arenas are memfds, which neither it nor kernel.shmmax limits"
    if not strict:
        return Check(name="memory.shared", status="ok", found=found)
    return Check(
        name="memory.shared",
        status="warn",
        found=f"{found}; but vm.overcommit_memory is 2, and an arena counts in full",
        remedy="leave room for --dram under CommitLimit of /proc/meminfo",
    )


def memlock(host: Host) -> Check:
    """Look whether RLIMIT_MEMLOCK is in the way of a network card that reads memory itself."""
    if host.memlock_bytes is None:
        return Check(name="memory.memlock", status="ok", found="unlimited")
    found = f"{size(host.memlock_bytes)} may be locked"
    if not any((host.root / "sys/class/infiniband").glob("*")):
        return Check(
            name="memory.memlock", status="ok", found=f"{found}; matters for RDMA only, not here"
        )
    return Check(
        name="memory.memlock",
        status="warn",
        found=f"{found}: RDMA devices cannot register an arena of {size(host.dram_bytes)}",
        remedy="ulimit -l unlimited, LimitMEMLOCK=infinity in a unit, or --ulimit memlock=-1",
    )


def descriptors(host: Host) -> Check:
    """Look for descriptors for as many clients as a server takes."""
    wanted = f"a server with all its clients wants {_DESCRIPTORS}"
    if host.descriptors is None or host.descriptors >= _DESCRIPTORS:
        count = "unlimited" if host.descriptors is None else str(host.descriptors)
        return Check(name="files.descriptors", status="ok", found=f"{count}; {wanted}")
    return Check(
        name="files.descriptors",
        status="warn",
        found=f"{host.descriptors}; {wanted}",
        remedy=f"ulimit -n {_DESCRIPTORS}, or LimitNOFILE={_DESCRIPTORS} in a unit",
    )


def memfd(host: Host) -> Check:
    """Say whether an arena opened: a memfd, sealed against resizing and further writers."""
    if not host.arena_refusal:
        return Check(
            name="kernel.memfd",
            status="ok",
            found="an arena opens: memfd, sealed against resizing and writers (F_SEAL_FUTURE_WRITE)",
        )
    return Check(
        name="kernel.memfd",
        status="lack",
        essential=True,
        found=f"no arena opens: {host.arena_refusal}",
        remedy="use Linux 5.1 or newer, and let the container's filter pass memfd_create",
    )


def pidfd(host: Host) -> Check:
    """Say whether the kernel tells of a peer process's death."""
    if not host.pidfd_refusal:
        return Check(name="kernel.pidfd", status="ok", found="the death of a peer is seen at once")
    return Check(
        name="kernel.pidfd",
        status="warn",
        found=f"refused ({host.pidfd_refusal}): a dead peer is seen by its socket only",
        remedy="use Linux 5.3 or newer, and let the container's filter pass pidfd_open",
    )


def io_uring(host: Host) -> Check:
    """Say whether io_uring is there, for an SSD tier."""
    if not host.io_uring_refusal:
        return Check(name="kernel.io_uring", status="ok", found="usable; no tier uses it yet")
    switched_off = host.read("proc/sys/kernel/io_uring_disabled").strip() in ("1", "2")
    return Check(
        name="kernel.io_uring",
        status="lack",
        found=f"refused ({host.io_uring_refusal}); no tier uses it yet",
        remedy="as root: sysctl kernel.io_uring_disabled=0"
        if switched_off
        else "use Linux 5.1 or newer, and let the container's filter pass io_uring_setup",
    )
