"""The side that answers control messages: a gRPC server of methods, each call looked at by a gate.

Owns how a handler is guarded: who may call, what its errors become, what is logged. Who calls it: the
server of a pool, and the workers.
"""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
)
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from kvpool.client.rpc import ERROR_KEY, OPTIONS, Method, Reply, Request, decoder, encode
from kvpool.errors import InternalError, KVPoolError, UsageError

logger = logging.getLogger(__name__)

Unary = Callable[[Any], Awaitable[msgspec.Struct | Message]]
Streaming = Callable[[Any], AsyncIterator[msgspec.Struct | Message]]
# Looks at a call as soon as its headers are there, and stays around it, in the same task: the metadata,
# and what the caller's verified certificate says it is. Raises UsageError if it may not call, and
# CapacityError if it has too many calls.
Gate = Callable[[Mapping[str, str], tuple[str, ...]], AbstractContextManager[None]]

# Longest time from the headers of a call to its message: what has none holds a place of calls.
MESSAGE_TIMEOUT_S: Final = 10.0

# A caller whose host is gone is found out within these two, while it has a call under way.
_OPTIONS: Final = [
    *OPTIONS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Callers ask once a minute; so many of gRPC's own pings are no attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    # Calls of one connection: behind them a client of gRPC waits by itself.
    ("grpc.max_concurrent_streams", 1024),
    # A connection that does not say what it is.
    ("grpc.server_handshake_timeout_ms", 10_000),
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
        # All of them take a stream, as gRPC has it here: so the gate sees the headers, and who sends no
        # message behind them is not waited for. On the wire it is the same.
        if method.streams:
            streaming = _guard_stream(self._gate, decode, handler)
            made = grpc.stream_stream_rpc_method_handler(streaming)
        else:
            guarded = _guard(self._gate, decode, handler, takes=method.takes)
            made = grpc.stream_unary_rpc_method_handler(guarded)
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
            raise UsageError(
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


async def first_message(context: Any, timeout_s: float) -> bytes:
    """Return the message of a call that has one.

    Raises UsageError: it did not come in time, or the call has none.
    """
    try:
        async with asyncio.timeout(timeout_s):
            message = await context.read()
    except TimeoutError as error:
        raise UsageError(f"no message within {timeout_s} s behind the headers of a call") from error
    if not isinstance(message, bytes):  # gRPC's EOF
        raise UsageError("a call without a message: send one")
    return message


@contextmanager
def _entered(gate: Gate | None, context: Any) -> Generator[None]:
    """Let a call in, and raise what the gate says."""
    if gate is None:
        yield
        return
    metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
    names: Any = context.peer_identities() or ()
    with gate(metadata, tuple(bytes(name).decode("utf-8", "replace") for name in names)):
        yield


async def _abort(
    context: Any, error: KVPoolError, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION
) -> None:
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    await context.abort(code, str(error))


async def _enter(stack: ExitStack, gate: Gate | None, context: Any) -> None:
    """Ask the gate; end the call with UNAUTHENTICATED if it may not come in."""
    try:
        stack.enter_context(_entered(gate, context))
    except UsageError as error:
        await _abort(context, error, grpc.StatusCode.UNAUTHENTICATED)
    except KVPoolError as error:
        await _abort(context, error, grpc.StatusCode.RESOURCE_EXHAUSTED)


def _guard(gate: Gate | None, decode: Callable[[bytes], Any], handler: Any, *, takes: bool) -> Any:
    async def guarded(payloads: AsyncIterator[bytes], context: Any) -> Any:
        with ExitStack() as stack:
            await _enter(stack, gate, context)
            try:
                if takes:
                    return encode(await handler(_decoded(payloads, decode)))
                return encode(
                    await handler(decode(await first_message(context, MESSAGE_TIMEOUT_S)))
                )
            except KVPoolError as error:
                await _abort(context, error)
            except Exception as error:
                logger.exception("handler failed")
                await _abort(context, InternalError(f"{type(error).__name__}: {error}"))
        return None

    return guarded


def _guard_stream(gate: Gate | None, decode: Callable[[bytes], Any], handler: Any) -> Any:
    async def guarded(_: AsyncIterator[bytes], context: Any) -> Any:
        with ExitStack() as stack:
            await _enter(stack, gate, context)
            try:
                request = decode(await first_message(context, MESSAGE_TIMEOUT_S))
                async with aclosing(handler(request)) as replies:
                    async for reply in replies:
                        yield encode(reply)
            except KVPoolError as error:
                await _abort(context, error)
            except Exception as error:
                logger.exception("handler failed")
                await _abort(context, InternalError(f"{type(error).__name__}: {error}"))

    return guarded


async def _decoded(
    payloads: AsyncIterator[bytes], decode: Callable[[bytes], Any]
) -> AsyncGenerator[Any]:
    async for payload in payloads:
        yield decode(payload)
