"""Nobody gets in who may not, nothing is granted to him, and nothing that is sent ends the server."""

import os
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from google.protobuf.message import Message

from kvpool.cli.main import main
from kvpool.client import protocol
from kvpool.client.access import OPEN, ClientAccess
from kvpool.client.link import Place
from kvpool.client.remote import RemotePool
from kvpool.client.rpc import Caller, Method
from kvpool.client.ways import Ways
from kvpool.errors import (
    CapacityError,
    KVPoolError,
    PeerUnreachableError,
    StaleIncarnationError,
    UsageError,
)
from kvpool.server.from_settings import parts_of
from kvpool.server.settings_file import parse_settings
from kvpool.testing.blocks import namespace
from tests.certificates import Authority
from tests.etcd_process import free_port
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, PATIENT, WAIT_S, chain_of, store
from tests.server_process import ServerProcess
from tests.waiting import until

DRAM_BYTES = 256 * LAYOUT.block_bytes
QUOTA_BLOCKS = 16
TENANTS = ("red", "blue", "small", "servers")
METHODS: list[Method[Message, Message]] = [
    made for made in vars(protocol).values() if isinstance(made, Method)
]
NAMES = [method.name for method in METHODS]


def token_of(tenant: str) -> str:
    return f"{tenant}-{'t' * 40}"


@dataclass
class Secure:
    """A server with TLS, and its authority. ``mutual``: it asks for certificates, not for tokens."""

    process: ServerProcess
    authority: Authority
    address: str
    http: int

    def caller(self, access: ClientAccess) -> Caller:
        return Caller(self.address, access)

    def tenant(self, name: str) -> ClientAccess:
        return self.authority.access(token=token_of(name))

    def pool(self, name: str) -> RemotePool:
        ways = Ways(LAYOUT, PATIENT)
        return RemotePool(Place(self.address, self.tenant(name)), LAYOUT, ways, PATIENT, WAIT_S)

    def counter(self, reason: str) -> float:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://127.0.0.1:{self.http}/metrics", timeout=WAIT_S) as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith(f'kvpool_server_refused_calls_total{{reason="{reason}"}}'):
                    return float(line.split()[1])
        return 0.0

    def stats(self) -> dict[str, int]:
        with closing(self.caller(self.tenant("servers"))) as caller:
            reply = caller.call(protocol.STATS, protocol.Done(), WAIT_S)
        return {**dict(reply.stats), **dict(reply.extra)}


def start(
    folder: Path,
    *,
    mutual: bool = False,
    expired: bool = False,
    ucx: bool = False,
    clients_max: int = 64,
) -> Secure:
    """Start a server with tenants and TLS."""
    authority = Authority(folder)
    server = authority.issue("server", expired=expired)
    port, http = free_port(), free_port()
    lines = [
        f'[node]\nname = "a"\nclients_max = {clients_max}',
        f'[[ring.members]]\nname = "a"\naddress = "127.0.0.1:{port}"',
        "[listen]",
        f'address = "127.0.0.1:{port}"',
        f'http = "127.0.0.1:{http}"',
        f'certificate_file = "{server.certificate}"',
        f'key_file = "{server.key}"',
        f'client_ca_file = "{authority.ca}"' if mutual else "",
        f"[transfer]\nucx = {str(ucx).lower()}",
        "[access]",
        f'server_ca_file = "{authority.ca}"',
        f'secret_file = "{_secret(folder / "secret", "p" * 64)}"',
    ]
    for tenant in TENANTS:
        lines += ["[[tenants]]", f'name = "{tenant}"']
        if mutual:
            lines.append(f'certificate_names = ["{tenant}.pool"]')
        else:
            lines.append(f'token_file = "{_secret(folder / tenant, token_of(tenant))}"')
        if tenant == "small":
            quota = QUOTA_BLOCKS * LAYOUT.block_bytes
            lines += [f"lease_bytes_max = {quota}", f"store_bytes_max = {2 * quota}"]
        lines.append(f"operator = {str(tenant == 'servers').lower()}")
    config = folder / "pool.toml"
    config.write_text("\n".join(lines))
    process = ServerProcess(folder / "run", DRAM_BYTES, "--config", str(config))
    return Secure(process, authority, f"127.0.0.1:{port}", http)


def _secret(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    made = start(tmp_path_factory.mktemp("secure"))
    with made.process:
        with closing(made.caller(made.tenant("servers"))) as caller:
            layout = protocol.encode_layout(LAYOUT)
            request = protocol.ConfigureRequest(version=protocol.PROTOCOL_VERSION, layout=layout)
            caller.call(protocol.CONFIGURE, request, WAIT_S)
        yield made


def _ask(caller: Caller, method: Method[Message, Message]) -> None:
    """Call a method with an empty request, whatever its shape."""
    if method.takes:
        caller.send(method, iter([method.request()]), WAIT_S)
    elif method.streams:
        for _ in caller.stream(method, method.request(), WAIT_S):
            return
    else:
        caller.call(method, method.request(), WAIT_S)


# ---- who may call --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_without_a_valid_token_every_method_is_refused(
    secure: Secure, method: Method[Message, Message]
) -> None:
    before = secure.counter("unknown")
    for token in ("", "x" * 64, token_of("red")[:-1], token_of("red") + "t", "../../etc/passwd"):
        with (
            closing(secure.caller(secure.authority.access(token=token))) as caller,
            pytest.raises(UsageError, match="lets nobody in without a valid token"),
        ):
            _ask(caller, method)
    assert secure.counter("unknown") == before + 5


def test_without_tls_there_is_no_answer(secure: Secure) -> None:
    for access in (OPEN, ClientAccess(token=token_of("red"))):
        with closing(secure.caller(access)) as caller, pytest.raises(PeerUnreachableError):
            caller.call(protocol.STATS, protocol.Done(), WAIT_S)


def test_a_server_that_another_authority_signed_is_not_trusted(
    secure: Secure, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path).access(token=token_of("red"))
    with closing(secure.caller(stranger)) as caller, pytest.raises(PeerUnreachableError):
        caller.call(protocol.STATS, protocol.Done(), WAIT_S)


def test_a_certificate_is_asked_for_and_looked_at(tmp_path: Path) -> None:
    made = start(tmp_path / "own", mutual=True)
    stranger = Authority(tmp_path / "other")
    own = made.authority
    with made.process:
        for access in (
            own.access(),
            own.access(own.issue("red.pool", expired=True)),
            ClientAccess(
                ca=own.ca.read_bytes(),
                certificate=stranger.issue("red.pool").certificate.read_bytes(),
                key=stranger.issue("red.pool").key.read_bytes(),
            ),
        ):
            with closing(made.caller(access)) as caller, pytest.raises(PeerUnreachableError):
                caller.call(protocol.STATS, protocol.Done(), WAIT_S)
        with (
            closing(made.caller(own.access(own.issue("nobody.pool")))) as caller,
            pytest.raises(UsageError, match="lets nobody in"),
        ):
            caller.call(protocol.STATS, protocol.Done(), WAIT_S)
        with closing(made.caller(own.access(own.issue("red.pool")))) as caller:
            caller.call(protocol.STATS, protocol.Done(), WAIT_S)


def test_a_server_whose_certificate_expired_is_not_trusted(tmp_path: Path) -> None:
    made = start(tmp_path / "own", expired=True)
    with (
        made.process,
        closing(made.caller(made.tenant("red"))) as caller,
        pytest.raises(PeerUnreachableError),
    ):
        caller.call(protocol.STATS, protocol.Done(), WAIT_S)


def test_nobody_need_read_what_strangers_have_it_logged(secure: Secure) -> None:
    """gRPC writes of each to standard error, a pipe here that is full long before the last of these."""
    host, port = secure.address.split(":")
    for _ in range(600):
        with socket.create_connection((host, int(port)), WAIT_S) as stranger:
            stranger.sendall(b"no TLS at all\n")
    assert secure.stats()["leases"] == 0


# ---- what a tenant may ---------------------------------------------------------------------------


def test_another_tenants_blocks_cannot_be_named(secure: Secure) -> None:
    with closing(secure.pool("red")) as red, closing(secure.pool("blue")) as blue:
        blocks = store(red, 1)
        assert red.match(chain_of(red, 1)).blocks == blocks > 0
        assert blue.match(chain_of(blue, 1)).blocks == 0
        assert chain_of(red, 1).hashes != chain_of(blue, 1).hashes
        assert red.salt() not in (b"", blue.salt())


def test_another_tenants_salt_opens_nothing(secure: Secure) -> None:
    """Even who knows the names, from a log, say, gets nothing for them."""
    before = secure.counter("tenant")
    with ExitStack() as stack:
        red = stack.enter_context(closing(secure.pool("red")))
        store(red, 2)
        names = chain_of(red, 2).hashes
        caller = stack.enter_context(closing(secure.caller(secure.tenant("blue"))))
        client = greet(caller)
        match = caller.call(protocol.MATCH, protocol.MatchRequest(hashes=names), WAIT_S)
        assert match.blocks == 0
        lease = protocol.LeaseRequest(client=client, hashes=names, seconds=1.0)
        with pytest.raises(UsageError, match="is another tenant's"):
            caller.call(protocol.LEASE, lease, WAIT_S)
        header = protocol.StoreRequest(
            client=client,
            hashes=names[:32],
            crcs=bytes(4 * LAYOUT.crc_count),
            timeout_s=1.0,
            hold_s=1.0,
        )
        write = iter([protocol.WriteRequest(header=header)])
        with pytest.raises(UsageError, match="is another tenant's"):
            caller.send(protocol.WRITE, write, WAIT_S)
        assert secure.stats()["leases"] == 0
    assert secure.counter("tenant") == before + 3


def test_a_connection_is_its_tenants_alone(secure: Secure) -> None:
    with ExitStack() as stack:
        red = stack.enter_context(closing(secure.caller(secure.tenant("red"))))
        blue = stack.enter_context(closing(secure.caller(secure.tenant("blue"))))
        client = greet(red)
        hello = protocol.HelloRequest(
            version=protocol.PROTOCOL_VERSION, client=client, streams=True
        )
        with pytest.raises(UsageError):
            blue.call(protocol.HELLO, hello, WAIT_S)
        release = protocol.ReleaseRequest(client=client, lease=1)
        with pytest.raises(StaleIncarnationError):
            blue.call(protocol.RELEASE, release, WAIT_S)


def test_another_tenants_lease_gives_no_bytes_and_stays(secure: Secure) -> None:
    with ExitStack() as stack:
        red = stack.enter_context(closing(secure.pool("red")))
        assert store(red, 6) == CHAIN_BLOCKS
        held = stack.enter_context(red.lease(red.match(chain_of(red, 6)), 60))
        blue = stack.enter_context(closing(secure.caller(secure.tenant("blue"))))
        for client in (greet(blue), held.link.client):
            read = protocol.ReadRequest(client=client, lease=held.number, first=0, count=1)
            with pytest.raises((UsageError, StaleIncarnationError)):
                for _ in blue.stream(protocol.READ, read, WAIT_S):
                    raise AssertionError("another tenant's bytes were sent")
            report = protocol.ReportRequest(client=client, lease=held.number, block=0)
            with pytest.raises((UsageError, StaleIncarnationError)):
                blue.call(protocol.REPORT, report, WAIT_S)
        release = protocol.ReleaseRequest(client=greet(blue), lease=held.number)
        blue.call(protocol.RELEASE, release, WAIT_S)
        assert secure.stats()["leases"] == 1
        assert red.match(chain_of(red, 6)).blocks == CHAIN_BLOCKS


@pytest.mark.parametrize("with_tls", [False, True])
def test_the_command_line_asks_in_the_run_directory(
    secure: Secure, capsys: pytest.CaptureFixture[str], with_tls: bool
) -> None:
    """Which speaks no TLS, whatever the servers' addresses speak; and no server is down there."""
    folder = secure.process.run_dir.parent
    shown = ["--ca-file", str(secure.authority.ca), "--token-file", str(folder / "servers")]
    where = ["--run-dir", str(secure.process.run_dir)]
    assert main(["nodes", *where, "--json", *(shown if with_tls else [])]) == 0
    (row,) = msgspec.json.decode(capsys.readouterr().out)
    assert (row["node"], row["address"], row["state"]) == ("a", secure.address, "up")
    assert main(["match", *where, "--json", "--hash", "0" * 64]) == 0
    (row,) = msgspec.json.decode(capsys.readouterr().out)["nodes"]
    assert row == {"node": "a", "blocks": 0}
    assert main(["nodes", "--server", secure.address]) == 2
    assert "--ca-file" in capsys.readouterr().err


def test_a_token_that_is_shown_counts_at_the_run_directory_too(secure: Secure) -> None:
    """Who says that he is a tenant is that one alone there, or nobody; who says nothing is the user."""
    target = Place.of_run_dir(secure.process.run_dir).target
    for token, said in (("x" * 64, "lets nobody in"), (token_of("red"), "is no operator")):
        with (
            closing(Caller(target, ClientAccess(token=token))) as caller,
            pytest.raises(UsageError, match=said),
        ):
            caller.call(protocol.EVICT, protocol.EvictRequest(), WAIT_S)
    with closing(Caller(target)) as caller:
        assert caller.call(protocol.EVICT, protocol.EvictRequest(blocks=0), WAIT_S).blocks == 0


def test_a_lease_quota_is_of_all_clients_of_a_tenant(secure: Secure) -> None:
    before = secure.counter("lease_bytes")
    with closing(secure.pool("small")) as first, closing(secure.pool("small")) as second:
        assert store(first, 3) == QUOTA_BLOCKS
        match = first.match(chain_of(first, 3))
        with first.lease(match, 30) as lease:
            assert lease.blocks == QUOTA_BLOCKS
            with pytest.raises(CapacityError, match="tenant small would hold"):
                second.lease(match, 30)
            assert secure.stats()["leases"] == 1
        assert secure.counter("lease_bytes") == before + 1
        until(lambda: secure.stats()["leases"] == 0, "the lease was given back")
        with second.lease(match, 30) as lease:
            assert lease.blocks == QUOTA_BLOCKS


def test_a_store_quota_refuses_and_others_go_on(secure: Secure) -> None:
    before = secure.counter("store_bytes")
    with closing(secure.pool("small")) as small, closing(secure.pool("red")) as red:
        store(small, 3), store(small, 4)
        with pytest.raises(CapacityError, match="tenant small has"):
            store(small, 5)
        assert store(red, 5) > 0
    assert secure.counter("store_bytes") == before + 1


def test_what_concerns_everybody_is_for_operators(secure: Secure) -> None:
    with closing(secure.caller(secure.tenant("red"))) as caller:
        with pytest.raises(UsageError, match="is no operator"):
            caller.call(protocol.EVICT, protocol.EvictRequest(), WAIT_S)
        with pytest.raises(UsageError, match="is no operator"):
            caller.call(protocol.VERIFY, protocol.Done(), WAIT_S)
        news = protocol.AnnounceRequest(
            version=protocol.PROTOCOL_VERSION, node="b", incarnation=bytes(16), names=bytes(32)
        )
        with pytest.raises(UsageError, match="operator's token"):
            caller.call(protocol.ANNOUNCE, news, WAIT_S)
        with pytest.raises(UsageError, match="only an operator may watch"):
            next(caller.stream(protocol.WATCH, protocol.Done(), WAIT_S))
        found = caller.call(protocol.LOOKUP, protocol.LookupRequest(names=bytes(32)), WAIT_S)
        assert not found.holders
    with closing(secure.caller(secure.tenant("servers"))) as caller:
        assert caller.call(protocol.EVICT, protocol.EvictRequest(blocks=1), WAIT_S).blocks <= 1


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a\0b", "x" * 300, "\u4e2d\u6587 \U0001f600", "'; --", "\n\r\t"]
)
def test_any_text_is_a_name_and_no_path(secure: Secure, name: str) -> None:
    with closing(secure.pool("red")) as pool:
        tokens = list(range(2 * LAYOUT.block_tokens))
        plain, odd = namespace(LAYOUT), namespace(LAYOUT, name)
        assert pool.match(pool.chain(odd, tokens)).blocks == 0
        assert pool.chain(odd, tokens).hashes != pool.chain(plain, tokens).hashes


def greet(caller: Caller) -> bytes:
    """Become a client without a transport; return its name."""
    client = os.urandom(protocol.CLIENT_BYTES)
    caller.call(
        protocol.HELLO,
        protocol.HelloRequest(version=protocol.PROTOCOL_VERSION, client=client, streams=True),
        WAIT_S,
    )
    return client


# ---- where it listens ----------------------------------------------------------------------------


def test_beyond_loopback_it_needs_tls_and_somebody_to_let_in(tmp_path: Path) -> None:
    server = Authority(tmp_path).issue("server")
    tls = f'certificate_file = "{server.certificate}"\nkey_file = "{server.key}"\n'
    listen = '[listen]\naddress = "0.0.0.0:7420"\n'
    for text, said in (
        (listen, "beyond loopback, without TLS"),
        (listen + tls, "lets everybody in"),
        ('[listen]\naddress = "[::]:7420"\n', "beyond loopback, without TLS"),
        ('[listen]\naddress = "7420"\n', "write HOST:PORT"),
        ('[listen]\naddress = "a/../b:7420"\n', "is no name or address"),
        ('[listen]\ncertificate_file = "x"\n', "go together"),
        ('[listen]\nclient_ca_file = "x"\n', "needs TLS"),
        ('[ring]\nmembers = [{name="a", address="a:1"}]\n', "set node.name"),
        (
            '[node]\nname="../a"\n[ring]\nmembers = [{name="a", address="a:1"}]\n',
            "no name of a node",
        ),
    ):
        with pytest.raises(KVPoolError, match=said):
            parts_of(parse_settings(text), tmp_path)
    for text in (
        '[listen]\naddress = "127.0.0.1:7420"\n',
        listen + "insecure = true\n",
        listen + tls + f'client_ca_file = "{tmp_path / "ca.pem"}"\n',
    ):
        assert parts_of(parse_settings(text), tmp_path).config.listen
    server.key.chmod(0o644)
    with pytest.raises(KVPoolError, match="others may read"):
        parts_of(parse_settings(listen + tls + "insecure = true\n"), tmp_path)
