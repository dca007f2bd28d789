"""The names of this node's blocks: which there are, which have left, and whom that is owed to.

Owns the announcer, and the work on all of its names at once, which runs on threads: one scan of the
tiers and one change of the ring at a time. Everything else runs in the server's event loop, a bounded
number of names at a time. Who calls it: the node.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final, TypeVar

from kvpool.block import HASH_BYTES, BlockHash, NodeId
from kvpool.errors import CapacityError, ClosedError, KVPoolError
from kvpool.index.announce import OWNERS, RUN_BLOCKS, Announcer, gone, moved_names, owned_names
from kvpool.index.directory import Kind
from kvpool.index.ring import Ring
from kvpool.metrics import Metrics
from kvpool.server.shard import MOVED_S, NAMES_MAX
from kvpool.tiers.base import Tier
from kvpool.tiers.dram import DramTier
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.stack import StackTier, stats_of

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# When everybody has dropped the names that others own: some time after ``MOVED_S`` of the shards.
_SETTLED_S: Final = 2 * MOVED_S
# Changes of the ring that may wait for their turn; with more, everybody is told everything anew.
_MOVES_MAX: Final = 8
# Names of blocks that left, taken back at once: the event loop, which answers stores, stands for 2 ms.
_REMOVED_MAX: Final = 256


class Naming:
    """What this node holds, as others have to know it.

    Args:
        ring: As it is now.
        executor: For what is linear in the names.
        metrics: Told of names.
        spread: Called when somebody is to be told something.
    """

    def __init__(
        self, ring: Ring, executor: Executor, metrics: Metrics, spread: Callable[[], None]
    ) -> None:
        self._ring = ring
        self._executor = executor
        self._metrics = metrics
        self._spread = spread
        self._loop = asyncio.get_running_loop()
        self._announcer: Announcer | None = None
        self._tier: Tier | None = None
        self._lost = 0
        self._scan: asyncio.Task[None] | None = None
        self._moves: deque[tuple[Ring, Ring]] = deque()
        self._moving: asyncio.Task[None] | None = None
        self._turned_at = 0.0
        self._closed = False

    async def opened(self, tier: Tier) -> None:
        """Take note of what the tier holds from earlier runs."""
        capacity = sum(stats.slots for _, stats in stats_of(tier))
        announcer = Announcer(capacity, self._ring)
        if isinstance(tier, StackTier) and isinstance(tier.slow, SsdTier):
            keys, parents = tier.slow.blocks()
            await self._aside(announcer.restored, keys, parents)
        before = announcer.turn(self._ring)
        if before is not self._ring:  # it has changed meanwhile
            self._moves.append((before, self._ring))
        self._tier, self._announcer = tier, announcer
        self._move()
        self._spread()

    async def stored(self, chain: bytes, first: int, count: int) -> bool:
        """Name blocks that came; say whether that was possible.

        Names of blocks that have left since the last scan give way.
        """
        announcer, tier = self._announcer, self._tier
        if announcer is None or tier is None or not count:
            return False
        try:
            announcer.stored(chain, first, count)
            return True
        except CapacityError:
            await self._remove(await self._aside(_gone, announcer.names(), tier))
        try:
            announcer.stored(chain, first, count)
            return True
        except CapacityError as error:
            logger.warning("%d blocks are here and not named: %s", count, error)
            self._metrics.count("kvpool_server_refused_names_total", count)
            return False

    def missed(self, names: bytes) -> None:
        """Take back the first of a chain's names, which is not here, and the run that it is in."""
        announcer, tier = self._announcer, self._tier
        first = BlockHash(names[:HASH_BYTES])
        if announcer is None or tier is None or self._closed:
            return
        with suppress(ClosedError):
            if not tier.match(first):
                announcer.denied(first)
                for at in range(HASH_BYTES, min(len(names), RUN_BLOCKS * HASH_BYTES), HASH_BYTES):
                    announcer.broken(BlockHash(names[at : at + HASH_BYTES]))
            self._spread()

    def tick(self) -> bool:
        """Scan the tiers for names that are not there any more, if blocks have left since.

        False: that is under way. Raises what the scan before this one met.
        """
        announcer, tier = self._announcer, self._tier
        if announcer is None or tier is None:
            return True
        before = self._scan
        if before is not None and not before.done():
            return False
        self._scan = None
        if self._turned_at and self._loop.time() - self._turned_at > _SETTLED_S:
            self._turned_at = 0.0
            announcer.settle()
        try:
            lost = sum(stats.evictions + stats.corruptions for _, stats in stats_of(tier))
        except KVPoolError:
            return True  # closed
        if lost != self._lost:
            self._lost = lost
            self._scan = self._loop.create_task(self._look_for_gone(announcer, tier))
        if before is not None:
            before.result()
        return True

    def turn(self, ring: Ring) -> None:
        """Use another ring. New owners are told what they own now, in the background."""
        before, self._ring = self._ring, ring
        self._turned_at = self._loop.time()
        if self._announcer is None:
            return
        self._announcer.turn(ring)
        self._moves.append((before, ring))
        if len(self._moves) > _MOVES_MAX:
            self._moves.clear()
            for node in ring.nodes:
                self._announcer.lose(node)
        self._move()

    def close(self) -> None:
        """End what is under way."""
        self._closed = True
        for task in (self._scan, self._moving):
            if task is not None:
                task.cancel()

    # ---- what is owed ----------------------------------------------------------------------------

    def waiting(self) -> list[NodeId]:
        """Return the nodes that are to be told something."""
        return [] if self._announcer is None else self._announcer.waiting()

    def is_behind(self, node: NodeId) -> bool:
        """Say whether a node is to be told everything anew: ``renew`` goes before ``take``."""
        return self._announcer is not None and self._announcer.is_behind(node)

    async def renew(self, node: NodeId) -> None:
        """Find out all that a node owns, if it is to be told everything anew."""
        announcer = self._announcer
        if announcer is None or not announcer.is_behind(node):
            return
        ring, names = announcer.begin_renewal(node)
        try:
            announcer.owe({node: await self._aside(owned_names, ring, names, node, OWNERS)})
        except BaseException:
            announcer.lose(node)
            raise

    def take(self, node: NodeId) -> tuple[Kind, bytes]:
        """Return what to tell a node next, and no longer owe it."""
        return ("stored", b"") if self._announcer is None else self._announcer.take(node, NAMES_MAX)

    def lose(self, node: NodeId, untold: tuple[Kind, bytes] = ("stored", b"")) -> None:
        """Take note that a node has to be told everything anew, and may not have heard ``untold``."""
        if self._announcer is not None:
            self._announcer.lose(node, untold)

    # ---- in the background -----------------------------------------------------------------------

    async def _aside(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run what is linear in the names on a thread."""
        return await self._loop.run_in_executor(self._executor, work, *arguments)

    def _move(self) -> None:
        if self._moves and self._announcer is not None and self._moving is None:
            self._moving = self._loop.create_task(self._tell_new_owners(self._announcer))

    async def _tell_new_owners(self, announcer: Announcer) -> None:
        try:
            while self._moves:
                before, after = self._moves.popleft()
                names = announcer.names()
                moved = await self._aside(moved_names, before, after, names, OWNERS)
                announcer.owe(moved)
                count = sum(len(some) for some in moved.values()) // HASH_BYTES
                self._metrics.count("kvpool_server_moved_names_total", count)
                logger.info("the ring has %d nodes: %d names to tell", len(after), count)
                self._spread()
        except Exception:
            logger.exception("new owners are not known: everybody is told everything anew")
            for node in self._ring.nodes:
                announcer.lose(node)
        finally:
            self._moving = None

    async def _look_for_gone(self, announcer: Announcer, tier: Tier) -> None:
        try:
            await self._remove(await self._aside(_gone, announcer.names(), tier))
        except KVPoolError as error:
            logger.debug("the tiers are not scanned: %s", error)  # closed
        except BaseException:
            self._lost = -1  # to look again
            raise

    async def _remove(self, names: list[BlockHash]) -> None:
        """Take back names whose blocks are not here, some at a time."""
        for at in range(0, len(names), _REMOVED_MAX):
            self._remove_some(names[at : at + _REMOVED_MAX])
            await asyncio.sleep(0)

    def _remove_some(self, names: list[BlockHash]) -> None:
        """Take back names whose blocks are not here now: stores and this run in the same loop."""
        announcer, tier = self._announcer, self._tier
        if announcer is None or tier is None or self._closed:
            return
        try:
            announcer.removed(b"".join(name for name in names if not tier.match(name)))
        except KVPoolError:
            return  # closed
        self._spread()


def _gone(names: bytes, tier: Tier) -> list[BlockHash]:
    """Return the names whose blocks a tier, and what it is made of, have not."""
    if isinstance(tier, StackTier):
        below = tier.slow.blocks()[0] if isinstance(tier.slow, SsdTier) else b""
        return gone(names, tier.fast.keys() + below)
    return gone(names, tier.keys() if isinstance(tier, DramTier) else b"")
