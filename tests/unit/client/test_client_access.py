"""A token never leaves this host in the clear, whoever says where it should go; saying so lets it."""

import argparse
import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from kvpool.block import BlockLayout, NodeId, new_incarnation
from kvpool.cli import asking
from kvpool.client import protocol
from kvpool.client.access import ClientAccess, is_this_host
from kvpool.client.connect import connect
from kvpool.client.rpc import AsyncCaller, Caller
from kvpool.client.rpc_service import Service
from kvpool.config import ServerConfig
from kvpool.errors import ConfigError, KVPoolError, UnavailableError, UsageError
from kvpool.index.membership import Member, StaticMembership
from kvpool.metrics import Metrics
from kvpool.server.from_settings import parts_of
from kvpool.server.node import Node
from kvpool.server.settings_file import parse_settings
from tests.waiting import until

LAYOUT = BlockLayout(num_layers=1, kv_heads=1, block_tokens=16, k_dim=8, v_dim=8)
TOKEN = "t" * 64
SECRET = ClientAccess(token=TOKEN)
IN_THE_CLEAR = "in the clear: set ca"
# Reserved for documentation: nobody is there.
REMOTE = "192.0.2.1:7420"

HERE = ("unix:/run/kvpool/control.sock", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1")
ELSEWHERE = (
    REMOTE,
    "0.0.0.0:1",
    "[::]:1",
    "[2001:db8::1]:1",
    "host:1",
    "localhost.example:1",
    "127.0.0.1.example:1",
    "ipv4:127.0.0.1,192.0.2.1:1",
    "dns:///host:1",
    "127.0.0.1",
    "",
)


@pytest.mark.parametrize("address", HERE)
def test_this_host_may_see_a_token(address: str) -> None:
    assert is_this_host(address)
    Caller(address, SECRET).close()


@pytest.mark.parametrize("address", ELSEWHERE)
def test_no_other_address_may_see_a_token_without_tls(address: str) -> None:
    for caller in (Caller, AsyncCaller):
        with pytest.raises(UsageError, match=IN_THE_CLEAR) as failed:
            caller(address, SECRET)
        assert TOKEN not in str(failed.value)
    ClientAccess(token=TOKEN, insecure=True).require_safe(address)
    ClientAccess(token=TOKEN, ca=b"-----BEGIN ").require_safe(address)
    ClientAccess().require_safe(address)


@pytest.mark.parametrize(
    "access",
    [
        ClientAccess(certificate=b"c"),
        ClientAccess(certificate=b"c", ca=b"a"),
        ClientAccess(key=b"k", ca=b"a"),
        ClientAccess(certificate=b"c", key=b"k"),
        ClientAccess(certificate=b"c", key=b"k", insecure=True),
    ],
)
def test_half_of_what_a_certificate_needs_is_no_plain_channel(access: ClientAccess) -> None:
    with pytest.raises(UsageError, match="set certificate, key and ca"):
        Caller("127.0.0.1:1", access)


@pytest.mark.parametrize("target", [REMOTE, [REMOTE], f"localhost:1,{REMOTE}"])
def test_connect_refuses_at_once(target: str | list[str]) -> None:
    with pytest.raises(UsageError, match=IN_THE_CLEAR):
        connect(target, LAYOUT, 5.0, access=SECRET)


@asynccontextmanager
async def _naming(address: str) -> AsyncIterator[str]:
    """Run a server of a ring whose other member is at ``address``; yield where it answers."""

    async def members(request: protocol.Done) -> protocol.MembersReply:
        return protocol.MembersReply(members=[protocol.Member(node="a", address=address)])

    service = Service()
    service.add(protocol.MEMBERS, members)
    port = service.listen("127.0.0.1:0")
    await service.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await service.stop(0)


def test_a_server_cannot_send_the_token_elsewhere() -> None:
    """The first server is of this host, and names one that is not."""

    async def asked(access: ClientAccess) -> KVPoolError:
        async with _naming("192.0.2.1:1") as seed:
            with pytest.raises(KVPoolError) as failed:
                await asyncio.to_thread(connect, seed, LAYOUT, 0.5, access=access)
        return failed.value

    before = set(threading.enumerate())
    refused = asyncio.run(asked(SECRET))
    until(
        lambda: (
            not any(one.name.startswith("kvpool-") for one in set(threading.enumerate()) - before)
        ),
        "nobody goes on trying",
    )
    assert isinstance(refused, UsageError) and IN_THE_CLEAR in str(refused)
    assert isinstance(
        asyncio.run(asked(ClientAccess(token=TOKEN, insecure=True))), UnavailableError
    )


def test_the_command_line_takes_the_risk_only_when_told(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    parser = argparse.ArgumentParser()
    asking.add_arguments(parser)
    given = ["--server", REMOTE, "--token-file", str(secret)]
    with (
        closing(asking.Asking(parser.parse_args(given))) as asked,
        pytest.raises(UsageError, match="--ca-file.*--insecure"),
    ):
        asked.caller()
    with closing(asking.Asking(parser.parse_args([*given, "--insecure"]))) as asked:
        asked.caller()


def _settings(tmp_path: Path, address: str, more: str = "") -> str:
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    return (
        '[node]\nname = "a"\n[listen]\naddress = "127.0.0.1:7420"\n'
        f'[access]\nserver_token_file = "{secret}"\n{more}'
        '[[ring.members]]\nname = "a"\naddress = "127.0.0.1:7420"\n'
        f'[[ring.members]]\nname = "b"\naddress = "{address}"\n'
    )


def test_a_server_refuses_to_show_its_token_in_the_clear(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"in the clear.*access\.server_ca_file.*access\.insecure"
    ):
        parts_of(parse_settings(_settings(tmp_path, REMOTE)), tmp_path)
    for text in (
        _settings(tmp_path, "127.0.0.1:7421"),
        _settings(tmp_path, REMOTE, "insecure = true\n"),
    ):
        parts = parts_of(parse_settings(text), tmp_path)
        assert parts.access.token == TOKEN
        assert parts.membership is not None
        parts.membership.close()


def test_a_member_that_joins_elsewhere_is_told_nothing(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As etcd may name it: no list was looked at before."""

    async def run() -> None:
        heard: list[str] = []

        async def announce(request: protocol.AnnounceRequest) -> protocol.AnnounceReply:
            heard.append(request.node)
            return protocol.AnnounceReply(incarnation=bytes(16))

        service = Service()
        service.add(protocol.ANNOUNCE, announce)
        port = service.listen("127.0.0.1:0")
        await service.start()
        members = [
            Member(node=NodeId("a"), address="127.0.0.1:1"),
            Member(node=NodeId("b"), address=REMOTE),
            Member(node=NodeId("c"), address=f"127.0.0.1:{port}"),
        ]
        with ThreadPoolExecutor(1) as executor, closing(StaticMembership(members)) as membership:
            node = Node(
                ServerConfig(run_dir=tmp_path, node="a"),
                new_incarnation(),
                membership,
                executor,
                metrics=Metrics(),
                access=SECRET,
            )
            node.join("127.0.0.1:1")
            async with asyncio.timeout(20):
                while not heard:
                    await asyncio.sleep(0.01)
            await node.leave(1.0)
        await service.stop(0)

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert [record.args for record in caplog.records if "told nothing" in record.message]
    assert TOKEN not in caplog.text
