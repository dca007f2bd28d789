"""Where UCX transports listen: families, interfaces, ports, many at once, and beside a fork."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.errors import ClosedError, ConfigError, PeerUnreachableError, UsageError
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import WAIT_S, Collected, empty, named, publish
from kvpool.transfer.base import Endpoint, RemoteSlots
from kvpool.transfer.ucx import UcxTransport, parse_address
from kvpool.transfer.ucx_endpoint import UcxEndpoint

pytestmark = pytest.mark.ucx

LAYOUT = SMALL_LAYOUT
BLOCKS = 4
INBOX = 1 << 20


class Node:
    """A transport that listens and owns blocks."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, **settings: object) -> None:
        self.transport = UcxTransport(
            host=host,
            inbox_bytes=INBOX,
            **{"endpoint_max": 4, **settings},  # type: ignore[arg-type]
        )
        self.accepted = Collected()
        self.arena = Arena(LAYOUT, BLOCKS, self.transport.incarnation)
        self.transport.register(self.arena)
        self.blocks = payload(LAYOUT, BLOCKS, seed=int(self.transport.incarnation[0]))
        self.slots: RemoteSlots = named(0, publish(self.arena, self.blocks))
        where = f"ucx://[{host}]:{port}" if ":" in host else f"ucx://{host}:{port}"
        self.address = self.transport.listen(where, self.accepted)

    def read_from(self, owner: "Node") -> None:
        """Connect to another node and read its blocks, exactly."""
        endpoint = self.transport.connect(owner.address, WAIT_S, owner.transport.incarnation)
        require_exact(endpoint, owner)

    def close(self) -> None:
        self.transport.close()
        self.arena.close()


def require_exact(endpoint: Endpoint, owner: Node) -> None:
    out = empty(LAYOUT, BLOCKS)
    read = endpoint.read_blocks(
        view_of(LAYOUT, out),
        owner.slots,
        source_layout=LAYOUT,
        dest_layer=None,
        deadline_s=WAIT_S,
    )
    assert read.wait(WAIT_S) == BLOCKS
    np.testing.assert_array_equal(out, owner.blocks)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Nodes that a test adds are closed after it."""
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_families_both_ways(nodes: list[Node], host: str) -> None:
    nodes += [Node(host), Node(host)]
    assert parse_address(nodes[0].address)[0] == host
    nodes[0].read_from(nodes[1])
    nodes[1].read_from(nodes[0])


def test_a_wildcard_listens_on_every_interface(nodes: list[Node]) -> None:
    everywhere = Node("0.0.0.0", trusted_network=True, advertise="127.0.0.1", endpoint_max=2)
    one, another = Node("127.0.0.1"), Node("127.0.0.1")
    nodes += [everywhere, one, another]
    assert parse_address(everywhere.address)[0] == "127.0.0.1"
    assert everywhere.accepted.items == []  # the trial of the address is nobody's endpoint
    one.read_from(everywhere)
    another.read_from(everywhere)  # it holds no slot either
    assert len(everywhere.accepted.wait(2)) == 2


@pytest.mark.parametrize("advertise", [None, "203.0.113.1", "localhost", "::1"])
def test_an_address_that_leads_nowhere_is_named_at_the_start(
    nodes: list[Node], advertise: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.transfer.ucx.PROBE_TIMEOUT_S", 0.5)
    with (
        UcxTransport(host="0.0.0.0", trusted_network=True, advertise=advertise) as transport,
        pytest.raises(ConfigError, match=advertise or "0.0.0.0") as caught,
    ):
        transport.listen("ucx://0.0.0.0:0", lambda endpoint: None)
    assert caught.value.key in {"transfer.advertise", "host"}


def test_a_port_that_was_just_used(nodes: list[Node]) -> None:
    reader = Node()
    nodes.append(reader)
    port = 0
    for _ in range(4):
        owner = Node(port=port)
        port = parse_address(owner.address)[1]
        reader.read_from(owner)
        owner.close()
        with pytest.raises(PeerUnreachableError):
            reader.read_from(owner)


def test_twenty_engines_started_at_once(nodes: list[Node]) -> None:
    start = threading.Barrier(20)

    def make(number: int) -> Node:
        start.wait(WAIT_S)
        return Node()

    with ThreadPoolExecutor(20) as pool:
        nodes += pool.map(make, range(20))
        assert len({node.address for node in nodes}) == 20
        others = nodes[1:] + nodes[:1]
        list(pool.map(Node.read_from, nodes, others))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_beside_transfers_harms_neither_side(nodes: list[Node]) -> None:
    """The child's copies of the engine are closed; the parent's go on, whatever the child does."""
    nodes += [Node(), Node()]
    reader, owner = nodes
    endpoint = reader.transport.connect(owner.address, WAIT_S)
    assert isinstance(endpoint, UcxEndpoint)
    stop = threading.Event()
    failures = Collected()

    def read_on() -> None:
        try:
            while not stop.is_set():
                require_exact(endpoint, owner)
        except BaseException as error:  # noqa: BLE001  # shown below
            failures(error)

    threads = [threading.Thread(target=read_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                endpoint.connection.notify(b"from the child")
            except (ClosedError, PeerUnreachableError):
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures.items == []
    require_exact(endpoint, owner)


def test_a_family_that_is_not_the_transports_is_refused(nodes: list[Node]) -> None:
    nodes += [Node("127.0.0.1"), Node("::1")]
    with pytest.raises(UsageError, match="family"):
        nodes[0].read_from(nodes[1])
