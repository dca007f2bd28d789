"""Networks of their own for peer processes: links that are cut or slow, packets that are lost or late.

A peer enters a network namespace of its own (``enter_namespace``), and a ``Link`` joins it to this
process's: a veth pair, or with loss and delay a pair of TUN devices and a thread that carries packets
between them. Needs root and the kernel's veth, tbf and TUN, and no program: without them a test
fails and says so.
"""

import errno
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from types import TracebackType
from typing import Final, Self

from pyroute2 import IPRoute

from tests.faults.namespaces import enter_namespace as enter_namespace  # noqa: PLC0414  # for peers

# 198.18.0.0/15 is for benchmarks between networks (RFC 2544): nobody routes it. A link is a /30 of it.
_LINKS: Final = itertools.count(os.getpid() * 16)
_LINKS_MAX: Final = 1 << 15

# A network for a few hosts is four of them, a /28.
PREFIX_BITS: Final = 28
_HOSTS_MAX: Final = 14

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x1001
_PACKET_BYTES_MAX: Final = 65536
_ROOT: Final = 0xFFFFFFFF


def take_network(count: int) -> list[str]:
    """Return so many addresses of a network, of ``PREFIX_BITS`` bits, that no other test has."""
    assert count <= _HOSTS_MAX, f"{count} hosts on a network of {_HOSTS_MAX}"
    number = next(one for one in _LINKS if one % 4 == 0) % _LINKS_MAX
    for _ in range(3):
        next(_LINKS)
    high, low = divmod(number * 4, 256)
    return [f"198.{18 + high // 256}.{high % 256}.{low + 1 + index}" for index in range(count)]


def configure(name: str, address: str) -> None:
    """Give the device ``name`` of this namespace an address, and bring it and loopback up."""
    with IPRoute() as route:
        _raise(route, "lo")
        route.addr("add", index=_index(route, name), address=address, prefixlen=30)
        _raise(route, name)


def throttle(name: str, rate: str) -> None:
    """Let no more than ``rate`` (such as "10mbit") out of the device ``name`` of this namespace."""
    with IPRoute() as route:
        index = _index(route, name)
        route.tc("add", "tbf", index, 0x10000, rate=rate, latency="1s", burst=65536)


def unthrottle(name: str) -> None:
    """Take the throttle away."""
    with IPRoute() as route:
        route.tc("del", index=_index(route, name), parent=_ROOT)


class Link:
    """A link between this process's namespace and a peer's. Closed, or gone with the peer.

    Attributes:
        here, there: The addresses of its two ends.
    """

    def __init__(self, pid: int) -> None:
        number = next(_LINKS) % _LINKS_MAX
        high, low = divmod(number * 4, 256)
        network = f"198.{18 + high // 256}.{high % 256}"
        self.here, self.there = f"{network}.{low + 1}", f"{network}.{low + 2}"
        self._near, self.far = f"kvpn{number}", f"kvpf{number}"
        self._route: IPRoute = IPRoute()
        self._make()
        far = _index(self._route, self.far)
        self._route.link("set", index=far, net_ns_pid=pid)
        self._index = _index(self._route, self._near)
        self._route.addr("add", index=self._index, address=self.here, prefixlen=30)
        _raise(self._route, self._near)

    def _make(self) -> None:
        self._route.link("add", ifname=self._near, kind="veth", peer={"ifname": self.far})

    def cut(self) -> None:
        """Set our end down: nothing passes, and nobody is told."""
        self._route.link("set", index=self._index, state="down")

    def mend(self) -> None:
        """Set it up again."""
        _raise(self._route, self._near)

    def passed_bytes(self) -> int:
        """Return the bytes that came in and went out at our end."""
        stats = self._route.get_links(self._index)[0].get_attr("IFLA_STATS64")
        return int(stats["rx_bytes"]) + int(stats["tx_bytes"])

    def close(self) -> None:
        """Remove the link."""
        if self._route.link_lookup(ifname=self._near):
            self._route.link("del", index=self._index)
        self._route.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class LossyLink(Link):
    """A link whose packets a thread carries: some are lost, the others come late.

    Attributes:
        loss: Share of packets that are lost.
        delay_s: How late each of the others comes.
        lost: Packets lost so far.
    """

    loss = 0.0
    delay_s = 0.0
    lost = 0

    def _make(self) -> None:
        self._ends = [_open_tun(name) for name in (self._near, self.far)]
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._carry, name="lossy-link")
        self._thread.start()

    def _carry(self) -> None:
        dice = random.Random(7)
        late: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        to = dict(zip(self._ends, reversed(self._ends), strict=True))
        while True:
            wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
            ready, _, _ = select.select([*self._ends, self._stop], [], [], wait_s)
            if self._stop in ready:
                return
            for end in ready:
                try:
                    packet = os.read(end, _PACKET_BYTES_MAX)
                except OSError as error:
                    if error.errno == errno.EBADFD:
                        return  # its device went with the namespace that it was in
                    raise
                if dice.random() < self.loss:
                    self.lost += 1
                else:
                    at = time.monotonic() + self.delay_s
                    heapq.heappush(late, (at, next(order), to[end], packet))
            while late and late[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(late)
                try:
                    os.write(end, packet)
                except OSError:
                    self.lost += 1  # its device is down, or full

    def close(self) -> None:
        """Remove the link, and end its thread."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for fd in (*self._ends, self._stop):
            os.close(fd)
        self._route.close()


def _open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
    return fd


def _index(route: IPRoute, name: str) -> int:
    found: list[int] = route.link_lookup(ifname=name)
    assert found, f"there is no device {name}"
    return found[0]


def _raise(route: IPRoute, name: str) -> None:
    route.link("set", index=_index(route, name), state="up")
