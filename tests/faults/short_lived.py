"""Peers that live for a moment: each reads us over both transports, or owns what we read, and is killed.

``python -m tests.faults.short_lived HOST_ADDRESS UCX_ADDRESS SLOTS`` is a nursery: it has everything
imported, and forks one peer for each letter of its stdin, which says in a line of JSON who it is. A
reader (r) reads our blocks over and over until it is killed, an owner (o) only waits.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict

import numpy as np

from kvpool.arena import Arena, Slot
from kvpool.errors import KVPoolError
from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import publish
from kvpool.transfer.base import RemoteSlots, Transport
from kvpool.transfer.host import HostTransport
from kvpool.transfer.ucx import UcxTransport
from tests.faults.peer import LAYOUT, ROOT, SEED, WAIT_S


class Told(TypedDict):
    """What a peer says of itself; a reader only its process."""

    pid: int
    addresses: list[str]
    slots: list[tuple[int, int]]


@dataclass(frozen=True)
class ShortOwner:
    """An owner: where it listens, over the host's transport and over UCX, and what it has."""

    pid: int
    addresses: list[str]
    slots: RemoteSlots


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

    def reader(self) -> int:
        """Start a peer that reads us; return its process id."""
        return int(self._bear(b"r")["pid"])

    def owner(self) -> "ShortOwner":
        """Start a peer that owns blocks."""
        told = self._bear(b"o")
        slots, generations = zip(*told["slots"], strict=True)
        return ShortOwner(told["pid"], told["addresses"], RemoteSlots(0, slots, generations))

    def _bear(self, role: bytes) -> Told:
        self._stdin.write(role)
        self._stdin.flush()
        told: Told = json.loads(self._stdout.readline())
        return told

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


def _say(**told: object) -> None:
    print(json.dumps({"pid": os.getpid(), **told}), flush=True)


def _read(host_address: str, ucx_address: str, pairs: list[tuple[int, int]]) -> None:
    _say()
    host = HostTransport("host")
    threading.Thread(target=_read_on, args=(host, host_address, pairs), daemon=True).start()
    _read_on(UcxTransport("ucx"), ucx_address, pairs)


def _own(folder: Path, count: int) -> None:
    """Own blocks behind both transports, until the end."""
    addresses: list[str] = []
    slots: list[Slot] = []
    where = (str(folder / f"owner-{os.getpid()}"), "ucx://127.0.0.1:0")
    for transport, address in zip((HostTransport("host"), UcxTransport("ucx")), where, strict=True):
        arena = Arena(LAYOUT, count, transport.incarnation)
        slots = publish(arena, payload(LAYOUT, count, SEED))  # the same in both arenas
        transport.register(arena)
        addresses.append(transport.listen(address, lambda endpoint: None))
    _say(addresses=addresses, slots=[(slot.index, slot.generation) for slot in slots])
    signal.pause()


def _live(role: bytes, host_address: str, ucx_address: str, pairs: list[tuple[int, int]]) -> None:
    try:
        if role == b"r":
            _read(host_address, ucx_address, pairs)
        else:
            _own(Path(host_address).parent, len(pairs))
    except KVPoolError as error:
        print(error, file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def main() -> None:
    """Fork a peer for each letter of stdin."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    host_address, ucx_address, pairs = sys.argv[1:]
    while role := os.read(0, 1):
        if os.fork() == 0:
            _live(role, host_address, ucx_address, json.loads(pairs))


if __name__ == "__main__":
    main()
