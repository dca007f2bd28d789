"""A pool of servers over etcd: whatever becomes of etcd, the pool serves, and its ring stays."""

import functools
import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvpool.cli.main import main
from kvpool.client.cluster import ClusterPool
from kvpool.client.connect import connect
from kvpool.testing.blocks import Payload, namespace, payload, view_of
from tests.etcd_process import EtcdProcess, free_port
from tests.faults.pool_client import LAYOUT, PATIENT, WAIT_S
from tests.server_process import ServerProcess
from tests.waiting import until

NAMES = ["a", "b", "c"]
DRAM_BYTES = 64 * LAYOUT.block_bytes
BLOCKS = 4


class Servers:
    """Servers of one ring, named by etcd, and how to start one more of them."""

    def __init__(self, folder: Path, etcd: EtcdProcess, closing_: ExitStack) -> None:
        self._folder = folder
        self._etcd = etcd
        self._closing = closing_
        self.addresses: dict[str, str] = {}
        self.running: dict[str, ServerProcess] = {}
        # Ends after the servers do: they die with the thread that started them.
        self._threads = closing_.enter_context(ThreadPoolExecutor(16))

    def start(self, name: str) -> None:
        address = self.addresses.setdefault(name, f"127.0.0.1:{free_port()}")
        config = self._folder / f"{name}.toml"
        config.write_text(
            f'[node]\nname = "{name}"\n'
            f'[listen]\naddress = "{address}"\n'
            f'[ring.etcd]\nendpoints = ["{self._etcd.url}"]\nlife_s = 2\n'
        )
        process = ServerProcess(self._folder / name, DRAM_BYTES, "--config", str(config))
        self._closing.enter_context(process)
        self.running[name] = process

    def start_all(self, names: Sequence[str]) -> None:
        """Start servers at once, and wait until each sees all of them."""
        list(self._threads.map(self.start, names))
        until(lambda: all(self.seen_by(name) == sorted(names) for name in names), "each sees all")

    def descriptors(self) -> dict[str, int]:
        return {
            name: len(os.listdir(f"/proc/{process.pid}/fd"))
            for name, process in self.running.items()
        }

    def counts(self, count: str) -> dict[str, int]:
        """Return one count of each server."""
        name = next(iter(self.addresses))
        assert main(["stat", "--server", self.addresses[name], "--json"]) == 0
        found = json.loads(self.capsys.readouterr().out)
        return {node: counts[count] for node, counts in found.items()}

    def seen_by(self, name: str) -> list[str]:
        """Return the nodes that a server names."""
        return [row["node"] for row in self._nodes(name)]

    def _nodes(self, name: str) -> list[dict[str, str]]:
        assert main(["nodes", "--server", self.addresses[name], "--json"]) == 0
        found: list[dict[str, str]] = json.loads(self.capsys.readouterr().out)
        return found

    capsys: pytest.CaptureFixture[str]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path) as process:
        yield process


@pytest.fixture
def servers(
    tmp_path: Path, etcd: EtcdProcess, capsys: pytest.CaptureFixture[str]
) -> Iterator[Servers]:
    with ExitStack() as stack:
        made = Servers(tmp_path, etcd, stack)
        made.capsys = capsys
        yield made


def _tokens(number: int) -> list[int]:
    return list(range(number, number + BLOCKS * LAYOUT.block_tokens))


def _store(pool: ClusterPool, number: int) -> int:
    chain = pool.chain(namespace(LAYOUT, f"chain {number}"), _tokens(number))
    source = view_of(LAYOUT, payload(LAYOUT, BLOCKS, seed=number))
    return pool.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S).stored


def _loads(pool: ClusterPool, number: int) -> bool:
    """Load a chain, and say whether all of it came. What came is compared."""
    chain = pool.chain(namespace(LAYOUT, f"chain {number}"), _tokens(number))
    found: Payload = payload(LAYOUT, BLOCKS, seed=0)
    with pool.lease(pool.match(chain), 30) as lease:
        if not lease.blocks:
            return False
        dest = view_of(LAYOUT, found[: lease.blocks])
        done = pool.load(lease, dest, deadline_s=WAIT_S).wait(WAIT_S)
    assert (found[:done] == payload(LAYOUT, BLOCKS, seed=number)[:done]).all()
    return done == BLOCKS


def _stopped(etcd: EtcdProcess, during: Callable[[], None]) -> None:
    etcd.halt()
    during()
    etcd.signal(signal.SIGCONT)


def _killed(etcd: EtcdProcess, during: Callable[[], None]) -> None:
    etcd.kill()
    during()
    etcd.start()


def _emptied(etcd: EtcdProcess, during: Callable[[], None]) -> None:
    etcd.wipe()
    during()
    etcd.start()


def test_the_pool_serves_whatever_becomes_of_etcd(etcd: EtcdProcess, servers: Servers) -> None:
    servers.start_all(NAMES)
    seeds = list(servers.addresses.values())
    numbers = itertools.count(1)
    with closing(connect(seeds, LAYOUT, WAIT_S, config=PATIENT)) as pool:

        def during() -> None:
            for number in itertools.islice(numbers, 8):
                assert _store(pool, number) == BLOCKS
                until(functools.partial(_loads, pool, number), "a stored chain is found")
            assert all(servers.seen_by(name) == NAMES for name in NAMES)

        for fault in (_killed, _emptied, _stopped):
            fault(etcd, during)
            assert all(servers.seen_by(name) == NAMES for name in NAMES)
        # etcd works again: a node that ends leaves the ring, and one that comes is in it.
        assert servers.running["c"].stop() == 0
        until(lambda: servers.seen_by("a") == ["a", "b"], "who left is gone")
        servers.start("c")
        until(lambda: servers.seen_by("a") == NAMES, "who came back is there")
        for number in range(1, next(numbers)):
            _loads(pool, number)  # what is left is right, whatever left with c


def test_every_lookup_is_answered_while_the_ring_changes(
    servers: Servers, count: Callable[[int, int], int]
) -> None:
    """One server leaves and others join; what is on a server that stays is found all the time."""
    servers.start_all(NAMES)
    chains = range(1, 9)
    with closing(connect([servers.addresses["a"]], LAYOUT, WAIT_S, config=PATIENT)) as pool:
        assert all(_store(pool, number) == BLOCKS for number in chains)
        wanted = [
            pool.chain(namespace(LAYOUT, f"chain {number}"), _tokens(number)) for number in chains
        ]
        holder = pool.match(wanted[0]).pieces[0].stores[0].node
        leaving = next(name for name in NAMES if name != holder)
        changing = threading.Event()
        asked: list[int] = []

        def ask() -> None:
            while not changing.is_set():
                for chain in wanted:
                    asked.append(pool.match(chain).blocks)

        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(ask)
            try:
                assert servers.running[leaving].stop() == 0
                left = [name for name in NAMES if name != leaving]
                until(lambda: servers.seen_by(holder) == left, "who left is gone")
                servers.start("d")
                until(lambda: servers.seen_by(holder) == [*left, "d"], "who came is there")
                # Readers go by the ring with it a little later.
                until(lambda: len(pool.nodes()) == 3, "the pool is connected to it")
                seen = len(asked)
                until(lambda: len(asked) > seen + count(200, 4_000), "look-ups go on")
            finally:
                changing.set()
            asking.result(WAIT_S)
        assert set(asked) == {BLOCKS}


def test_all_join_that_start_at_once_and_what_they_take_stays_flat(
    servers: Servers, count: Callable[[int, int], int]
) -> None:
    """A few servers and clients, and 16 and 64 of them in a soak."""
    names = [f"n{number:02}" for number in range(count(2, 16))]
    servers.start_all(names)
    seeds = list(servers.addresses.values())
    with ExitStack() as stack, ThreadPoolExecutor(count(4, 64)) as threads:

        def connected(_: int) -> ClusterPool:
            return connect(seeds, LAYOUT, WAIT_S, config=PATIENT)

        pools = list(threads.map(connected, range(count(4, 64))))
        for pool in pools:
            stack.enter_context(closing(pool))
        before: dict[str, int] = {}

        def work(client: int) -> None:
            rng = random.Random(client)
            for _ in range(count(10, 20)):
                number = rng.randrange(40)
                if rng.random() < 0.5:
                    _store(pools[client], number)
                else:
                    _loads(pools[client], number)

        for _ in range(2):
            list(threads.map(work, range(len(pools))))
            before = before or servers.descriptors()
        after = servers.descriptors()
        assert all(after[name] <= before[name] + len(pools) for name in names), (before, after)
        until(lambda: not any(servers.counts("leases").values()), "every lease was given back")
    until(lambda: not any(servers.counts("quarantined").values()), "quarantine is empty")
