"""Checks of what moves bytes between hosts: the UCX library, RDMA, the network, the address. Pure.

One host needs none of it: its processes share memory. Who calls it: ``kvpool doctor``.
"""

import ipaddress
from pathlib import Path

from kvpool.cli.doctor_host import Host
from kvpool.cli.doctor_report import Check
from kvpool.cli.doctor_ucx import UcxLibrary
from kvpool.errors import ConfigError
from kvpool.transfer.ucx_library import require_trusted

_TRUST = "whoever can reach it can write to the memory of kvpool's processes"


def ucx_library(host: Host) -> Check:
    """Say which libucp is loaded, why this one, and whether a put over TCP arrived."""
    chosen = host.chosen
    if chosen.problem:
        return Check(
            name="ucx.library",
            status="lack",
            found=f"{_named(chosen)}, {chosen.why}: {chosen.problem}",
            remedy="pip install libucx-cu12, or a system UCX of 1.17 or newer; one host needs none",
        )
    found = f"{_named(chosen)}, {chosen.why}; transports: {_transports(chosen)}"
    if "software emulation" in chosen.put_protocol:
        return Check(
            name="ucx.library",
            status="warn",
            found=f"{found}; puts over TCP are emulated, which is slow",
            remedy="use the same version of UCX, 1.22 or newer, on all hosts",
        )
    if chosen.put_protocol and "zero-copy" not in chosen.put_protocol:
        return Check(
            name="ucx.library",
            status="warn",
            found=f"{found}; it copies what it puts over TCP: {chosen.put_protocol}",
            remedy="use a UCX of 1.22 or newer, and unset what UCX_ variables change its protocols",
        )
    how = chosen.put_protocol or "how, it does not say"
    return Check(name="ucx.library", status="ok", found=f"{found}; a put over TCP arrived: {how}")


def ucx_others(host: Host) -> Check:
    """Say which other libucp the system has, and which transports they know."""
    if not host.others:
        return Check(name="ucx.others", status="ok", found="no other UCX library")
    found = "; ".join(
        f"{_named(other)}: {other.problem or _transports(other)}" for other in host.others
    )
    return Check(
        name="ucx.others",
        status="ok",
        found=f"{found}. Not loaded: all hosts need one version, and a process holds one library",
    )


def rdma(host: Host) -> Check:
    """Look for RDMA devices, and a library that knows them. kvpool uses TCP either way."""
    devices = [_device(path) for path in sorted((host.root / "sys/class/infiniband").glob("*"))]
    if not devices:
        return Check(
            name="network.rdma",
            status="lack",
            found="no RDMA device",
            remedy="nothing: between hosts kvpool uses TCP",
        )
    able = [one for one in (host.chosen, *host.others) if _knows_rdma(one)]
    knows = f"{_named(able[0])} knows them" if able else "no UCX library here knows them"
    return Check(
        name="network.rdma",
        status="warn",
        found=f"{'; '.join(devices)}; {knows}; kvpool uses TCP, it has never been run over RDMA",
        remedy="nothing yet" if able else "install the system's UCX with its InfiniBand module",
    )


def network(host: Host) -> Check:
    """List the devices that have addresses, and their speed."""
    shown = "; ".join(
        f"{device} {', '.join(some)}{_speed(host, device)}"
        for device, some in host.addresses.items()
        if some
    )
    beyond = any(not _is_loopback(one) for some in host.addresses.values() for one in some)
    if beyond:
        return Check(name="network.devices", status="ok", found=shown)
    return Check(
        name="network.devices",
        status="lack",
        found=f"{shown or 'no address'}: nothing beyond loopback",
        remedy="give a network device an address before a pool spans hosts",
    )


def bind(host: Host) -> Check:
    """Name the address that UCX binds to, if it is not loopback: UCX is one trust domain."""
    try:
        require_trusted(host.bind, trusted_network=False)
    except ConfigError as error:
        if error.key != "transfer.trusted_network":
            return Check(
                name="network.bind",
                status="lack",
                found=str(error),
                remedy="give a number such as 10.0.0.5, no name",
            )
        beyond = True
    else:
        beyond = False
    if host.bind_refusal:
        return Check(
            name="network.bind",
            status="lack",
            found=f"{host.bind} cannot be bound: {host.bind_refusal}",
            remedy="give an address of network.devices",
        )
    if not beyond:
        return Check(
            name="network.bind",
            status="ok",
            found=f"{host.bind}: loopback, the default; other hosts do not reach it",
        )
    device = next((name for name, some in host.addresses.items() if host.bind in some), None)
    where = f" ({device})" if device else ""
    return Check(
        name="network.bind",
        status="warn",
        found=f"{host.bind}{where} is beyond loopback: {_TRUST}",
        remedy="set transfer.trusted_network only if the network is yours alone",
    )


def _named(library: UcxLibrary) -> str:
    version = f"UCX {library.version}" if library.version else "UCX"
    return f"{version} at {library.path}" if "/" in library.path else f"{version} ({library.path})"


def _transports(library: UcxLibrary) -> str:
    return ", ".join(("tcp", "shared memory", *library.modules))


def _knows_rdma(library: UcxLibrary) -> bool:
    return not library.problem and any(name.startswith("ib") for name in library.modules)


def _device(path: Path) -> str:
    ports: list[str] = []
    for port in sorted(path.glob("ports/*")):
        kind, state = (
            (port / name).read_text().strip() if (port / name).is_file() else "unknown"
            for name in ("link_layer", "state")
        )
        ports.append(f"port {port.name} {kind} {state.split(': ')[-1].lower()}")
    return f"{path.name} ({', '.join(ports) or 'no port'})"


def _speed(host: Host, device: str) -> str:
    megabits = host.read(f"sys/class/net/{device}/speed").strip()
    return f" at {int(megabits) / 1000:g} Gbit/s" if megabits.isdecimal() else ""


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
