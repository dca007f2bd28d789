"""One read waits for silent servers as long as its budget says, whatever many there are, at any step.

Without a clock: what is added up are the deadlines that servers were given, which are what a caller
waits where nobody answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool.base import Chain
from kvpool.client import protocol
from kvpool.client.cluster import ClusterPool
from kvpool.client.connect import connect
from kvpool.client.rpc import Method
from kvpool.config import TransferConfig
from kvpool.errors import UnavailableError
from kvpool.memory import BlockView
from kvpool.testing.blocks import SMALL_LAYOUT, Payload, namespace, payload, view_of
from tests.faults.silent_peers import SilentPeers
from tests.server_process import WAIT_S
from tests.waiting import until

LAYOUT = SMALL_LAYOUT
BLOCKS = 1  # so that one shard is asked at a time
BUDGET_S = 1.0
STEPS = (protocol.LOOKUP, protocol.LEASE, protocol.READ)
_CHAINS_MAX = 64  # until one's first owner is among those whose shards are silent
LIVES_S = 60.0  # the longest that a server may take that lives: more than any test
CONFIG = TransferConfig(
    ways=(),
    match_timeout_s=LIVES_S,
    request_timeout_s=LIVES_S,
    read_timeout_s=BUDGET_S,
    backoff_min_s=LIVES_S,
    backoff_max_s=LIVES_S,
)


@pytest.fixture(scope="module")
def held() -> Payload:
    return payload(LAYOUT, BLOCKS, seed=1)


@pytest.fixture
def peers(held: Payload) -> Iterator[SilentPeers]:
    with SilentPeers(4, view_of(LAYOUT, held)) as made:
        yield made


@pytest.fixture
def pool(peers: SilentPeers) -> Iterator[ClusterPool]:
    with connect(list(peers.addresses.values()), LAYOUT, WAIT_S, config=CONFIG) as made:
        assert isinstance(made, ClusterPool)
        until(lambda: made.nodes() == peers.names, "all are connected")
        peers.forget()
        yield made
        peers.speak()  # whoever says goodbye is patient


def chain_of(pool: ClusterPool, number: int = 0) -> Chain:
    return pool.chain(namespace(LAYOUT), list(range(number, number + LAYOUT.block_tokens)))


def read(pool: ClusterPool, held: Payload, number: int = 0) -> int:
    """Read a chain; return how many of its blocks came, which must be right."""
    chain = chain_of(pool, number)
    out = np.zeros_like(held)
    try:
        with pool.lease(pool.match(chain), LIVES_S) as lease:
            if not lease.blocks:
                return 0
            dest: BlockView = view_of(LAYOUT, out[: lease.blocks])
            good = pool.load(lease, dest, deadline_s=LIVES_S).wait(LIVES_S)
    except UnavailableError:
        return 0
    np.testing.assert_array_equal(out[:good], held[:good])
    return good


def waited_s(peers: SilentPeers) -> float:
    """Return what the reader waited, at most, by what it told those who did not answer.

    A sign of life is asked for when half of a server's time is over; its own thread asks with the
    longest time of a try. Of a server the last one counts: on a busy machine one may be asked for
    before an answer that comes.
    """
    looks = [call.timeout_s for call in peers.calls(protocol.LOOKUP) if call.silent]
    signs = {
        call.node: call.timeout_s
        for call in peers.calls(protocol.MATCH)
        if call.silent and call.timeout_s < BUDGET_S
    }
    return sum(looks) + 2 * sum(signs.values())


@pytest.mark.parametrize(
    "methods",
    [
        (protocol.LOOKUP,),
        (protocol.LEASE,),
        (protocol.READ,),
        (protocol.LEASE, protocol.RELEASE),
        (protocol.READ, protocol.RELEASE),
    ],
    ids=lambda methods: "+".join(method.name for method in methods),
)
def test_servers_that_are_all_silent_cost_one_budget(
    peers: SilentPeers,
    pool: ClusterPool,
    held: Payload,
    methods: Sequence[Method[Any, Any]],
) -> None:
    peers.silence(protocol.MATCH, *methods)
    assert read(pool, held) == 0
    assert 0 < waited_s(peers) <= BUDGET_S
    asked = {call.node for call in peers.calls(methods[0])}
    assert len(asked) > 1, "the next one was tried"


def test_servers_that_are_silent_at_one_step_each_share_one_budget(
    peers: SilentPeers, pool: ClusterPool, held: Payload
) -> None:
    """Whoever is asked for a look-up, the next for a lease, and the next for bytes."""
    met: set[str] = set()
    for number in range(_CHAINS_MAX):
        peers.forget()
        peers.silence(protocol.LOOKUP, protocol.MATCH, nodes=peers.names[:2])
        peers.silence(protocol.READ, protocol.MATCH, nodes=peers.names[2:3])
        peers.silence(protocol.LEASE, protocol.MATCH, nodes=peers.names[3:])
        assert read(pool, held, number) in (0, BLOCKS)
        assert waited_s(peers) <= BUDGET_S
        met = {call.method for call in peers.calls(*STEPS) if call.silent}
        peers.speak()
        until(lambda: pool.nodes() == peers.names, "who answers again is used again")
        if len(met) == len(STEPS):
            break
    assert len(met) == len(STEPS), "one read met silence at every step"
    until(lambda: read(pool, held) == BLOCKS, "all are well")


def test_a_release_at_a_server_that_fell_silent_is_within_the_budget(
    peers: SilentPeers, pool: ClusterPool
) -> None:
    lease = pool.lease(pool.match(chain_of(pool)), LIVES_S)
    peers.forget()
    peers.silence(protocol.RELEASE, protocol.MATCH)
    lease.close()
    until(lambda: bool(peers.calls(protocol.RELEASE)), "it was asked")
    assert all(release.timeout_s <= BUDGET_S for release in peers.calls(protocol.RELEASE))


def test_a_silent_server_is_asked_once_and_then_by_its_own_thread_alone(
    peers: SilentPeers, pool: ClusterPool, held: Payload
) -> None:
    peers.silence(protocol.LEASE, protocol.MATCH)
    until(lambda: _silence(pool, held), "each was met once")
    peers.forget()
    for _ in range(5):
        assert read(pool, held) == 0
    assert not peers.calls(protocol.LOOKUP, protocol.LEASE, protocol.READ), "a read costs nothing"
    peers.speak()
    until(lambda: pool.nodes() == peers.names, "who answers again is used again")
    until(lambda: read(pool, held) == BLOCKS, "it gives what it holds")


def test_a_load_and_a_release_at_a_server_known_to_be_silent_do_not_ask_it(
    peers: SilentPeers, pool: ClusterPool, held: Payload
) -> None:
    lease = pool.lease(pool.match(chain_of(pool)), LIVES_S)
    peers.silence(protocol.LEASE, protocol.READ, protocol.RELEASE, protocol.MATCH)
    until(lambda: _silence(pool, held), "each was met once")
    peers.forget()
    dest = view_of(LAYOUT, np.zeros_like(held[: lease.blocks]))
    assert not pool.load(lease, dest, deadline_s=LIVES_S).wait(LIVES_S)
    lease.close()
    asked = peers.calls(protocol.MATCH, protocol.RELEASE)
    assert not [call for call in asked if call.timeout_s < LIVES_S / 2], "its own thread alone asks"


def test_who_read_from_the_next_replica_does_not_wait_until_it_takes_its_lease_back(
    peers: SilentPeers, held: Payload
) -> None:
    patient = replace(CONFIG, read_timeout_s=LIVES_S)
    with connect(list(peers.addresses.values()), LAYOUT, WAIT_S, config=patient) as pool:
        assert isinstance(pool, ClusterPool)
        until(lambda: pool.nodes() == peers.names, "all are connected")
        first = max(peers.names)
        peers.fail(protocol.READ, first)
        peers.silence(protocol.RELEASE, nodes=[name for name in peers.names if name != first])
        assert read(pool, held) == BLOCKS
        until(
            lambda: peers.kept(protocol.RELEASE) == 1, "the release is under way behind the reader"
        )
        peers.speak()


def _silence(pool: ClusterPool, held: Payload) -> bool:
    read(pool, held)
    return not pool.nodes()
