"""What every membership must do. Subclass ``MembershipSuite`` once for each implementation.

Uses the ``Membership`` contract alone. ``SharedMembershipSuite`` adds what holds where several
processes share one source; a static list has none.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from kvpool.block import Incarnation, NodeId
from kvpool.errors import ClosedError, UsageError
from kvpool.index.membership import Member, Members, Membership

# Only a hang reaches it.
WAIT_S: Final = 30.0
NAMES: Final = ("a", "b", "c")


def member(name: str, run: int = 1) -> Member:
    """Return the member of a name in one of its runs."""
    incarnation = Incarnation(bytes([run]) * 16)
    return Member(node=NodeId(name), address=f"127.0.0.1:{7000 + run}", incarnation=incarnation)


class Listener:
    """Keeps what a membership tells, and waits for it."""

    def __init__(self, membership: Membership) -> None:
        self.told: list[Members] = []
        self._changed = threading.Condition()
        membership.subscribe(self._take)

    def _take(self, members: Members) -> None:
        with self._changed:
            self.told.append(members)
            self._changed.notify_all()

    def wait(self, condition: Callable[[Members], bool], what: str) -> Members:
        """Return the newest members that satisfy a condition; a hang fails with ``what``."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: bool(self.told) and condition(self.told[-1]), WAIT_S
            )
            assert done, f"{what}: told last {self.told[-1:]}"
            return self.told[-1]


def names(members: Members) -> list[str]:
    """Return the members' names in their order."""
    return [str(one.node) for one in members]


class MembershipSuite(ABC):
    """The suite. ``open_membership`` is called once for each process that a test plays."""

    @abstractmethod
    def open_membership(self) -> Membership:
        """Open a view that lists, or may come to list, the nodes of ``NAMES``."""

    @pytest.fixture
    def opened(self) -> Iterator[Callable[[], Membership]]:
        """Give each test a way to open memberships; they are closed at its end."""
        with ExitStack() as closing:

            def opened() -> Membership:
                membership = self.open_membership()
                closing.callback(membership.close)
                return membership

            yield opened

    def test_who_joins_is_there_at_once(self, opened: Callable[[], Membership]) -> None:
        membership = opened()
        membership.join(member("b"))
        assert member("b") in membership.members()
        assert names(membership.members()) == sorted(names(membership.members()))

    def test_joining_again_replaces_the_incarnation(self, opened: Callable[[], Membership]) -> None:
        membership = opened()
        membership.join(member("a", run=1))
        membership.join(member("a", run=2))
        assert [one for one in membership.members() if one.node == "a"] == [member("a", run=2)]

    def test_one_process_is_one_node(self, opened: Callable[[], Membership]) -> None:
        membership = opened()
        membership.join(member("a"))
        with pytest.raises(UsageError, match="one process is one node"):
            membership.join(member("b"))

    def test_a_subscriber_is_told_what_is_known_and_each_change(
        self, opened: Callable[[], Membership]
    ) -> None:
        membership = opened()
        listener = Listener(membership)
        assert len(listener.told) == 1
        membership.join(member("a"))
        listener.wait(lambda told: member("a") in told, "the join was not told")

    def test_no_change_is_told_twice(self, opened: Callable[[], Membership]) -> None:
        membership = opened()
        listener = Listener(membership)
        for _ in range(3):
            membership.join(member("a"))
        pairs = zip(listener.told, listener.told[1:], strict=False)
        assert all(before != after for before, after in pairs)

    def test_leaving_without_joining_does_nothing(self, opened: Callable[[], Membership]) -> None:
        membership = opened()
        before = membership.members()
        membership.leave(WAIT_S)
        assert membership.members() == before

    def test_who_left_may_join_again(self, opened: Callable[[], Membership]) -> None:
        membership = opened()
        membership.join(member("a", run=1))
        membership.leave(WAIT_S)
        assert member("a", run=1) not in membership.members()
        membership.join(member("a", run=2))
        assert member("a", run=2) in membership.members()

    def test_a_closed_membership_says_so(self, opened: Callable[[], Membership]) -> None:
        membership = opened()
        membership.join(member("a"))
        membership.close()
        membership.close()
        membership.leave(WAIT_S)
        for call in (
            membership.members,
            lambda: membership.join(member("a")),
            lambda: membership.subscribe(lambda _: None),
        ):
            with pytest.raises(ClosedError):
                call()

    def test_closing_ends_every_thread(self, opened: Callable[[], Membership]) -> None:
        before = threading.active_count()
        memberships = [opened() for _ in range(3)]
        memberships[0].join(member("a"))
        for membership in memberships:
            membership.close()
        give_up = time.monotonic() + WAIT_S
        while threading.active_count() > before:
            assert time.monotonic() < give_up, threading.enumerate()
            time.sleep(0.01)

    @pytest.mark.parametrize(
        "name",
        ["", "../etc/passwd", "a/b", "a\0b", "a" * 300, "-a", ".", "..", "n\u00f6de", "a b", "a\n"],
    )
    def test_a_bad_name_is_refused(self, name: str) -> None:
        with pytest.raises(UsageError, match="is no name of a node"):
            Member(node=NodeId(name), address="127.0.0.1:1")

    @pytest.mark.parametrize("address", ["", "a\0b", "x" * 300, "h\u00f6st:1", "a b:1", "a\n:1"])
    def test_a_bad_address_is_refused(self, address: str) -> None:
        with pytest.raises(UsageError, match="the address of node a"):
            Member(node=NodeId("a"), address=address)


class SharedMembershipSuite(MembershipSuite):
    """The suite for a source that several processes share. Each test begins with an empty one."""

    def test_a_new_pool_is_empty(self, opened: Callable[[], Membership]) -> None:
        assert opened().members() == ()

    def test_others_see_who_joins(self, opened: Callable[[], Membership]) -> None:
        first, second, looker = opened(), opened(), Listener(opened())
        first.join(member("a"))
        second.join(member("b"))
        looker.wait(lambda told: told == (member("a"), member("b")), "joins were not seen")

    def test_who_comes_later_sees_who_is_there(self, opened: Callable[[], Membership]) -> None:
        first = opened()
        first.join(member("a"))
        Listener(opened()).wait(lambda told: told == (member("a"),), "the member was not found")

    def test_others_see_at_once_who_leaves(self, opened: Callable[[], Membership]) -> None:
        first, second, looker = opened(), opened(), Listener(opened())
        first.join(member("a"))
        second.join(member("b"))
        looker.wait(lambda told: names(told) == ["a", "b"], "joins were not seen")
        first.leave(WAIT_S)
        looker.wait(lambda told: names(told) == ["b"], "the leave was not seen")

    def test_another_run_of_a_node_takes_its_place(self, opened: Callable[[], Membership]) -> None:
        first, looker = opened(), Listener(opened())
        first.join(member("a", run=1))
        looker.wait(lambda told: told == (member("a", run=1),), "the join was not seen")
        first.close()
        second = opened()
        second.join(member("a", run=2))
        looker.wait(lambda told: told == (member("a", run=2),), "the new run was not seen")

    def test_a_lost_member_leaves_the_view_in_the_end(
        self, opened: Callable[[], Membership]
    ) -> None:
        first, second, looker = opened(), opened(), Listener(opened())
        first.join(member("a"))
        second.join(member("b"))
        looker.wait(lambda told: names(told) == ["a", "b"], "joins were not seen")
        first.close()
        looker.wait(lambda told: names(told) == ["b"], "the lost member stayed for ever")

    def test_many_join_at_once(self, opened: Callable[[], Membership]) -> None:
        memberships = [opened() for _ in range(12)]
        listeners = [Listener(membership) for membership in memberships]
        threads = [
            threading.Thread(target=membership.join, args=(member(f"n{number:02}"),))
            for number, membership in enumerate(memberships)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        for listener in listeners:
            listener.wait(lambda told: len(told) == len(memberships), "not all were seen")
