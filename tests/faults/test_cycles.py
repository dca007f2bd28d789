"""Peers that connect and are killed, many times: what they held comes back, to the last of it."""

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.errors import PeerUnreachableError
from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import Collected, named, publish
from kvpool.transfer.base import Endpoint
from kvpool.transfer.host import HostTransport
from kvpool.transfer.ucx import UcxTransport
from tests.conftest import Count
from tests.faults.peer import LAYOUT, SEED, WAIT_S
from tests.faults.short_lived import Nursery
from tests.waiting import until

pytestmark = pytest.mark.ucx

BLOCKS = 64
# Under way at once over each transport when an owner is killed.
READS = 8
# Cycles after which caches of the allocator and of libucp are full.
WARM = 5
# What the process may have grown by in the end: over a soak 2 KiB a peer. A leak of one connection's
# inbox would be 2 MiB and more a cycle, of a ring 1.1 MiB, of a mapped arena as much as it has blocks.
GROWTH_BYTES_MAX = 2 << 20


class Survivor:
    """This process: an arena behind both transports, to which peers connect."""

    def __init__(self, folder: Path) -> None:
        self.host, self.ucx = HostTransport("survivor"), UcxTransport("survivor")
        self.told = {transport: Collected() for transport in (self.host, self.ucx)}
        self.endpoints: list[Endpoint] = []
        self.blocks = payload(LAYOUT, BLOCKS, SEED)
        # Written once here, or how many reads came whole before a kill would count as growth.
        self.outs = [[np.full_like(self.blocks, 7) for _ in range(READS)] for _ in range(2)]
        self.arenas: list[Arena] = []
        addresses = [
            self.host.listen(str(folder / "us"), lambda endpoint: self._met(self.host, endpoint)),
            self.ucx.listen("ucx://127.0.0.1:0", lambda endpoint: self._met(self.ucx, endpoint)),
        ]
        slots = None
        for transport in (self.host, self.ucx):
            arena = Arena(LAYOUT, BLOCKS, transport.incarnation)
            transport.register(arena)
            slots = named(0, publish(arena, self.blocks))
            self.arenas.append(arena)
        assert slots is not None
        self.nursery = Nursery(addresses[0], addresses[1], slots)

    def _met(self, transport: HostTransport | UcxTransport, endpoint: Endpoint) -> None:
        self.endpoints.append(endpoint)
        endpoint.on_notification(self.told[transport])

    def be_read(self, number: int) -> None:
        """Let a peer connect over both, and kill it in the middle of its reads."""
        child = self.nursery.reader()
        for told in self.told.values():
            assert told.wait(number + 1)[-1] == str(child).encode()
        puts = self.ucx.counts()["put_bytes"]
        until(lambda: self.ucx.counts()["put_bytes"] > puts)
        os.kill(child, signal.SIGKILL)
        for endpoint in self.endpoints:
            until(lambda endpoint=endpoint: not endpoint.alive())  # type: ignore[misc]
        self.endpoints.clear()

    def read(self) -> None:
        """Read an owner over both, and kill it while reads of ours are under way."""
        owner = self.nursery.owner()
        endpoints = [
            transport.connect(address, WAIT_S)
            for transport, address in zip((self.host, self.ucx), owner.addresses, strict=True)
        ]
        reads = []
        for endpoint, out in zip(endpoints, self.outs, strict=True):
            endpoint.wait_region(0, WAIT_S)
            for room in out:
                reads.append(
                    endpoint.read_blocks(
                        view_of(LAYOUT, room),
                        owner.slots,
                        source_layout=LAYOUT,
                        dest_layer=None,
                        deadline_s=WAIT_S,
                    )
                )
        assert reads[-READS].wait(WAIT_S) == BLOCKS  # the others over UCX are behind it
        os.kill(owner.pid, signal.SIGKILL)
        for endpoint, out in zip(endpoints, self.outs, strict=True):
            for room in out:
                with contextlib.suppress(PeerUnreachableError):
                    assert reads.pop(0).wait(WAIT_S) == BLOCKS
                    np.testing.assert_array_equal(room, self.blocks)
            until(lambda endpoint=endpoint: not endpoint.alive())  # type: ignore[misc]
            endpoint.close()

    def held(self) -> dict[str, int]:
        """Say what is held for peers."""
        counts = self.ucx.counts()
        return {
            "endpoints": counts["endpoints"],
            "batches": counts["batches"],
            "grants": sum(arena.counts().grants for arena in self.arenas),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "mapped": Path("/proc/self/maps").read_text().count("memfd:"),
        }

    def close(self) -> None:
        self.nursery.close()
        self.ucx.close()
        self.host.close()
        for arena in self.arenas:
            arena.close()


@contextmanager
def survivor(folder: Path) -> Generator[Survivor]:
    it = Survivor(folder)
    try:
        yield it
    finally:
        it.close()


def within(held: dict[str, int], before: dict[str, int]) -> bool:
    """Say whether no more is held; what earlier tests had may have gone meanwhile."""
    return all(held[name] <= count for name, count in before.items())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_connections_and_kills_leave_nothing_behind(tmp_path: Path, count: Count) -> None:
    with survivor(tmp_path) as it:
        before = it.held()
        assert before["endpoints"] == before["grants"] == 0
        for number in range(WARM):
            it.be_read(number)
            it.read()
        until(lambda: within(it.held(), before))
        resident = resident_bytes()
        cycles = count(10, 500)
        for number in range(WARM, cycles):
            it.be_read(number)
            it.read()
        until(lambda: within(it.held(), before))
        grown = resident_bytes() - resident
        print(f"{cycles} readers and {cycles} owners killed: {grown / 1024:.0f} KiB grown")
        assert grown < GROWTH_BYTES_MAX
