"""Links between hosts that are cut, slow, or lose packets: before, in and after a read.

Run by ``test_peers_die`` in a process of its own, in which the links are made before libucp is first
used: it reads the machine's routes once.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvpool.transfer.ucx import UcxTransport
from tests.faults.network import Link, LossyLink
from tests.faults.owner import Owner
from tests.faults.peer import Peer, peer
from tests.faults.scene import BLOCKS, HEARTBEAT_S, LATE, SHORT_S, Fault, Scene


def _slow(other: Peer) -> None:
    other.do("throttle", device=other.link.far, rate="10mbit")


def _quick(other: Peer) -> None:
    other.do("throttle", device=other.link.far, rate=None)


def _lose(other: Peer, loss: float = 0.05, delay_s: float = 0.02) -> None:
    assert isinstance(other.link, LossyLink)
    other.link.loss, other.link.delay_s = loss, delay_s


def _lose_nothing(other: Peer) -> None:
    assert isinstance(other.link, LossyLink)
    assert other.link.lost > 0
    _lose(other, 0.0, 0.0)


FAULTS = {
    "cut": (Link, Fault(lambda other: other.link.cut(), LATE, lambda other: other.link.mend())),
    "slow": (Link, Fault(_slow, LATE, _quick, fails=False)),
    "lossy": (LossyLink, Fault(_lose, LATE, _lose_nothing, fails=False)),
    # Everything is lost on the way; both ends think that they are connected.
    "silent": (LossyLink, Fault(lambda other: _lose(other, 1.0), LATE, _lose_nothing)),
}


@pytest.fixture(scope="module")
def owners() -> Iterator[dict[type[Link] | None, Owner]]:
    """Owners behind links, and one on loopback, which is the lively one."""
    with ExitStack() as stack:
        peers = {link: stack.enter_context(peer("ucx", link)) for link in (Link, LossyLink, None)}
        transport = stack.enter_context(open_transport())
        yield {link: Owner(transport, other, blocks=BLOCKS) for link, other in peers.items()}


def open_transport() -> UcxTransport:
    """Open a transport on all interfaces: the links', and loopback."""
    return UcxTransport(
        "survivor", host="0.0.0.0", trusted_network=True, heartbeat_timeout_s=HEARTBEAT_S
    )


@pytest.fixture(params=FAULTS)
def scene(
    owners: dict[type[Link] | None, Owner], request: pytest.FixtureRequest
) -> Iterator[Scene]:
    link, fault = FAULTS[request.param]
    with open_transport() as transport:
        yield Scene(transport, owners[link], owners[None], fault)


def test_before_a_read(scene: Scene) -> None:
    scene.before()


def test_during_a_read(scene: Scene) -> None:
    scene.during()


def test_after_a_read(scene: Scene) -> None:
    scene.after()


def test_connecting_over_a_cut_link_costs_its_deadline(
    owners: dict[type[Link] | None, Owner],
) -> None:
    owner = owners[Link]
    with open_transport() as transport:
        lively = owners[None].through(transport)
        owner.peer.link.cut()
        with pytest.raises(LATE):
            transport.connect(owner.address, SHORT_S, owner.incarnation)
        lively.require_exact()
        owner.peer.link.mend()
        owner.through(transport).require_exact()
