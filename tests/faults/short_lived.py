"""Peers that live for a moment: each connects to us over both transports, reads, and is killed.

``python -m tests.faults.short_lived HOST_ADDRESS UCX_ADDRESS SLOTS`` is a nursery: it has everything
imported, and forks one peer for each line of its stdin, whose number it says. A peer reads our
blocks over and over until it is killed.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from typing import IO

import numpy as np

from kvpool.errors import KVPoolError
from kvpool.testing.blocks import view_of
from kvpool.transfer.base import RemoteSlots, Transport
from kvpool.transfer.host import HostTransport
from kvpool.transfer.ucx import UcxTransport
from tests.faults.peer import LAYOUT, ROOT, WAIT_S


class Nursery:
    """The test's side of the nursery."""

    def __init__(self, host_address: str, ucx_address: str, slots: RemoteSlots) -> None:
        pairs = json.dumps(list(zip(slots.slots, slots.generations, strict=True)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.short_lived", host_address, ucx_address, pairs],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout

    def bear(self) -> int:
        """Start a peer; return its process id."""
        self._stdin.write(b"\n")
        self._stdin.flush()
        return int(self._stdout.readline())

    def close(self) -> None:
        """End the nursery."""
        self._stdin.close()
        self._process.wait(WAIT_S)
        self._stdout.close()


def _read_on(transport: Transport, address: str, pairs: list[tuple[int, int]]) -> None:
    endpoint = transport.connect(address, WAIT_S)
    endpoint.notify(str(os.getpid()).encode())
    endpoint.wait_region(0, WAIT_S)
    slots, generations = zip(*pairs, strict=True)
    out = np.zeros((len(pairs), LAYOUT.block_bytes), dtype=np.uint8)
    while True:
        endpoint.read_blocks(
            view_of(LAYOUT, out),
            RemoteSlots(0, slots, generations),
            source_layout=LAYOUT,
            dest_layer=None,
            deadline_s=WAIT_S,
        ).wait(WAIT_S)


def _live(host_address: str, ucx_address: str, pairs: list[tuple[int, int]]) -> None:
    try:
        host = HostTransport("host")
        threading.Thread(target=_read_on, args=(host, host_address, pairs), daemon=True).start()
        _read_on(UcxTransport("ucx"), ucx_address, pairs)
    except KVPoolError as error:
        print(error, file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def main() -> None:
    """Fork a peer for each line of stdin."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    host_address, ucx_address, pairs = sys.argv[1:]
    while os.read(0, 1):
        child = os.fork()
        if child == 0:
            _live(host_address, ucx_address, json.loads(pairs))
        print(child, flush=True)


if __name__ == "__main__":
    main()
