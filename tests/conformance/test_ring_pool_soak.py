"""The pool over a ring passes the suite of pools: one server and five hosts, each way that blocks go.

With ``--soak`` only: one server by streams and five hosts by shared memory are in every run.
"""

from typing import ClassVar

from tests.conformance.ring_suite import OverUcx, RingSuite, ring

__all__ = ["ring"]


class TestOneServer(RingSuite):
    pass


class TestOneServerOverUcx(OverUcx):
    pass


class TestFiveHostsThroughStreams(RingSuite):
    servers = 5
    apart = True
    ways: ClassVar[tuple[str, ...]] = ()


class TestFiveHostsOverUcx(OverUcx):
    servers = 5
    apart = True
