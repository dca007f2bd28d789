"""The pool over a ring passes the suite of pools: one server and five, over shared memory and UCX.

Each test starts its own servers, which takes minutes altogether: with ``--soak`` only.
"""

import pytest

from tests.conformance.test_ring_pool import RingSuite


class TestOneServer(RingSuite):
    pass


class TestFiveServers(RingSuite):
    servers = 5


@pytest.mark.ucx
class TestOneServerOverUcx(RingSuite):
    flags: tuple[str, ...] = ("--transport", "ucx")


@pytest.mark.ucx
class TestFiveServersOverUcx(RingSuite):
    servers = 5
    flags: tuple[str, ...] = ("--transport", "ucx")

    # These need two chains on one server. Without a server of this host the ring spreads chains.
    test_a_full_pool_of_leases_refuses_and_says_why = None  # type: ignore[assignment]
    test_a_lease_on_a_stale_match_is_shorter = None  # type: ignore[assignment]
    test_stats_count = None  # type: ignore[assignment]
