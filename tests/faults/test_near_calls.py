"""Calls over a client's connection: damaged at random they grant nothing, and both ways end alike."""

import random
from contextlib import closing
from functools import partial

from kvpool.client import protocol
from kvpool.client.call_wire import CALL_BYTES_MAX, Call, Cancel, Message, cut
from kvpool.client.rpc import Caller
from kvpool.errors import CapacityError, KVPoolError, UsageError
from kvpool.transfer.base import Endpoint
from tests.conftest import Count
from tests.faults.pool_client import WAIT_S, chain_of
from tests.faults.test_pool_service import BLOCKS, Storer, running
from tests.waiting import until

CALLED = (
    protocol.MATCH,
    protocol.LEASE,
    protocol.REPORT,
    protocol.RELEASE,
    protocol.STORE,
    protocol.STATS,
    protocol.LOOKUP,
)


# Far from those of the call that is looked at behind them.
FIRST = 1 << 20


def said(endpoint: Endpoint, notification: bytes) -> None:
    until(partial(endpoint.notify, notification), "the server takes what it is told")


def is_answered(caller: Caller) -> bool:
    try:
        return caller.call(protocol.STATS, protocol.Done(), WAIT_S).stats["ready"] == BLOCKS
    except CapacityError:
        return False


def test_a_call_that_is_damaged_grants_nothing(count: Count) -> None:
    rng = random.Random("calls")
    with running() as service, closing(Storer(service)) as storer, service.connect() as watcher:
        chain = chain_of(watcher, 1, BLOCKS)
        stored = storer.request(chain.hashes)
        storer.store(stored)
        before = watcher.stats()
        with closing(Storer(service)) as hostile:
            link = hostile.link
            assert link.endpoint is not None
            for number in range(FIRST, FIRST + count(150, 20_000)):
                request = rng.choice(
                    [stored.SerializeToString(), rng.randbytes(rng.randrange(3000)), b""]
                )
                call = Call(number, rng.choice(CALLED).path, 5.0, request)
                messages: list[Message] = [call, call, Cancel(number)]
                for part in cut(number, rng.choice(messages)):
                    changed = bytearray(part)
                    if rng.random() < 0.7:
                        changed[rng.randrange(len(changed))] = rng.randrange(256)
                    said(link.endpoint, bytes(changed))
            # It is a client still: its calls are answered as soon as not too many are under way.
            until(partial(is_answered, link.caller), "a call is answered behind all that")
        assert watcher.match(chain).blocks == BLOCKS
        until(lambda: watcher.stats().leases == 0, "nothing is leased")
        after = watcher.stats()
        assert (after.ready, after.corruptions) == (before.ready, 0)
        assert (after.reserved, after.quarantined) == (0, 0)


def test_both_ways_of_calling_end_alike() -> None:
    """A call goes over the connection, one too long for it through gRPC: the same answer or error."""
    with running() as service, closing(Storer(service)) as storer, service.connect() as watcher:
        names = chain_of(watcher, 1, BLOCKS).hashes
        storer.store(storer.request(names))
        ask = partial(storer.link.caller.call, protocol.MATCH, timeout_s=WAIT_S)
        for hashes in (names, names + bytes(CALL_BYTES_MAX)):
            assert ask(protocol.MatchRequest(hashes=hashes)).blocks == BLOCKS
        errors: list[KVPoolError] = []
        for hashes in (b"short", bytes(CALL_BYTES_MAX + 5)):
            try:
                ask(protocol.MatchRequest(hashes=hashes))
            except KVPoolError as error:
                errors.append(error)
        assert [type(error) for error in errors] == [UsageError, UsageError]
        Caller.close(storer.link.caller)  # gRPC's channel alone
        assert ask(protocol.MatchRequest(hashes=names)).blocks == BLOCKS
