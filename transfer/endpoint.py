"""The part of an endpoint that transports share: reads, writes, regions, callbacks, being lost.

Owns the state of one connection and its lock. How notifications travel and how a loss is seen is
its subclass's. Who calls it: the host and loopback transports.
"""

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.arena import Window
from kvpool.block import BlockLayout, Incarnation
from kvpool.completion import Completion
from kvpool.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    KVPoolError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import BlockView, Crcs, Span
from kvpool.transfer.base import (
    NOTIFICATION_BYTES_MAX,
    Endpoint,
    RegionDescriptor,
    RemoteSlots,
    SlotSpan,
)
from kvpool.transfer.bounds import is_index, require_writes
from kvpool.transfer.engine import CopyEngine
from kvpool.transfer.forked import in_child
from kvpool.transfer.pull import BlockPull, SpanPull
from kvpool.transfer.registered import Registered
from kvpool.transfer.write_wire import Note, Part, Took, WriteMessage
from kvpool.transfer.writes import Takes, Writes

logger = logging.getLogger(__name__)

# Regions that one process may register with one transport.
REGIONS_MAX: Final = 64
# Notes of writes that wait for a callback to be set.
NOTES_MAX: Final = 1024
# Longest that closing an endpoint waits for copies that have begun, each a fraction of a ms.
CLOSE_TIMEOUT_S: Final = 5.0


def require_notification(payload: bytes) -> None:
    """Raise UsageError unless the payload fits a notification."""
    if not 0 < len(payload) <= NOTIFICATION_BYTES_MAX:
        raise UsageError(f"a notification of {len(payload)} bytes: 1 to {NOTIFICATION_BYTES_MAX}")


class LinkedEndpoint(Endpoint):
    """What every endpoint keeps: the peer's regions, its own callbacks, and what ended it.

    One condition guards the state; callbacks run outside it.
    """

    def __init__(self, peer: Incarnation, ours: Registered) -> None:
        self.peer = peer
        self._ours = ours
        self._writes = Writes(self)
        self._takes = Takes(self, ours)
        self._arrived: deque[bytes] = deque()  # notes of writes that wait for the callback
        self._changed = threading.Condition()
        self._regions: list[RegionDescriptor] = []
        self._lost: KVPoolError | None = None
        self._on_lost: list[Callable[[Endpoint], None]] = []
        self._on_notification: Callable[[bytes], None] | None = None

    def regions(self) -> tuple[RegionDescriptor, ...]:
        """Return the regions that the peer has told of."""
        with self._changed:
            return tuple(self._regions)

    def wait_region(self, region: int, timeout_s: float) -> RegionDescriptor:
        """Wait until the peer has told of ``region``."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self._regions) > region >= 0 or self._lost is not None, timeout_s
            ):
                raise TransferTimeoutError(f"no word of region {region} within {timeout_s} s")
            self._require_alive()
            return self._regions[region]

    def write_spans(
        self, pairs: Sequence[tuple[SlotSpan, SlotSpan]], deadline_s: float, note: bytes = b""
    ) -> Completion[int]:
        """Have the peer pull flat bytes into its slots."""
        if note:
            require_notification(note)
        with self._changed:
            self._require_alive()
            theirs = [(region.slot_count, region.slot_bytes) for region in self._regions]
        rows = require_writes(pairs, self._ours.geometries(), theirs)
        return self._writes.submit(rows, note, deadline_s)

    def take_write(self, message: WriteMessage) -> None:
        """Take what the peer says of writes. On the progress thread. Raises CorruptionError."""
        if self._lost is not None:
            return
        if isinstance(message, Part):
            self._takes.part(message)
        elif isinstance(message, Note):
            self._takes.note(message)
        elif isinstance(message, Took):
            self._writes.take(message)
        else:
            self._takes.drop(message)

    def take_note(self, payload: bytes) -> None:
        """Hand the note of a write to the callback, or keep it. Raises CapacityError."""
        with self._changed:
            if len(self._arrived) >= NOTES_MAX:
                raise CapacityError("nobody takes the notifications of this endpoint")
            self._arrived.append(payload)
        self._deliver_arrived()

    def _deliver_arrived(self) -> None:
        """Hand notes of writes to the callback. On the progress thread."""
        while self._arrived and (callback := self._on_notification) is not None:
            try:
                callback(self._arrived.popleft())
            except Exception:
                logger.exception("a notification callback failed")

    def on_notification(self, callback: Callable[[bytes], None]) -> None:
        """Set who gets the peer's messages from now on."""
        with self._changed:
            self._on_notification = callback
        self._deliver_soon()
        self.post(self._deliver_arrived)

    def on_lost(self, callback: Callable[[Endpoint], None]) -> None:
        """Call back once at the end of this endpoint."""
        with self._changed:
            if self._lost is None:
                self._on_lost.append(callback)
                return
        callback(self)

    def alive(self) -> bool:
        """Say whether nothing has ended this endpoint."""
        return self._lost is None

    def lose(self, error: KVPoolError) -> bool:
        """End this endpoint for a reason: its reads end with it, then ``on_lost`` is called.

        Returns False if it had ended already. Safe from any thread, does not wait.
        """
        with self._changed:
            if self._lost is not None:
                return False
            self._lost = error
            callbacks, self._on_lost = self._on_lost, []
            self._changed.notify_all()
        self._end_reads(error)
        self._writes.refuse(error)
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                logger.exception("an on_lost callback failed")
        self._release()
        return True

    def after_fork(self) -> None:
        """Be ended in a child; see ``forked``. No callback runs."""
        self._changed = threading.Condition()
        self._lost = in_child()
        self._on_lost = []
        self._writes.after_fork()

    def _require_alive(self) -> None:
        """Raise what ended this endpoint. Under the condition."""
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))

    def _add_region(self, region: RegionDescriptor) -> bool:
        """Take the peer's next region. Under the condition. False if the endpoint has ended."""
        if region.region != len(self._regions) or region.region >= REGIONS_MAX:
            raise CorruptionError(f"region {region.region} is not the peer's next one")
        if self._lost is not None:
            return False
        self._regions.append(region)
        self._changed.notify_all()
        return True

    @abstractmethod
    def say_write(self, message: WriteMessage) -> None:
        """Tell the peer of a write, in order. On the progress thread; lost with the peer."""

    @abstractmethod
    def post(self, call: Callable[[], None]) -> bool:
        """Run ``call`` soon on the progress thread. False if that has ended."""

    @abstractmethod
    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Run ``call`` on the progress thread after ``seconds``. On that thread."""

    @abstractmethod
    def _end_reads(self, error: KVPoolError) -> None:
        """End every read with an error like ``error``. Called once, from any thread."""

    @abstractmethod
    def _deliver_soon(self) -> None:
        """Hand waiting messages to the callback, on the progress thread."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what the transport holds for this endpoint. Called once, from any thread."""


class PullEndpoint(LinkedEndpoint):
    """An endpoint whose reads are copies from the peer's arenas, mapped read-only.

    A window stays mapped until the endpoint is lost and the last copy out of it has ended.
    """

    def __init__(self, peer: Incarnation, engine: CopyEngine, ours: Registered) -> None:
        super().__init__(peer, ours)
        self._engine = engine
        self._windows: list[Window] = []

    def add_region(self, region: RegionDescriptor, fd: int) -> None:
        """Map the next region of the peer. ``fd`` stays the caller's.

        Raises:
            CorruptionError, StaleIncarnationError: The peer sent something else than it said.
        """
        window = Window(fd, self.peer)
        if (window.slot_count, window.slot_bytes) != (region.slot_count, region.slot_bytes):
            raise CorruptionError(f"the peer's arena is not what its descriptor says: {region}")
        with self._changed:
            if self._add_region(region):
                self._windows.append(window)

    def read_spans(
        self, pairs: Sequence[tuple[Span, RemoteSlots, int]], deadline_s: float
    ) -> Completion[int]:
        """Pull flat bytes; every destination from one slot."""
        windows = [self._window(slots.region) for _, slots, _ in pairs]
        return self._submit(SpanPull(pairs, windows), deadline_s)

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
        """Pull blocks, verified."""
        window = self._window(source.region)
        crew = self._engine.crew
        pull = BlockPull(window, dest, source, source_layout, dest_layer, crcs, crew, sums)
        return self._submit(pull, deadline_s)

    def _submit(self, pull: BlockPull | SpanPull, deadline_s: float) -> Completion[int]:
        completion = self._engine.submit(pull, self, deadline_s)
        # Lost meanwhile, and end_reads came before submit: end it now.
        with self._changed:
            lost = self._lost
        if lost is not None:
            self._engine.end_reads(self, lost)
        return completion

    def _window(self, region: int) -> Window:
        with self._changed:
            self._require_alive()
            if not is_index(region, len(self._windows)):
                raise UsageError(f"the peer has told of no region {region}: see wait_region")
            return self._windows[region]

    def _end_reads(self, error: KVPoolError) -> None:
        with self._changed:
            self._windows.clear()
        self._engine.end_reads(self, error)

    def close(self) -> None:
        """End the connection."""
        self.lose(ClosedError("the endpoint was closed"))
        if not self._engine.drain(self, CLOSE_TIMEOUT_S):
            logger.error("copies of a closed endpoint have not ended in %s s", CLOSE_TIMEOUT_S)
