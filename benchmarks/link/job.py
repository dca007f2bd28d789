"""A row of a peer behind a link that is cut, or slowed down, in the middle of reads. Both its processes.

The peer is in a network namespace of its own, behind a pair of virtual devices: that needs root, and
pyroute2 to make them. The reader is a process of its own as well, since libucp reads the machine's
routes once, so the link has to come first. Who calls it: ``kvpool.cli.bench_beside``, as ``job.py
cut|slow MEMORY OPERATION ROUNDS``, which answers "ready" or why not, then a rate for each line,
"value" or "reference". It starts ``job.py owner DEVICE ADDRESS`` by itself.
"""

import ctypes
import ipaddress
import json
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from kvpool.cli.bench_beside import LAYERS, Beside, victim_bytes
from kvpool.cli.bench_ucx import Child, Reader, Scale, peer
from kvpool.cli.bench_ucx_peer import offer_blocks
from kvpool.errors import KVPoolError, UsageError
from kvpool.transfer.ucx import UcxTransport

if TYPE_CHECKING:
    from pyroute2 import IPRoute

# 198.18.0.0/15 is for benchmarks between networks (RFC 2544): nobody routes it. A link is a /30 of it.
_NETWORK: Final = ipaddress.IPv4Network("198.18.0.0/15")
_PREFIX_BITS: Final = 30
_RATE: Final = "10mbit"
_BURST_BYTES: Final = 65536
_TBF: Final = 0x10000
_ROOT: Final = 0xFFFFFFFF
# linux/sched.h, sys/mount.h
_CLONE_NEWNS: Final = 0x20000
_CLONE_NEWNET: Final = 0x40000000
_MS_PRIVATE_REC: Final = 0x44000


class LinkedVictim:
    """A process of blocks behind a link of its own; see ``bench_beside.Victim``."""

    def __init__(self, fate: str) -> None:
        self._stack = ExitStack()
        self._cuts = fate == "cut"
        links = list(_NETWORK.subnets(new_prefix=_PREFIX_BITS))
        here, there = map(str, links[os.getpid() % len(links)].hosts())
        self._near, far = f"kvpn{os.getpid()}", f"kvpf{os.getpid()}"
        self._owner = Child(self._stack, sys.executable, __file__, "owner", far, there)
        entered = self._owner.ask()
        if not entered.isdecimal():
            raise UsageError(entered)
        self._route = self._stack.enter_context(_open_route())
        self._route.link("add", ifname=self._near, kind="veth", peer={"ifname": far})
        self._stack.callback(self._remove)
        self._route.link("set", index=_index(self._route, far), net_ns_pid=int(entered))
        self._raise(here)
        self.said = self._owner.ask("linked")

    def _raise(self, address: str) -> None:
        configure(self._route, self._near, address)

    def _remove(self) -> None:
        if self._route.link_lookup(ifname=self._near):
            self._route.link("del", index=_index(self._route, self._near))

    def strike(self) -> None:
        """Set our end of the link down, or let 10 Mbit/s come over it."""
        if self._cuts:
            self._route.link("set", index=_index(self._route, self._near), state="down")
        else:
            self._owner.ask("slow")

    def mend(self) -> None:
        """Set it up again, or let everything through."""
        if self._cuts:
            self._route.link("set", index=_index(self._route, self._near), state="up")
        else:
            self._owner.ask("quick")

    def ended(self) -> bool:
        """Say no: a link can be mended."""
        return False

    def close(self) -> None:
        """End the process and remove the link."""
        self._stack.close()


def configure(route: "IPRoute", name: str, address: str) -> None:
    """Give a device of this namespace an address, and bring it up."""
    index = _index(route, name)
    route.addr("add", index=index, address=address, prefixlen=_PREFIX_BITS)
    route.link("set", index=index, state="up")


def _index(route: "IPRoute", name: str) -> int:
    found: list[int] = route.link_lookup(ifname=name)
    if not found:
        raise UsageError(f"the network device {name} is gone")
    return found[0]


def _open_route() -> "IPRoute":
    try:
        from pyroute2 import IPRoute
    except ImportError as error:
        raise UsageError("it needs pyroute2: make env") from error
    return IPRoute()


def enter_namespace() -> None:
    """Move this process into a network namespace of its own, and show its devices in /sys.

    Raises:
        UsageError: Not as root, or the kernel has none.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _require(libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET))
    _require(libc.mount(b"none", b"/", None, _MS_PRIVATE_REC, None))
    # libucp finds its devices there.
    _require(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))


def _require(result: int) -> None:
    if result != 0:
        why = os.strerror(ctypes.get_errno())
        raise UsageError(f"no network namespace can be made ({why}): run it as root")


def be_owner(device: str, address: str) -> None:
    """Enter a namespace, wait for its link, and be read from over it."""
    try:
        enter_namespace()
        route = _open_route()
    except UsageError as error:
        print(error, flush=True)
        return
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    route.link("set", index=_index(route, "lo"), state="up")
    configure(route, device, address)
    index = _index(route, device)
    with UcxTransport("bench-owner", host=address, trusted_network=True) as transport:
        where = offer_blocks(transport, f"ucx://{address}:0", victim_bytes(), LAYERS)
        print(json.dumps(where), flush=True)
        for line in sys.stdin:
            if line.strip() == "slow":
                route.tc("add", "tbf", index, _TBF, rate=_RATE, latency="1s", burst=_BURST_BYTES)
            else:
                route.tc("del", index=index, parent=_ROOT)
            print("done", flush=True)


def be_reader(fate: str, scale: Scale, rounds: int) -> None:
    """Read a lively peer beside one behind a link, and say how fast that was, for each line."""
    with ExitStack() as stack:
        try:
            victim = LinkedVictim(fate)
        except KVPoolError as error:
            print(str(error).replace("\n", " "), flush=True)
            return
        # Before libucp is first used here: the link is there.
        transport = stack.enter_context(
            UcxTransport("bench-beside", host="0.0.0.0", trusted_network=True)
        )
        said = peer(stack, "blocks", scale.memory_bytes, LAYERS).ask()
        lively = Reader(transport, said, LAYERS, scale, time.perf_counter)
        beside = Beside(transport, lively, partial(_once, victim), rounds)
        stack.callback(beside.close)
        print("ready", flush=True)
        for line in sys.stdin:
            rate = beside.value() if line.strip() == "value" else beside.reference()
            print(f"{rate:.9f}", flush=True)


def _once(victim: LinkedVictim) -> LinkedVictim:
    return victim


if __name__ == "__main__":
    if sys.argv[1] == "owner":
        be_owner(*sys.argv[2:4])
    else:
        memory, operation, turns = map(int, sys.argv[2:5])
        be_reader(sys.argv[1], Scale(operation, memory, 0, 0.0), turns)
