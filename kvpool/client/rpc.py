"""Control messages between kvpool's processes over gRPC, typed errors both ways.

Owns how a method is named, encoded, guarded, and how a KVPoolError crosses the wire. Messages are
protobuf (the pool's, ``kvpool.proto``: any language) or msgspec structs (between workers of one
version). gRPC gives deadlines, cancellation and streams; no pickle is ever read. Who calls it: the
client and the server of a pool, the Conductor and the workers.
"""

import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError, Message

from kvpool import errors
from kvpool.errors import InternalError, KVPoolError, PeerUnreachableError, TransferTimeoutError

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=msgspec.Struct | Message)
Reply = TypeVar("Reply", bound=msgspec.Struct | Message)

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


def _encode(message: msgspec.Struct | Message) -> bytes:
    """Encode a message, here and not in gRPC's hands, which would hide why it cannot be."""
    if isinstance(message, Message):
        return message.SerializeToString()
    try:
        return msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError) as error:  # UnicodeEncodeError is a ValueError
        raise InternalError(f"a {type(message).__name__} cannot be encoded: {error}") from error


def _decoder(kind: type[Reply]) -> Callable[[bytes], Reply]:
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
        if key == _ERROR_KEY:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAccess:
    """How a caller shows who it is, and knows whom it speaks to. PEM texts, read from files before.

    Attributes:
        token: Sent with every call as a bearer token; empty: none. Never without TLS, but to a
            server of this host.
        ca: Certificates of those who sign servers' certificates; empty: no TLS.
        certificate, key: Of the caller, where servers ask for one.
    """

    token: str = ""
    ca: bytes = b""
    certificate: bytes = b""
    key: bytes = b""

    def __repr__(self) -> str:
        """Say what is set, and no secret."""
        return f"ClientAccess(token={bool(self.token)}, tls={bool(self.ca)})"

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Return what every call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else None

    def credentials(self) -> Any:
        """Return gRPC's credentials, or None for a plain channel."""
        if not self.ca:
            return None
        return grpc.ssl_channel_credentials(self.ca, self.key or None, self.certificate or None)


OPEN: Final = ClientAccess()


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


class Caller:
    """Blocking calls to one address, from any thread. Owns one gRPC channel."""

    def __init__(self, address: str, access: ClientAccess = OPEN) -> None:
        credentials = access.credentials()
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        self._metadata = access.metadata()

    def call(self, method: Method[Request, Reply], request: Request, timeout_s: float) -> Reply:
        """Call a unary method. Raises the typed error of the other side, or UnavailableError."""
        return self.ask(method, request, timeout_s).reply()

    def ask(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> Asked[Reply]:
        """Begin a unary call, so that others can run beside it."""
        encoded = _encode(request)
        try:
            call = self._channel.unary_unary(method.path).future(
                encoded, timeout=timeout_s, metadata=self._metadata
            )
        except ValueError as error:  # what gRPC raises for a closed channel
            raise errors.ClosedError("the channel is closed: connect again") from error
        return Asked(call, _decoder(method.reply))

    def stream(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> Generator[Reply, None, None]:
        """Call a streaming method. Closing the iterator cancels the call at the other side."""
        decode = _decoder(method.reply)
        call: Any = None
        try:
            call = self._channel.unary_stream(method.path)(
                _encode(request), timeout=timeout_s, metadata=self._metadata
            )
            for payload in call:
                yield decode(payload)
        except grpc.RpcError as error:
            raise typed_error(error) from error
        except ValueError as error:
            raise errors.ClosedError("the channel is closed: connect again") from error
        finally:
            if call is not None:
                call.cancel()

    def send(
        self, method: Method[Request, Reply], requests: Iterator[Request], timeout_s: float
    ) -> Reply:
        """Call a method that takes a stream. Raises as ``call``."""
        return self.begin_send(method, requests, timeout_s).reply()

    def begin_send(
        self, method: Method[Request, Reply], requests: Iterator[Request], timeout_s: float
    ) -> Asked[Reply]:
        """Begin a call that takes a stream; a thread of gRPC's takes the requests."""
        encoded = (_encode(request) for request in requests)
        try:
            call = self._channel.stream_unary(method.path).future(
                encoded, timeout=timeout_s, metadata=self._metadata
            )
        except ValueError as error:
            raise errors.ClosedError("the channel is closed: connect again") from error
        return Asked(call, _decoder(method.reply))

    def close(self) -> None:
        """Close the channel: calls under way end with PeerUnreachableError. Idempotent."""
        self._channel.close()


class AsyncCaller:
    """Calls from asyncio to one address. Owns one gRPC channel of the running loop."""

    def __init__(self, address: str, access: ClientAccess = OPEN) -> None:
        credentials = access.credentials()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        self._metadata = access.metadata()

    async def call(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> Reply:
        """Call a unary method. Cancelling the task cancels the call at the other side."""
        bound = self._channel.unary_unary(method.path)
        encoded = _encode(request)
        try:
            payload: bytes = await bound(encoded, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise typed_error(error) from error
        return _decoder(method.reply)(payload)

    async def stream(
        self, method: Method[Request, Reply], request: Request, timeout_s: float
    ) -> AsyncGenerator[Reply]:
        """Call a streaming method. Closing the iterator cancels the call at the other side."""
        decode = _decoder(method.reply)
        call = self._channel.unary_stream(method.path)(
            _encode(request), timeout=timeout_s, metadata=self._metadata
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


Unary = Callable[[Any], Awaitable[msgspec.Struct | Message]]
Streaming = Callable[[Any], AsyncIterator[msgspec.Struct | Message]]
# Looks at a call before its handler runs, in the same task: the metadata, and what the caller's
# verified certificate says it is. Raises UsageError if it may not call.
Gate = Callable[[Mapping[str, str], tuple[str, ...]], None]


class Service:
    """A gRPC server of methods, in the running asyncio loop.

    Handlers are coroutines (unary) or async generators (streaming). A handler is cancelled, by
    asyncio's own cancellation, when its caller goes away or its deadline passes. A KVPoolError it
    raises reaches the caller as the same class.

    Args:
        calls_max: Calls under way at once; one more is refused with CapacityError.
        gate: Decides who may call; None: whoever reaches an address.

    Attributes:
        server: gRPC's own, for services that come ready made. Add them before ``start``.
    """

    def __init__(self, calls_max: int = 4096, *, gate: Gate | None = None) -> None:
        self.server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=calls_max)
        self._gate = gate
        self._handlers: dict[str, dict[str, grpc.RpcMethodHandler]] = {}

    def add(self, method: Method[Request, Reply], handler: Unary | Streaming) -> None:
        """Serve a method. A handler of a method that takes a stream gets an iterator. Before ``start``."""
        decode = _decoder(method.request)
        if method.takes:
            guarded = _guard_taking(self._gate, decode, handler)
            made = grpc.stream_unary_rpc_method_handler(guarded)
        elif method.streams:
            guarded = _guard_stream(self._gate, decode, handler)
            made = grpc.unary_stream_rpc_method_handler(guarded)
        else:
            guarded = _guard_unary(self._gate, decode, handler)
            made = grpc.unary_unary_rpc_method_handler(guarded)
        self._handlers.setdefault(f"kvpool.{method.service}", {})[method.name] = made

    def listen(self, address: str, credentials: Any = None) -> int:
        """Add an address, say ``HOST:PORT``, before ``start``; return its port.

        Args:
            address: Port 0 picks a free one.
            credentials: ``grpc.ssl_server_credentials``, or None for none.

        Raises:
            UsageError: It cannot be had.
        """
        try:
            if credentials is None:
                return int(self.server.add_insecure_port(address))
            return int(self.server.add_secure_port(address, credentials))
        except RuntimeError as error:
            raise errors.UsageError(f"cannot listen at {address}: {error}") from error

    async def start(self, address: str = "") -> None:
        """Serve at ``address``, say ``unix:PATH``, and where ``listen`` said. Raises as ``listen``."""
        for service, handlers in self._handlers.items():
            generic = grpc.method_handlers_generic_handler(service, handlers)
            self.server.add_generic_rpc_handlers((generic,))
        if address:
            self.listen(address)
        await self.server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s``, then cancel them."""
        await self.server.stop(grace_s)


async def _enter(gate: Gate | None, context: Any) -> None:
    """Ask the gate; end the call with UNAUTHENTICATED if it may not come in."""
    if gate is None:
        return
    metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
    names: Any = context.peer_identities() or ()
    try:
        gate(metadata, tuple(bytes(name).decode("utf-8", "replace") for name in names))
    except KVPoolError as error:
        context.set_trailing_metadata(((_ERROR_KEY, type(error).__name__),))
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))


async def _abort(context: Any, error: KVPoolError) -> None:
    context.set_trailing_metadata(((_ERROR_KEY, type(error).__name__),))
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


def _guard_unary(gate: Gate | None, decode: Callable[[bytes], Any], handler: Any) -> Any:
    async def guarded(payload: bytes, context: Any) -> Any:
        await _enter(gate, context)
        try:
            return _encode(await handler(decode(payload)))
        except KVPoolError as error:
            await _abort(context, error)
        except Exception as error:
            logger.exception("handler failed")
            await _abort(context, InternalError(f"{type(error).__name__}: {error}"))
        return None

    return guarded


def _guard_stream(gate: Gate | None, decode: Callable[[bytes], Any], handler: Any) -> Any:
    async def guarded(payload: bytes, context: Any) -> Any:
        await _enter(gate, context)
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


def _guard_taking(gate: Gate | None, decode: Callable[[bytes], Any], handler: Any) -> Any:
    async def decoded(payloads: AsyncIterator[bytes]) -> AsyncGenerator[Any]:
        async for payload in payloads:
            yield decode(payload)

    guarded = _guard_unary(gate, decoded, handler)  # type: ignore[arg-type]
    return guarded
