"""The side that answers control messages: a gRPC server of methods, each call looked at by a gate.

Owns how a handler is guarded: who may call, what its errors become, what is logged. Who calls it: the
server of a pool, and the workers.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from kvpool import errors
from kvpool.client.rpc import ERROR_KEY, OPTIONS, Method, Reply, Request, decoder, encode
from kvpool.errors import InternalError, KVPoolError

logger = logging.getLogger(__name__)

Unary = Callable[[Any], Awaitable[msgspec.Struct | Message]]
Streaming = Callable[[Any], AsyncIterator[msgspec.Struct | Message]]
# Looks at a call before its handler runs, in the same task: the metadata, and what the caller's
# verified certificate says it is. Raises UsageError if it may not call.
Gate = Callable[[Mapping[str, str], tuple[str, ...]], None]


# A caller whose host is gone is found out within these two, while it has a call under way.
_OPTIONS: Final = [
    *OPTIONS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Callers ask once a minute; so many of gRPC's own pings are no attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    # A second server at one address is refused; else the kernel would share callers among the two.
    ("grpc.so_reuseport", 0),
]


class Methods(Protocol):
    """What methods are served by: gRPC, or the connections of transports."""

    def add(self, method: Method[Request, Reply], handler: Unary | Streaming) -> None:
        """Serve a method."""
        ...


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
        decode = decoder(method.request)
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
            raise errors.UsageError(
                f"cannot listen at {address}: is something else at this port, and is the host's name "
                f"or address one of this machine? ({error})"
            ) from error

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
        context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))


async def _abort(context: Any, error: KVPoolError) -> None:
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


def _guard_unary(gate: Gate | None, decode: Callable[[bytes], Any], handler: Any) -> Any:
    async def guarded(payload: bytes, context: Any) -> Any:
        await _enter(gate, context)
        try:
            return encode(await handler(decode(payload)))
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
                    yield encode(reply)
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
