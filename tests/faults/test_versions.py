"""Sides of two versions of the protocol: what one of them does not know is not said to it."""

import numpy as np
import pytest

from kvpool.block import BlockLayout
from kvpool.client import protocol
from kvpool.memory import Crcs
from kvpool.server import storing
from kvpool.testing.blocks import view_of
from kvpool.testing.pair import empty
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, WAIT_S, blocks_of, chain_of, store
from tests.faults.test_pool_service import running


@pytest.mark.parametrize("spoken", [protocol.PROTOCOL_VERSION_MIN, protocol.SLOT_SUMS_VERSION])
@pytest.mark.parametrize("older", ["client", "server"])
def test_checksums_are_left_to_the_slots_only_where_both_sides_know_that(
    older: str, spoken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of version 2 refuses a store without them, and one of a version 2 client has them."""
    sums: list[int] = []
    real = storing._checked  # pyright: ignore[reportPrivateUsage]

    def note(request: protocol.StoreRequest, layout: BlockLayout) -> Crcs | None:
        sums.append(len(request.crcs))
        return real(request, layout)

    monkeypatch.setattr(storing, "_checked", note)
    if older == "client":
        monkeypatch.setattr(protocol, "PROTOCOL_VERSION", spoken)
    else:
        monkeypatch.setattr(protocol, "spoken_version", lambda version: min(version, spoken))
    with running() as service, service.connect() as pool:
        keeper = pool._keeper  # pyright: ignore[reportPrivateUsage]
        assert keeper.welcome().version == spoken
        assert store(pool, 1) == CHAIN_BLOCKS
        told = 0 if spoken >= protocol.SLOT_SUMS_VERSION else 4 * LAYOUT.crc_count * CHAIN_BLOCKS
        assert sum(sums) == told and sums
        out = empty(LAYOUT, CHAIN_BLOCKS)
        with pool.lease(pool.match(chain_of(pool, 1)), WAIT_S) as lease:
            pool.load(lease, view_of(LAYOUT, out), deadline_s=WAIT_S).wait(WAIT_S)
        np.testing.assert_array_equal(out, blocks_of(1, CHAIN_BLOCKS))
