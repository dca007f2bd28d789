"""One job, done by a peer's engine in a peer's own environment: batches between two processes.

    python job.py ENGINE serve BYTES         prints where it is, as JSON; ends with its stdin
    python job.py ENGINE move BYTES WHERE    for each line "write|read SIZE COUNT STRIDE" moves COUNT
                                             spans of SIZE bytes, every STRIDE-th of the memory, and
                                             prints the seconds it took

Needs the engine's package and numpy, and nothing of kvpool. ``kvpool bench peers`` runs it.
"""

import asyncio
import json
import mmap
import sys
import threading
import time
from collections.abc import Callable, Coroutine
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


class Ucxx:
    """ucxx over TCP, as its documentation shows it: asyncio, tagged messages, one a span.

    It has no one-sided operations in Python: the owner is told of a batch, and sends or receives each
    span under its number.
    """

    def __init__(self, size: int, where: str | None) -> None:
        import ucxx

        self._ucxx = ucxx
        self._room = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        self._room.fill(1)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        # Large segments, as kvpool has them: without them it is three times slower.
        options = {"TLS": "tcp", "TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k"}
        self._run(self._start(options, where))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, options: dict[str, str], where: str | None) -> None:
        self._ucxx.init(options, progress_mode="thread", enable_python_future=True)
        if where is None:
            self._listener = self._ucxx.create_listener(self._serve)
        else:
            port = json.loads(where)["port"]
            self._peer = await self._ucxx.create_endpoint("127.0.0.1", port)

    def where(self) -> dict[str, object]:
        """Return what the mover must know."""
        return {"port": self._listener.port}

    async def _serve(self, peer: Any) -> None:  # noqa: ANN401  # ucxx has no types
        """Do the other half of each batch: count, size, whether it is written, offsets."""
        head, done = np.zeros(3, dtype=np.uint64), np.zeros(1, dtype=np.uint8)
        while True:
            try:
                await peer.recv(head)
            except self._ucxx.exceptions.UCXError:  # the mover has ended
                return
            count, size, written = map(int, head)
            offsets = np.zeros(count, dtype=np.uint64)
            await peer.recv(offsets)
            await self._all(peer, offsets.tolist(), size, sends=not written)
            if written:
                await peer.send(done)

    async def _all(
        self,
        peer: Any,  # noqa: ANN401
        offsets: list[int],
        size: int,
        sends: bool,
    ) -> None:
        call = peer.send if sends else peer.recv
        await asyncio.gather(
            *(
                call(self._room[offset : offset + size], tag=number)
                for number, offset in enumerate(offsets)
            )
        )

    def prepare(self, way: str, offsets: list[int], size: int) -> Callable[[], None]:
        """Describe a batch; what is returned moves it."""
        written = way == "write"
        head = np.array([len(offsets), size, written], dtype=np.uint64)
        theirs, done = np.array(offsets, dtype=np.uint64), np.zeros(1, dtype=np.uint8)

        async def move() -> None:
            await self._peer.send(head)
            await self._peer.send(theirs)
            await self._all(self._peer, offsets, size, sends=written)
            if written:
                await self._peer.recv(done)

        return lambda: self._run(move())


def main() -> None:
    """Be one side."""
    engine = {"nixl": Nixl, "mooncake": Mooncake, "ucxx": Ucxx}[sys.argv[1]]
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
