"""The pool over a ring passes the suite of pools: one server by streams, five hosts by shared memory.

The servers are started once, which takes seconds, and emptied between tests. Each of the five has a
network namespace of its own. ``test_ring_pool_soak.py`` goes all other ways; of UCX between hosts
there are a few here.
"""

from dataclasses import replace
from typing import ClassVar

import pytest

from kvpool.base import BlockPool
from kvpool.testing.blocks import namespace, payload, view_of
from kvpool.testing.pool_suite import SLOTS
from tests.conformance.ring_suite import OverUcx, RingSuite, ring
from tests.ring import PATIENT
from tests.server_process import WAIT_S
from tests.waiting import until

__all__ = ["ring"]


class TestOneServerThroughStreams(RingSuite):
    ways: ClassVar[tuple[str, ...]] = ()

    def test_what_a_closed_client_had_leased_is_free(self, pool: BlockPool) -> None:
        """Over streams no connection ends with it, so that it has to be said."""
        with self.ring.connect(self.layout, replace(PATIENT, ways=())) as other:
            chain = other.chain(namespace(self.layout), list(range(self.layout.block_tokens)))
            source = view_of(self.layout, payload(self.layout, 1, seed=1))
            assert other.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S).stored == 1
            lease = other.lease(other.match(chain), 300)
            assert pool.stats().leases == lease.blocks == 1
        until(lambda: pool.stats().leases == 0, "the lease is given back")


class TestFiveHosts(RingSuite):
    servers = 5
    apart = True
    ways: ClassVar[tuple[str, ...]] = ("host",)


class _TwoHostsOverUcx(OverUcx):
    servers = 2
    apart = True


@pytest.mark.ucx
class TestSomeOfTwoHostsOverUcx:
    servers, apart, flags, layout = 2, True, OverUcx.flags, OverUcx.layout

    @pytest.mark.parametrize(
        "name",
        [
            "test_what_was_stored_is_loaded",
            "test_a_full_pool_of_leases_refuses_and_says_why",
            "test_a_load_outlives_the_close_of_its_lease",
        ],
    )
    def test_one(self, name: str, ring: object) -> None:
        suite = _TwoHostsOverUcx()
        suite.ring = ring  # type: ignore[assignment]
        with suite.open_pool(suite.layout, SLOTS) as pool:
            getattr(suite, name)(pool)
