"""Control messages between kvpool's processes: msgspec structs over gRPC, typed errors both ways.

Owns how a method is named, encoded and how a KVPoolError crosses the wire. Carries no KV bytes. gRPC
gives deadlines, cancellation and streams; msgspec gives validation, so no pickle is ever read.
Who calls it: the client and the server of a pool, the Conductor and the workers.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio
import msgspec

from kvpool import errors
from kvpool.errors import InternalError, KVPoolError, PeerUnreachableError, TransferTimeoutError

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=msgspec.Struct)
Reply = TypeVar("Reply", bound=msgspec.Struct)

# Trailing metadata that names the class of a KVPoolError.
_ERROR_KEY: Final = "kvpool-error"
# Largest control message. A 128k-token prompt is 0.5 MiB; KV bytes never travel here.
MESSAGE_BYTES_MAX: Final = 16 << 20
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A proxy of the environment must never see a call between local processes.
    ("grpc.enable_http_proxy", 0),
    # A process that was restarted at the same address is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply]):
    """One remote method.

    Attributes:
        service, name: Where it lives.
        request, reply: Struct types of its messages.
        streams: True if it answers with a stream of replies.
    """

    service: str
    name: str
    request: type[Request]
    reply: type[Reply]
    streams: bool = False

    @property
    def path(self) -> str:
        """The method's path in gRPC."""
        return f"/kvpool.{self.service}/{self.name}"


def _encode(message: msgspec.Struct) -> bytes:
    """Encode a message, here and not in gRPC's hands, which would hide why it cannot be."""
    try:
        return msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError) as error:  # UnicodeEncodeError is a ValueError
        raise InternalError(f"a {type(message).__name__} cannot be encoded: {error}") from error


def _decoder(kind: type[Reply]) -> Callable[[bytes], Reply]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(payload: bytes) -> Reply:
        try:
            return decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise errors.UsageError(
                f"this is no {kind.__name__} of this version of kvpool ({error}): "
                "use one version on both sides"
            ) from error

    return checked


def typed_error(error: grpc.RpcError) -> KVPoolError:
    """Turn a failed call back into the error that the other side raised, or into what it means."""
    trailing: Any = error.trailing_metadata()  # pairs; gRPC's own stub says something else
    for key, value in trailing or ():
        if key == _ERROR_KEY:
            kind = getattr(errors, str(value), None)
            if isinstance(kind, type) and issubclass(kind, KVPoolError):
                return kind(error.details() or str(value))
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return TransferTimeoutError(f"no answer within the deadline: {details}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return PeerUnreachableError(f"the other process is gone or shutting down: {details}")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in str(details):
        return errors.CapacityError(f"the other process is busy with other calls: {details}")
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED):
        return errors.UsageError(f"the other process refused the message ({code}): {details}")
    return InternalError(f"call failed with {code}: {details}")


class Caller:
    """Blocking calls to one address, from any thread. Owns one gRPC channel."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)

    def call(self, method: Method[Request, Reply], request: Request, timeout_s: float) -> Reply:
        """Call a unary method. Raises the typed error of the other side, or UnavailableError."""
        encoded = _encode(request)
        try:
            payload: bytes = self._channel.unary_unary(method.path)(encoded, timeout=timeout_s)
        except grpc.RpcError as error:
            raise typed_error(error) from error
        except ValueError as error:  # what gRPC raises for a closed channel
            raise errors.ClosedError("the channel is closed: connect again") from error
        return _decoder(method.reply)(payload)

    def close(self) -> None:
        """Close the channel: calls under way end with PeerUnreachableError. Idempotent."""
        self._channel.close()


class AsyncCaller:
    """Calls from asyncio to one address. Owns one gRPC channel of the running loop."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def call(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> Reply:
        """Call a unary method. Cancelling the task cancels the call at the other side."""
        bound = self._channel.unary_unary(method.path)
        encoded = _encode(request)
        try:
            payload: bytes = await bound(encoded, timeout=timeout_s)
        except grpc.RpcError as error:
            raise typed_error(error) from error
        return _decoder(method.reply)(payload)

    async def stream(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> AsyncGenerator[Reply]:
        """Call a streaming method. Closing the iterator cancels the call at the other side."""
        decode = _decoder(method.reply)
        call = self._channel.unary_stream(method.path)(_encode(request), timeout=timeout_s)
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


Unary = Callable[[Any], Awaitable[msgspec.Struct]]
Streaming = Callable[[Any], AsyncIterator[msgspec.Struct]]


class Service:
    """A gRPC server of methods, in the running asyncio loop.

    Handlers are coroutines (unary) or async generators (streaming). A handler is cancelled, by
    asyncio's own cancellation, when its caller goes away or its deadline passes. A KVPoolError it
    raises reaches the caller as the same class.

    Args:
        calls_max: Calls under way at once; one more is refused with CapacityError.
    """

    def __init__(self, calls_max: int = 4096) -> None:
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=calls_max)
        self._handlers: dict[str, dict[str, grpc.RpcMethodHandler]] = {}

    def add(self, method: Method[Request, Reply], handler: Unary | Streaming) -> None:
        """Serve a method. Call before ``start``."""
        decode = _decoder(method.request)
        if method.streams:
            made = grpc.unary_stream_rpc_method_handler(_guard_stream(decode, handler))
        else:
            made = grpc.unary_unary_rpc_method_handler(_guard_unary(decode, handler))
        self._handlers.setdefault(f"kvpool.{method.service}", {})[method.name] = made

    async def start(self, address: str) -> None:
        """Listen, say at ``unix:PATH``. Raises UsageError if the address cannot be had."""
        for service, handlers in self._handlers.items():
            generic = grpc.method_handlers_generic_handler(service, handlers)
            self._server.add_generic_rpc_handlers((generic,))
        try:
            self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise errors.UsageError(f"cannot listen at {address}: {error}") from error
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s``, then cancel them."""
        await self._server.stop(grace_s)


async def _abort(context: Any, error: KVPoolError) -> None:
    context.set_trailing_metadata(((_ERROR_KEY, type(error).__name__),))
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


def _guard_unary(decode: Callable[[bytes], Any], handler: Any) -> Any:
    async def guarded(payload: bytes, context: Any) -> Any:
        try:
            return _encode(await handler(decode(payload)))
        except KVPoolError as error:
            await _abort(context, error)
        except Exception as error:
            logger.exception("handler failed")
            await _abort(context, InternalError(f"{type(error).__name__}: {error}"))
        return None

    return guarded


def _guard_stream(decode: Callable[[bytes], Any], handler: Any) -> Any:
    async def guarded(payload: bytes, context: Any) -> Any:
        try:
            async with aclosing(handler(decode(payload))) as replies:
                async for reply in replies:
                    yield _encode(reply)
        except KVPoolError as error:
            await _abort(context, error)
        except Exception as error:
            logger.exception("handler failed")
            await _abort(context, InternalError(f"{type(error).__name__}: {error}"))

    return guarded
