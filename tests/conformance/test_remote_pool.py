"""The client of a server process passes the suite of pools."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.base import BlockPool
from kvpool.block import BlockLayout
from kvpool.client.connect import connect
from kvpool.config import TransferConfig
from kvpool.testing.pool_suite import PoolSuite
from tests.server_process import WAIT_S, ServerProcess

# The suite asks what a pool holds: a busy machine must not turn an answer into a miss.
PATIENT = TransferConfig(match_timeout_s=WAIT_S, request_timeout_s=WAIT_S)


class TestRemotePool(PoolSuite):
    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield

    def open_pool(self, layout: BlockLayout, slot_count: int) -> BlockPool:
        slot_bytes = -(-layout.block_bytes // 4096) * 4096
        run_dir = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-")))
        self.stack.enter_context(ServerProcess(run_dir, slot_count * slot_bytes))
        return self.stack.enter_context(connect(run_dir, layout, WAIT_S, config=PATIENT))
