"""Where a server listens: at addresses of its own, of either family, and with a limit of who watches."""

import asyncio
import contextlib
import socket

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.client.rpc_service import Service
from kvpool.clock import ManualClock
from kvpool.errors import UsageError
from kvpool.metrics import Metrics
from kvpool.server.grpc_health import ASKING_MAX, GrpcHealth
from kvpool.server.http import Health, HttpServer

WAIT_S = 20.0


def test_a_second_server_at_one_address_is_refused() -> None:
    """Not shared with the first: the kernel would give each caller to either of them."""

    async def main() -> None:
        first, second = Service(), Service()
        port = first.listen("127.0.0.1:0")
        await first.start()
        with pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1:{port}: is something"):
            second.listen(f"127.0.0.1:{port}")
        await first.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_http_is_answered_over_both_families(host: str) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this host has no address ::1")
    server = HttpServer(host, 0, Metrics(), Health(ManualClock()))
    try:
        shown = f"[{host}]" if ":" in host else host
        with httpx.Client(trust_env=False, timeout=WAIT_S) as client:
            assert client.get(f"http://{shown}:{server.port}/healthz").text == "ok\n"
    finally:
        server.close()


def test_watchers_of_the_health_have_a_limit() -> None:
    """They need no token: they must not have all the calls that a server takes at once."""

    async def main() -> None:
        service, health = Service(), GrpcHealth()
        health.add(service)
        port = service.listen("127.0.0.1:0")
        await health.ready()
        await service.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            watches = [stub.Watch(request, timeout=WAIT_S) for _ in range(ASKING_MAX)]
            for watch in watches:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as refused:
                async for _ in stub.Watch(request, timeout=WAIT_S):
                    pass
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await stub.Check(request, timeout=WAIT_S)).status
            watches[0].cancel()
            async with asyncio.timeout(WAIT_S):
                while True:  # its place is free once the server has noticed
                    again = stub.Watch(request, timeout=WAIT_S)
                    with contextlib.suppress(grpc.RpcError):
                        if await again.read() is not grpc.aio.EOF:
                            break
                    await asyncio.sleep(0.01)
        await service.stop(0)

    asyncio.run(main())


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
        return True
