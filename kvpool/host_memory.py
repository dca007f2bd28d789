"""How much memory this process may still take: the machine's, and that of the groups it is in.

Owns the reading of /proc and of control groups. Never takes memory. Who calls it: the arena, which
asks before it touches a page, because the kernel would kill the process rather than refuse.
"""

from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


class Limit(NamedTuple):
    """Bytes that may still be taken, and who says so."""

    available_bytes: int
    source: str


def memory_limit(proc: Path = _PROC, groups: Path = _GROUPS) -> Limit | None:
    """Return the tightest limit on memory that is not taken yet; None if nothing tells of one.

    ``proc`` and ``groups`` are where procfs and the control groups are mounted.
    """
    found = [_machine(proc), *_control_groups(proc, groups)]
    return min((limit for limit in found if limit is not None), default=None)


def _machine(proc: Path) -> Limit | None:
    available = _fields(proc / "meminfo").get("MemAvailable:")
    return None if available is None else Limit(available << 10, "the machine's MemAvailable")


def _control_groups(proc: Path, groups: Path) -> list[Limit]:
    """Return the limits of this process's group and of all above it, of either version."""
    limits: list[Limit] = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        # In a container the path may be the host's: then only the root is here.
        group = root / path.strip("/")
        for folder in {root, *(one for one in (group, *group.parents) if root in one.parents)}:
            most, taken = (_text(folder / name).strip() for name in names)
            if most.isdigit() and taken.isdigit():
                stat = _fields(folder / "memory.stat")
                cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
                free = max(0, int(most) - max(0, int(taken) - cache))
                limits.append(Limit(free, f"the limit of control group {folder}"))
    return limits


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines of a name and a number."""
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not mounted, or not ours to read: it limits nothing that we know of
        return ""
