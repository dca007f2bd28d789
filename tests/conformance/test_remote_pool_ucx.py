"""The client of a server passes the suite of pools, bytes over UCX, each test with a server of its own."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.base import BlockPool
from kvpool.block import BlockLayout
from kvpool.client.connect import connect
from kvpool.client.protocol import TRANSPORT_SOCKET
from kvpool.config import TransferConfig
from kvpool.errors import UsageError
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.pool_suite import PoolSuite
from kvpool.transfer.choice import TransportKind, open_transport
from kvpool.transfer.ucx import UcxTransport
from tests.server_process import WAIT_S, ServerProcess

pytestmark = pytest.mark.ucx

# The suite asks what a pool holds: a busy machine must not turn an answer into a miss.
PATIENT = TransferConfig(match_timeout_s=WAIT_S, request_timeout_s=WAIT_S)


class TestRemotePoolOverUcx(PoolSuite):
    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield

    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        slot_bytes = -(-layout.block_bytes // 4096) * 4096
        run_dir = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-")))
        dram_bytes = slot_count * slot_bytes
        self.stack.enter_context(ServerProcess(run_dir, dram_bytes, "--transport", "ucx"))
        assert not (run_dir / TRANSPORT_SOCKET).exists()
        transport = self.stack.enter_context(UcxTransport())
        return self.stack.enter_context(
            connect(run_dir, layout, WAIT_S, transport=transport, config=PATIENT)
        )


@pytest.mark.parametrize(("kind", "other"), [("host", "ucx"), ("ucx", "host")])
def test_another_transport_than_the_server_has_is_named(
    kind: str, other: TransportKind, tmp_path: Path
) -> None:
    with (
        ServerProcess(tmp_path, 1 << 20, "--transport", kind),
        open_transport(other, "test") as transport,
        pytest.raises(UsageError, match="--transport"),
    ):
        connect(tmp_path, SMALL_LAYOUT, WAIT_S, transport=transport)


def test_a_client_without_a_transport_takes_the_servers_kind(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, 1 << 20, "--transport", "ucx"),
        connect(tmp_path, SMALL_LAYOUT, WAIT_S) as pool,
    ):
        assert pool.stats().extra["clients"] == 1
