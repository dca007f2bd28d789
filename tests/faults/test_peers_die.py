"""Peers over UCX that die, stop or leave: before, in and after a read. And links that fail."""

import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from kvpool.errors import PeerUnreachableError, StaleIncarnationError
from kvpool.transfer.ucx import UcxTransport
from tests.faults.owner import Owner
from tests.faults.peer import ROOT, Peer, peer
from tests.faults.scene import BLOCKS, HEARTBEAT_S, LATE, Fault, Scene

pytestmark = pytest.mark.ucx

FAULTS = {
    "killed": Fault(Peer.kill, (PeerUnreachableError,)),
    "left": Fault(lambda other: other.do("leave"), (PeerUnreachableError,)),
    "stopped": Fault(Peer.stop, LATE, Peer.resume),
}


@pytest.fixture(scope="module")
def lively() -> Iterator[Owner]:
    """An owner to which nothing happens."""
    with peer("ucx") as other, UcxTransport("first") as transport:
        yield Owner(transport, other, blocks=BLOCKS)


@contextmanager
def scene(lively: Owner, fault: Fault) -> Generator[Scene]:
    with (
        peer("ucx") as other,
        UcxTransport("first") as first,
        UcxTransport("survivor", heartbeat_timeout_s=HEARTBEAT_S) as transport,
    ):
        yield Scene(transport, Owner(first, other, blocks=BLOCKS), lively, fault)


@pytest.mark.parametrize("name", FAULTS)
def test_before_a_read(lively: Owner, name: str) -> None:
    with scene(lively, FAULTS[name]) as it:
        it.before()


@pytest.mark.parametrize("name", FAULTS)
def test_during_a_read(lively: Owner, name: str) -> None:
    with scene(lively, FAULTS[name]) as it:
        it.during()


@pytest.mark.parametrize("name", FAULTS)
def test_after_a_read(lively: Owner, name: str) -> None:
    with scene(lively, FAULTS[name]) as it:
        it.after()


def test_a_peer_that_starts_again_on_its_port_is_another(lively: Owner) -> None:
    with UcxTransport("survivor") as transport, peer("ucx") as first:
        before = Owner(transport, first, blocks=BLOCKS)
        before.require_exact()
        other = lively.through(transport)
        first.kill()
        with peer("ucx") as second:
            after = Owner(transport, second, before.address, blocks=BLOCKS)
            with pytest.raises(PeerUnreachableError):
                before.require_exact()
            with pytest.raises(StaleIncarnationError):
                before.connect()
            after.require_exact()
            other.require_exact()


@pytest.mark.timeout(600)
def test_links_that_are_cut_slow_or_lossy() -> None:
    """In a process of its own: libucp reads the routes once a process, so the links come first."""
    cases = "tests/faults/link_cases.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cases],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
