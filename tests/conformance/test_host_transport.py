"""The host transport passes the suite of transports."""

import itertools
from pathlib import Path

import pytest

from kvpool.testing.transport_suite import TransportSuite
from kvpool.transfer.base import Transport
from kvpool.transfer.host import HostTransport


class TestHostTransport(TransportSuite):
    folder: Path
    numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open_transport(self) -> Transport:
        return HostTransport()

    def fresh_address(self) -> str:
        return str(self.folder / f"{next(self.numbers)}.sock")
