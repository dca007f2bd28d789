"""A transport that fails on purpose, by a seed. With its faults off it passes the suite of transports."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvpool.arena import Arena
from kvpool.block import BlockLayout, Incarnation
from kvpool.completion import Completion, CompletionSource
from kvpool.memory import BlockView, Crcs, Span
from kvpool.transfer.base import Endpoint, RegionDescriptor, RemoteSlots, SlotSpan, Transport
from kvpool.transfer.endpoint import require_notification


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities of what goes wrong, per call.

    Attributes:
        busy: ``notify`` says that there is no room though there is: allowed, and slow.
        drop: ``notify`` says that a message was sent, and it was not.
        short: ``read_blocks`` delivers fewer leading blocks, as if the next one were stale.
        lose: A call loses the endpoint, before or after it has done its work.
    """

    busy: float = 0.0
    drop: float = 0.0
    short: float = 0.0
    lose: float = 0.0


class LossyEndpoint(Endpoint):
    """Wraps one endpoint. Safe from any thread; a run of one thread is repeatable."""

    def __init__(self, inner: Endpoint, transport: "LossyTransport") -> None:
        self.peer = inner.peer
        self._inner = inner
        self._transport = transport

    def regions(self) -> tuple[RegionDescriptor, ...]:
        """Pass on."""
        return self._inner.regions()

    def wait_region(self, region: int, timeout_s: float) -> RegionDescriptor:
        """Pass on."""
        return self._inner.wait_region(region, timeout_s)

    def read_spans(
        self, pairs: Sequence[tuple[Span, RemoteSlots, int]], deadline_s: float
    ) -> Completion[int]:
        """Pull, unless the endpoint is lost now."""
        self._perhaps_lose()
        return self._inner.read_spans(pairs, deadline_s)

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
        """Pull, perhaps only some leading blocks."""
        self._perhaps_lose()
        count = len(source.slots)
        if self._transport.happens(self._transport.faults.short) and count == len(dest) > 0:
            count = self._transport.below(count)
            if count == 0:
                nothing: CompletionSource[int] = CompletionSource()
                nothing.finish(0)
                return nothing.completion
            dest = dest.take(0, count)
            source = replace(
                source, slots=source.slots[:count], generations=source.generations[:count]
            )
            crcs = None if crcs is None else crcs[:count]
            sums = None if sums is None else sums[:count]
        return self._inner.read_blocks(
            dest,
            source,
            source_layout=source_layout,
            dest_layer=dest_layer,
            deadline_s=deadline_s,
            crcs=crcs,
            sums=sums,
        )

    def write_spans(
        self, pairs: Sequence[tuple[SlotSpan, SlotSpan]], deadline_s: float, note: bytes = b""
    ) -> Completion[int]:
        """Write, unless the endpoint is lost now."""
        self._perhaps_lose()
        return self._inner.write_spans(pairs, deadline_s, note)

    def notify(self, payload: bytes) -> bool:
        """Send, or say that there is no room, or lose the message."""
        require_notification(payload)
        self._perhaps_lose()
        if self._transport.happens(self._transport.faults.busy):
            return False
        if self._transport.happens(self._transport.faults.drop):
            return True
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
        """Pass on."""
        self._inner.close()

    def _perhaps_lose(self) -> None:
        if self._transport.happens(self._transport.faults.lose):
            # On a thread of its own: no callback may run inside the call that fails.
            threading.Thread(target=self._inner.close, name="kvpool-lossy-lose").start()


class LossyTransport(Transport):
    """Wraps a transport; its endpoints fail by the seed.

    Args:
        inner: The transport that does the work. This one closes it.
        seed: Which calls fail.
        faults: How often. May be replaced while it runs.

    Attributes:
        faulted: Faults so far.
    """

    def __init__(self, inner: Transport, *, seed: int, faults: Faults | None = None) -> None:
        self.incarnation = inner.incarnation
        self.faults = faults or Faults()
        self.faulted = 0
        self._inner = inner
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # guards the random numbers and the count

    def happens(self, probability: float) -> bool:
        """Draw whether a fault happens now."""
        with self._lock:
            if self._random.random() >= probability:
                return False
            self.faulted += 1
            return True

    def below(self, count: int) -> int:
        """Draw a number from 0 to ``count - 1``."""
        with self._lock:
            return self._random.randrange(count)

    def register(self, arena: Arena, *, writable: bool = False) -> RegionDescriptor:
        """Pass on."""
        return self._inner.register(arena, writable=writable)

    def listen(self, address: str, on_connect: Callable[[Endpoint], None]) -> str:
        """Pass on, with wrapped endpoints."""
        return self._inner.listen(
            address, lambda endpoint: on_connect(LossyEndpoint(endpoint, self))
        )

    def connect(
        self, address: str, timeout_s: float, expected: Incarnation | None = None
    ) -> Endpoint:
        """Pass on, with a wrapped endpoint."""
        return LossyEndpoint(self._inner.connect(address, timeout_s, expected), self)

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()
