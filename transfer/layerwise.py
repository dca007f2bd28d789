"""Layer-wise streams: each layer of a prompt travels as soon as it is computed.

The sender copies slices of a layer into its outbox, an arena of slots of one layer, and announces
them; the receiver pulls them into its paged cache, verified, and acknowledges, which frees the
slots. Owns the hub that all streams of a process share; the two sides of a stream are in
``stream_sender`` and ``stream_receiver``. Who calls it: the prefill and decode runtime.
"""

import itertools
import logging
import math
import threading
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self

from kvpool.block import BlockLayout
from kvpool.completion import Deadline
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    CorruptionError,
    PeerUnreachableError,
    UsageError,
)
from kvpool.events import EventSink
from kvpool.memory import BlockView
from kvpool.transfer.base import Endpoint
from kvpool.transfer.outbox import Outbox
from kvpool.transfer.stream_link import StreamLink
from kvpool.transfer.stream_receiver import LayerReceiver, ack_of
from kvpool.transfer.stream_sender import LayerSender
from kvpool.transfer.stream_wire import (
    REQUEST_BYTES_MAX,
    Abort,
    Ack,
    Announce,
    Done,
    End,
    Open,
    Refuse,
    decode,
    pack_error,
    pack_layout,
    slice_layout,
    unpack_error,
)

__all__ = ["LayerReceiver", "LayerSender", "Outbox", "StreamHub"]

logger = logging.getLogger(__name__)

# Streams of one process in either direction.
STREAMS_MAX: Final = 4096
# How often the hub's thread looks: while something waits for room; while streams are live (for
# deadlines and cancels); otherwise. It is woken for everything else.
_RETRY_S: Final = 0.005
_CHECK_S: Final = 0.05
_IDLE_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 5.0


class StreamHub:
    """All layer streams of one process, over all of its endpoints. Safe from any thread.

    Owns one thread, for what must be tried again and for deadlines. One condition guards the
    tables; no stream is called under it.

    Args:
        events: Takes SliceAnnounced, SliceArrived, LayerReadBegun and LayerRead.
    """

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._changed = threading.Condition()
        self._links: dict[Endpoint, StreamLink] = {}
        self._senders: dict[int, LayerSender] = {}
        self._expected: dict[str, LayerReceiver] = {}
        self._receivers: dict[tuple[StreamLink, int], LayerReceiver] = {}
        self._numbers = itertools.count(1)
        self._turn = itertools.count()
        self._stirred = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvpool-streams", daemon=True)
        self._thread.start()

    def attach(self, endpoint: Endpoint) -> None:
        """Use an endpoint for streams, on both of its sides, once. Takes its notifications over.

        Raises:
            UsageError: It is attached already.
            ClosedError: The hub is closed.
        """
        link = StreamLink(endpoint, self._stir)
        with self._changed:
            self._require_open()
            if endpoint in self._links:
                raise UsageError("the endpoint is attached already")
            self._links[endpoint] = link
        endpoint.on_lost(self._lost)
        endpoint.on_notification(partial(self._take, link))

    def expect(self, request: str, dest: BlockView, *, deadline_s: float) -> LayerReceiver:
        """Be ready for a stream, before its sender opens it.

        Args:
            request: Names the stream, at most 256 bytes; not expected twice at once.
            dest: Where the blocks go, in the sender's order. It belongs to the stream until the
                receiver's completion is done.
            deadline_s: Seconds from now until the stream fails if it has not ended.

        Raises:
            UsageError: The request is expected already, or an argument is out of range.
            CapacityError: Too many streams.
            ClosedError: The hub is closed.
        """
        _require_request(request, deadline_s)
        if not dest.writable:
            raise UsageError("the destination is read-only")
        receiver = LayerReceiver(
            request,
            dest,
            deadline_s=deadline_s,
            events=self._events,
            stir=self._stir,
            on_over=self._forget_receiver,
        )
        with self._changed:
            self._require_open()
            if request in self._expected:
                raise UsageError(f"request {request} is expected already")
            if len(self._expected) >= STREAMS_MAX:
                raise CapacityError(f"{STREAMS_MAX} streams are expected")
            self._expected[request] = receiver
        self._stir()
        return receiver

    def open(
        self,
        endpoint: Endpoint,
        request: str,
        outbox: Outbox,
        layout: BlockLayout,
        block_count: int,
        *,
        deadline_s: float,
    ) -> LayerSender:
        """Begin a stream to whoever expects ``request`` at the peer.

        Args:
            endpoint: An attached one.
            request: Names the stream, at most 256 bytes.
            outbox: Of the endpoint's transport.
            layout: Of whole blocks; the outbox holds single layers of it.
            block_count: Blocks of which every layer will be sent; 0 sends only the end.
            deadline_s: Seconds from now until the stream fails if it has not ended.

        Raises:
            UsageError, LayoutMismatchError: An argument does not fit. Nothing was done.
            PeerUnreachableError: The endpoint is lost.
            CapacityError: Too many streams.
            ClosedError: The hub is closed.
        """
        _require_request(request, deadline_s)
        outbox.arena.layout.require_equal(slice_layout(layout))
        if block_count < 0:
            raise UsageError(f"a stream of {block_count} blocks")
        with self._changed:
            self._require_open()
            link = self._links.get(endpoint)
            if link is None:
                if endpoint.alive():
                    raise UsageError("attach the endpoint first")
                raise PeerUnreachableError("the endpoint is lost")
            if len(self._senders) >= STREAMS_MAX:
                raise CapacityError(f"{STREAMS_MAX} streams are open")
            stream = next(self._numbers)
            sender = LayerSender(
                link,
                stream,
                outbox,
                layout,
                block_count,
                request=request,
                deadline_s=deadline_s,
                events=self._events,
                on_drained=self._forget_sender,
            )
            self._senders[stream] = sender
        sizes, dtype = pack_layout(layout)
        link.post(Open(stream, request, outbox.region, block_count, sizes, dtype))
        self._stir()
        return sender

    def close(self) -> None:
        """End every stream with ClosedError, on both sides, and the thread. Idempotent, bounded.

        Close it before its transport. Slots that a receiver may still read come back when it
        acknowledges them or its endpoint is lost.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)
        error = ClosedError("the hub was closed")
        senders, receivers, links = self._snapshot()
        for sender in senders:
            sender.fail(error, True)
        for receiver in receivers:
            receiver.fail(error, True)
        for link in links:
            link.flush()
        deadline = Deadline(_CLOSE_TIMEOUT_S)
        for receiver in receivers:
            receiver.wait_over(deadline.remaining_s())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- what peers say, on the transports' progress threads --------------------------------------

    def _take(self, link: StreamLink, payload: bytes) -> None:
        try:
            message = decode(payload)
        except CorruptionError as error:
            logger.warning("closing an endpoint: %s", error)
            link.break_off()
            return
        if isinstance(message, Open):
            self._opened(link, message)
        elif isinstance(message, Announce | End | Abort):
            self._from_sender(link, message)
        else:
            self._from_receiver(link, message)

    def _opened(self, link: StreamLink, message: Open) -> None:
        with self._changed:
            receiver = self._expected.get(message.request)
            number = (link, message.stream)
            if self._links.get(link.endpoint) is not link:
                return  # lost meanwhile
            if number in self._receivers or (receiver and not receiver.claim(link, message)):
                receiver = None
            if receiver is not None:
                self._receivers[number] = receiver
        if receiver is not None:
            receiver.opened(message)
        else:
            error = CancelledTransferError(f"nobody expects request {message.request[:64]}")
            link.post(Refuse(message.stream, *pack_error(error)))

    def _from_sender(self, link: StreamLink, message: Announce | End | Abort) -> None:
        with self._changed:
            receiver = self._receivers.get((link, message.stream))
        if isinstance(message, Announce):
            if receiver is not None:
                receiver.announced(link, message)
            else:  # cancelled meanwhile: the slots go back
                link.post(ack_of(message))
        elif receiver is None:
            if isinstance(message, End):
                error = CancelledTransferError("the receiver has given up")
                link.post(Refuse(message.stream, *pack_error(error)))
        elif isinstance(message, End):
            receiver.ended(message)
        else:
            receiver.fail(unpack_error("the sender", message.kind, message.reason), False)

    def _from_receiver(self, link: StreamLink, message: Ack | Done | Refuse) -> None:
        with self._changed:
            sender = self._senders.get(message.stream)
        if sender is None or sender.link is not link:
            return
        if isinstance(message, Ack):
            sender.acked(message)
            self._stir_if_backlogged()
        elif isinstance(message, Done):
            sender.done()
        else:
            sender.fail(unpack_error("the receiver", message.kind, message.reason), False)

    def _lost(self, endpoint: Endpoint) -> None:
        with self._changed:
            link = self._links.pop(endpoint, None)
            senders = [sender for sender in self._senders.values() if sender.link is link]
            receivers = [r for r in self._receivers.values() if r.link is link]
        if link is not None:
            error = PeerUnreachableError("the other side of the stream is gone")
            for sender in senders:
                sender.lost(error)
            for receiver in receivers:
                receiver.fail(error, False)

    # ---- the hub's thread -------------------------------------------------------------------------

    def _stir(self) -> None:
        with self._changed:
            self._stirred = True
            self._changed.notify()

    def _stir_if_backlogged(self) -> None:
        with self._changed:
            senders = list(self._senders.values())
        if any(sender.backlogged() for sender in senders):
            self._stir()

    def _run(self) -> None:
        timeout_s = _IDLE_S
        while True:
            with self._changed:
                if not self._stirred and not self._closed:
                    self._changed.wait(timeout_s)
                self._stirred = False
                if self._closed:
                    return
            try:
                timeout_s = self._look()
            except Exception:
                logger.exception("the stream hub failed to look after its streams")
                timeout_s = _CHECK_S

    def _look(self) -> float:
        """Try again what waits, end what is late; return for how long to sleep."""
        senders, receivers, links = self._snapshot()
        waiting = False
        for link in links:
            if link.broken:
                link.endpoint.close()
            else:
                waiting |= not link.flush()
        for sender in senders:
            sender.check()
            if sender.backlogged():
                sender.pump()
                waiting |= sender.backlogged()
        for receiver in receivers:
            receiver.check()
            waiting |= not receiver.start_reads()
        if waiting:
            return _RETRY_S
        return _CHECK_S if senders or receivers else _IDLE_S

    def _snapshot(self) -> tuple[Sequence[LayerSender], Sequence[LayerReceiver], list[StreamLink]]:
        """Return what there is; senders from another one on each time, so that none starves."""
        with self._changed:
            senders = list(self._senders.values())
            receivers = {*self._expected.values(), *self._receivers.values()}
            links = list(self._links.values())
        turn = next(self._turn) % max(1, len(senders))
        return senders[turn:] + senders[:turn], list(receivers), links

    def _forget_sender(self, sender: LayerSender) -> None:
        with self._changed:
            self._senders.pop(sender.stream, None)

    def _forget_receiver(self, receiver: LayerReceiver) -> None:
        with self._changed:
            if self._expected.get(receiver.request) is receiver:
                del self._expected[receiver.request]
            if receiver.link is not None:
                self._receivers.pop((receiver.link, receiver.stream), None)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the hub is closed")


def _require_request(request: str, deadline_s: float) -> None:
    if not 0 < len(request.encode("utf-8", "surrogatepass")) <= REQUEST_BYTES_MAX:
        raise UsageError(f"a request's name has 1 to {REQUEST_BYTES_MAX} bytes")
    if not math.isfinite(deadline_s):
        raise UsageError(f"a deadline of {deadline_s} s: every stream needs a finite one")
