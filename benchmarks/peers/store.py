"""Mooncake's store as its users run it: a master, memory for the pool, and a client.

    python store.py hold BYTES         starts a master and gives it BYTES of memory; prints its address
    python store.py use BYTES MASTER [MEMORY]
                                       a client with two registered buffers of BYTES each; with MEMORY
                                       it also gives so much to the pool. For each line
        put SIZE COUNT                 puts its buffer under new keys, COUNT objects of SIZE a call;
                                       what it put before is removed first, outside of the time
        get SIZE COUNT                 gets them back, and compares them outside of the time
        keep COUNT                     puts COUNT small objects that stay
        exist COUNT                    asks in one call whether those are there
                                       it prints the seconds that the calls took

Both end with their stdin. Needs the package ``mooncake-transfer-engine-non-cuda`` and numpy, and
nothing of kvpool. ``kvpool bench server`` runs it.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

PAGE = 4096
START_S = 30.0
SMALL = 4096
LOCAL_BYTES = 64 << 20  # the client's own room for what it copies itself


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def buffer(size: int) -> Any:  # noqa: ANN401  # an array of bytes
    """Return touched memory that begins on a page."""
    room = np.ones(size + PAGE, dtype=np.uint8)
    begin = -room.ctypes.data % PAGE
    return room[begin : begin + size]


def start_master() -> tuple[str, "subprocess.Popen[bytes]"]:
    """Start a master; return its address, and it."""
    port, metrics = free_port(), free_port()
    program = Path(sys.executable).parent / "mooncake_master"
    command = [str(program), f"-rpc_port={port}", f"-metrics_port={metrics}"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    give_up = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return f"127.0.0.1:{port}", process
        except OSError:
            if time.monotonic() > give_up:
                process.kill()
                raise SystemExit("Mooncake's master does not start") from None
            time.sleep(0.05)


def connect(master: str, memory: int) -> Any:  # noqa: ANN401  # Mooncake has no types
    """Return a client that gives ``memory`` to the pool."""
    store = MooncakeDistributedStore()
    host = f"127.0.0.1:{free_port()}"
    if store.setup(host, "P2PHANDSHAKE", memory, LOCAL_BYTES, "tcp", "", master) != 0:
        raise SystemExit("Mooncake's client does not start")
    return store


class Client:
    """A client with a buffer to put from and one to get into."""

    def __init__(self, size: int, master: str, memory: int) -> None:
        self._store = connect(master, memory)
        self._size = size
        self._source, self._dest = buffer(size), buffer(size)
        self._source[:] = np.frombuffer(np.random.default_rng(0).bytes(size), dtype=np.uint8)
        for room in (self._source, self._dest):
            if self._store.register_buffer(room.ctypes.data, size) != 0:
                raise SystemExit("Mooncake's client does not take the memory")
        self._calls: list[list[str]] = []
        self._number = 0

    def warm(self) -> None:
        """Touch most of the memory that was given, which the kernel hands out at first use."""
        for _ in range(3):
            self._put(2 << 20, 16)
        self._remove()

    def put(self, size: int, count: int) -> float:
        """Put the whole buffer; return seconds."""
        self._remove()
        return self._put(size, count)

    def _put(self, size: int, count: int) -> float:
        took_s = 0.0
        for at in range(0, self._size, size * count):
            keys = [f"block-{self._number + index:016x}" for index in range(count)]
            self._number += count
            begin = self._source.ctypes.data + at
            places = [begin + index * size for index in range(count)]
            sizes = [size] * count
            began = time.perf_counter()
            done = self._store.batch_put_from(keys, places, sizes)
            took_s += time.perf_counter() - began
            if any(done):
                raise SystemExit(f"Mooncake put {done}")
            self._calls.append(keys)
        return took_s

    def get(self, size: int, count: int) -> float:
        """Get what was put last; return seconds."""
        took_s = 0.0
        self._dest[:] = 0
        for number, keys in enumerate(self._calls):
            begin = self._dest.ctypes.data + number * size * count
            places = [begin + index * size for index in range(count)]
            sizes = [size] * count
            began = time.perf_counter()
            done = self._store.batch_get_into(keys, places, sizes)
            took_s += time.perf_counter() - began
            if any(one != size for one in done):
                raise SystemExit(f"Mooncake got {done}")
        if not np.array_equal(self._source, self._dest):
            raise SystemExit("Mooncake gave other bytes than it was given")
        return took_s

    def keep(self, count: int) -> float:
        """Put small objects that stay; return seconds."""
        began = time.perf_counter()
        for at in range(0, count, 1000):
            keys = [f"small-{index:016x}" for index in range(at, min(at + 1000, count))]
            places = [self._source.ctypes.data] * len(keys)
            done = self._store.batch_put_from(keys, places, [SMALL] * len(keys))
            if any(done):
                raise SystemExit(f"Mooncake put {done}")
        return time.perf_counter() - began

    def exist(self, count: int) -> float:
        """Ask whether they are there; return seconds."""
        keys = [f"small-{index:016x}" for index in range(count)]
        began = time.perf_counter()
        found = self._store.batch_is_exist(keys)
        took_s = time.perf_counter() - began
        if sum(found) != count:
            raise SystemExit(f"Mooncake has {sum(found)} of {count} objects")
        return took_s

    def _remove(self) -> None:
        for keys in self._calls:
            for key in keys:
                self._store.remove(key, True)
        self._calls.clear()


def quieten() -> None:
    """Keep Mooncake's own log, which goes to stderr, from the caller's terminal; errors are ours."""
    sys.stderr = os.fdopen(os.dup(2), "w")
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)


def main() -> None:
    """Be one of the two."""
    quieten()
    role, size = sys.argv[1], int(sys.argv[2])
    # Mooncake speaks on stdout too: only lines that begin so are for the caller.
    if role == "hold":
        master, process = start_master()
        try:
            store = connect(master, size) if size else None
            print(f"kvpool:{master}", flush=True)
            sys.stdin.read()
            del store
        finally:
            process.kill()
            process.wait()
        return
    client = Client(size, sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    client.warm()
    print("kvpool:ready", flush=True)
    for line in sys.stdin:
        call, *numbers = line.split()
        print(f"kvpool:{getattr(client, call)(*map(int, numbers)):.9f}", flush=True)


if __name__ == "__main__":
    main()
