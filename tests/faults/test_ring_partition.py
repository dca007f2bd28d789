"""A host that the others cannot reach for a while: nothing is wrong meanwhile, and all is well after."""

import time
from contextlib import closing

import numpy as np
import pytest

from kvpool.cli.main import main
from kvpool.client import protocol
from kvpool.client.cluster import ClusterPool
from kvpool.client.rpc import Caller
from kvpool.config import TransferConfig
from kvpool.errors import UnavailableError
from kvpool.testing.blocks import view_of
from tests.conftest import Count
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, blocks_of, chain_of
from tests.ring import RingNode, RingOfServers
from tests.server_process import WAIT_S
from tests.waiting import until

CHAINS = 8


def _load(pool: ClusterPool, number: int) -> int:
    """Load a chain; return how many of its blocks came, all of them right."""
    into = np.zeros_like(blocks_of(number))
    try:
        with pool.lease(pool.match(chain_of(pool, number)), WAIT_S) as lease:
            dest = view_of(LAYOUT, into[: lease.blocks])
            good = pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S)
    except UnavailableError:
        return 0
    assert np.array_equal(into[:good], blocks_of(number)[:good])
    return good


def _hears(node: RingNode, name: str) -> bool:
    with closing(Caller(node.address)) as caller:
        reply = caller.call(protocol.MEMBERS, protocol.Done(), WAIT_S)
    return next(member.heard for member in reply.members if member.node == name)


def test_a_host_that_is_cut_off_is_a_miss_and_comes_back(
    count: Count, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--soak`` cuts for so long that TCP has stopped to try often."""
    with RingOfServers(2, 16 * CHAINS * CHAIN_BLOCKS * LAYOUT.block_bytes, apart=True) as ring:
        near, far = ring.nodes
        with closing(ring.connect(LAYOUT, TransferConfig(ways=()))) as pool:
            for number in range(CHAINS):
                source = view_of(LAYOUT, blocks_of(number))
                done = pool.store(chain_of(pool, number), source, deadline_s=WAIT_S)
                assert done.wait(WAIT_S).stored == CHAIN_BLOCKS

            def whole() -> int:
                return sum(_load(pool, number) == CHAIN_BLOCKS for number in range(CHAINS))

            until(lambda: whole() == CHAINS, "every chain is found")
            ring.host(far).cut()
            began = time.monotonic()
            try:
                until(
                    lambda: whole() < CHAINS and pool.nodes() == [near.name],
                    "the chains are spread over both, and the client goes on without it",
                )
                until(lambda: not _hears(near, far.name), "the other server hears it no more")
                status = main(["stat", "--server", near.address, "--node", far.name])
                assert (status, f"node {far.name} at {far.address}" in capsys.readouterr().err) == (
                    2,
                    True,
                )
                until(lambda: time.monotonic() - began > count(0, 25), "it was cut off for so long")
            finally:
                ring.host(far).mend()
            until(lambda: whole() == CHAINS, "every chain is found again")
            until(lambda: _hears(near, far.name) and _hears(far, near.name), "both are heard")
