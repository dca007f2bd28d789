"""A tenant that has all that it may keeps no other out: clients, stores and calls at once."""

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvpool.client import protocol
from kvpool.client.access import ClientAccess
from kvpool.client.connect import connect
from kvpool.client.link import Place, open_link
from kvpool.client.remote import RemotePool
from kvpool.client.ways import Ways
from kvpool.errors import CapacityError, KVPoolError
from tests.etcd_process import free_port
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, PATIENT, WAIT_S, chain_of, store
from tests.server_process import ServerProcess
from tests.waiting import until

DRAM_BYTES = 64 * LAYOUT.block_bytes
CLIENTS, STORES = 2, 1  # of each of two tenants, and as many for this user
CALLS = 8  # of red


def token_of(tenant: str) -> str:
    return f"{tenant}-{'t' * 40}"


class Server:
    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.http = free_port()
        for name in ("red", "blue", "secret"):
            (folder / name).write_text(token_of(name))
            (folder / name).chmod(0o600)
        config = folder / "pool.toml"
        config.write_text(
            f"[node]\nclients_max = {3 * CLIENTS}\nstores_max = {3 * STORES}\n"
            f'[listen]\naddress = "{self.address}"\nhttp = "127.0.0.1:{self.http}"\n'
            f'[access]\nsecret_file = "{folder / "secret"}"\n'
            f'[[tenants]]\nname = "red"\ntoken_file = "{folder / "red"}"\ncalls_max = {CALLS}\n'
            f'[[tenants]]\nname = "blue"\ntoken_file = "{folder / "blue"}"\n'
        )
        self.process = ServerProcess(run_dir, DRAM_BYTES, "--config", str(config))

    def access(self, tenant: str) -> ClientAccess:
        return ClientAccess(token=token_of(tenant))

    def counter(self, reason: str) -> float:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://127.0.0.1:{self.http}/metrics", timeout=WAIT_S) as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith(f'kvpool_server_refused_calls_total{{reason="{reason}"}}'):
                    return float(line.split()[1])
        return 0.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("shares"), tmp_path_factory.mktemp("r") / "d")
    with made.process:
        yield made


def test_a_tenant_has_its_share_of_clients(server: Server) -> None:
    ways = Ways(LAYOUT, replace(PATIENT, ways=()))
    with closing(ways), ExitStack() as links:

        def enter(tenant: str) -> None:
            place = Place(server.address, server.access(tenant))
            links.enter_context(closing(open_link(place, LAYOUT, ways, WAIT_S)))

        for _ in range(CLIENTS):
            enter("red")
        with pytest.raises(CapacityError, match=f"tenant red has {CLIENTS} clients connected") as r:
            enter("red")
        assert "tenants.clients_max" in str(r.value)
        for _ in range(CLIENTS):
            enter("blue")
        with connect(server.process.run_dir, LAYOUT, WAIT_S, config=PATIENT) as own:
            assert store(own, 1) == CHAIN_BLOCKS
    assert server.counter("clients") >= 1


def test_a_tenant_has_its_share_of_stores(server: Server) -> None:
    go_on = threading.Event()
    ways = Ways(LAYOUT, replace(PATIENT, ways=()))
    with ExitStack() as stack:
        stack.enter_context(closing(ways))
        place = Place(server.address, server.access("red"))
        link = stack.enter_context(closing(open_link(place, LAYOUT, ways, WAIT_S)))
        own = stack.enter_context(connect(server.process.run_dir, LAYOUT, WAIT_S, config=PATIENT))

        def begun(number: int, timeout_s: float) -> Iterator[protocol.WriteRequest]:
            hashes = chain_of(own, number, 4).hashes
            request = protocol.StoreRequest(client=link.client, hashes=hashes, timeout_s=timeout_s)
            yield protocol.WriteRequest(header=request)
            go_on.wait(WAIT_S)

        def stuck() -> None:
            with suppress(KVPoolError):  # it is cut short in the end
                link.caller.send(protocol.WRITE, begun(7, WAIT_S), WAIT_S)

        thread = threading.Thread(target=stuck)
        thread.start()
        try:

            def stores() -> int:
                return own.stats().extra["stores"]

            until(lambda: stores() == STORES, "red stores")
            with pytest.raises(CapacityError, match=f"tenant red has {STORES} stores under") as r:
                link.caller.send(protocol.WRITE, begun(8, WAIT_S), WAIT_S)
            assert "tenants.stores_max" in str(r.value)
            there = Place(server.address, server.access("blue"))
            both = Ways(LAYOUT, PATIENT)
            blue = stack.enter_context(RemotePool(there, LAYOUT, both, PATIENT, WAIT_S))
            assert store(blue, 9) == CHAIN_BLOCKS
            assert stores() == STORES, "red stores still"
        finally:
            go_on.set()
            thread.join(WAIT_S)
    assert server.counter("stores") == 1


SHOWN = (("authorization", f"Bearer {token_of('red')}"),)


def is_full(channel: grpc.Channel) -> bool:
    """Say whether one call more of red is refused."""
    try:
        channel.unary_unary(protocol.MATCH.path)(b"", timeout=WAIT_S, metadata=SHOWN)
    except grpc.RpcError as error:
        return bool(error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    return False


def end_calls(server: Server, how: str) -> None:
    """Have as many calls under way as red may, and end them."""
    go_on = threading.Event()

    def messages() -> Iterator[bytes]:
        go_on.wait(WAIT_S)
        yield b""

    with grpc.insecure_channel(server.address) as channel:
        method = protocol.STATS if how == "answered" else protocol.WRITE
        begin = channel.stream_unary(method.path).future
        limit_s = 2.0 if how == "late" else WAIT_S
        begun: list[grpc.Future] = []

        def fill() -> bool:
            begun[:] = [one for one in begun if not one.done()]
            for _ in range(CALLS - len(begun)):  # who asked whether it is full may have been first
                begun.append(begin(messages(), timeout=limit_s, metadata=SHOWN))
            return how == "late" or (is_full(channel) and not any(one.done() for one in begun))

        try:
            until(fill, "they are under way")
            if how == "cancelled":
                for one in begun:
                    one.cancel()
            elif how == "gone":
                channel.close()
            elif how != "late":
                go_on.set()
            until(lambda: all(one.done() for one in begun), "they have ended")
        finally:
            go_on.set()


@pytest.mark.parametrize("how", ["cancelled", "late", "gone", "refused", "answered"])
def test_a_share_of_calls_comes_back_however_they_end(server: Server, how: str) -> None:
    with grpc.insecure_channel(server.address) as asking:
        end_calls(server, how)
        until(lambda: not is_full(asking), "there is room again")
        end_calls(server, how)  # with as much room as before
