"""Clients that send a store as a stream and stop sending: the server gives up by itself."""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from kvpool.client import protocol
from kvpool.client.link import Place, open_link
from kvpool.client.streams import cut
from kvpool.client.ways import Ways
from kvpool.errors import TransferTimeoutError, UsageError
from kvpool.server import storing
from kvpool.testing.blocks import view_of
from tests.faults.pool_client import (
    LAYOUT,
    PATIENT,
    WAIT_S,
    blocks_of,
    chain_of,
)
from tests.faults.test_pool_service import running
from tests.waiting import until


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_a_stream_that_stands_still_ends_by_its_own_timeout(sent: int) -> None:
    """The call itself has all the time there is, as one of another language's client may have."""
    go_on = threading.Event()
    ways = Ways(LAYOUT, replace(PATIENT, ways=()))
    with running() as service, service.connect() as watcher, closing(ways):
        hashes = chain_of(watcher, 1, 4).hashes
        with closing(open_link(Place.of_run_dir(service.run_dir), LAYOUT, ways, WAIT_S)) as link:

            def requests() -> Iterator[protocol.WriteRequest]:
                yield protocol.WriteRequest(
                    header=protocol.StoreRequest(client=link.client, hashes=hashes, timeout_s=0.5)
                )
                payloads = cut(view_of(LAYOUT, blocks_of(1, 4)))
                for _ in range(sent):
                    yield protocol.WriteRequest(payload=next(payloads))
                go_on.wait(WAIT_S)

            try:
                with pytest.raises(TransferTimeoutError, match=r"did not come within 0\.5 s"):
                    link.caller.send(protocol.WRITE, requests(), WAIT_S)
            finally:
                go_on.set()
        stats = watcher.stats()
        assert (stats.reserved, stats.quarantined, stats.extra["stores"]) == (0, 0, 0)
        assert stats.extra["stores_aborted"] == 1
        assert watcher.match(chain_of(watcher, 1, 4)).blocks == 0


def test_a_stream_without_a_header_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "_HEADER_TIMEOUT_S", 0.5)
    go_on = threading.Event()
    with running() as service, service.connect() as watcher:
        ways = Ways(LAYOUT, replace(PATIENT, ways=()))
        place = Place.of_run_dir(service.run_dir)
        with closing(ways), closing(open_link(place, LAYOUT, ways, WAIT_S)) as link:

            def requests() -> Iterator[protocol.WriteRequest]:
                go_on.wait(WAIT_S)
                yield from ()

            try:
                with pytest.raises(UsageError, match="no header of a Write within"):
                    link.caller.send(protocol.WRITE, requests(), WAIT_S)
            finally:
                go_on.set()
        until(lambda: watcher.stats().extra["stores"] == 0, "the call has ended")


def test_a_reader_that_takes_nothing_pins_no_block_beyond_the_longest_lease() -> None:
    ways = Ways(LAYOUT, replace(PATIENT, ways=()))
    count = 256  # 16 MiB: more than a connection holds on its way
    with (
        running(lease_seconds_max=1.0, slots=count) as service,
        service.connect() as watcher,
        closing(ways),
    ):
        chain = chain_of(watcher, 1, count)
        source = view_of(LAYOUT, blocks_of(1, count))
        assert watcher.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S).stored == count
        place = Place.of_run_dir(service.run_dir)
        with closing(open_link(place, LAYOUT, ways, WAIT_S)) as link:
            asked = protocol.LeaseRequest(client=link.client, hashes=chain.hashes, seconds=1.0)
            lease = link.caller.call(protocol.LEASE, asked, WAIT_S).lease
            request = protocol.ReadRequest(client=link.client, lease=lease, count=count)
            with closing(link.caller.stream(protocol.READ, request, 4 * WAIT_S)) as stream:
                next(stream)  # and no more
                evict = protocol.EvictRequest(blocks=count)

                def emptied() -> bool:
                    service.tick()
                    link.caller.call(protocol.EVICT, evict, WAIT_S)
                    return watcher.stats().ready == 0

                until(emptied, "the blocks are free")
