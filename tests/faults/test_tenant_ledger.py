"""What a tenant has in the pool counts, whenever he leaves: else he would store without a limit."""
# pyright: reportPrivateUsage=false

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from kvpool.block import HASH_BYTES
from kvpool.client import protocol
from kvpool.errors import CapacityError
from kvpool.metrics import Metrics
from kvpool.server.tenancy import Tenancy
from kvpool.server.tenant import Tenant, calling_tenant
from tests.faults.pool_client import LAYOUT, WAIT_S, chain_of
from tests.faults.test_pool_service import BLOCKS, Storer, running
from tests.faults.test_stream_clients import Waiting
from tests.waiting import until

LIMIT_BYTES = BLOCKS * LAYOUT.block_bytes
RED = Tenant(name="red", operator=False, store_bytes_max=LIMIT_BYTES)


@pytest.mark.parametrize("how", ["cancelled", "lost"])
def test_blocks_count_though_their_tenant_leaves_before_the_answer(how: str) -> None:
    waiting, tenancy = Waiting(), Tenancy(Metrics())
    with (
        running(holdings=waiting, tenancy=tenancy) as service,
        service.connect() as watcher,
        closing(Storer(service)) as storer,
        closing(Storer(service)) as again,
    ):
        for one in (storer, again):
            session = service.pool.sessions._sessions[one.link.client]
            session.tenant, session.caller = "red", RED
        request = storer.request(chain_of(watcher, 1, BLOCKS).hashes)
        asked = storer.link.caller.ask(protocol.STORE, request, WAIT_S)
        assert waiting.told.wait(WAIT_S), "they are here"
        if how == "cancelled":
            asked.cancel()
        else:
            storer.link.close()
        until(lambda: not tenancy._stores["red"], "the store has ended")
        assert watcher.match(chain_of(watcher, 1, BLOCKS)).blocks == BLOCKS
        waiting.go.set()
        refused = again.store(again.request(chain_of(watcher, 2, BLOCKS).hashes))
        assert isinstance(refused, CapacityError), refused
        assert watcher.stats().ready == BLOCKS


def test_blocks_count_though_their_tenant_leaves_while_room_is_made_for_their_names() -> None:
    looked, go_on = threading.Event(), threading.Event()

    def present(_: bytes) -> int:
        looked.set()
        assert go_on.wait(WAIT_S)
        return 0

    async def main() -> None:
        tenancy = Tenancy(Metrics())
        tenancy.opened(BLOCKS // 2, LAYOUT.block_bytes, present)
        calling_tenant.set(RED)
        names = bytes(range(256)) * HASH_BYTES
        before, after = names[: BLOCKS * HASH_BYTES], names[::-1][: BLOCKS * HASH_BYTES]
        await tenancy.stored(before, executor)
        store = asyncio.create_task(tenancy.stored(after, executor))
        assert await asyncio.to_thread(looked.wait, WAIT_S)
        store.cancel()
        with pytest.raises(asyncio.CancelledError):
            await store
        go_on.set()
        ledger = tenancy._ledger
        assert ledger is not None
        async with asyncio.timeout(WAIT_S):
            while not ledger._names.match(after):
                await asyncio.sleep(0.005)

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(main())
