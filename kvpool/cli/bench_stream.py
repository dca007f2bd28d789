"""The row of layer-wise streaming: whether shipping hides behind computing.

Both ends live in this process. Computing a layer is a sleep, as an accelerator would leave the CPU
alone; the link is paced so that shipping all layers one after another takes as long as computing
them. What is measured is the whole: from the first layer's beginning until the last has arrived.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from kvpool.block import BlockLayout
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_tiers import aligned_room
from kvpool.completion import Completion, CompletionSource
from kvpool.errors import KVPoolError
from kvpool.events import NullSink
from kvpool.memory import BlockView, Crcs, Span
from kvpool.transfer.base import Endpoint, RegionDescriptor, RemoteSlots, SlotSpan
from kvpool.transfer.host import HostTransport
from kvpool.transfer.layerwise import Outbox, StreamHub
from kvpool.transfer.stream_wire import slice_layout

_TIMEOUT_S: Final = 60.0
# A prompt of 1,024 tokens of a model like Llama-3-8B at half its depth: 64 MiB.
_LAYOUT: Final = BlockLayout(
    num_layers=16, kv_heads=8, block_tokens=16, k_dim=128, v_dim=128, dtype="bfloat16"
)
_BLOCKS: Final = 64
_PREFILL_S: Final = 0.8


def cases(quick: bool) -> list[Case]:
    """Return the row."""
    return [
        Case(
            name="transfer.stream.overlap",
            unit="s",
            reference="the longer of computing all layers and shipping all layers",
            open=partial(_open, _PREFILL_S / (4 if quick else 1)),
            lower_is_better=True,
            one_process=False,  # most of it is waiting
        )
    ]


class PacedEndpoint(Endpoint):
    """An endpoint whose reads arrive no sooner than a link of ``bytes_per_s`` would bring them.

    One thread ends the reads, one after another: the link carries one slice at a time.
    """

    def __init__(self, inner: Endpoint, bytes_per_s: float) -> None:
        self.peer = inner.peer
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()
        self._waiting: list[tuple[Completion[int], CompletionSource[int], int]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._carry, name="kvpool-paced", daemon=True)
        self._thread.start()

    def regions(self) -> tuple[RegionDescriptor, ...]:
        """Pass on."""
        return self._inner.regions()

    def wait_region(self, region: int, timeout_s: float) -> RegionDescriptor:
        """Pass on."""
        return self._inner.wait_region(region, timeout_s)

    def read_spans(
        self, pairs: Sequence[tuple[Span, RemoteSlots, int]], deadline_s: float
    ) -> Completion[int]:
        """Pull, at the link's pace."""
        size = sum(span.size for span, _, _ in pairs)
        return self._pace(self._inner.read_spans(pairs, deadline_s), size)

    def read_blocks(
        self,
        dest: BlockView,
        source: RemoteSlots,
        *,
        source_layout: BlockLayout,
        dest_layer: int | None,
        deadline_s: float,
        crcs: Crcs | None = None,
        sums: Crcs | None = None,
    ) -> Completion[int]:
        """Pull, at the link's pace."""
        read = self._inner.read_blocks(
            dest,
            source,
            source_layout=source_layout,
            dest_layer=dest_layer,
            deadline_s=deadline_s,
            crcs=crcs,
            sums=sums,
        )
        return self._pace(read, len(source.slots) * source_layout.block_bytes)

    def write_spans(
        self, pairs: Sequence[tuple[SlotSpan, SlotSpan]], deadline_s: float, note: bytes = b""
    ) -> Completion[int]:
        """Pass on; streams write nothing."""
        return self._inner.write_spans(pairs, deadline_s, note)

    def notify(self, payload: bytes) -> bool:
        """Pass on."""
        return self._inner.notify(payload)

    def on_notification(self, callback: Callable[[bytes], None]) -> None:
        """Pass on."""
        self._inner.on_notification(callback)

    def on_lost(self, callback: Callable[[Endpoint], None]) -> None:
        """Pass on, with this wrapper as the endpoint."""
        self._inner.on_lost(lambda _: callback(self))

    def alive(self) -> bool:
        """Pass on."""
        return self._inner.alive()

    def close(self) -> None:
        """Let every read through, and close."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_TIMEOUT_S)
        self._inner.close()

    def _pace(self, read: Completion[int], size: int) -> Completion[int]:
        source: CompletionSource[int] = CompletionSource()
        with self._changed:
            self._waiting.append((read, source, size))
            self._changed.notify_all()
        return source.completion

    def _carry(self) -> None:
        free_at = time.monotonic()
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait(_TIMEOUT_S)
                if not self._waiting:
                    return
                read, source, size = self._waiting.pop(0)
                free_at = max(free_at, time.monotonic()) + size / self._bytes_per_s
                self._changed.wait_for(lambda: self._closed, free_at - time.monotonic())
            try:
                source.finish(read.wait(_TIMEOUT_S))
            except KVPoolError as error:
                source.fail(error)


@contextmanager
def _open(prefill_s: float, timer: Timer) -> Generator[Sides, None, None]:
    total = _BLOCKS * _LAYOUT.block_bytes
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-"))
        here = stack.enter_context(HostTransport("bench-prefill"))
        there = stack.enter_context(HostTransport("bench-decode"))
        outbox = Outbox(here, slice_layout(_LAYOUT), 4 * _BLOCKS)
        stack.callback(outbox.close)
        sending = stack.enter_context(StreamHub(NullSink()))
        receiving = stack.enter_context(StreamHub(NullSink()))
        connected: list[Endpoint] = []
        arrived = threading.Event()

        def on_connect(endpoint: Endpoint) -> None:
            connected.append(PacedEndpoint(endpoint, total / prefill_s))
            receiving.attach(connected[0])
            arrived.set()

        address = there.listen(str(Path(folder) / "bench.sock"), on_connect)
        endpoint = here.connect(address, _TIMEOUT_S)
        sending.attach(endpoint)
        if not arrived.wait(_TIMEOUT_S):
            raise KVPoolError("the two ends did not connect")
        stack.callback(connected[0].close)
        yield _Overlap(sending, receiving, endpoint, outbox, prefill_s, timer)


class _Overlap:
    def __init__(
        self,
        sending: StreamHub,
        receiving: StreamHub,
        endpoint: Endpoint,
        outbox: Outbox,
        prefill_s: float,
        timer: Timer,
    ) -> None:
        self._sending = sending
        self._receiving = receiving
        self._endpoint = endpoint
        self._outbox = outbox
        self._prefill_s = prefill_s
        self._timer = timer
        self._request = 0
        size = _BLOCKS * _LAYOUT.block_bytes
        self._source = BlockView.of_buffer(_LAYOUT, aligned_room(size))
        self._dest = BlockView.of_buffer(_LAYOUT, aligned_room(size))
        self.ceiling: float | None = prefill_s

    def value(self) -> float:
        """Compute and ship, each layer as soon as it is there."""
        return self._run(lambda layer: time.sleep(self._prefill_s / _LAYOUT.num_layers))

    def reference(self) -> float:
        """Ship alone, all layers being there; or compute alone, if that takes longer."""
        return max(self._run(lambda layer: None), self._prefill_s)

    def _run(self, compute: Callable[[int], None]) -> float:
        self._request += 1
        name = f"bench-{self._request}"
        began = self._timer()
        receiver = self._receiving.expect(name, self._dest, deadline_s=_TIMEOUT_S)
        sender = self._sending.open(
            self._endpoint, name, self._outbox, _LAYOUT, _BLOCKS, deadline_s=_TIMEOUT_S
        )
        for layer in range(_LAYOUT.num_layers):
            compute(layer)
            sender.send(layer, 0, self._source, chunk=0)
        sender.finish(b"", deadline_s=_TIMEOUT_S)
        receiver.completion.wait(_TIMEOUT_S)
        return self._timer() - began
