"""What a client in any language may count on: health, versions, unknown fields, names that come and go."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.client import protocol
from kvpool.client.rpc import MESSAGE_BYTES_MAX, Caller
from kvpool.errors import UsageError
from kvpool.server.shard import LOOKUP_NAMES_MAX, NAMES_MAX
from tests.faults.pool_client import LAYOUT
from tests.faults.relay import Relay
from tests.faults.test_ring import BLOCKS, chain, store
from tests.ring import RingOfServers
from tests.server_process import WAIT_S
from tests.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def ring() -> Iterator[RingOfServers]:
    with RingOfServers(1, 64 * LAYOUT.block_bytes) as ring, ring.connect(LAYOUT):
        yield ring


@pytest.fixture
def caller(ring: RingOfServers) -> Iterator[Caller]:
    with closing(Caller(ring.nodes[0].address)) as caller:
        yield caller


def test_the_standard_health_service_answers(ring: RingOfServers) -> None:
    node = ring.nodes[0]
    for address in (node.address, f"unix:{node.folder}/run/{protocol.CONTROL_SOCKET}"):
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            assert stub.Check(request, timeout=WAIT_S).status == SERVING
            with pytest.raises(grpc.RpcError) as failed:
                stub.Check(health_pb2.HealthCheckRequest(service="x"), timeout=WAIT_S)
            assert failed.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_server_that_takes_its_time_to_answer_a_connection_is_waited_for(
    ring: RingOfServers,
) -> None:
    control = ring.nodes[0].folder / "run" / protocol.CONTROL_SOCKET
    with tempfile.TemporaryDirectory(prefix="kvpool-") as folder:
        path = Path(folder) / "relay"
        with Relay(path, control, hold_s=0.5), closing(Caller(f"unix:{path}")) as caller:
            assert caller.call(protocol.STATS, protocol.Done(), WAIT_S).stats["slots"] == 64


def _configure(version: int) -> protocol.ConfigureRequest:
    return protocol.ConfigureRequest(version=version, layout=protocol.encode_layout(LAYOUT))


def test_the_lower_version_is_spoken_and_one_too_old_refused(caller: Caller) -> None:
    now = protocol.PROTOCOL_VERSION
    for version in (now, now + 1, now + 7):
        assert caller.call(protocol.CONFIGURE, _configure(version), WAIT_S).version == now
    for version in range(protocol.PROTOCOL_VERSION_MIN):
        with pytest.raises(UsageError, match="bring it up to date"):
            caller.call(protocol.CONFIGURE, _configure(version), WAIT_S)
        hello = protocol.HelloRequest(version=version, client=bytes(16), streams=True)
        with pytest.raises(UsageError, match="bring it up to date"):
            caller.call(protocol.HELLO, hello, WAIT_S)
        news = protocol.AnnounceRequest(version=version, node="x", incarnation=bytes(16))
        with pytest.raises(UsageError, match="bring it up to date"):
            caller.call(protocol.ANNOUNCE, news, WAIT_S)


def test_fields_of_a_later_version_are_skipped(ring: RingOfServers) -> None:
    # Field 999, a varint: what a version that does not exist yet may add.
    later = _configure(protocol.PROTOCOL_VERSION + 1).SerializeToString() + b"\xb8\x3e\x01"
    with grpc.insecure_channel(ring.nodes[0].address) as channel:
        reply = channel.unary_unary(protocol.CONFIGURE.path)(later, timeout=WAIT_S)
    assert protocol.Welcome.FromString(reply).version == protocol.PROTOCOL_VERSION


def test_a_message_that_is_too_long_is_refused_and_the_next_one_served(caller: Caller) -> None:
    too_long = protocol.MatchRequest(hashes=bytes(MESSAGE_BYTES_MAX))
    with pytest.raises(UsageError):
        caller.call(protocol.MATCH, too_long, WAIT_S)
    assert caller.call(protocol.MATCH, protocol.MatchRequest(), WAIT_S).blocks == 0


def test_no_message_holds_the_server_for_long(ring: RingOfServers, caller: Caller) -> None:
    """More names in one message than a server says at once: taken in pieces, or refused."""
    with closing(Caller(f"unix:{ring.nodes[0].folder}/run/{protocol.CONTROL_SOCKET}")) as local:
        names = b"".join(number.to_bytes(32, "big") for number in range(1, 3 * NAMES_MAX))
        news = protocol.AnnounceRequest(
            version=protocol.PROTOCOL_VERSION,
            node="elsewhere",
            incarnation=bytes(16),
            kind=protocol.STORED,
            names=names,
        )
        local.call(protocol.ANNOUNCE, news, WAIT_S)
        found = local.call(protocol.LOOKUP, protocol.LookupRequest(names=names), WAIT_S)
        assert len(found.holders) == 3 * NAMES_MAX - 1
        news.kind = protocol.REMOVED
        local.call(protocol.ANNOUNCE, news, WAIT_S)
        found = local.call(protocol.LOOKUP, protocol.LookupRequest(names=names), WAIT_S)
        assert not found.holders
    with pytest.raises(UsageError, match=f"ask for {LOOKUP_NAMES_MAX} at once"):
        caller.call(
            protocol.LOOKUP, protocol.LookupRequest(names=bytes(32 * LOOKUP_NAMES_MAX + 32)), WAIT_S
        )


def test_who_watches_is_told_what_comes_and_what_leaves(
    ring: RingOfServers, caller: Caller
) -> None:
    told: dict[int, bytes] = {protocol.STORED: b"", protocol.REMOVED: b""}
    stream = caller.stream(protocol.WATCH, protocol.Done(), WAIT_S)

    def watch() -> None:
        for change in stream:
            assert change.node == ring.nodes[0].name
            told[change.kind] += change.names
            if len(told[protocol.REMOVED]) >= BLOCKS * 32:
                return

    watcher = threading.Thread(target=watch, name="watcher", daemon=True)
    watcher.start()
    with ring.connect(LAYOUT) as pool:
        # The watcher may begin after a store: store others until it is told of one.
        number = 0
        while not told[protocol.STORED]:
            number += 1
            assert store(pool, number).stored == BLOCKS
        names = chain(pool, number).hashes
        until(lambda: names in told[protocol.STORED], "the store is told")
        while watcher.is_alive():
            caller.call(protocol.EVICT, protocol.EvictRequest(blocks=64), WAIT_S)
            watcher.join(0.1)
        gone, size = told[protocol.REMOVED], 32
        removed = {gone[begin : begin + size] for begin in range(0, len(gone), size)}
        assert removed & {names[begin : begin + size] for begin in range(0, len(names), size)}
