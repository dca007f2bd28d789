"""gRPC's standard health service: what balancers and ``grpc_health_probe`` ask.

Owns what it says; the service itself is gRPC's own. Who calls it: the daemon.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio  # pyright: ignore[reportAttributeAccessIssue]

from kvpool.client.rpc_service import Service, first_message
from kvpool.errors import UsageError

# Calls of each method at once: nobody shows who he is, and each lasts as long as its caller likes.
ASKING_MAX: Final = 64
_SERVICE: Final = "grpc.health.v1.Health"
# Longest time from the headers of a call to its message.
_MESSAGE_TIMEOUT_S: Final = 2.0


class _Servicer(aio.HealthServicer):  # type: ignore[misc]
    """gRPC's own, with a limit of calls."""

    def __init__(self) -> None:
        super().__init__()
        self._asking: Counter[str] = Counter()

    async def check(
        self, _: object, context: "grpc.aio.ServicerContext[object, object]"
    ) -> health_pb2.HealthCheckResponse:
        """Answer one call of Check, whose message may not come."""
        with await self._place("Check", context):
            request = await _request(context)
            answer: health_pb2.HealthCheckResponse = await self.Check(request, context)
            return answer

    async def watch(self, _: object, context: "grpc.aio.ServicerContext[object, object]") -> None:
        """Answer one call of Watch, for as long as its caller likes."""
        with await self._place("Watch", context):
            await self.Watch(await _request(context), context)

    async def _place(
        self, method: str, context: "grpc.aio.ServicerContext[object, object]"
    ) -> AbstractContextManager[None]:
        if self._asking[method] >= ASKING_MAX:
            why = f"{ASKING_MAX} calls of {method} are under way: try again, or the other method"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        return self._counted(method)

    @contextmanager
    def _counted(self, method: str) -> Generator[None]:
        self._asking[method] += 1
        try:
            yield
        finally:
            self._asking[method] -= 1


async def _request(
    context: "grpc.aio.ServicerContext[object, object]",
) -> health_pb2.HealthCheckRequest:
    try:
        message = await first_message(context, _MESSAGE_TIMEOUT_S)
        return health_pb2.HealthCheckRequest.FromString(message)
    except (UsageError, DecodeError) as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise


class GrpcHealth:
    """Says NOT_SERVING until ``ready``, SERVING until ``stopping``, of the process as a whole.

    Anyone who reaches the address may ask: it says nothing else, and probes have no token.
    """

    def __init__(self) -> None:
        self._servicer: Any = _Servicer()

    def add(self, service: Service) -> None:
        """Serve it at one more gRPC service, before that starts."""
        encode = health_pb2.HealthCheckResponse.SerializeToString
        # Unary on the wire; a stream here, so that a call without a message is not waited for.
        handlers = {
            "Check": grpc.stream_unary_rpc_method_handler(
                self._servicer.check, response_serializer=encode
            ),
            "Watch": grpc.stream_stream_rpc_method_handler(
                self._servicer.watch, response_serializer=encode
            ),
        }
        generic = grpc.method_handlers_generic_handler(_SERVICE, handlers)
        service.server.add_generic_rpc_handlers((generic,))

    async def starting(self) -> None:
        """Say that clients should not come yet."""
        await self._servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    async def ready(self) -> None:
        """Say that clients may come."""
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stopping(self) -> None:
        """Say that they should go elsewhere, from now on."""
        await self._servicer.enter_graceful_shutdown()
