"""A lossy transport without faults passes the suite of transports."""

import itertools

from kvpool.testing.lossy import LossyTransport
from kvpool.testing.transport_suite import TransportSuite
from kvpool.transfer.base import Transport
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport


class TestLossyTransport(TransportSuite):
    network = LoopbackNetwork()
    numbers = itertools.count()

    def open_transport(self) -> Transport:
        return LossyTransport(LoopbackTransport(self.network), seed=1)

    def fresh_address(self) -> str:
        return f"lossy-{next(self.numbers)}"
