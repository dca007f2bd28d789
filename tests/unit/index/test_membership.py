"""The view of the members follows its source, and no fault of the source empties it."""

import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.block import NodeId
from kvpool.errors import PeerUnreachableError, UsageError
from kvpool.index import etcd
from kvpool.index.etcd import EtcdMembership
from kvpool.index.etcd_gateway import Gateway, Snapshot
from kvpool.index.membership import Member, MemberView, StaticMembership
from kvpool.testing.membership_suite import Listener, member, names

GRACE_S = 10.0
WAIT_S = 20.0
NODES = ("a", "b", "c", "d")
OWN = member("own")


def _view(*there: str) -> MemberView:
    view = MemberView(GRACE_S)
    view.whole({NodeId(name): member(name) for name in there}, 0.0, resumed=True)
    return view


def test_a_member_that_vanished_stays_for_the_grace_time() -> None:
    view = _view("a", "b")
    view.vanished(NodeId("a"), 1.0)
    view.expire(10.9)
    assert names(view.members()) == ["a", "b"]
    assert view.missing() == ["a"]
    view.expire(11.0)
    assert names(view.members()) == ["b"]


def test_one_that_comes_back_in_time_was_never_away() -> None:
    view = _view("a")
    view.vanished(NodeId("a"), 1.0)
    view.put(member("a", run=2))
    view.expire(1000.0)
    assert view.members() == (member("a", run=2),)


def test_one_that_says_it_leaves_is_gone_at_once() -> None:
    view = _view("a", "b")
    view.left(NodeId("a"))
    assert names(view.members()) == ["b"]


def test_an_empty_source_empties_nothing() -> None:
    view = _view(*NODES)
    view.whole({}, 5.0, resumed=False)
    view.expire(5.0)
    assert names(view.members()) == list(NODES)


def test_the_grace_time_begins_anew_after_silence() -> None:
    view = _view("a")
    view.vanished(NodeId("a"), 1.0)
    view.whole({}, 500.0, resumed=True)
    view.expire(509.0)
    assert names(view.members()) == ["a"]
    view.expire(510.0)
    assert view.members() == ()


def test_this_node_is_there_whatever_the_source_says() -> None:
    view = _view("a")
    view.own(OWN)
    view.left(OWN.node)
    view.put(Member(node=OWN.node, address="elsewhere:1"))
    view.vanished(OWN.node, 0.0)
    view.whole({}, 1.0, resumed=False)
    view.expire(1000.0)
    assert view.members() == (OWN,)


STEP = st.one_of(
    st.tuples(st.just("die"), st.sampled_from(NODES)),
    st.tuples(st.just("start"), st.sampled_from(NODES)),
    st.tuples(st.just("leave"), st.sampled_from(NODES)),
    st.tuples(st.sampled_from(["wipe", "stall", "resume", "read"]), st.just("")),
    st.tuples(st.just("wait"), st.sampled_from(["1", "4", "30"])),
)


@given(st.lists(STEP, max_size=60))
def test_who_lives_stays_and_who_died_goes(steps: list[tuple[str, str]]) -> None:
    """Play a source and nodes. Nodes that live put their key back within 2 s of an answer."""
    view, now, resumed, stalled = MemberView(GRACE_S), 0.0, True, False
    alive: set[str] = set()
    left: set[str] = set()
    source: set[str] = set()
    seen: set[str] = set()  # who must be in the view: alive, and read from the source once
    died_s: dict[str, float] = {}

    def read() -> None:
        nonlocal resumed
        view.whole({NodeId(name): member(name) for name in source}, now, resumed=resumed)
        resumed = False
        view.expire(now)

    for kind, value in steps:
        if kind == "die" and value in alive:
            alive.discard(value)
            died_s[value] = 0.0
        elif kind == "start" and value not in alive:
            alive.add(value)
            died_s.pop(value, None)
        elif kind == "leave" and value in alive and not stalled:
            alive.discard(value)
            source.discard(value)
            seen.discard(value)
            view.left(NodeId(value))
        elif kind == "wipe":
            source.clear()
        elif kind in ("stall", "resume"):
            stalled = kind == "stall"
            resumed = resumed or stalled
        elif kind == "wait":
            for _ in range(int(value)):
                now += 1.0
                if stalled:
                    continue
                read()
                source = set(alive)  # those that live are back, leases of the dead are over
                for name in died_s:
                    died_s[name] += 1.0
        elif kind == "read" and not stalled:
            read()
            seen |= source & alive
        shown = set(names(view.members()))
        assert seen & alive <= shown
        assert not {name for name, age_s in died_s.items() if age_s > GRACE_S + 2} & shown
        assert not left & shown


def test_a_static_list_names_each_node_once_and_knows_who_may_join() -> None:
    with pytest.raises(UsageError, match="listed twice"):
        StaticMembership([member("a"), member("a", run=2)])
    membership = StaticMembership([Member(node=NodeId("a"), address="h:1")])
    with pytest.raises(UsageError, match=r"not among the listed nodes \(a\)"):
        membership.join(member("z"))


def test_a_subscriber_that_comes_later_does_not_take_a_change_from_others() -> None:
    membership = StaticMembership([Member(node=NodeId("a"), address="h:1")])
    first = Listener(membership)
    membership.join(member("a"))
    Listener(membership)
    membership.join(member("a", run=2))
    assert [told[0] for told in first.told[1:]] == [member("a"), member("a", run=2)]


class Unwell(Gateway):
    """A way to an etcd that fails so many times, in a way that nobody thought of or out of reach."""

    def __init__(self, failures: int, error: type[Exception]) -> None:
        super().__init__(["http://127.0.0.1:1"], timeout_s=1.0)
        self.left = {"read": failures, "grant": failures}
        self.error = error
        self.put_key = threading.Event()
        self.was_read = threading.Event()

    def _fail(self, kind: str) -> None:
        if self.left[kind]:
            self.left[kind] -= 1
            raise self.error("etcd")

    def read(self, prefix: bytes) -> Snapshot:
        self._fail("read")
        self.was_read.set()
        raise PeerUnreachableError("gone again")

    def grant(self, seconds: int) -> str:
        self._fail("grant")
        return "7"

    def put(self, key: bytes, value: bytes, lease: str) -> int:
        self.put_key.set()
        return 1


@pytest.mark.parametrize("error", [PeerUnreachableError, ValueError])
@pytest.mark.parametrize("failures", [1, 1200])
def test_a_node_comes_back_however_often_and_however_etcd_failed(
    monkeypatch: pytest.MonkeyPatch, failures: int, error: type[Exception]
) -> None:
    """1,200 failures are 40 minutes without etcd."""
    monkeypatch.setattr(etcd, "_PAUSE_MIN_S", 1e-6)
    monkeypatch.setattr(etcd, "_PAUSE_MAX_S", 1e-6)
    monkeypatch.setattr(etcd.logger, "disabled", True)
    gateway = Unwell(failures, error)
    membership = EtcdMembership(gateway)
    try:
        membership.join(member("a"))
        assert gateway.put_key.wait(WAIT_S)
        assert gateway.was_read.wait(WAIT_S)
    finally:
        membership.close()
