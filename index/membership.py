"""Who is in the pool: the nodes that the ring is made of, and where each one answers.

Owns the contract ``Membership``, the static list of a configuration file, and ``MemberView``, the
pure rules by which a view follows a shared source such as etcd. The source is an adviser, never the
truth: what it forgets all at once is forgotten late, and what it cannot say leaves the view as it
is. Decides nothing about blocks. Who calls it: servers, which join, and clients, which look.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvpool.block import Incarnation, NodeId
from kvpool.errors import ClosedError, UsageError

# Names become keys of etcd, labels and parts of messages: letters, digits and three marks, no path.
NODE_NAME_BYTES_MAX: Final = 64
_NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
ADDRESS_BYTES_MAX: Final = 256
INCARNATION_BYTES: Final = 16
UNKNOWN_RUN: Final = Incarnation(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node of the pool.

    Attributes:
        node: Its name, one in the pool. See ``node_id`` for what a name may be.
        address: Where its gRPC service answers, ``host:port`` or ``unix:/path``.
        incarnation: Of its running process; empty where only its server knows it (a static list).
    """

    node: NodeId
    address: str
    incarnation: Incarnation = UNKNOWN_RUN

    def __post_init__(self) -> None:
        node_id(self.node)
        address = self.address
        if not 0 < len(address) <= ADDRESS_BYTES_MAX or not (address.isascii() and _plain(address)):
            raise UsageError(
                f"the address of node {self.node} is {address[:300]!r}: write host:port or unix:/path"
            )
        if len(self.incarnation) not in (0, INCARNATION_BYTES):
            raise UsageError(
                f"the incarnation of node {self.node} has {len(self.incarnation)} bytes, not 16"
            )


Members = tuple[Member, ...]
Told = Callable[[Members], None]


class Membership(Protocol):
    """The members of one pool, as far as they are known here, and the right to be one of them.

    ``members`` never blocks and never raises while open: a source that is stalled, wiped or out of
    reach leaves the last view in use. Safe from any thread.
    """

    def members(self) -> Members:
        """Return the members, sorted by name. Blocks for nothing.

        Raises:
            ClosedError: ``close`` was called.
        """
        ...

    def subscribe(self, told: Told) -> None:
        """Have every change of the members told, from now on.

        ``told`` gets all members, in the order of changes, from a thread of the membership or from
        the caller of ``join`` and ``leave``; it must not block. What is known already is told once
        before this returns.

        Raises:
            ClosedError: ``close`` was called.
        """
        ...

    def join(self, member: Member) -> None:
        """Become a member, and stay one until ``leave``. Seen here at once, elsewhere soon.

        Returns at once, whether the source answers or not: it goes on in the background. Joining
        again with the same name replaces the address and the incarnation.

        Raises:
            UsageError: Another name has joined here already, or a static list lacks it.
            ClosedError: ``close`` was called.
        """
        ...

    def leave(self, timeout_s: float) -> None:
        """Stop being a member, so that others see it at once. Does nothing if nobody joined.

        Blocks for at most ``timeout_s``; a source that is silent forgets this node later by itself.
        """
        ...

    def trouble(self) -> str:
        """Return what an operator should know about the source; empty: all is well."""
        ...

    def close(self) -> None:
        """End what runs, without leaving: as a killed process would. Idempotent, bounded by 5 s."""
        ...


def node_id(name: str) -> NodeId:
    """Return the name of a node, checked.

    Raises:
        UsageError: It is empty, longer than 64 bytes, or not of letters, digits, ``.``, ``_``, ``-``.
    """
    if len(name) > NODE_NAME_BYTES_MAX or not _NODE_NAME.fullmatch(name):
        shown = name if len(name) <= NODE_NAME_BYTES_MAX else name[:NODE_NAME_BYTES_MAX] + "..."
        raise UsageError(
            f"{shown!r} is no name of a node: use 1 to {NODE_NAME_BYTES_MAX} letters, digits, dots, "
            "underscores and dashes, beginning with a letter or a digit"
        )
    return NodeId(name)


def _plain(text: str) -> bool:
    return text.isprintable() and " " not in text


def in_order(members: Iterable[Member]) -> Members:
    """Return members sorted by name."""
    return tuple(sorted(members, key=lambda member: member.node))


class MemberView:
    """A view of the members that follows a source, by rules that no fault of the source can empty.

    - A member that is put is there; one that says that it leaves is gone at once.
    - A member that merely vanished stays for ``grace_s`` more, in which a node that lives comes back
      by itself: it sees that it is missing. So a source that lost its data, or let every lease run
      out because it stood still, empties nothing.
    - That time runs only while the source answers, and begins anew when it answers again.
    - The node of this process, once it has joined, is there whatever the source says.

    Pure: times come in as arguments. Not thread-safe: its owner's lock guards it.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._members: dict[NodeId, Member] = {}
        self._missing: dict[NodeId, float] = {}  # and when it was first missed
        self._own: Member | None = None

    def members(self) -> Members:
        """Return the members, sorted by name."""
        return in_order(self._members.values())

    def missing(self) -> list[NodeId]:
        """Return those that the source no longer names, sorted."""
        return sorted(self._missing)

    def own(self, member: Member | None) -> None:
        """Set the member that this process is, or None once it has left."""
        if self._own is not None and (member is None or member.node != self._own.node):
            self._members.pop(self._own.node, None)
            self._missing.pop(self._own.node, None)
        self._own = member
        if member is not None:
            self._members[member.node] = member
            self._missing.pop(member.node, None)

    def put(self, member: Member) -> None:
        """Take a member that the source names."""
        self._missing.pop(member.node, None)
        if self._own is None or member.node != self._own.node:
            self._members[member.node] = member

    def left(self, node: NodeId) -> None:
        """Take note that a node said that it leaves."""
        self._missing.pop(node, None)
        if self._own is None or node != self._own.node:
            self._members.pop(node, None)

    def vanished(self, node: NodeId, now: float) -> None:
        """Take note that the source no longer names a node."""
        if node in self._members and (self._own is None or node != self._own.node):
            self._missing.setdefault(node, now)

    def whole(self, found: Mapping[NodeId, Member], now: float, *, resumed: bool) -> None:
        """Take all that the source names now. ``resumed``: it has been silent until now."""
        if resumed:
            self._missing = dict.fromkeys(self._missing, now)
        for member in found.values():
            self.put(member)
        for node in [node for node in self._members if node not in found]:
            self.vanished(node, now)

    def expire(self, now: float) -> None:
        """Drop those that are missing for too long. Only to be called while the source answers."""
        for node, since in list(self._missing.items()):
            if now - since >= self._grace_s:
                del self._missing[node]
                self._members.pop(node, None)


class Subscribers:
    """Those who are told of changes, each change once and in order. Safe from any thread.

    Its lock ``_telling`` is held while they are told: they must not block, and not change what they
    are told of.
    """

    def __init__(self) -> None:
        self._telling = threading.RLock()
        self._told: list[Told] = []
        self._last: Members | None = None

    def add(self, told: Told, members: Callable[[], Members]) -> None:
        """Add one, and tell it what is known."""
        with self._telling:
            self.tell(members)
            self._told.append(told)
            told(members())

    def tell(self, members: Callable[[], Members]) -> None:
        """Tell all of them what ``members`` returns now, unless it is what they were told last."""
        with self._telling:
            now = members()
            if now == self._last:
                return
            self._last = now
            for told in self._told:
                told(now)


class StaticMembership:
    """The members that a configuration file lists: they are the ring whether they answer or not.

    A node that is down is found out by those who ask it; the ring does not change. One lock,
    ``_lock``, guards the members.

    Args:
        members: All of them, this node too.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        listed = list(members)
        self._members = {member.node: member for member in listed}
        if len(self._members) != len(listed):
            raise UsageError("a node is listed twice: every node needs a name of its own")
        self._lock = threading.Lock()
        self._subscribers = Subscribers()
        self._own: NodeId | None = None
        self._closed = False

    def members(self) -> Members:
        """Return the listed members, sorted by name."""
        with self._lock:
            self._require_open()
            return in_order(self._members.values())

    def subscribe(self, told: Told) -> None:
        """Have every change told: only this node's own incarnation and address ever change."""
        self._subscribers.add(told, self.members)

    def join(self, member: Member) -> None:
        """Say which of the listed nodes this process is, and its incarnation."""
        with self._lock:
            self._require_open()
            if self._own is not None and self._own != member.node:
                raise UsageError(f"node {self._own} has joined here: one process is one node")
            if member.node not in self._members:
                raise UsageError(
                    f"node {member.node} is not among the listed nodes "
                    f"({', '.join(sorted(self._members)) or 'none'}): add it to the list on every host"
                )
            self._own = member.node
            self._members[member.node] = member
        self._subscribers.tell(self.members)

    def leave(self, timeout_s: float) -> None:
        """Forget the incarnation: a list that is fixed keeps the node."""
        with self._lock:
            if self._closed or self._own is None:
                return
            left, self._own = self._own, None
            self._members[left] = replace(self._members[left], incarnation=UNKNOWN_RUN)
        self._subscribers.tell(self.members)

    def trouble(self) -> str:
        """Return nothing: a list cannot fail."""
        return ""

    def close(self) -> None:
        """Refuse every later call. Idempotent."""
        with self._lock:
            self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this membership was closed: open another")
