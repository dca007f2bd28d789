"""ucxx, the Python binding of UCX, as far as kvpool uses it: one worker, driven by one thread.

Owns the UCX context of a transport, its requests, and when the worker makes progress. ucxx's own
asyncio interface is not used: it polls while anything is awaited, and has one context a process.
Needs the extra ``kvpool[ucx-py]``; nothing is imported before a worker is opened. Who calls it: the
ucxx transport and its endpoints, on the thread of ``loop``.
"""

import importlib
import logging
import selectors
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import ConfigError
from kvpool.transfer.progress import ProgressLoop

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
# Told of a request's end: with what it failed, None if it did not.
Done = Callable[[Exception | None], None]

# Large messages go as puts of their sender, and segments are large: 3 GB/s over one core's loopback
# where the defaults give 1.2.
SETTINGS: Final = {
    "RNDV_SCHEME": "put_zcopy",
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
}
# Rounds of progress before the thread looks at what else there is to do.
_ROUNDS: Final = 64
_OPEN_TIMEOUT_S: Final = 10.0
# ucxx takes nanoseconds, for each of two steps of a close. Its own thread would need them; ours not.
_CLOSE_NS: Final = 10**9
# First in a connection's stream, before the tag; and what frames each message.
_MAGIC: Final = int.from_bytes(b"kvpool-1", "little")
_SIZE_BYTES: Final = 4


class Request(Protocol):
    """Something under way."""

    @property
    def completed(self) -> bool:
        """Whether it has ended."""
        ...

    def check_error(self) -> None:
        """Raise what it failed with."""
        ...


class RawEndpoint(Protocol):
    """A connection."""

    @property
    def alive(self) -> bool:
        """Whether nothing has ended it."""
        ...

    def stream_send(self, array: object) -> Request:
        """Send bytes of the connection's stream."""
        ...

    def stream_recv(self, array: object) -> Request:
        """Take as many bytes of the connection's stream."""
        ...

    def tag_send(self, array: object, tag: object) -> Request:
        """Send memory to who waits for a tag."""
        ...

    def tag_recv(self, array: object, tag: object) -> Request:
        """Wait for a tag."""
        ...

    def set_close_callback(self, call: Callable[[], None]) -> None:
        """Have the end told, from inside of progress."""
        ...

    def remove_close_callback(self) -> None:
        """Have no end told."""
        ...

    def close_blocking(self, period: int, max_attempts: int) -> None:
        """Force it closed; what is under way ends."""
        ...


class Listener(Protocol):
    """An open port, on all interfaces."""

    @property
    def port(self) -> int:
        """Which."""
        ...


class _Found(Protocol):
    """What waits under a tag."""

    matched: bool
    length: int


class _Worker(Protocol):
    """ucxx's own worker, as far as it is used without a connection."""

    epoll_file_descriptor: int

    def init_blocking_progress_mode(self) -> None: ...
    def progress(self) -> None: ...
    def arm(self) -> bool: ...
    def tag_probe(self, tag: object, *, remove: bool) -> _Found: ...
    def tag_recv_with_handle(self, array: object, found: _Found) -> Request: ...


class UcxxWorker:
    """One UCX worker and the thread that owns it. All but the constructor and ``close`` runs there.

    Args:
        name: Names the thread.
        tls: Transports of UCX, as UCX_TLS has them.

    Attributes:
        loop: The thread; whoever asks something of the worker posts it there.

    Raises:
        ConfigError: ucxx is not installed, or finds no usable UCX.
    """

    def __init__(self, name: str, tls: str) -> None:
        try:
            self._ucxx = importlib.import_module("ucxx._lib.libucxx")
            self._array: Callable[[object], object] = importlib.import_module("ucxx._lib.arr").Array
        except ImportError as error:
            raise ConfigError(
                f"ucxx cannot be used: {error}. pip install 'kvpool[ucx-py]', or take the ucx or"
                " host transport, which need no ucxx",
                key="transfer.ucx_py",
            ) from error
        self._requests: list[tuple[Request, object, Done]] = []
        self._problem: Exception | None = None
        self._context: object = None
        self._worker: _Worker | None = None
        self._event_fd = -1
        self.loop = ProgressLoop(name)
        opened = self.loop.run(lambda: self._open(tls), _OPEN_TIMEOUT_S)
        if not opened or self._problem is not None:
            self.loop.close()
            raise ConfigError(
                f"UCX does not open with transports {tls!r}: {self._problem}", key="transfer.ucx_py"
            ) from self._problem

    def _open(self, tls: str) -> None:
        try:
            self._context = self._ucxx.UCXContext({"TLS": tls, **SETTINGS})
            worker: _Worker = self._ucxx.UCXWorker(
                self._context, enable_delayed_submission=False, enable_python_future=False
            )
            worker.init_blocking_progress_mode()
        except Exception as error:  # noqa: BLE001  # ucxx raises its own and RuntimeError
            self._problem = error
            return
        self._worker = worker
        self._event_fd = worker.epoll_file_descriptor
        self.loop.watch(self._event_fd, selectors.EVENT_READ, self.progress)
        self.progress()

    def progress(self) -> None:
        """Do what UCX has to do, end requests, and arm the event that wakes the thread again.

        Whoever has started something calls it before the thread may sleep.
        """
        for _ in range(_ROUNDS):
            if self._worker is None:
                return
            self._worker.progress()
            if not self._end_requests() and self._worker.arm():
                return
        self.loop.post(self.progress)

    def _end_requests(self) -> bool:
        ended = [each for each in self._requests if each[0].completed]
        if not ended:
            return False
        self._requests = [each for each in self._requests if not each[0].completed]
        for request, _, done in ended:
            error: Exception | None = None
            try:
                request.check_error()
            except Exception as failure:  # noqa: BLE001  # ucxx's own errors are RuntimeErrors too
                error = failure.with_traceback(None)
            try:
                done(error)
            except Exception:
                logger.exception("the end of a request failed")
        return True

    def _await(self, request: Request, kept: object, done: Done) -> None:
        self._requests.append((request, kept, done))

    # ---- what endpoints ask ----------------------------------------------------------------------

    def listen(self, port: int, accept: Callable[[RawEndpoint], None]) -> Listener:
        """Listen on all interfaces. ``accept`` is called on the thread, with error handling on."""

        def accepted(endpoint: RawEndpoint) -> None:  # from inside of progress
            self.loop.post(lambda: accept(endpoint))

        listener: Listener = self._ucxx.UCXListener.create(
            worker=self._worker, port=port, cb_func=accepted, cb_args=(), deliver_endpoint=True
        )
        return listener

    def connect(self, host: str, port: int) -> RawEndpoint:
        """Begin to connect, with error handling on."""
        endpoint: RawEndpoint = self._ucxx.UCXEndpoint.create(self._worker, host, port, True)
        return endpoint

    def exchange_tags(
        self, endpoint: RawEndpoint, ours: int, done: Callable[[int | None], None]
    ) -> None:
        """Tell the peer under which tag we take its messages, and hear the same; None: it has ended.

        Not by active messages: ucxx keeps those by the address of a connection, so one that comes
        after another at the same address is given what the other left.
        """
        said = np.array([_MAGIC, ours], dtype="<u8").view(np.uint8)
        heard = np.zeros_like(said)

        def ended(error: Exception | None) -> None:
            magic, theirs = heard.view("<u8").tolist()
            done(theirs if error is None and magic == _MAGIC else None)

        self._await(endpoint.stream_send(self._array(said)), said, lambda error: None)
        self._await(endpoint.stream_recv(self._array(heard)), heard, ended)

    def send_message(self, endpoint: RawEndpoint, message: bytes, tag: int) -> None:
        """Send a message behind the earlier ones of this tag."""
        size = len(message).to_bytes(_SIZE_BYTES, "little")
        framed = np.frombuffer(size + message, dtype=np.uint8)
        self.send_memory(endpoint, framed, tag, lambda error: None)

    def take_message(
        self, endpoint: RawEndpoint, room: Bytes, tag: int, done: Callable[[bytes | None], None]
    ) -> None:
        """Wait for the next message; None: there will be none. ``room`` holds the largest one."""

        def ended(error: Exception | None) -> None:
            size = int.from_bytes(room[:_SIZE_BYTES].tobytes(), "little")
            if error is not None or size > room.size - _SIZE_BYTES:
                done(None)
            else:
                done(room[_SIZE_BYTES : _SIZE_BYTES + size].tobytes())

        self.take_memory(endpoint, room, tag, ended)

    def drop_messages(self, tag: int) -> None:
        """Forget what came under a tag that nobody takes any more."""
        if self._worker is None:
            return
        name = self._ucxx.UCXXTag(tag)
        while (found := self._worker.tag_probe(name, remove=True)).matched:
            room = np.zeros(max(1, found.length), dtype=np.uint8)
            request = self._worker.tag_recv_with_handle(self._array(room), found)
            self._await(request, room, lambda error: None)

    def send_memory(self, endpoint: RawEndpoint, memory: Bytes, tag: int, done: Done) -> None:
        """Send memory under a tag. It stays as it is until ``done``."""
        request = endpoint.tag_send(self._array(memory), self._ucxx.UCXXTag(tag))
        self._await(request, memory, done)

    def take_memory(self, endpoint: RawEndpoint, memory: Bytes, tag: int, done: Done) -> None:
        """Have memory filled by what comes under a tag. Nobody else uses it until ``done``."""
        request = endpoint.tag_recv(self._array(memory), self._ucxx.UCXXTag(tag))
        self._await(request, memory, done)

    def close_endpoint(self, endpoint: RawEndpoint) -> None:
        """Force a connection closed: its requests end, and no memory of ours is written any more."""
        endpoint.close_blocking(_CLOSE_NS, 1)
        endpoint.remove_close_callback()
        self.loop.post(self.progress)

    def close(self) -> None:
        """Give the worker back, and end the thread. Its endpoints are closed already."""
        self.loop.run(self._give_back, _OPEN_TIMEOUT_S)
        self.loop.close()

    def _give_back(self) -> None:
        if self._worker is not None:
            self.progress()
            self.loop.unwatch(self._event_fd)
            self._requests.clear()
            self._worker = self._context = None
