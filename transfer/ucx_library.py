"""Which libucp to load and why, and from which address it may be used. Nothing is loaded here.

A process holds one libucp of the usual name: a second one would find the first one's libucs. So one
that is mapped already is taken; otherwise the configured one, then the system's if it alone knows
this host's RDMA devices, then the newer of wheel and system. Who calls it: the UCX engine and
``kvpool doctor``.
"""

import functools
import importlib.metadata
import importlib.util
import ipaddress
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.errors import ConfigError

log = logging.getLogger(__name__)

# Where a system keeps libraries, below the root.
LIBRARY_FOLDERS: Final = (
    "lib64",
    "usr/lib",
    "usr/lib64",
    "usr/lib/*-linux-gnu",
    "usr/local/lib",
    "usr/local/lib64",
    "opt/*/lib",
    "opt/*/*/lib",
)
# Older ones are not used: docs/decisions/0003-ucx.md.
OLDEST: Final = (1, 17, 0)
_BARE: Final = "libucp.so.0"
_PROBE_TIMEOUT_S: Final = 10.0
# In a process of its own: a library that does not fit may end it.
_PROBE: Final = (
    "import ctypes, sys; u = [ctypes.c_uint() for _ in range(3)];"
    "ctypes.CDLL(sys.argv[1]).ucp_get_version(*map(ctypes.byref, u));"
    "print(*(n.value for n in u))"
)


@dataclass(frozen=True, slots=True)
class LibraryChoice:
    """A libucp, and why it is the one."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A libucp that is installed.

    Attributes:
        path: Where it is.
        version: Major, minor, release.
        modules: Names of the transports beside it, such as ``cma`` and ``ib``.
    """

    path: str
    version: tuple[int, ...]
    modules: tuple[str, ...]

    def named(self) -> str:
        """Name it to a person."""
        return f"UCX {'.'.join(map(str, self.version))}"


def choose_library(explicit: str | None = None, root: Path = Path("/")) -> LibraryChoice:
    """Choose the libucp to load.

    Args:
        explicit: The one that the configuration names, if it does.
        root: Below which the system's libraries and devices are looked for.
    """
    if explicit is not None:
        return LibraryChoice(explicit, "the one that is configured")
    mapped = re.search(
        r"\s(/\S*/libucp\.so\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE
    )
    if mapped is not None:
        return LibraryChoice(mapped[1], "the one that this process has loaded already")
    return decide(wheel(), system(root), rdma=any(root.glob("sys/class/infiniband/*")))


def find_library(explicit: str | None = None) -> str:
    """Return the path of the libucp to load."""
    return choose_library(explicit).path


def decide(
    of_wheel: Candidate | None, of_system: Sequence[Candidate], *, rdma: bool
) -> LibraryChoice:
    """Choose between what is installed; ``rdma`` says whether the host has such devices."""
    usable = [one for one in of_system if one.version >= OLDEST]
    best = max(usable, key=lambda one: (rdma and _knows_rdma(one), one.version), default=None)
    if of_wheel is None and best is None:
        return LibraryChoice(_BARE, "the system's, if the loader finds one: no other is installed")
    if of_wheel is None or best is None:
        only = of_wheel or best
        assert only is not None
        whose = "the one of the libucx-cu12 wheel" if only is of_wheel else "the system's"
        return LibraryChoice(only.path, whose)
    if rdma and _knows_rdma(best) and not _knows_rdma(of_wheel):
        return LibraryChoice(best.path, "the system's: it knows this host's RDMA devices")
    if best.version > of_wheel.version:
        why = f"the system's: {best.named()} is newer than the wheel's {of_wheel.named()}"
        return LibraryChoice(best.path, why)
    return LibraryChoice(
        of_wheel.path,
        f"the one of the libucx-cu12 wheel: no older than the system's {best.named()}",
    )


def wheel() -> Candidate | None:
    """Return the libucp of the libucx wheel, if that is installed."""
    found = importlib.util.find_spec("libucx")
    for folder in (found and found.submodule_search_locations) or ():
        # Not libucp.so.0: the wheel holds copies, and its own loader maps this one.
        path = Path(folder, "lib", "libucp.so")
        if path.is_file():
            return Candidate(str(path), _wheel_version(), modules_beside(path))
    return None


def system(root: Path) -> list[Candidate]:
    """Return the system's libucp, each once, as far as they can be asked for their version."""
    found: dict[Path, Candidate] = {}
    for folder in LIBRARY_FOLDERS:
        for path in sorted(root.glob(f"{folder}/{_BARE}")):
            if path.resolve() not in found and (version := _version_of(str(path))):
                found[path.resolve()] = Candidate(str(path), version, modules_beside(path))
    return list(found.values())


def modules_beside(path: Path) -> tuple[str, ...]:
    """Name the transports in the folder ``ucx`` beside a libucp."""
    files = (path.resolve().parent / "ucx").glob("libuct_*.so*")
    return tuple(sorted({file.name.removeprefix("libuct_").split(".so")[0] for file in files}))


def _knows_rdma(library: Candidate) -> bool:
    return any(name.startswith("ib") for name in library.modules)


def _wheel_version() -> tuple[int, ...]:
    for name in ("libucx-cu12", "libucx-cu13"):
        try:
            return _numbers(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            pass
    return OLDEST


@functools.lru_cache(maxsize=64)
def _version_of(path: str) -> tuple[int, ...]:
    """Ask a library for its version; empty if it does not say."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE, path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ()
    return _numbers(done.stdout.replace(" ", ".")) if done.returncode == 0 else ()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def require_trusted(host: str, trusted_network: bool) -> None:
    """Refuse an address beyond loopback unless its network is declared trusted.

    Raises:
        ConfigError: ``host`` is no numeric address, or not loopback and not trusted.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(f"{host} is not a numeric address", key="host") from error
    if loopback:
        return
    if not trusted_network:
        raise ConfigError(
            f"{host} is not loopback, and whoever reaches it could write to this process's memory:"
            " set trusted_network if the network is yours alone",
            key="transfer.trusted_network",
        )
    log.warning("UCX listens beyond loopback, on %s: everybody who can reach it is trusted", host)
