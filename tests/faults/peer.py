"""A peer process for tests: does what it is told, one JSON line a command, until its stdin ends.

Run as ``python -m tests.faults.peer TRANSPORT [namespace]``. The test's side is ``Peer``.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import numpy as np

from kvpool.arena import Arena, Slot
from kvpool.block import BlockLayout
from kvpool.completion import Completion
from kvpool.errors import KVPoolError
from kvpool.events import NullSink
from kvpool.memory import BlockView, copy_blocks
from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import publish
from kvpool.transfer.base import Endpoint, RemoteSlots, SlotSpan, Transport
from kvpool.transfer.choice import TransportKind, open_transport
from kvpool.transfer.layerwise import LayerReceiver, LayerSender, Outbox, StreamHub
from kvpool.transfer.stream_wire import slice_layout
from kvpool.transfer.ucx import UcxTransport
from tests.stopped import stop

if TYPE_CHECKING:
    from tests.faults.network import Link

ROOT: Final = Path(__file__).resolve().parents[2]
# Small, and large enough that a stream of it takes many turns of a small outbox.
LAYOUT: Final = BlockLayout(num_layers=6, kv_heads=2, block_tokens=16, k_dim=16, v_dim=16)
BLOCKS: Final = 40
SEED: Final = 11
# Ends a test that hangs; what is tested has far shorter deadlines.
WAIT_S: Final = 30.0

Value = float | str | bool | None


class Peer:
    """The test's side of one peer process.

    Args:
        kind: Of its transport.
        link: Joins it, in a network namespace of its own, to us: ``Link``, ``LossyLink``.
    """

    def __init__(self, kind: TransportKind, link: "type[Link] | None" = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.peer", kind, *(["namespace"] if link else [])],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        self.host = "127.0.0.1"
        self._link: Link | None = None
        if link is not None:
            self.answer()  # it is in its namespace
            self._link = link(self.pid)
            self.host = self._link.there
            self.do("configure", name=self._link.far, address=self.host)

    @property
    def link(self) -> "Link":
        """The link to a peer in a namespace."""
        assert self._link is not None
        return self._link

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def do(self, command: str, **arguments: Value) -> Value:
        """Run a command and return its answer."""
        self.start(command, **arguments)
        return self.answer()

    def start(self, command: str, **arguments: Value) -> None:
        """Send a command without waiting for its answer."""
        self._stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self._stdin.flush()

    def answer(self) -> Value:
        """Wait for the answer of a command."""
        ready, _, _ = select.select([self._stdout], [], [], WAIT_S)
        assert ready, "the peer does not answer"
        line = self._stdout.readline()
        assert line, "the peer has died"
        value: Value = json.loads(line)
        return value

    def stop(self) -> None:
        """Stop it (SIGSTOP), and wait until it is stopped."""
        stop(self.pid)

    def resume(self) -> None:
        """Let it run again."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it as -9 does, and wait for its end."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def close(self) -> None:
        """Kill it and close the pipes, and its link."""
        self.kill()
        if self._link is not None:
            self._link.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()


@contextlib.contextmanager
def peer(kind: TransportKind = "host", link: "type[Link] | None" = None) -> Iterator[Peer]:
    """Start a peer process with a transport of some kind, perhaps behind a link, and end it."""
    process = Peer(kind, link)
    try:
        yield process
    finally:
        process.close()


class _Commands:
    """The process's side: its transport and what has been made with it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.address = ""
        self.hub = StreamHub(NullSink())
        self.endpoints: list[Endpoint] = []
        self.arenas: list[Arena] = []
        self.slots: list[Slot] = []
        self.out = np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
        self.reads: list[Completion[int]] = []
        self.sender: LayerSender | None = None
        self.receiver: LayerReceiver | None = None
        self.outbox: Outbox | None = None

    def view(self) -> BlockView:
        return view_of(LAYOUT, self.out)

    def listen(self, path: str) -> str:
        """Listen and use every connection for streams."""

        def connected(endpoint: Endpoint) -> None:
            self.endpoints.append(endpoint)
            self.hub.attach(endpoint)

        self.address = self.transport.listen(path, connected)
        return self.transport.incarnation.hex()

    def where(self) -> str:
        """Say where it listens."""
        return self.address

    def throttle(self, device: str, rate: str | None) -> None:
        """Let no more than ``rate`` out of this namespace's device, or everything again."""
        from tests.faults import network  # only who is behind a link pays for it

        if rate is None:
            network.unthrottle(device)
        else:
            network.throttle(device, rate)

    def leave(self) -> None:
        """Close the transport, and with it the port; the process lives on."""
        self.hub.close()
        self.transport.close()

    def connect(self, path: str) -> str:
        endpoint = self.transport.connect(path, WAIT_S)
        self.endpoints.append(endpoint)
        self.hub.attach(endpoint)
        return self.transport.incarnation.hex()

    def publish(self, blocks: int) -> str:
        """Put payloads of SEED into a new arena; answer the generations."""
        arena = Arena(LAYOUT, blocks, self.transport.incarnation)
        self.arenas.append(arena)
        self.slots = publish(arena, payload(LAYOUT, blocks, SEED))
        self.transport.register(arena)
        return json.dumps([[slot.index, slot.generation] for slot in self.slots])

    def read_on(self, slots: str) -> str:
        """Read a region of the peer's over and over until that ends."""
        pairs = json.loads(slots)
        source = RemoteSlots(0, *map(tuple, zip(*pairs, strict=True)))
        out = np.zeros((len(pairs), LAYOUT.block_bytes), dtype=np.uint8)
        try:
            while True:
                reads = [
                    self.endpoints[0].read_blocks(
                        view_of(LAYOUT, out),
                        source,
                        source_layout=LAYOUT,
                        dest_layer=None,
                        deadline_s=WAIT_S,
                    )
                    for _ in range(4)
                ]
                for read in reads:
                    read.wait(WAIT_S)
        except KVPoolError as error:
            return type(error).__name__

    def take_writes(self, blocks: int) -> str:
        """Reserve slots that may be written into; answer their generations."""
        arena = Arena(LAYOUT, blocks, self.transport.incarnation)
        self.arenas.append(arena)
        self.slots = list(arena.reserve_some(blocks))
        self.transport.register(arena, writable=True)
        return json.dumps([[slot.index, slot.generation] for slot in self.slots])

    def written(self) -> bool:
        """Say whether the slots of ``take_writes`` hold the payloads of SEED."""
        out = np.zeros((len(self.slots), LAYOUT.block_bytes), dtype=np.uint8)
        copy_blocks(view_of(LAYOUT, out), self.arenas[-1].view(self.slots))
        return bool((out == payload(LAYOUT, len(self.slots), SEED)).all())

    def write_on(self, slots: str) -> str:
        """Write a published block into slots of the peer's, in small pieces, until that ends."""
        try:
            while True:
                for index, life in json.loads(slots):
                    source = self.slots[index % len(self.slots)]
                    pairs = [
                        (
                            SlotSpan(0, source.index, source.generation, at, 16),
                            SlotSpan(0, index, life, at, 16),
                        )
                        for at in range(0, LAYOUT.block_bytes, 16)
                    ]
                    self.endpoints[0].write_spans(pairs, WAIT_S).wait(WAIT_S)
        except KVPoolError as error:
            return type(error).__name__

    def expect(self, request: str, deadline_s: float) -> None:
        self.receiver = self.hub.expect(request, self.view(), deadline_s=deadline_s)

    def received(self) -> str:
        """Wait for the stream's end."""
        assert self.receiver is not None
        try:
            return self.receiver.completion.wait(WAIT_S).decode()
        except KVPoolError as error:
            return type(error).__name__

    def exact(self) -> bool:
        return bool((self.out == payload(LAYOUT, BLOCKS, SEED)).all())

    def open(self, request: str, slots: int, deadline_s: float) -> None:
        self.outbox = Outbox(self.transport, slice_layout(LAYOUT), slots)
        self.out[:] = payload(LAYOUT, BLOCKS, SEED)
        self.sender = self.hub.open(
            self.endpoints[0], request, self.outbox, LAYOUT, BLOCKS, deadline_s=deadline_s
        )

    def send(self, layers: int) -> str:
        """Send the first ``layers`` layers."""
        assert self.sender is not None
        try:
            for layer in range(layers):
                self.sender.send(layer, 0, self.view(), chunk=0)
        except KVPoolError as error:
            return type(error).__name__
        return "sent"

    def finish(self, deadline_s: float) -> str:
        assert self.sender is not None
        try:
            self.sender.finish(b"the end", deadline_s=deadline_s)
        except KVPoolError as error:
            self.sender.abort("failed")
            return type(error).__name__
        return "finished"

    def outbox_free(self) -> int:
        """Wait until every slot of the outbox is free, or not."""
        assert self.outbox is not None
        for _ in range(int(WAIT_S * 100)):
            if self.outbox.counts().free == self.outbox.arena.slot_count:
                break
            time.sleep(0.01)
        return self.outbox.counts().free


def main() -> None:
    """Run commands until stdin ends."""
    if sys.argv[2:]:
        from tests.faults import network  # only who is behind a link pays for it

        network.enter_namespace()
        print(json.dumps(None), flush=True)
        _, arguments = json.loads(sys.stdin.readline())
        network.configure(**arguments)
        print(json.dumps(None), flush=True)
        transport: Transport = UcxTransport("peer", host=arguments["address"], trusted_network=True)
    else:
        transport = open_transport("ucx" if sys.argv[1] == "ucx" else "host", "peer")
    commands = _Commands(transport)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answer = getattr(commands, name)(**arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
