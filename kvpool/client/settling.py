"""Whose shards are asked while the ring changes: holders have to tell the new owners first.

Pure: who is there and the time come as arguments. Who calls it: the servers of a ring, as a client
knows them, whose lock guards it.
"""

from collections.abc import Collection, Iterable

from kvpool.block import NodeId


class Settling:
    """The nodes that look-ups go by: who joined counts a little later, who left a little longer.

    As long as one who left counts, names that it was an owner of are asked of their other owner,
    which knows them, and not of the new one, which may not have heard of them yet.

    Args:
        settle_s: How much later, and how much longer.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._joined: dict[NodeId, float] = {}
        self._left: dict[NodeId, float] = {}

    def take(self, told: Collection[NodeId], new: Iterable[NodeId], now: float) -> list[NodeId]:
        """Take who there is, and which of them were not here before; return who counts.

        The first ones count at once. None if nobody does yet: then the ring stays.
        """
        first = not self._joined and not self._left
        for node in [one for one in self._joined if one not in told]:
            if self._settled(self._joined.pop(node), now):
                self._left[node] = now
        for node in new:
            self._joined[node] = now - (self._settle_s if first else 0.0)
        self._left = {
            node: at
            for node, at in self._left.items()
            if node not in told and not self._settled(at, now)
        }
        settled = [node for node, at in self._joined.items() if self._settled(at, now)]
        return [*settled, *self._left] if settled else []

    def _settled(self, since: float, now: float) -> bool:
        return now - since >= self._settle_s
