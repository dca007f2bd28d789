"""A fork of a process that has transports: the child has their memory and none of their threads.

Owns the set of transports of this process, and what becomes of them in a child: they are closed, at
once and without a word to a peer, so that every call there raises instead of waiting for a thread
that does not exist. Who calls it: the transports that have threads in Python.
"""

import os
import weakref
from typing import Final, Protocol

from kvpool.errors import ClosedError


class Forked(Protocol):
    """What has threads."""

    def after_fork(self) -> None:
        """Be closed, in the child. Takes no lock: a thread that is not here may have held it."""
        ...


_living: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()


def close_in_children(one: Forked) -> None:
    """Have ``after_fork`` called in every child, as long as it lives here."""
    _living.add(one)


def in_child() -> ClosedError:
    """Return why nothing works in a child."""
    return ClosedError(
        "this process was forked from the one that connected: open a transport of its own, and start"
        " processes with spawn"
    )


def _after_fork() -> None:
    for one in list(_living):
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork)
