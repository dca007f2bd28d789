"""Control messages between kvpool's processes over gRPC, typed errors both ways.

Owns how a method is named, encoded and called, and how a KVPoolError crosses the wire;
``rpc_service`` is the side that answers. Messages are protobuf (the pool's, ``kvpool.proto``: any
language) or msgspec structs (between workers of one version). gRPC gives deadlines, cancellation and
streams; no pickle is ever read. Who calls it: the client and the server of a pool, the Conductor and
the workers.
"""

import logging
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterator,
)
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError, Message

from kvpool import errors
from kvpool.client.access import OPEN, ClientAccess
from kvpool.errors import InternalError, KVPoolError, PeerUnreachableError, TransferTimeoutError

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=msgspec.Struct | Message)
Reply = TypeVar("Reply", bound=msgspec.Struct | Message)

# Trailing metadata that names the class of a KVPoolError.
ERROR_KEY: Final = "kvpool-error"
# Largest control message. A 128k-token prompt is 0.5 MiB; KV bytes never travel here.
MESSAGE_BYTES_MAX: Final = 16 << 20
OPTIONS: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A proxy of the environment must never see a call between local processes.
    ("grpc.enable_http_proxy", 0),
    # A process that was restarted at the same address is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # gRPC's name for how long one try to connect may take: the other side may be busy, or far away.
    ("grpc.min_reconnect_backoff_ms", 2000),
]

_CALLER_OPTIONS: Final = [
    *OPTIONS,
    # A connection whose bytes nobody acknowledges for 5 s is given up, and another one tried: else, after
    # a partition, TCP waits for as long again as that lasted. (The timeout is TCP_USER_TIMEOUT, too.)
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply]):
    """One remote method.

    Attributes:
        service, name: Where it lives.
        request, reply: Struct types of its messages.
        streams: True if it answers with a stream of replies.
        takes: True if it takes a stream of requests.
    """

    service: str
    name: str
    request: type[Request]
    reply: type[Reply]
    streams: bool = False
    takes: bool = False

    @property
    def path(self) -> str:
        """The method's path in gRPC."""
        return f"/kvpool.{self.service}/{self.name}"


def encode(message: msgspec.Struct | Message) -> bytes:
    """Encode a message, here and not in gRPC's hands, which would hide why it cannot be."""
    if isinstance(message, Message):
        return message.SerializeToString()
    try:
        return msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError) as error:  # UnicodeEncodeError is a ValueError
        raise InternalError(f"a {type(message).__name__} cannot be encoded: {error}") from error


# What ``decoder`` has made, once for each kind of message.
_decoders: Final[dict[type[Any], Callable[[bytes], Any]]] = {}


def decoder(kind: type[Reply]) -> Callable[[bytes], Reply]:
    """Return what decodes messages of one kind; it raises UsageError for what is none."""
    made = _decoders.get(kind)
    if made is None:
        made = _decoders[kind] = _new_decoder(kind)
    return made


def _new_decoder(kind: type[Reply]) -> Callable[[bytes], Reply]:
    decode: Callable[[bytes], Any]
    if issubclass(kind, Message):
        decode = kind.FromString
    else:
        decode = msgspec.msgpack.Decoder(kind).decode

    def checked(payload: bytes) -> Reply:
        try:
            decoded: Reply = decode(payload)
            return decoded
        except (msgspec.DecodeError, DecodeError, UnicodeDecodeError) as error:
            raise errors.UsageError(
                f"this is no {kind.__name__} of this version of kvpool ({error}): "
                "use one version on both sides"
            ) from error

    return checked


def typed_error(error: grpc.RpcError) -> KVPoolError:
    """Turn a failed call back into the error that the other side raised, or into what it means."""
    trailing: Any = error.trailing_metadata()  # pairs; gRPC's own stub says something else
    for key, value in trailing or ():
        if key == ERROR_KEY:
            kind = getattr(errors, str(value), None)
            if isinstance(kind, type) and issubclass(kind, KVPoolError):
                return kind(error.details() or str(value))
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return TransferTimeoutError(f"no answer within the deadline: {details}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return errors.UsageError(f"the other process does not let you in: {details}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return PeerUnreachableError(f"the other process is gone or shutting down: {details}")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in str(details):
        return errors.CapacityError(f"the other process is busy with other calls: {details}")
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED):
        return errors.UsageError(f"the other process refused the message ({code}): {details}")
    return InternalError(f"call failed with {code}: {details}")


def _credentials(access: ClientAccess, address: str) -> Any:
    """Return gRPC's credentials, or None for a plain channel. Raises as ``require_safe``."""
    access.require_safe(address)
    if not access.ca or address.startswith("unix:"):  # a run directory speaks no TLS
        return None
    return grpc.ssl_channel_credentials(access.ca, access.key or None, access.certificate or None)


class Asked(Generic[Reply]):
    """One call under way. Safe from any thread."""

    def __init__(self, call: Any, decode: Callable[[bytes], Reply]) -> None:
        self._call = call
        self._decode = decode

    def reply(self) -> Reply:
        """Wait for its end, which its deadline bounds. Raises as ``Caller.call``."""
        try:
            payload: bytes = self._call.result()
        except grpc.RpcError as error:
            raise typed_error(error) from error
        except grpc.FutureCancelledError as error:
            raise PeerUnreachableError("the channel was closed: connect again") from error
        return self._decode(payload)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most so long; say whether it ended."""
        try:
            self._call.exception(timeout_s)
        except grpc.FutureTimeoutError:
            return False
        except grpc.FutureCancelledError:
            return True
        return True

    def cancel(self) -> None:
        """Give the call up."""
        self._call.cancel()


class Stayed:
    """A call that lasts as long as its connection and the other side. Safe from any thread."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def alive(self) -> bool:
        """Say whether it has not ended; one that the other side does not know has no end."""
        return not self._call.done() or self._is_unknown()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back once it has ended, on a thread of gRPC's; at once if it has already."""

        def ended() -> None:
            if not self._is_unknown():
                callback()

        if not self._call.add_callback(ended):
            ended()

    def _is_unknown(self) -> bool:
        """Say whether the other side is of a version that has no such method."""
        unknown: bool = self._call.done() and self._call.code() == grpc.StatusCode.UNIMPLEMENTED
        return unknown


class Caller:
    """Blocking calls to one address, from any thread. Owns one gRPC channel.

    Raises UsageError if the address may not be shown the token.
    """

    def __init__(self, address: str, access: ClientAccess = OPEN) -> None:
        credentials = _credentials(access, address)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=_CALLER_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=_CALLER_OPTIONS)
        self._metadata = access.metadata()

    def call(self, method: Method[Request, Reply], request: Request, timeout_s: float) -> Reply:
        """Call a unary method. Raises the typed error of the other side, or UnavailableError."""
        return self.ask(method, request, timeout_s).reply()

    def ask(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> Asked[Reply]:
        """Begin a unary call, so that others can run beside it."""
        encoded = encode(request)
        try:
            call = self._channel.unary_unary(method.path).future(
                encoded, timeout=timeout_s, metadata=self._metadata
            )
        except ValueError as error:  # what gRPC raises for a closed channel
            raise errors.ClosedError("the channel is closed: connect again") from error
        return Asked(call, decoder(method.reply))

    def stream(
        self,
        method: Method[Request, Reply],
        request: Request,
        timeout_s: float,
        *,
        began: Callable[[Callable[[], object]], object] | None = None,
    ) -> Generator[Reply, None, None]:
        """Call a streaming method. Closing the iterator cancels the call at the other side.

        ``began`` is given what cancels the call from any other thread, for the iterator may stand still.
        """
        decode = decoder(method.reply)
        call: Any = None
        try:
            call = self._channel.unary_stream(method.path)(
                encode(request), timeout=timeout_s, metadata=self._metadata
            )
            if began is not None:
                began(call.cancel)
            for payload in call:
                yield decode(payload)
        except grpc.RpcError as error:
            raise typed_error(error) from error
        except ValueError as error:
            raise errors.ClosedError("the channel is closed: connect again") from error
        finally:
            if call is not None:
                call.cancel()

    def stay(self, method: Method[Request, Reply], request: Request) -> Stayed:
        """Begin a streaming call that nobody reads: only its end says something. Ends with ``close``."""
        encoded = encode(request)
        try:
            call = self._channel.unary_stream(method.path)(encoded, metadata=self._metadata)
        except ValueError as error:
            raise errors.ClosedError("the channel is closed: connect again") from error
        return Stayed(call)

    def send(
        self, method: Method[Request, Reply], requests: Iterator[Request], timeout_s: float
    ) -> Reply:
        """Call a method that takes a stream. Raises as ``call``."""
        return self.begin_send(method, requests, timeout_s).reply()

    def begin_send(
        self, method: Method[Request, Reply], requests: Iterator[Request], timeout_s: float
    ) -> Asked[Reply]:
        """Begin a call that takes a stream; a thread of gRPC's takes the requests."""
        encoded = (encode(request) for request in requests)
        try:
            call = self._channel.stream_unary(method.path).future(
                encoded, timeout=timeout_s, metadata=self._metadata
            )
        except ValueError as error:
            raise errors.ClosedError("the channel is closed: connect again") from error
        return Asked(call, decoder(method.reply))

    def close(self) -> None:
        """Close the channel: calls under way end with PeerUnreachableError. Idempotent."""
        self._channel.close()


class AsyncCaller:
    """Calls from asyncio to one address. Owns one gRPC channel of the running loop.

    Raises UsageError if the address may not be shown the token.
    """

    def __init__(self, address: str, access: ClientAccess = OPEN) -> None:
        credentials = _credentials(access, address)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=_CALLER_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=_CALLER_OPTIONS)
        self._metadata = access.metadata()

    async def call(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> Reply:
        """Call a unary method. Cancelling the task cancels the call at the other side."""
        bound = self._channel.unary_unary(method.path)
        encoded = encode(request)
        try:
            payload: bytes = await bound(encoded, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise typed_error(error) from error
        return decoder(method.reply)(payload)

    async def stream(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> AsyncGenerator[Reply]:
        """Call a streaming method. Closing the iterator cancels the call at the other side."""
        decode = decoder(method.reply)
        call = self._channel.unary_stream(method.path)(
            encode(request), timeout=timeout_s, metadata=self._metadata
        )
        try:
            async for payload in call:
                yield decode(payload)
        except grpc.RpcError as error:
            raise typed_error(error) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the channel. Idempotent."""
        await self._channel.close()
