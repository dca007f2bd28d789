"""Leases that are granted on a connection's thread: never to a client that has ended meanwhile."""
# pyright: reportPrivateUsage=false
# What happens between two steps of a grant is played where the steps are.

import threading

import pytest

from kvpool.arena import Slots
from kvpool.base import Match
from kvpool.client.remote import RemotePool
from kvpool.errors import PeerUnreachableError
from kvpool.leases import PoolLeases
from kvpool.tiers.base import BlockTokens
from kvpool.tiers.lease import LeaseId
from kvpool.transfer.host_endpoint import HostEndpoint
from tests.faults.pool_client import CHAIN_BLOCKS, WAIT_S, chain_of, store
from tests.faults.test_pool_service import SLOTS, Running, running
from tests.waiting import until

assert SLOTS == CHAIN_BLOCKS


def leases_of(service: Running) -> PoolLeases:
    return service.pool._served.get().leases


def store_and_rest(service: Running, pool: RemotePool) -> None:
    """Store a chain, and wait until the loop has no call of a client: the next one may be prompt.

    The loop is done with a call a moment after its answer has gone.
    """
    assert store(pool, 1) == CHAIN_BLOCKS
    sessions = service.pool.sessions._sessions.values()
    until(lambda: all(one.handed == one.ended for one in sessions), "no call is with the loop")


def test_nothing_is_granted_to_a_client_whose_connection_ended_in_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running() as service, service.connect() as pool:
        store_and_rest(service, pool)
        sessions, leases = service.pool.sessions, leases_of(service)
        threads: list[threading.Thread] = []
        real = leases.grant

        def grant(
            client: bytes, hashes: bytes, seconds: float, tokens: BlockTokens | None = None
        ) -> tuple[LeaseId, Slots]:
            """Grant behind the end of the connection, as a thread that was slow would."""
            threads.append(threading.current_thread())
            session = sessions._sessions[client]
            assert isinstance(session.endpoint, HostEndpoint)
            session.endpoint.lose(PeerUnreachableError("the connection ended"))
            until(lambda: not sessions.is_alive(session), "the loop has ended the client")
            return real(client, hashes, seconds, tokens)

        monkeypatch.setattr(leases, "grant", grant)
        with pytest.raises(PeerUnreachableError):
            pool.lease(Match(chain_of(pool, 1), CHAIN_BLOCKS), WAIT_S)
        assert [thread.name for thread in threads] == ["test-server-progress"]
        until(lambda: leases.counts().leases == 0, "what was granted too late is given back")


def test_a_block_that_left_before_its_pin_is_leased_by_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running() as service, service.connect() as pool:
        store_and_rest(service, pool)
        leases, tier = leases_of(service), service.pool._served.get().tier
        real, threads = leases.grant, list[str]()

        def grant(
            client: bytes, hashes: bytes, seconds: float, tokens: BlockTokens | None = None
        ) -> tuple[LeaseId, Slots]:
            if not threads:
                assert tier.evict(1) == 1
            threads.append(threading.current_thread().name)
            return real(client, hashes, seconds, tokens)

        monkeypatch.setattr(leases, "grant", grant)
        with pool.lease(Match(chain_of(pool, 1), CHAIN_BLOCKS), WAIT_S) as lease:
            assert lease.blocks == CHAIN_BLOCKS - 1
            assert leases.counts().leases == 1
        assert threads[0] == "test-server-progress" != threads[1]
        until(lambda: leases.counts().leases == 0, "it is given back")
