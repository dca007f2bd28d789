"""One job, done by a peer's engine in a peer's own environment: batches between two processes.

    python job.py ENGINE serve BYTES         prints where it is, as JSON; ends with its stdin
    python job.py ENGINE move BYTES WHERE    for each line "write|read SIZE COUNT STRIDE" moves COUNT
                                             spans of SIZE bytes, every STRIDE-th of the memory, and
                                             prints the seconds it took

Needs the engine's package and numpy, and nothing of kvpool. ``kvpool bench peers`` runs it.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

PAGE = 4096


def memory(size: int) -> tuple[int, Any]:
    """Return the address of touched, page-aligned memory, and what keeps it."""
    room = np.ones(size + PAGE, dtype=np.uint8)
    return room.ctypes.data + -room.ctypes.data % PAGE, room


class Nixl:
    """NIXL's UCX backend. Which transports is said by UCX_TLS in the environment."""

    def __init__(self, size: int, where: str | None) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.address, self._room = memory(size)
        name = "owner" if where is None else "mover"
        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(self.address, size, 0, "")], "DRAM")
        if where is not None:
            told = json.loads(where)
            self._remote = told["address"]
            self._peer = self._agent.add_remote_agent(bytes.fromhex(told["metadata"]))

    def where(self) -> dict[str, object]:
        """Return what the mover must know."""
        return {"address": self.address, "metadata": self._agent.get_agent_metadata().hex()}

    def prepare(self, way: str, offsets: list[int], size: int) -> Callable[[], None]:
        """Describe a batch; what is returned moves it."""
        ours = [(self.address + offset, size, 0) for offset in offsets]
        theirs = [(self._remote + offset, size, 0) for offset in offsets]
        agent = self._agent
        work = agent.initialize_xfer(
            way.upper(),
            agent.get_xfer_descs(ours, "DRAM"),
            agent.get_xfer_descs(theirs, "DRAM"),
            self._peer,
        )

        def move() -> None:
            state = agent.transfer(work)
            while state == "PROC":
                state = agent.check_xfer_state(work)
            if state != "DONE":
                raise SystemExit(f"NIXL says {state}")
            agent.release_xfer_handle(work)

        return move


class Mooncake:
    """Mooncake's transfer engine over TCP, without a metadata server."""

    def __init__(self, size: int, where: str | None) -> None:
        from mooncake.engine import TransferEngine

        self.address, self._room = memory(size)
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise SystemExit("Mooncake's engine does not start")
        if self._engine.register_memory(self.address, size) != 0:
            raise SystemExit("Mooncake's engine does not take the memory")
        if where is not None:
            told = json.loads(where)
            self._remote, self._peer = told["address"], told["peer"]

    def where(self) -> dict[str, object]:
        """Return what the mover must know."""
        return {"address": self.address, "peer": f"127.0.0.1:{self._engine.get_rpc_port()}"}

    def prepare(self, way: str, offsets: list[int], size: int) -> Callable[[], None]:
        """Describe a batch; what is returned moves it."""
        ours = [self.address + offset for offset in offsets]
        theirs = [self._remote + offset for offset in offsets]
        sizes = [size] * len(offsets)
        call = getattr(self._engine, f"batch_transfer_sync_{way}")

        def move() -> None:
            if call(self._peer, ours, theirs, sizes) != 0:
                raise SystemExit("Mooncake's engine failed")

        return move


def main() -> None:
    """Be one side."""
    engine = {"nixl": Nixl, "mooncake": Mooncake}[sys.argv[1]]
    size = int(sys.argv[3])
    side = engine(size, sys.argv[4] if sys.argv[2] == "move" else None)
    # Engines speak on stdout too: only lines that begin so are for the caller.
    if sys.argv[2] == "serve":
        print("kvpool:" + json.dumps(side.where()), flush=True)
        sys.stdin.read()
        return
    print("kvpool:ready", flush=True)
    turn = 0
    for line in sys.stdin:
        way, *numbers = line.split()
        span, count, stride = map(int, numbers)
        blocks = size // span
        offsets = [(turn + i) * stride % blocks * span for i in range(count)]
        turn += count
        move = side.prepare(way, offsets, span)
        began = time.perf_counter()
        move()
        print(f"kvpool:{time.perf_counter() - began:.9f}", flush=True)


if __name__ == "__main__":
    main()
