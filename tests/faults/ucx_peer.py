"""A peer process for the tests of the UCX transport. It says what happens to it.

``python -m tests.faults.ucx_peer serve INBOX_BYTES HEARTBEAT_S`` listens and says what arrived;
``... send PORT SIZE`` puts SIZE bytes over and over until that ends. One JSON object a line goes to
stdout. The process ends when its stdin does.
"""

import hashlib
import json
import mmap
import queue
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvpool.block import Incarnation
from kvpool.errors import KVPoolError
from kvpool.memory import Span
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_engine import UcxEngine
from tests.stopped import stop
from tests.tidy.mirror import ROOT


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def take(endpoint: UcxConnection, note: bytes) -> None:
    """Say the hash of what was put before the note. The note names its extent."""
    assert endpoint.inbox is not None
    size = json.loads(note)["size"]
    digest = hashlib.sha256(endpoint.inbox.view()[:size]).hexdigest()
    say(event="arrived", note=note.decode(), digest=digest)


def accept(endpoint: UcxConnection) -> None:
    endpoint.on_notification(lambda note: take(endpoint, note))
    endpoint.on_lost(lambda lost: say(event="lost", peer=lost.peer.hex()))
    say(event="connected", peer=endpoint.peer.hex())


def serve(inbox_bytes: int, heartbeat_s: float) -> None:
    inbox = Span.of(np.frombuffer(mmap.mmap(-1, inbox_bytes), dtype=np.uint8))
    with UcxEngine(inbox=inbox, endpoint_max=4, heartbeat_interval_s=heartbeat_s) as transport:
        port = transport.listen(accept)
        say(event="listens", port=port, incarnation=transport.incarnation.hex())
        sys.stdin.read()


def send(port: int, size: int) -> None:
    """Put other bytes each time, so that a late one would show."""
    data = np.zeros(size, dtype=np.uint8)
    with UcxEngine(heartbeat_interval_s=0) as transport:
        endpoint = transport.connect("127.0.0.1", port, 20)
        say(event="connected", peer=endpoint.peer.hex())
        try:
            while True:
                data += 1
                endpoint.put([(Span.of(data), 0)], 20, b"x").wait(20)
        except KVPoolError as error:
            say(event="ended", error=type(error).__name__)
        sys.stdin.read()


class Peer:
    """The parent's side of such a process. Every wait has a deadline."""

    def __init__(self, mode: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.ucx_peer", mode, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))

    def next(self, event: str, timeout_s: float = 20) -> dict[str, Any]:
        """Return the next thing it says of that kind, skipping others."""
        deadline = time.monotonic() + timeout_s
        while True:
            said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            if said["event"] == event:
                return said

    def stop(self) -> None:
        """Stop it, and wait until the kernel says that it is."""
        stop(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._reader.join(20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Server(Peer):
    """A peer that listens."""

    def __init__(self, inbox_bytes: int = 64 << 20, heartbeat_s: float = 0) -> None:
        super().__init__("serve", inbox_bytes, heartbeat_s)
        hello = self.next("listens")
        self.port: int = hello["port"]
        self.incarnation = Incarnation(bytes.fromhex(hello["incarnation"]))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), float(sys.argv[3]))
    else:
        send(int(sys.argv[2]), int(sys.argv[3]))
