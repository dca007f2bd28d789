"""Real kvpool-server processes that make up a ring on loopback, for tests that need several."""

import contextlib
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from kvpool.block import BlockLayout
from kvpool.client import protocol
from kvpool.client.cluster import ClusterPool
from kvpool.client.connect import connect
from kvpool.client.rpc import Caller
from kvpool.config import TransferConfig
from tests.server_process import WAIT_S, ServerProcess, until

# The suite asks what a pool holds: a busy machine must not turn an answer into a miss.
PATIENT = TransferConfig(
    match_timeout_s=WAIT_S, request_timeout_s=WAIT_S, read_timeout_s=WAIT_S, staging_bytes=4 << 20
)


class RingNode:
    """One server of a ring: its name, its addresses, and its process while it runs."""

    def __init__(self, number: int, folder: Path, dram_bytes: int) -> None:
        self.name = f"node-{number}"
        self.host = f"127.0.0.{number + 1}"
        with socket.socket() as probe:
            probe.bind((self.host, 0))
            self.address = f"{self.host}:{probe.getsockname()[1]}"
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
            f"[ring]\nannounce_interval_s = 0.2\n{listed}\n"
        )
        run_dir = self.folder / "run"
        run_dir.mkdir(mode=0o700, exist_ok=True)
        self.process = ServerProcess(run_dir, self.dram_bytes, "--config", str(config), *flags)

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
        self.process.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.signal(signal.SIGCONT)

    def stop(self) -> int:
        """Ask it to end; return its exit status."""
        assert self.process is not None
        process, self.process = self.process, None
        return process.stop()


class RingOfServers:
    """A ring of servers, from construction to the end of its ``with``."""

    def __init__(self, count: int, dram_bytes: int, *flags: str, ssd_bytes: int = 0) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvp-")))
        self.flags = flags
        self._ssd_bytes = ssd_bytes
        self.nodes = [RingNode(number, folder, dram_bytes) for number in range(count)]
        try:
            for node in self.nodes:
                self.start(node)
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

    def _all_heard(self) -> bool:
        for node in self.nodes:
            with contextlib.closing(Caller(node.address)) as caller:
                reply = caller.call(protocol.MEMBERS, protocol.Done(), WAIT_S)
            if not all(member.heard for member in reply.members):
                return False
        return True

    def connect(self, layout: BlockLayout, config: TransferConfig = PATIENT) -> ClusterPool:
        """Return a pool over all of them."""
        return connect([self.nodes[0].address], layout, WAIT_S, config=config)

    def named(self, name: str) -> RingNode:
        """Return a server by its name."""
        return next(node for node in self.nodes if node.name == name)

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
