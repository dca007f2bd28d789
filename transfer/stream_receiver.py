"""The receiving side of one layer stream: pulls announced slices into place, verified, and acks.

Owns what has arrived, and the reads under way. Who calls it: the decode runtime, and the hub with
what the sender says.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from kvpool.completion import Completion, CompletionSource, Deadline
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    CorruptionError,
    KVPoolError,
    LayoutMismatchError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.events import EventSink, LayerRead, LayerReadBegun, SliceArrived
from kvpool.memory import BlockView
from kvpool.transfer.base import RemoteSlots
from kvpool.transfer.stream_link import StreamLink
from kvpool.transfer.stream_wire import (
    Ack,
    Announce,
    Done,
    End,
    Open,
    Refuse,
    pack_error,
    slice_layout,
    unpack_layout,
)

# A read that was told to end does so within a batch; this only orders a deadline after the stream's.
_READ_GRACE_S: Final = 1.0
# A slice that is gone was usually taken back by a sender whose word of it is still on its way; only
# after this long is it called corrupt.
_ABORT_GRACE_S: Final = 0.1


def ack_of(message: Announce) -> Ack:
    """Say that the slots of an announcement are not read, or no longer."""
    return Ack(message.stream, message.slots, message.generations)


class LayerReceiver:
    """Receives the layers of one request. Made by ``StreamHub.expect``.

    Attributes:
        completion: Its result is the payload of the sender's ``finish``. ``layers_ready`` counts
            the leading layers of which all blocks have arrived, verified. It is done only when
            nothing writes to the destination any more. Errors: CancelledTransferError (either side
            gave up), CorruptionError, LayoutMismatchError, PeerUnreachableError,
            TransferTimeoutError, ClosedError.

    Safe from any thread. One lock guards the state and is held for microseconds.
    """

    def __init__(
        self,
        request: str,
        dest: BlockView,
        *,
        deadline_s: float,
        events: EventSink,
        stir: Callable[[], None],
        on_over: Callable[["LayerReceiver"], None],
    ) -> None:
        self.request = request
        self.link: StreamLink | None = None
        self.stream = -1
        self._dest = dest
        self._deadline = Deadline(deadline_s)
        self._events = events
        self._stir = stir
        self._on_over = on_over
        self._source: CompletionSource[bytes] = CompletionSource()
        self._state = threading.Lock()
        shape = (dest.layout.num_layers, len(dest))
        self._announced = np.zeros(shape, dtype=bool)
        self._arrived = np.zeros(shape[0], dtype=np.int64)
        self._layers_ready = 0
        self._region = 0
        self._deferred: deque[Announce] = deque()
        self._active = 0
        self._reads: set[Completion[int]] = set()
        self._payload: bytes | None = None
        self._error: KVPoolError | None = None
        self._suspicion: tuple[KVPoolError, Deadline] | None = None
        self._over = False

    @property
    def completion(self) -> Completion[bytes]:
        """The receiver's end of the stream."""
        return self._source.completion

    def cancel(self, reason: str) -> None:
        """Give up and tell the sender. Idempotent, does not wait: see ``completion``."""
        self.fail(CancelledTransferError(f"the receiver gave up: {reason}"), True)

    # ---- for the hub -----------------------------------------------------------------------------

    def claim(self, link: StreamLink, message: Open) -> bool:
        """Bind to the sender that opened the stream. False if it has one, or has failed."""
        with self._state:
            if self.link is not None or self._error is not None:
                return False
            self.link, self.stream, self._region = link, message.stream, message.region
            return True

    def opened(self, message: Open) -> None:
        """Check that the sender has what is expected; otherwise fail on both sides."""
        try:
            unpack_layout(message).require_equal(self._dest.layout)
            if message.block_count != len(self._dest):
                raise LayoutMismatchError(
                    f"the sender has {message.block_count} blocks, {len(self._dest)} are expected"
                )
        except KVPoolError as error:
            self.fail(LayoutMismatchError(str(error)), True)
            return
        if len(self._dest) == 0:
            self._source.advance(self._dest.layout.num_layers)

    def announced(self, link: StreamLink, message: Announce) -> None:
        """Take slices that are ready at the sender; pull them as soon as there is room."""
        with self._state:
            error = self._error
            if error is None and not self._plausible(message):
                error = CorruptionError("the sender announced what it cannot have, or twice")
            elif error is None:
                begin = message.first_block
                self._announced[message.layer, begin : begin + len(message.slots)] = True
                self._active += 1  # until it waits with the others, or is given back
        if error is not None:
            link.post(ack_of(message))
            self.fail(error, True)
            return
        count = len(message.slots)
        # Before any thread can begin to read it.
        self._events.emit(SliceArrived(request=self.request, layer=message.layer, blocks=count))
        if self._defer(message, behind=True):
            self.start_reads()

    def ended(self, message: End) -> None:
        """Take the sender's word that all is announced."""
        with self._state:
            complete = bool(self._announced.all())
            if complete:
                self._payload = message.payload
        if not complete:
            self.fail(CorruptionError("the sender ended a stream that was not complete"), True)
        self._end_if_over()

    def start_reads(self) -> bool:
        """Start reads that wait for room or for the sender's region. False if some still wait."""
        while True:
            with self._state:
                if not self._deferred or self.link is None:
                    return True
                message, endpoint = self._deferred.popleft(), self.link.endpoint
                self._active += 1
            try:
                if len(endpoint.regions()) <= self._region and endpoint.alive():
                    raise CapacityError("the sender's region is not known yet")
                begin, count = message.first_block, len(message.slots)
                begun = LayerReadBegun(request=self.request, layer=message.layer, blocks=count)
                read = endpoint.read_blocks(
                    self._dest.take(begin, begin + count),
                    RemoteSlots(self._region, tuple(message.slots), tuple(message.generations)),
                    source_layout=slice_layout(self._dest.layout),
                    dest_layer=message.layer,
                    deadline_s=self._deadline.remaining_s() + _READ_GRACE_S,
                )
            except CapacityError:
                if self._defer(message, behind=False):
                    self._stir()
                    return False
                continue
            except UsageError as error:
                self._read_ended(message, CorruptionError(f"the sender named no slots: {error}"))
                continue
            except KVPoolError as error:
                self._read_ended(message, error)
                continue
            self._events.emit(begun)
            self._watch(message, read)

    def check(self) -> None:
        """Fail a stream whose deadline has passed, or whose completion was cancelled."""
        if self._source.cancel_requested:
            self.cancel("cancelled by the caller")
        with self._state:
            suspicion = self._suspicion
        if suspicion is not None and suspicion[1].passed():
            self.fail(suspicion[0], True)
        if self._deadline.passed():
            self.fail(TransferTimeoutError("the deadline of the stream passed"), True)

    def wait_over(self, timeout_s: float) -> bool:
        """Wait for a stream that has failed until nothing writes any more."""
        over = threading.Event()
        self.completion.add_done_callback(over.set)
        return over.wait(timeout_s)

    def fail(self, error: KVPoolError, tell: bool) -> None:
        """End the stream with an error as soon as nothing writes; ``tell`` the sender."""
        with self._state:
            if self._error is not None or self._over:
                return
            self._error = error
            dropped = list(self._deferred)
            self._deferred.clear()
            reads, link = list(self._reads), self.link
        for read in reads:
            read.cancel()
        if link is not None:
            for message in dropped:
                link.post(ack_of(message))
            if tell:
                link.post(Refuse(self.stream, *pack_error(error)))
        self._end_if_over()

    # ---- inside ----------------------------------------------------------------------------------

    def _plausible(self, message: Announce) -> bool:
        count, begin = len(message.slots), message.first_block
        return (
            0 < count == len(message.generations)
            and message.layer < len(self._arrived)
            and begin + count <= len(self._dest)
            and not self._announced[message.layer, begin : begin + count].any()
        )

    def _defer(self, message: Announce, *, behind: bool) -> bool:
        """Let an announcement wait, behind others or before. False, and acked, if the stream failed."""
        with self._state:
            self._active -= 1
            failed = self._error is not None
            if not failed:
                (self._deferred.append if behind else self._deferred.appendleft)(message)
            link = self.link
        if failed and link is not None:
            link.post(ack_of(message))
            self._end_if_over()
        return not failed

    def _watch(self, message: Announce, read: Completion[int]) -> None:
        with self._state:
            self._reads.add(read)
            failed = self._error is not None
        if failed:
            read.cancel()

        def ended() -> None:
            error: KVPoolError | None = None
            try:
                if read.result() < len(message.slots):
                    error = CorruptionError(
                        f"a slice of layer {message.layer} is corrupt, or was taken back"
                    )
            except KVPoolError as failure:
                error = failure
            with self._state:
                self._reads.discard(read)
            self._read_ended(message, error)

        read.add_done_callback(ended)

    def _read_ended(self, message: Announce, error: KVPoolError | None) -> None:
        """Count one read as over: the slots are the sender's again, well or not."""
        count = len(message.slots)
        if error is None:
            self._events.emit(LayerRead(request=self.request, layer=message.layer, blocks=count))
        if self.link is not None:
            self.link.post(ack_of(message))
        with self._state:
            if error is None:
                self._arrived[message.layer] += count
                while self._layers_ready < len(self._arrived) and self._arrived[
                    self._layers_ready
                ] == len(self._dest):
                    self._layers_ready += 1
            if self._error is None and error is None:
                self._source.advance(self._layers_ready)
        if isinstance(error, CorruptionError):
            with self._state:
                self._suspicion = self._suspicion or (error, Deadline(_ABORT_GRACE_S))
        elif error is not None:
            self.fail(error, True)
        with self._state:
            self._active -= 1
        self._end_if_over()

    def _end_if_over(self) -> None:
        with self._state:
            if self._over or self._active:
                return
            complete = self._payload is not None and bool((self._arrived == len(self._dest)).all())
            if self._error is None and not complete:
                return
            self._over = True
            error, payload, link = self._error, self._payload, self.link
        self._on_over(self)
        if error is not None:
            self._source.fail(error)
        elif payload is not None and link is not None:
            link.post(Done(self.stream))
            self._source.finish(payload)
