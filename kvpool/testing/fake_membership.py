"""Members of a pool in one process: what tests of servers and clients use instead of etcd.

``SharedMembers`` is the source, ``FakeMembership`` one process's view of it. A node that closes
without leaving is gone at once: nothing here takes time.
"""

import threading
from typing import Final

from kvpool.block import NodeId
from kvpool.errors import ClosedError, UsageError
from kvpool.index.membership import Member, Members, Subscribers, Told, in_order

_OPEN: Final = "this membership was closed: open another"


class SharedMembers:
    """The members that all views share. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[NodeId, Member] = {}
        self._views: list[FakeMembership] = []

    def members(self) -> Members:
        """Return them, sorted by name."""
        with self._lock:
            return in_order(self._members.values())

    def add(self, view: "FakeMembership") -> None:
        """Have a view told of every change."""
        with self._lock:
            self._views.append(view)

    def put(self, member: Member) -> None:
        """Add or replace a member."""
        with self._lock:
            self._members[member.node] = member
        self._tell()

    def remove(self, member: Member) -> None:
        """Remove a member, unless another run of it has taken its place."""
        with self._lock:
            if self._members.get(member.node) == member:
                del self._members[member.node]
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            views = list(self._views)
        for view in views:
            view.tell()


class FakeMembership:
    """One process's view of ``SharedMembers``."""

    def __init__(self, shared: SharedMembers) -> None:
        self._shared = shared
        self._subscribers = Subscribers()
        self._own: Member | None = None
        self._closed = False
        shared.add(self)

    def members(self) -> Members:
        """Return the members, sorted by name."""
        self._require_open()
        return self._shared.members()

    def subscribe(self, told: Told) -> None:
        """Have every change told."""
        self._require_open()
        self._subscribers.add(told, self._shared.members)

    def join(self, member: Member) -> None:
        """Become a member."""
        self._require_open()
        if self._own is not None and self._own.node != member.node:
            raise UsageError(f"node {self._own.node} has joined here: one process is one node")
        self._own = member
        self._shared.put(member)

    def leave(self, timeout_s: float) -> None:
        """Stop being one."""
        if self._own is not None and not self._closed:
            own, self._own = self._own, None
            self._shared.remove(own)

    def trouble(self) -> str:
        """Return nothing."""
        return ""

    def close(self) -> None:
        """End the view; its node is gone."""
        if not self._closed:
            self.leave(0)
            self._closed = True

    def tell(self) -> None:
        """Tell the subscribers. For ``SharedMembers``."""
        if not self._closed:
            self._subscribers.tell(self._shared.members)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(_OPEN)
