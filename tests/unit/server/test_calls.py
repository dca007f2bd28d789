"""Calls at once: none is held by who may not call, or sends no message, and each tenant has a share."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.client import protocol, rpc_service
from kvpool.client.access import ClientAccess
from kvpool.client.rpc import AsyncCaller
from kvpool.client.rpc_service import Service
from kvpool.errors import CapacityError, UsageError
from kvpool.metrics import Metrics
from kvpool.server import grpc_health
from kvpool.server.access import Credential, TenantAccess
from kvpool.server.grpc_health import ASKING_MAX, GrpcHealth
from kvpool.server.tenancy import Tenancy
from kvpool.server.tenant import Tenant
from tests.http2 import MAX_CONCURRENT_STREAMS, Http2

WAIT_S = 30.0
CALLS_MAX = 8
SHARE = 3
STATS = f"/kvpool.{protocol.STATS.service}/{protocol.STATS.name}"
READ = f"/kvpool.{protocol.READ.service}/{protocol.READ.name}"


def token_of(tenant: str) -> str:
    return f"{tenant}-{'t' * 40}"


class Scene:
    """A gRPC server of two methods, whose tenants red and blue have a share of its calls each."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        tenants = [Tenant(name=name, calls_max=SHARE) for name in ("red", "blue")]
        access = TenantAccess([Credential(tenant=t, token=token_of(t.name)) for t in tenants], "s")
        gate = Tenancy(self.metrics).gate(access, local=False)
        self.service = Service(CALLS_MAX, gate=gate)
        self.go_on = asyncio.Event()
        self.port = 0

    async def stats(self, request: protocol.Done) -> protocol.StatsReply:
        return protocol.StatsReply()

    async def members(self, request: protocol.Done) -> protocol.MembersReply:
        await self.go_on.wait()
        return protocol.MembersReply()

    def caller(self, tenant: str) -> AsyncCaller:
        return AsyncCaller(f"127.0.0.1:{self.port}", ClientAccess(token=token_of(tenant)))

    async def ask(self, tenant: str) -> None:
        caller = self.caller(tenant)
        try:
            await caller.call(protocol.STATS, protocol.Done(), WAIT_S)
        finally:
            await caller.close()


def play(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene()
        scene.service.add(protocol.STATS, scene.stats)
        scene.service.add(protocol.MEMBERS, scene.members)
        scene.port = scene.service.listen("127.0.0.1:0")
        await scene.service.start()
        try:
            await story(scene)
        finally:
            await scene.service.stop(0)

    asyncio.run(main())


def test_headers_of_a_stranger_hold_no_call() -> None:
    async def story(scene: Scene) -> None:
        with Http2(scene.port, WAIT_S) as stranger:
            begun = {stranger.begin(STATS) for _ in range(2 * CALLS_MAX)}
            await asyncio.to_thread(stranger.wait_ended, begun)
            await scene.ask("red")

    play(story)


def test_headers_of_a_tenant_hold_no_call_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        shown = {"authorization": f"Bearer {token_of('red')}"}
        with Http2(scene.port, WAIT_S) as silent:
            begun = {silent.begin(STATS, **shown) for _ in range(3 * SHARE)}
            await asyncio.to_thread(silent.wait_ended, begun)
            monkeypatch.undo()
            await scene.ask("red")

    monkeypatch.setattr(rpc_service, "MESSAGE_TIMEOUT_S", 0.1)
    play(story)


def test_a_tenant_has_its_share_of_calls_and_no_more() -> None:
    async def story(scene: Scene) -> None:
        red, blue = scene.caller("red"), scene.caller("blue")
        waiting = [
            asyncio.create_task(red.call(protocol.MEMBERS, protocol.Done(), WAIT_S))
            for _ in range(SHARE)
        ]
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await red.call(protocol.STATS, protocol.Done(), WAIT_S)
                except CapacityError as error:
                    said = f"tenant red has {SHARE} calls under way, all that it may"
                    assert said in str(error) and "tenants.calls_max" in str(error)
                    break
                await asyncio.sleep(0)
        await blue.call(protocol.STATS, protocol.Done(), WAIT_S)
        scene.go_on.set()
        await asyncio.gather(*waiting)
        await red.call(protocol.STATS, protocol.Done(), WAIT_S)
        assert 'refused_calls_total{reason="calls"} 1.0' in scene.metrics.expose().decode()
        await red.close()
        await blue.close()

    play(story)


def test_nobody_comes_in_by_a_wrong_token() -> None:
    async def story(scene: Scene) -> None:
        with pytest.raises(UsageError, match="valid token"):
            await scene.ask("green")

    play(story)


def test_a_call_that_ends_without_a_message_is_refused() -> None:
    async def story(scene: Scene) -> None:
        credentials = ("authorization", f"Bearer {token_of('red')}")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{scene.port}") as channel:
            call = channel.stream_unary(STATS)(iter(()), metadata=(credentials,), timeout=WAIT_S)
            with pytest.raises(grpc.RpcError, match="a call without a message: send one"):
                await call

    play(story)


def test_a_connection_has_so_many_calls() -> None:
    async def story(scene: Scene) -> None:
        with Http2(scene.port, WAIT_S) as peer:
            streams = await asyncio.to_thread(peer.setting, MAX_CONCURRENT_STREAMS)
        assert streams == 1024

    play(story)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    sooner = [
        (name, 200 if name == "grpc.server_handshake_timeout_ms" else value)
        for name, value in rpc_service._OPTIONS
    ]
    monkeypatch.setattr(rpc_service, "_OPTIONS", sooner)

    async def story(scene: Scene) -> None:
        with socket.create_connection(("127.0.0.1", scene.port), WAIT_S) as silent:

            def hear() -> None:
                while silent.recv(4096):  # its settings come first
                    pass

            await asyncio.to_thread(hear)

    play(story)


def test_headers_of_health_checks_hold_no_call_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_health, "_MESSAGE_TIMEOUT_S", 0.1)

    async def main() -> None:
        service, health = Service(2 * ASKING_MAX), GrpcHealth()
        health.add(service)
        port = service.listen("127.0.0.1:0")
        await health.ready()
        await service.start()
        with Http2(port, WAIT_S) as silent:
            for method in ("Check", "Watch"):
                begun = {
                    silent.begin(f"/grpc.health.v1.Health/{method}") for _ in range(3 * ASKING_MAX)
                }
                await asyncio.to_thread(silent.wait_ended, begun)
            monkeypatch.undo()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await service.stop(0)

    asyncio.run(main())
