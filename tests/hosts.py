"""Hosts of their own for servers: network namespaces on one bridge, each with an address.

A keeper process holds each namespace, so that what runs there may be killed and started again. Needs
root and the kernel's veth and bridge, and no program: without them a test fails and says so.
"""

import itertools
import os
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

from pyroute2 import IPRoute

from tests.faults.network import PREFIX_BITS, take_network

_NUMBERS: Final = itertools.count()
_PROGRAM: Final = ["-m", "tests.faults.namespaces"]


class Host:
    """One namespace with one address, from construction to ``close``."""

    def __init__(self, name: str, address: str) -> None:
        self.address = address
        self._name, self._device = name, f"{name}e"
        self._route: IPRoute | None = None
        self._near = 0
        self._keeper = subprocess.Popen(
            [sys.executable, *_PROGRAM, "keep", self._device, address, str(PREFIX_BITS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def attach(self, route: IPRoute, bridge: int) -> None:
        """Lead a link from it to the bridge."""
        self._hear("in")
        route.link("add", ifname=self._name, kind="veth", peer={"ifname": self._device})
        (near,) = route.link_lookup(ifname=self._name)
        (far,) = route.link_lookup(ifname=self._device)
        route.link("set", index=far, net_ns_pid=self._keeper.pid)
        route.link("set", index=near, master=bridge, state="up")
        self._route, self._near = route, near
        assert self._keeper.stdin is not None
        print("moved", file=self._keeper.stdin, flush=True)

    def wait_up(self) -> None:
        """Wait until its address can be used."""
        self._hear("up")

    def cut(self) -> None:
        """Have nothing pass its link any more: nobody is told."""
        self._set("down")

    def mend(self) -> None:
        """Have its link carry what comes again."""
        self._set("up")

    def _set(self, state: str) -> None:
        assert self._route is not None, "it is on no bridge"
        self._route.link("set", index=self._near, state=state)

    def prefix(self) -> list[str]:
        """Return what goes before a command that is to run there."""
        return [sys.executable, *_PROGRAM, "run", str(self._keeper.pid)]

    def close(self) -> None:
        """End it; its link goes with it."""
        self._keeper.communicate()

    def _hear(self, word: str) -> None:
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == f"{word}\n", "a network namespace needs root"


class Hosts:
    """Hosts on one bridge, which this process's own namespace is on, too.

    Attributes:
        here: The address of this process there.
        hosts: The others.
    """

    def __init__(self, count: int) -> None:
        self.here, *others = take_network(count + 1)
        name = f"kv{os.getpid() % 1_000_000}x{next(_NUMBERS)}"
        self._route: IPRoute = IPRoute()
        self._route.link("add", ifname=name, kind="bridge")
        (self._bridge,) = self._route.link_lookup(ifname=name)
        self.hosts: list[Host] = []
        try:
            self._route.addr("add", index=self._bridge, address=self.here, prefixlen=PREFIX_BITS)
            self._route.link("set", index=self._bridge, state="up")
            for number, address in enumerate(others):
                self.hosts.append(Host(f"{name}h{number}", address))
            for host in self.hosts:
                host.attach(self._route, self._bridge)
            for host in self.hosts:
                host.wait_up()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all of them."""
        for host in self.hosts:
            host.close()
        self._route.link("del", index=self._bridge)
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
