"""Real kvpool-server processes that make up a ring, on loopback or on hosts of their own."""

import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from kvpool.block import BlockLayout
from kvpool.client import protocol
from kvpool.client.cluster import ClusterPool
from kvpool.client.connect import connect
from kvpool.client.rpc import Caller
from kvpool.config import TransferConfig
from kvpool.errors import UsageError
from tests.hosts import Host, Hosts
from tests.server_process import WAIT_S, ServerProcess
from tests.waiting import until

# The suite asks what a pool holds: a busy machine must not turn an answer into a miss.
PATIENT = TransferConfig(
    match_timeout_s=WAIT_S, request_timeout_s=WAIT_S, read_timeout_s=WAIT_S, staging_bytes=4 << 20
)


_EVERY = 1 << 20
_PORT = 7420  # on a host that nobody else is on


class RingNode:
    """One server of a ring: its name, its addresses, and its process while it runs."""

    def __init__(self, number: int, folder: Path, dram_bytes: int, host: Host | None) -> None:
        self.name = f"node-{number}"
        self._host = host
        if host is not None:
            self.address = f"{host.address}:{_PORT}"
        else:
            self.address = _free_address(f"127.0.0.{number + 1}")
        self.folder = folder / self.name
        self.folder.mkdir()
        self.dram_bytes = dram_bytes
        self.process: ServerProcess | None = None

    def start(self, members: "list[RingNode]", *flags: str) -> None:
        """Start it; it is ready when this returns."""
        config = self.folder / "pool.toml"
        listed = "\n".join(
            f'[[ring.members]]\nname = "{one.name}"\naddress = "{one.address}"' for one in members
        )
        config.write_text(
            f'[node]\nname = "{self.name}"\n[listen]\naddress = "{self.address}"\n'
            f"{self._trust()}[ring]\nannounce_interval_s = 0.2\n{listed}\n"
        )
        run_dir = self.folder / "run"
        run_dir.mkdir(mode=0o700, exist_ok=True)
        told = ("--config", str(config), *flags)
        prefix = self._host.prefix() if self._host is not None else []
        self.process = ServerProcess(run_dir, self.dram_bytes, *told, prefix=prefix)

    def _trust(self) -> str:
        """Say in its file that its network is this test's own."""
        if self._host is None:
            return ""
        ucx = f'ucx_host = "{self._host.address}"\ntrusted_network = true'
        return f"insecure = true\n[transfer]\n{ucx}\n"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """End it at once."""
        assert self.process is not None
        self.process.kill()
        self.process.stop()
        self.process = None

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Hold it with SIGSTOP meanwhile: it is silent, and its connections stay."""
        assert self.process is not None
        self.process.halt()
        try:
            yield
        finally:
            self.process.signal(signal.SIGCONT)

    def stop(self) -> int:
        """Ask it to end; return its exit status."""
        assert self.process is not None
        process, self.process = self.process, None
        return process.stop()


def _emptied(address: str) -> bool:
    with contextlib.closing(Caller(address)) as caller:
        try:
            caller.call(protocol.EVICT, protocol.EvictRequest(blocks=_EVERY), WAIT_S)
        except UsageError:
            return True  # nobody has brought a layout yet
        stats = dict(caller.call(protocol.STATS, protocol.Done(), WAIT_S).stats)
    return stats["free"] == stats["slots"]


def _free_address(host: str) -> str:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


class RingOfServers:
    """A ring of servers, from construction to the end of its ``with``; with ``apart`` each on a host."""

    def __init__(
        self, count: int, dram_bytes: int, *flags: str, ssd_bytes: int = 0, apart: bool = False
    ) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvp-")))
        self.flags = flags
        self._ssd_bytes = ssd_bytes
        self._hosts = self._stack.enter_context(Hosts(count)) if apart else None
        hosts = self._hosts.hosts if self._hosts is not None else [None] * count
        self.nodes = [
            RingNode(number, folder, dram_bytes, host) for number, host in enumerate(hosts)
        ]
        try:
            # Side by side: most of a start is reading Python's modules. They die with their thread.
            starters = self._stack.enter_context(ThreadPoolExecutor(count))
            list(starters.map(self.start, self.nodes))
            until(self._all_heard, "every server has heard from every other one")
        except BaseException:
            self.close()
            raise

    def start(self, node: RingNode) -> None:
        """Start one of the servers, again perhaps."""
        flags = [*self.flags]
        if self._ssd_bytes:
            flags += ["--ssd", str(node.folder / "ssd"), "--ssd-bytes", str(self._ssd_bytes)]
        node.start(self.nodes, *flags)

    def kill(self) -> None:
        """End all of them in the same moment."""
        for node in self.nodes:
            os.kill(node.pid, signal.SIGKILL)
        for node in self.nodes:
            node.kill()

    def mend(self) -> None:
        """Start what was killed or stopped again, and wait until all have heard of each other."""
        for node in self.nodes:
            if node.process is None:
                self.start(node)
        until(self._all_heard, "every server has heard from every other one")

    def empty(self) -> None:
        """Evict every block, once nobody has one leased."""
        until(lambda: all(_emptied(node.address) for node in self.nodes), "every block is evicted")

    def _all_heard(self) -> bool:
        for node in self.nodes:
            with contextlib.closing(Caller(node.address)) as caller:
                reply = caller.call(protocol.MEMBERS, protocol.Done(), WAIT_S)
            if not all(member.heard for member in reply.members):
                return False
        return True

    def connect(self, layout: BlockLayout, config: TransferConfig = PATIENT) -> ClusterPool:
        """Return a pool over all of them."""
        if self._hosts is not None:
            config = replace(config, ucx_host=self._hosts.here, trusted_network=True)
        return connect([self.nodes[0].address], layout, WAIT_S, config=config)

    def named(self, name: str) -> RingNode:
        """Return a server by its name."""
        return next(node for node in self.nodes if node.name == name)

    def host(self, node: RingNode) -> Host:
        """Return the host of a server of its own."""
        assert self._hosts is not None
        return self._hosts.hosts[self.nodes.index(node)]

    def close(self) -> None:
        """End all of them."""
        for node in self.nodes:
            if node.process is not None:
                with contextlib.suppress(AssertionError):
                    node.kill()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
