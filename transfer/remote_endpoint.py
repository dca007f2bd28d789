"""The part of an endpoint between hosts that both bindings of UCX share: what the peer has told.

Owns the peer's regions, reads of them, the notifications that wait here, and the window of those under way. How a
message travels is its subclass's. Who calls it: the endpoints of ``ucx`` and ``ucxpy``, on whose
progress thread everything here runs that is not an operation of a caller.
"""

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvpool.block import BlockLayout, Incarnation
from kvpool.completion import Completion
from kvpool.errors import ClosedError, CorruptionError, PeerUnreachableError, UsageError
from kvpool.memory import BlockView, Crcs, Span
from kvpool.transfer.base import RegionDescriptor, RemoteSlots
from kvpool.transfer.bounds import is_index
from kvpool.transfer.endpoint import LinkedEndpoint
from kvpool.transfer.registered import Registered
from kvpool.transfer.ucx_reads import PeerRegion
from kvpool.transfer.ucx_wire import Bye, Offer, Taken
from kvpool.transfer.write_wire import WriteMessage

logger = logging.getLogger(__name__)

# Notifications that may wait for a callback at a receiver; it says so after each quarter.
NOTIFICATIONS_MAX: Final = 1024
# A peer that is told of the end takes the last words and ends it; after this long we do.
BYE_TIMEOUT_S: Final = 0.5

Job = TypeVar("Job")
SpanJobs = Callable[[Sequence[tuple[Span, RemoteSlots, int]], Sequence[PeerRegion]], Job]
BlockJobs = Callable[
    [PeerRegion, BlockView, RemoteSlots, BlockLayout, int | None, Crcs | None, Crcs | None], Job
]


class RemoteEndpoint(LinkedEndpoint, Generic[Job]):
    """See ``Endpoint``.

    Args:
        peer: Incarnation of the other side.
        ours: What the transport has registered.
        span_job, block_job: Describe a read for ``_submit``. They raise as
            ``Endpoint.read_spans`` and ``read_blocks``.

    ``_send_lock`` guards the counts of notifications that are under way, and the order of what is
    sent. It is taken after ``_changed`` and before those of what carries the bytes.
    """

    def __init__(
        self,
        peer: Incarnation,
        ours: Registered,
        span_job: SpanJobs[Job],
        block_job: BlockJobs[Job],
    ) -> None:
        super().__init__(peer, ours)
        self._span_job = span_job
        self._block_job = block_job
        self._peer_regions: list[PeerRegion] = []
        self._drained = threading.Event()
        self._send_lock = threading.Lock()
        self._told = 0  # regions of ours
        self._sent = self._sent_taken = 0  # notifications, and how many of them the peer handed on
        # The progress thread alone: notifications that wait for the callback, and those handed on.
        self._notes: deque[bytes] = deque()
        self._taken = 0

    def read_spans(
        self, pairs: Sequence[tuple[Span, RemoteSlots, int]], deadline_s: float
    ) -> Completion[int]:
        """Have flat bytes brought here; see ``Endpoint``. Raises CapacityError: too many reads."""
        regions = [self._region(slots.region) for _, slots, _ in pairs]
        return self._submit(self._span_job(pairs, regions), deadline_s)

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
        """Have blocks brought here; see ``Endpoint``. Raises CapacityError: too many reads."""
        region = self._region(source.region)
        job = self._block_job(region, dest, source, source_layout, dest_layer, crcs, sums)
        return self._submit(job, deadline_s)

    @abstractmethod
    def _submit(self, job: Job, deadline_s: float) -> Completion[int]:
        """Start a read. Raises CapacityError: too many are under way."""

    @abstractmethod
    def _say(self, message: Offer | Taken | Bye | WriteMessage) -> None:
        """Send a message in order, now or as soon as there is room. Lost with the peer."""

    def say_write(self, message: WriteMessage) -> None:
        """Send a message of a write."""
        self._say(message)

    def after_fork(self) -> None:
        """Be ended in a child; see ``forked``."""
        super().after_fork()
        self._send_lock = threading.Lock()
        self._drained.set()

    def _full(self) -> bool:
        """Say whether the peer has to hand on notifications before another. With the lock held."""
        return self._sent - self._sent_taken >= NOTIFICATIONS_MAX

    def _told_of(self, message: Offer | Taken | Bye | WriteMessage) -> None:
        """Take what the peer says. Raises CorruptionError: it may not say so."""
        if isinstance(message, Offer):
            self._offered(message)
        elif isinstance(message, Taken):
            with self._send_lock:
                sound = self._sent_taken <= message.count <= self._sent
                self._sent_taken = message.count if sound else self._sent_taken
            if not sound:
                raise CorruptionError("the peer took more notifications than were sent")
        elif isinstance(message, Bye):
            self.lose(PeerUnreachableError("the other side closed the connection"))
        else:
            self.take_write(message)

    def _offered(self, offer: Offer) -> None:
        descriptor = RegionDescriptor(self.peer, offer.region, offer.slot_count, offer.slot_bytes)
        with self._changed:
            if self._add_region(descriptor):
                self._peer_regions.append(PeerRegion(descriptor, offer.crc_count))

    def _notified(self, payload: bytes) -> None:
        if len(self._notes) >= NOTIFICATIONS_MAX:
            raise CorruptionError("the peer sent a notification that it might not send yet")
        self._notes.append(payload)
        self._deliver()

    def _deliver_soon(self) -> None:
        self.post(self._deliver)

    def _deliver(self) -> None:
        while self._notes and (callback := self._on_notification) is not None:
            if isinstance(self._lost, ClosedError):
                return
            payload = self._notes.popleft()
            try:
                callback(payload)
            except Exception:
                logger.exception("a notification callback failed")
            self._taken += 1
            if self._taken % (NOTIFICATIONS_MAX // 4) == 0:
                self._say(Taken(self._taken))

    def _break(self, reason: str) -> None:
        if self.lose(PeerUnreachableError(f"the connection was ended: {reason}")):
            logger.warning("closing an endpoint: %s", reason)

    def _region(self, region: int) -> PeerRegion:
        with self._changed:
            self._require_alive()
            if not is_index(region, len(self._peer_regions)):
                raise UsageError(f"the peer has told of no region {region}: see wait_region")
            return self._peer_regions[region]
