"""gRPC's standard health service: what balancers and ``grpc_health_probe`` ask.

Owns what it says; the service itself is gRPC's own. Who calls it: the daemon.
"""

from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio  # pyright: ignore[reportAttributeAccessIssue]

from kvpool.client.rpc_service import Service


class GrpcHealth:
    """Says NOT_SERVING until ``ready``, SERVING until ``stopping``, of the process as a whole.

    Anyone who reaches the address may ask: it says nothing else, and probes have no token.
    """

    def __init__(self) -> None:
        self._servicer: Any = aio.HealthServicer()

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
