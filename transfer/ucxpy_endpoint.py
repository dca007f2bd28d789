"""One connection over ucxx: messages both ways, the peer's asks answered, and how it ends.

Owns the order of messages, what the peer may have unanswered, and the memory that answers are sent
from. Everything but the contract's own calls runs on the thread of the worker's loop. Who calls it:
``UcxxTransport``.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvpool.arena import Window
from kvpool.block import BlockLayout, Incarnation
from kvpool.completion import Completion
from kvpool.errors import (
    ClosedError,
    CorruptionError,
    KVPoolError,
    PeerUnreachableError,
    UsageError,
)
from kvpool.memory import BlockView, Span
from kvpool.transfer.base import RemoteSlots
from kvpool.transfer.calls import weakly
from kvpool.transfer.endpoint import CLOSE_TIMEOUT_S, require_notification
from kvpool.transfer.pull import BlockPull, SpanPull
from kvpool.transfer.registered import Registered
from kvpool.transfer.remote_endpoint import BYE_TIMEOUT_S, RemoteEndpoint
from kvpool.transfer.ucx_wire import Bye, Offer
from kvpool.transfer.ucxpy_library import Bytes, RawEndpoint, UcxxWorker
from kvpool.transfer.ucxpy_reads import BlockJob, Job, SpanJob, UcxxReads, crc32c, new_window
from kvpool.transfer.ucxpy_wire import (
    ASKS_MAX,
    Answer,
    Ask,
    Hello,
    Message,
    answer_bytes,
    decode,
    encode,
    frame,
)

logger = logging.getLogger(__name__)


class Regions(Protocol):
    """What an endpoint asks of its transport."""

    def region(self, number: int) -> tuple[Window, BlockLayout]:
        """Return one of our regions. Raises CorruptionError: the peer asked for none of ours."""
        ...

    def new_tag(self) -> int:
        """Return a tag that nothing in the worker has."""
        ...

    def forget(self, endpoint: "UcxxEndpoint") -> None:
        """Drop an endpoint that is closed."""
        ...


class UcxxEndpoint(RemoteEndpoint[Job]):
    """See ``Endpoint``. Made on the loop's thread when both have said hello.

    Args:
        peer: Incarnation of the other side.
        raw: The connection; the endpoint closes it.
        worker: Of the connection.
        transport: Whose regions the peer may ask for.
        told: How many of them our hello has told of.
        room: Where the peer's messages come, under ``our_tag``.
        their_tag: What the peer takes messages under.
        window_bytes: Largest answer, ours and the peer's.
        ours: What the transport has registered.
    """

    def __init__(
        self,
        peer: Incarnation,
        raw: RawEndpoint,
        worker: UcxxWorker,
        transport: Regions,
        told: int,
        room: Bytes,
        our_tag: int,
        their_tag: int,
        window_bytes: int,
        ours: Registered,
    ) -> None:
        super().__init__(peer, ours, SpanJob, BlockJob)
        self._raw: RawEndpoint | None = raw
        self._worker = worker
        self._transport = transport
        self._told = told
        self._room, self._our_tag, self._their_tag = room, our_tag, their_tag
        self._window_bytes = window_bytes
        self._answers: list[Bytes] = []  # memory to answer from
        self._unanswered = 0
        self._reads = UcxxReads(
            worker.loop, window_bytes, transport.new_tag, self._send_ask, self._break
        )

    def start(self, offers: Sequence[Offer]) -> None:
        """Take what the peer's hello told, and listen to it. On the loop's thread, once."""
        for offer in offers:
            self._offered(offer)
        if self._raw is not None:
            self._raw.set_close_callback(self._lost_by_ucx)
            self._listen()
            if not self._raw.alive:
                self._gone()

    # ---- the contract ----------------------------------------------------------------------------

    def notify(self, payload: bytes) -> bool:
        """Send a notification behind what was sent before."""
        require_notification(payload)
        with self._changed:
            self._require_alive()
        message = frame(payload)
        with self._send_lock:
            if self._full():
                return False
            if not self._worker.loop.post(lambda: self._send(message)):
                raise ClosedError("the transport is closed")
            self._sent += 1
            return True

    def post(self, call: Callable[[], None]) -> bool:
        """Run ``call`` on the worker's loop."""
        return self._worker.loop.post(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Run ``call`` on the worker's loop, later."""
        self._worker.loop.call_later(seconds, call)

    def close(self) -> None:
        """End the connection: last words first, then nothing comes here any more."""
        self.lose(ClosedError("the endpoint was closed"))
        if not self._worker.loop.on_thread() and not self._drained.wait(CLOSE_TIMEOUT_S):
            logger.error("a closed endpoint has not ended in %s s", CLOSE_TIMEOUT_S)

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until nothing comes into memory of ours any more. Not on the loop's thread."""
        return self._drained.wait(timeout_s)

    def windows(self) -> tuple[int, int]:
        """Return the windows that are free, and those that an answer may still come into."""
        return self._reads.counts()

    # ---- sending, on the loop's thread -----------------------------------------------------------

    def tell_regions(self, ours: Sequence[Offer]) -> None:
        """Tell the peer of regions that it has not been told of."""
        for offer in ours[self._told :]:
            self._say(offer)
        self._told = max(self._told, len(ours))

    def _say(self, message: Message) -> None:
        self._send(encode(message))

    def _send(self, message: bytes) -> None:
        if self._raw is not None:
            self._guarded(lambda raw: self._worker.send_message(raw, message, self._their_tag))

    def _guarded(self, call: Callable[[RawEndpoint], None]) -> bool:
        """Do something with the connection, which may have ended: then say so and go on."""
        raw = self._raw
        if raw is None:
            return False
        try:
            call(raw)
        except Exception as error:  # noqa: BLE001  # ucxx raises its own and RuntimeError
            self.lose(_unreachable(error))
            return False
        self._worker.loop.post(self._worker.progress)
        return True

    def _send_ask(
        self, ask: Ask, window: Bytes, tag: int, done: Callable[[Exception | None], None]
    ) -> None:
        if not self._guarded(lambda raw: self._worker.take_memory(raw, window, tag, done)):
            done(PeerUnreachableError("the connection is closed"))
            return
        self._say(ask)

    # ---- what the peer says, on the loop's thread ------------------------------------------------

    def _listen(self) -> None:
        self._guarded(
            lambda raw: self._worker.take_message(raw, self._room, self._our_tag, self._heard)
        )

    def _heard(self, message: bytes | None) -> None:
        if self._lost is not None:
            return
        if message is None:  # the connection has ended, or the message is larger than any may be
            self._gone()
            return
        try:
            said = decode(message)
            if isinstance(said, bytes):
                self._notified(said)
            else:
                self._said(said)
        except KVPoolError as error:
            self._break(str(error))
        else:
            self._listen()

    def _said(self, message: Message) -> None:
        if isinstance(message, Ask):
            self._answer(message)
        elif isinstance(message, Hello):
            raise CorruptionError("the peer said hello twice")
        else:
            self._told_of(message)

    # ---- answering, on the loop's thread ---------------------------------------------------------

    def _answer(self, ask: Ask) -> None:
        """Copy what is asked for and send it. Raises CorruptionError: it may not be asked."""
        count = len(ask.slots)
        spans = bool(ask.begins or ask.sizes)
        wanted = (count, count) if spans else (0, 0)
        if (
            len(ask.regions) != count
            or len(ask.generations) != 8 * count
            or (len(ask.begins), len(ask.sizes)) != wanted
            or self._unanswered >= ASKS_MAX
        ):
            raise CorruptionError("the peer asked what it may not ask, or too much at once")
        generations: list[int] = np.frombuffer(ask.generations, dtype="<u8").tolist()
        buffer = self._answers.pop() if self._answers else new_window(self._window_bytes)
        try:
            size = (
                self._answer_spans(ask, generations, buffer)
                if spans
                else self._answer_blocks(ask, generations, buffer)
            )
        except UsageError as error:
            raise CorruptionError(f"the peer asked for what is not there: {error}") from error

        def sent(error: Exception | None) -> None:
            self._unanswered -= 1
            self._answers.append(buffer)

        self._unanswered += 1
        tag = int.from_bytes(ask.tag, "little")
        if not self._guarded(lambda raw: self._worker.send_memory(raw, buffer[:size], tag, sent)):
            self._unanswered -= 1

    def _answer_blocks(self, ask: Ask, generations: list[int], buffer: Bytes) -> int:
        window, layout = self._transport.region(ask.regions[0])
        source = RemoteSlots(ask.regions[0], tuple(ask.slots), tuple(generations))
        count = len(ask.slots)
        size = answer_bytes(count, layout.crc_count, count * layout.block_bytes)
        if set(ask.regions) != {ask.regions[0]} or size > self._window_bytes:
            raise UsageError("slots of several regions, or more than a window holds")
        answer = Answer(buffer, count, layout.crc_count)
        room = Span.of(answer.payload[: count * layout.block_bytes])
        pull = BlockPull(window, BlockView.of_buffer(layout, room), source, layout, None)
        good = pull.copy(0, count)
        if good:
            crcs, still = window.crcs(layout, ask.slots[:good], generations[:good])
            answer.crcs[:good] = crcs.reshape(good, layout.crc_count)
            good = min(good, still)
        answer.write_head(ask.number, good, 0)
        return answer_bytes(count, layout.crc_count, good * layout.block_bytes)

    def _answer_spans(self, ask: Ask, generations: list[int], buffer: Bytes) -> int:
        total = sum(ask.sizes)
        if answer_bytes(len(ask.sizes), 0, total) > self._window_bytes:
            raise UsageError("more than a window holds")
        answer = Answer(buffer, len(ask.sizes), 0)
        room = Span.of(answer.payload[:total]) if total else None
        pairs: list[tuple[Span, RemoteSlots, int]] = []
        windows: list[Window] = []
        at = 0
        for region, slot, life, begin, size in zip(
            ask.regions, ask.slots, generations, ask.begins, ask.sizes, strict=True
        ):
            if room is None or size == 0:
                raise UsageError("a span of zero bytes")
            windows.append(self._transport.region(region)[0])
            pairs.append((room.part(at, size), RemoteSlots(region, (slot,), (life,)), begin))
            at += size
        good = SpanPull(pairs, windows).copy(0, len(pairs))
        answer.write_head(ask.number, good, crc32c(answer.payload[:total]))
        return answer_bytes(len(pairs), 0, total)

    # ---- the end ---------------------------------------------------------------------------------

    def _submit(self, job: Job, deadline_s: float) -> Completion[int]:
        return self._reads.submit(job, deadline_s)

    def _end_reads(self, error: KVPoolError) -> None:
        self._reads.refuse(error)

    def _release(self) -> None:
        if not self._worker.loop.post(self._leave):
            self._drained.set()

    def _leave(self) -> None:
        raw = self._raw
        if raw is not None and raw.alive and isinstance(self._lost, ClosedError):
            self._say(Bye())
            self._worker.loop.call_later(BYE_TIMEOUT_S, weakly(self._close_raw))
        else:
            self._close_raw()

    def _lost_by_ucx(self) -> None:
        """Hear of the end from inside of progress, where nothing may be asked of UCX."""
        self._worker.loop.post(self._gone)

    def _gone(self) -> None:
        """End with the connection, which has ended by itself or by the peer."""
        self.lose(PeerUnreachableError("the connection was lost: the peer ended or is not reached"))
        self._close_raw()

    def _close_raw(self) -> None:
        raw, self._raw = self._raw, None
        if raw is None:
            return
        try:
            self._worker.close_endpoint(raw)
        except Exception:
            logger.exception("ucxx did not close a connection")
        # Requests end before the endpoint counts as drained.
        self._worker.loop.post(self._finish)

    def _finish(self) -> None:
        self._worker.progress()
        self._worker.drop_messages(self._our_tag)
        self._transport.forget(self)
        self._drained.set()


def _unreachable(error: Exception) -> KVPoolError:
    lost = PeerUnreachableError(f"the connection was lost: {error}")
    lost.__cause__ = error.with_traceback(None)
    return lost
