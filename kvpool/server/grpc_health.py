"""gRPC's standard health service: what balancers and ``grpc_health_probe`` ask.

Owns what it says; the service itself is gRPC's own. Who calls it: the daemon.
"""

from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio  # pyright: ignore[reportAttributeAccessIssue]

from kvpool.client.rpc_service import Service

# Calls of Watch at once: nobody shows who he is, and each lasts as long as its caller likes.
WATCHERS_MAX: Final = 64


class _Servicer(aio.HealthServicer):  # type: ignore[misc]
    """gRPC's own, with a limit of watchers."""

    def __init__(self) -> None:
        super().__init__()
        self._watching = 0

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> None:
        if self._watching >= WATCHERS_MAX:
            why = f"{WATCHERS_MAX} callers watch this server's health: use Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._watching += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watching -= 1


class GrpcHealth:
    """Says NOT_SERVING until ``ready``, SERVING until ``stopping``, of the process as a whole.

    Anyone who reaches the address may ask: it says nothing else, and probes have no token.
    """

    def __init__(self) -> None:
        self._servicer: Any = _Servicer()

    def add(self, service: Service) -> None:
        """Serve it at one more gRPC service, before that starts."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, service.server)

    async def starting(self) -> None:
        """Say that clients should not come yet."""
        await self._servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    async def ready(self) -> None:
        """Say that clients may come."""
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stopping(self) -> None:
        """Say that they should go elsewhere, from now on."""
        await self._servicer.enter_graceful_shutdown()
