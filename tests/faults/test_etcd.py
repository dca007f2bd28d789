"""etcd is killed, restarted, emptied and stopped: nobody leaves the view for it, nobody is lost."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.index.etcd import EtcdMembership
from kvpool.index.etcd_gateway import Gateway
from kvpool.index.membership import Members
from kvpool.testing.membership_suite import Listener, member, names
from tests.etcd_process import EtcdProcess, free_port
from tests.waiting import until

NAMES = ["a", "b", "c"]
LIFE_S = 2


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path) as process:
        yield process


class Pool:
    """Three nodes and one that looks on; ``told`` is every view that any of them was told."""

    def __init__(self, etcd: EtcdProcess, closing: ExitStack) -> None:
        self._etcd = etcd
        self._closing = closing
        self.nodes = [self.open() for _ in NAMES]
        for node, name in zip(self.nodes, NAMES, strict=True):
            node.join(member(name))
        self.listeners = [Listener(node) for node in [*self.nodes, self.open()]]
        for listener in self.listeners:
            listener.wait(lambda told: names(told) == NAMES, "not all were seen")
        self._before = [len(listener.told) for listener in self.listeners]

    def open(self) -> EtcdMembership:
        gateway = Gateway([self._etcd.url], timeout_s=1.0)
        # A grace time that the slowest machine keeps, within which every living node is back.
        made = EtcdMembership(gateway, life_s=LIFE_S, grace_s=30, silence_s=0.5)
        self._closing.callback(made.close)
        return made

    def told_since(self) -> list[Members]:
        pairs = zip(self.listeners, self._before, strict=True)
        return [told for listener, before in pairs for told in listener.told[before:]]

    def troubled(self) -> bool:
        return all(node.trouble() for node in self.nodes)

    def well(self) -> bool:
        return not any(node.trouble() for node in self.nodes)

    def keys(self) -> list[str]:
        gateway = Gateway([self._etcd.url], timeout_s=10)
        try:
            pairs = gateway.read(b"/kvpool/1/default/nodes/").pairs
        finally:
            gateway.close()
        return [pair.key.decode().split("/")[-1] for pair in pairs]


@pytest.fixture
def pool(etcd: EtcdProcess) -> Iterator[Pool]:
    with ExitStack() as closing:
        yield Pool(etcd, closing)


def _kill(etcd: EtcdProcess, wait: Callable[[], None]) -> None:
    etcd.kill()
    wait()
    etcd.start()


def _wipe(etcd: EtcdProcess, wait: Callable[[], None]) -> None:
    etcd.wipe()
    wait()
    etcd.start()


def _stop(etcd: EtcdProcess, wait: Callable[[], None]) -> None:
    etcd.halt()
    wait()
    etcd.signal(signal.SIGCONT)


FAULTS = (_kill, _wipe, _stop)


def test_a_fault_of_etcd_changes_no_view_and_loses_nobody(tmp_path: Path) -> None:
    """Each fault with an etcd of its own, side by side: they wait more than they work."""

    def check(fault: Callable[[EtcdProcess, Callable[[], None]], None]) -> None:
        folder = tmp_path / fault.__name__
        folder.mkdir()
        with EtcdProcess(folder) as etcd, ExitStack() as closing:
            _require_all_stay(fault, etcd, Pool(etcd, closing))

    with ThreadPoolExecutor(len(FAULTS)) as threads:
        list(threads.map(check, FAULTS))


def _require_all_stay(
    fault: Callable[[EtcdProcess, Callable[[], None]], None], etcd: EtcdProcess, pool: Pool
) -> None:
    def wait() -> None:
        until(pool.troubled, "the trouble with etcd was not said")
        began = time.monotonic()  # every lease would be over by now
        until(lambda: time.monotonic() - began > LIFE_S, "time")
        assert all(names(node.members()) == NAMES for node in pool.nodes)

    fault(etcd, wait)
    until(pool.well, "etcd was not found again")
    until(lambda: pool.keys() == NAMES, "not every node has its key again")
    late = Listener(pool.open())
    late.wait(lambda told: names(told) == NAMES, "who comes later does not see all")
    assert all(names(told) == NAMES for told in pool.told_since())


def test_a_key_that_somebody_removed_is_put_back(etcd: EtcdProcess, pool: Pool) -> None:
    gateway = Gateway([etcd.url], timeout_s=10)
    try:
        for _ in range(3):
            lease = gateway.grant(LIFE_S)
            gateway.put(b"/kvpool/1/default/nodes/b", b"{}", lease)
            gateway.revoke(lease)
            until(lambda: pool.keys() == NAMES, "the key was not put back")
    finally:
        gateway.close()
    assert all(names(told) == NAMES for told in pool.told_since())


def test_a_second_process_of_the_same_name_is_said_aloud(pool: Pool) -> None:
    second = pool.open()
    second.join(member("b", run=2))
    until(lambda: "another process has joined as node b" in pool.nodes[1].trouble(), "not said")
    pool.listeners[0].wait(lambda told: told[1] == member("b", run=2), "the newer run was not seen")
    pool.nodes[1].leave(10)  # and does not take the key of the other with it
    until(lambda: pool.keys() == NAMES, "the key of the newer run is gone")
    assert second.trouble() == ""


def test_what_is_no_node_is_passed_over(etcd: EtcdProcess, pool: Pool) -> None:
    gateway = Gateway([etcd.url], timeout_s=10)
    try:
        lease = gateway.grant(60)
        for key in (b"", b"../x", b"\xff", b"x" * 300, b"good"):
            gateway.put(b"/kvpool/1/default/nodes/" + key, b"{not json", lease)
    finally:
        gateway.close()
    late = Listener(pool.open())
    late.wait(lambda told: names(told) == NAMES, "who comes later does not see all")


def test_a_pool_that_never_saw_etcd_is_its_own_node_and_closes_in_time() -> None:
    with ExitStack() as closing:
        gateway = Gateway([f"http://127.0.0.1:{free_port()}"], timeout_s=1.0)
        alone = EtcdMembership(gateway, life_s=LIFE_S)
        closing.callback(alone.close)
        alone.join(member("a"))
        until(lambda: "cannot be reached" in alone.trouble(), "the trouble was not said")
        assert alone.members() == (member("a"),)
        alone.leave(0.1)
        assert alone.members() == ()
