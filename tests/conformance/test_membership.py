"""The static list, etcd and the fake pass the suite of memberships."""

import itertools
from collections.abc import Iterator

import pytest

from kvpool.block import NodeId
from kvpool.index.etcd import EtcdMembership
from kvpool.index.etcd_gateway import Gateway
from kvpool.index.membership import Member, Membership, StaticMembership
from kvpool.testing.fake_membership import FakeMembership, SharedMembers
from kvpool.testing.membership_suite import NAMES, MembershipSuite, SharedMembershipSuite
from tests.etcd_process import EtcdProcess

_pools = itertools.count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path_factory.mktemp("etcd")) as process:
        yield process


class TestStaticMembership(MembershipSuite):
    def open_membership(self) -> Membership:
        listed = [Member(node=NodeId(name), address="127.0.0.1:7000") for name in NAMES]
        return StaticMembership(listed)


class TestFakeMembership(SharedMembershipSuite):
    shared: SharedMembers

    @pytest.fixture(autouse=True)
    def _own_members(self) -> None:
        self.shared = SharedMembers()

    def open_membership(self) -> Membership:
        return FakeMembership(self.shared)


class TestEtcdMembership(SharedMembershipSuite):
    url: str
    pool: str

    @pytest.fixture(autouse=True)
    def _own_pool(self, etcd: EtcdProcess) -> None:
        self.url = etcd.url
        self.pool = f"pool-{next(_pools)}"

    def open_membership(self) -> Membership:
        gateway = Gateway([self.url], timeout_s=10)
        return EtcdMembership(gateway, pool=self.pool, life_s=2, grace_s=0.5, silence_s=0.5)
