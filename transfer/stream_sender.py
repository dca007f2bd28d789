"""The sending side of one layer stream: stages slices into the outbox, announces, collects acks.

Owns the backlog of what found no room, and every slot that the receiver may still read. Staging is
bounded by the outbox: its slots are the credits. Who calls it: the prefill runtime, and the hub
with what the receiver says.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvpool.arena import NO_HASH, Slot, Slots
from kvpool.block import BlockLayout
from kvpool.completion import Deadline
from kvpool.errors import (
    CancelledTransferError,
    CorruptionError,
    KVPoolError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.events import EventSink, SliceAnnounced
from kvpool.memory import BlockView, copy_blocks
from kvpool.transfer.outbox import Outbox
from kvpool.transfer.pull import layer_view
from kvpool.transfer.stream_link import StreamLink
from kvpool.transfer.stream_wire import (
    PAYLOAD_BYTES_MAX,
    SLOTS_MAX,
    Abort,
    Ack,
    Announce,
    End,
    pack_error,
)


@dataclass(slots=True)
class _Pending:
    """Blocks of one layer that wait for slots; ``source`` shrinks from its front."""

    layer: int
    first_block: int
    source: BlockView
    chunk: int


@dataclass(slots=True)
class _Staged:
    """Blocks of one layer that lie in slots and have not been announced."""

    layer: int
    first_block: int
    slots: Slots
    chunk: int


class LayerSender:
    """Sends the layers of one request as they are computed. Made by ``StreamHub.open``.

    Safe from any thread. Two locks, always in this order: ``_staging`` is held while slices are
    copied into the outbox, ``_state`` guards the rest and is held for microseconds. After an error
    call ``abort``: when that returns, nothing reads the sources any more.
    """

    def __init__(
        self,
        link: StreamLink,
        stream: int,
        outbox: Outbox,
        layout: BlockLayout,
        block_count: int,
        *,
        request: str,
        deadline_s: float,
        events: EventSink,
        on_drained: Callable[["LayerSender"], None],
    ) -> None:
        self.link = link
        self.stream = stream
        self._request = request
        self._outbox = outbox
        self._layout = layout
        self._block_count = block_count
        self._deadline = Deadline(deadline_s)
        self._events = events
        self._on_drained = on_drained
        self._staging = threading.Lock()
        self._state = threading.Condition()
        self._given = np.zeros((layout.num_layers, block_count), dtype=bool)
        self._backlog: deque[_Pending] = deque()
        self._unannounced: deque[_Staged] = deque()
        self._announced: dict[tuple[int, int], Slot] = {}
        self._end: End | None = None
        self._end_sent = False
        self._done = False
        self._error: KVPoolError | None = None
        self._released = False  # what was announced, because the stream failed

    def send(self, layer: int, first_block: int, source: BlockView, *, chunk: int) -> None:
        """Stage one layer of consecutive blocks and announce it. Never waits for the receiver.

        Args:
            layer: Layer of the layout.
            first_block: Block of the request that ``source`` begins with.
            source: ``len(source)`` blocks of the full layout, of which that layer is read. What
                finds no free slot now is read later: it must stay unchanged until ``finish`` or
                ``abort`` has returned.
            chunk: Of the prefill, for the events.

        Raises:
            UsageError, LayoutMismatchError: Out of range, or given before. Nothing was done.
            KVPoolError: The stream has failed before; the same error as ``finish`` would raise.
        """
        self._layout.require_equal(source.layout)
        end = first_block + len(source)
        if not (0 <= layer < self._layout.num_layers and 0 <= first_block < end):
            raise UsageError(f"layer {layer} of blocks {first_block} to {end} is no slice to send")
        if end > self._block_count:
            raise UsageError(f"block {end - 1} of a request of {self._block_count}")
        with self._state:
            self._require_open()
            if self._given[layer, first_block:end].any():
                raise UsageError(f"layer {layer} of blocks {first_block} to {end} was sent before")
            self._given[layer, first_block:end] = True
            self._backlog.append(_Pending(layer, first_block, source, chunk))
        self.pump()
        with self._state:
            self._require_open()

    def pump(self) -> None:
        """Stage and announce what there is room for now. Never raises, never waits for the peer."""
        with self._staging:
            try:
                while self._announce() and self._stage():
                    pass
                return
            except KVPoolError as error:
                failure = error
        self.fail(failure, True)

    def finish(self, payload: bytes, *, deadline_s: float) -> None:
        """Announce the end and wait until the receiver has everything.

        Args:
            payload: For the receiver, at most 900 bytes.
            deadline_s: Seconds from now; the stream's own deadline holds too.

        Raises:
            UsageError: A layer of a block was not sent, or the payload is too large.
            TransferTimeoutError: A deadline passed; the stream is aborted.
            CancelledTransferError, CorruptionError, LayoutMismatchError, PeerUnreachableError,
            ClosedError: The stream failed; so it did for the receiver.
        """
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise UsageError(f"a payload of {len(payload)} bytes: at most {PAYLOAD_BYTES_MAX}")
        with self._state:
            self._require_open()
            if not self._given.all():
                layer, block = np.argwhere(~self._given)[0]
                raise UsageError(f"layer {layer} of block {block} was not sent: finish comes last")
            self._end = End(self.stream, payload)
        self.pump()
        timeout_s = min(deadline_s, self._deadline.remaining_s())
        with self._state:
            ended = self._state.wait_for(lambda: self._done or self._error is not None, timeout_s)
        if not ended:
            self.fail(TransferTimeoutError("the receiver has not taken everything in time"), True)
        with self._staging, self._state:
            if self._error is not None:
                raise self._error

    def abort(self, reason: str) -> None:
        """Give up and tell the receiver. Idempotent; harmless after ``finish``.

        When it returns nothing reads the sources. Slots that the receiver may still read come back
        when it says so, or is gone.
        """
        self.fail(CancelledTransferError(f"the sender gave up: {reason}"), True)
        with self._staging:
            pass  # a copy that was under way has ended

    # ---- for the hub -----------------------------------------------------------------------------

    def backlogged(self) -> bool:
        """Say whether ``pump`` has something to do."""
        with self._state:
            waiting = bool(self._backlog or self._unannounced)
            return waiting or (self._end is not None and not self._end_sent and not self._error)

    def check(self) -> None:
        """Fail a stream whose deadline has passed."""
        if self._deadline.passed():
            self.fail(TransferTimeoutError("the deadline of the stream passed"), True)

    def fail(self, error: KVPoolError, tell: bool) -> None:
        """End the stream with an error; ``tell`` the receiver. Later ends are lost."""
        with self._state:
            if self._error is not None or self._done:
                return
            self._error = error
            self._backlog.clear()
            self._state.notify_all()
        if tell:  # before the slots go: a receiver that finds one gone then knows why
            self.link.post(Abort(self.stream, *pack_error(error)))
        with self._state:
            self._released = True
            for staged in self._unannounced:
                self._outbox.arena.settle(staged.slots)
                self._drop(staged.slots)
            self._unannounced.clear()
            # Quarantined: the receiver may be reading them until it acknowledges or is gone.
            self._outbox.arena.release(list(self._announced.values()))
        self._tell_if_drained()

    def acked(self, message: Ack) -> None:
        """Take slots back that the receiver no longer reads."""
        with self._state:
            for number in zip(message.slots, message.generations, strict=False):
                slot = self._announced.pop(number, None)
                if slot is not None:
                    self._take_back(slot)
        self._tell_if_drained()

    def done(self) -> None:
        """Take the receiver's word that everything arrived."""
        with self._state:
            if self._error is None and self._end_sent:
                self._done = True
                self._take_all_back()
                self._state.notify_all()
        if not self._done:
            self.fail(CorruptionError("the receiver ended a stream that was not complete"), True)
        self._tell_if_drained()

    def lost(self, error: KVPoolError) -> None:
        """End it because the endpoint is gone: the receiver reads nothing any more."""
        self.fail(error, False)
        with self._state:
            self._take_all_back()
        self._tell_if_drained()

    # ---- inside ----------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._end is not None:
            raise UsageError("the stream has been finished")

    def _take_back(self, slot: Slot) -> None:
        self._outbox.arena.settle(slot)
        if not self._released:  # otherwise it was released when the stream failed
            self._outbox.arena.release(slot)
        self._outbox.give_back(1, self.link)

    def _take_all_back(self) -> None:
        for slot in self._announced.values():
            self._take_back(slot)
        self._announced.clear()

    def _tell_if_drained(self) -> None:
        with self._state:
            drained = not self._announced and (self._done or self._error is not None)
        if drained:
            self._on_drained(self)

    def _announce(self) -> bool:
        """Announce what is staged, then the end. False if the ring is full or all is said."""
        while True:
            with self._state:
                if self._error is not None or self._end_sent:
                    return False
                if not self._unannounced:
                    if not self._backlog and self._end is not None:
                        self._end_sent = self.link.offer(self._end)
                    return True
                event = self._announce_first(self._unannounced[0])
                if event is None:
                    return False
                self._unannounced.popleft()
            self._events.emit(event)

    def _announce_first(self, staged: _Staged) -> SliceAnnounced | None:
        numbers = [(slot.index, slot.generation) for slot in staged.slots]
        # The event's time is that of the start; an ack may come before the next line runs.
        event = SliceAnnounced(
            request=self._request,
            chunk=staged.chunk,
            layer=staged.layer,
            blocks=len(staged.slots),
            staged_bytes=self._outbox.staged_bytes(),
        )
        self._announced.update(zip(numbers, staged.slots, strict=True))
        message = Announce(
            self.stream,
            staged.layer,
            staged.first_block,
            [index for index, _ in numbers],
            [generation for _, generation in numbers],
        )
        if self.link.offer(message):
            return event
        for number in numbers:
            del self._announced[number]
        return None

    def _failed(self) -> bool:
        return self._error is not None

    def _drop(self, slots: Slots) -> None:
        """Give up slots that the receiver has not been told of."""
        self._outbox.arena.release(slots)
        self._outbox.give_back(len(slots), self.link)

    def _stage(self) -> bool:
        """Copy the front of the backlog into free slots. False if there is none, or no slot."""
        with self._state:
            if self._error is not None or not self._backlog:
                return False
            pending = self._backlog[0]
        slots = self._outbox.reserve(min(len(pending.source), SLOTS_MAX), self.link)
        if not slots:
            return False
        count = len(slots)
        arena = self._outbox.arena
        source = layer_view(pending.source.take(0, count), pending.layer)
        try:
            crcs = copy_blocks(arena.view(slots), source)
        except KVPoolError:
            self._drop(slots)
            raise
        with self._state:
            if self._failed():
                self._drop(slots)
                return False
            arena.commit_all(slots, crcs, NO_HASH * count)
            arena.grant(slots)
            staged = _Staged(pending.layer, pending.first_block, slots, pending.chunk)
            self._unannounced.append(staged)
            pending.source = pending.source.take(count, len(pending.source))
            pending.first_block += count
            if not len(pending.source):
                self._backlog.popleft()
        return True
