"""The UCX transport passes the suite of transports."""

import socket

import pytest

from kvpool.testing.transport_suite import TransportSuite
from kvpool.transfer.base import Transport
from kvpool.transfer.ucx import UcxTransport


@pytest.mark.ucx
class TestUcxTransport(TransportSuite):
    def open_transport(self) -> Transport:
        return UcxTransport()

    def fresh_address(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return f"ucx://127.0.0.1:{free.getsockname()[1]}"
