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
