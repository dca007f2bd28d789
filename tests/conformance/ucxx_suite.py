"""The ucxx transport passes the suite of transports. Run where ucxx is installed.

That is an environment of its own, because ucxx holds UCX to versions below the one that kvpool
develops with: ``test_ucxx_transport.py`` runs this file there, and so does ``make test-ucxx``.
"""

import socket

from kvpool.testing.transport_suite import TransportSuite
from kvpool.transfer.base import Transport
from kvpool.transfer.ucxpy import UcxxTransport


class TestUcxxTransport(TransportSuite):
    def open_transport(self) -> Transport:
        return UcxxTransport(trusted_network=True)

    def fresh_address(self) -> str:
        with socket.create_server(("0.0.0.0", 0)) as free:
            return f"ucxx://127.0.0.1:{free.getsockname()[1]}"
