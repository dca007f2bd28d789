"""The shard of the directory that this server keeps, and the methods that concern it.

Owns the names that nodes announced to this one, who of them is heard, and the ring by which names have
owners. All of it is soft state. Everything here runs in the server's event loop, but for short look-ups,
which any thread may ask. Who calls it: other nodes and readers, through ``kvpool.client.protocol``; the
node, of what it holds itself.
"""

import asyncio
import hashlib
import logging
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from typing import Final

from kvpool.block import HASH_BYTES, NodeId
from kvpool.client import protocol
from kvpool.client.rpc_service import Methods
from kvpool.errors import CapacityError, StaleIncarnationError, UsageError
from kvpool.index.announce import OWNERS, other_names
from kvpool.index.directory import Change, Directory, Kind, Store, Stores
from kvpool.index.ring import Ring
from kvpool.metrics import Metrics
from kvpool.server.answering import Answering
from kvpool.server.tenant import calling_tenant

logger = logging.getLogger(__name__)

# The one store of a node: its tiers together.
STORE_NAME: Final = "pool"
# Names entered or dropped at once: the event loop, which answers look-ups, stands for some 25 ms.
NAMES_MAX: Final = 2048
# Names of one look-up: some 20 ms. A prompt is looked up by its runs, 64 blocks each.
LOOKUP_NAMES_MAX: Final = 1 << 16
# Names of a look-up that is answered on its connection's thread: some 0.1 ms.
PROMPT_NAMES_MAX: Final = 256
# A node that was silent for so many intervals is hidden until it is heard again.
_SILENT_INTERVALS: Final = 5
# How long the entries of a node that is gone are kept, in case it comes back.
_FORGET_S: Final = 600.0
# How long names that moved to other owners are kept here, while readers learn of the new ring.
MOVED_S: Final = 60.0
# Changes that one watcher may be behind.
_WATCH_MAX: Final = 1024


class Shard:
    """Names, who holds them, and who said so.

    ``_lock`` guards the directory against look-ups on other threads; only the loop changes it.

    Args:
        own: The store of this node.
        names_max: Room for names.
        interval_s: How often a node that is well is heard.
        executor: For what is linear in the names.
        metrics: Told of names and nodes.

    Attributes:
        ring: As it is now.
    """

    def __init__(
        self, own: Store, names_max: int, interval_s: float, executor: Executor, metrics: Metrics
    ) -> None:
        self._own = own
        self._interval_s = interval_s
        self._executor = executor
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._directory = Directory(names_max)
        self._directory.join(own)
        self._take_ring(Ring([own.node]))
        self._lives: dict[NodeId, tuple[int, bytes]] = {}
        self._heard: dict[NodeId, float] = {}
        self._gone: dict[NodeId, float] = {}
        self._moved_at = 0.0
        self._ticked = self._loop.time()
        self._dropping: asyncio.Task[None] | None = None

    def serve(self, service: Methods) -> None:
        """Add the directory's methods to what serves them."""
        service.add(protocol.LOOKUP, self._on_lookup)
        service.add(protocol.ANNOUNCE, self._on_announce)
        service.add(protocol.WATCH, self._on_watch)

    def serve_prompts(self, answering: Answering) -> None:
        """Add what can be answered at once."""
        answering.add_prompt(protocol.LOOKUP, self.lookup_now)

    def digest(self) -> bytes:
        """Return what tells one ring from another."""
        return self._digest

    def _take_ring(self, ring: Ring) -> None:
        self.ring = ring
        self._digest = hashlib.sha256("\n".join(ring.nodes).encode()).digest()[:8]

    def heard(self, node: NodeId) -> bool:
        """Say whether a node is heard."""
        return node in self._heard or node == self._own.node

    def turn(self, ring: Ring) -> None:
        """Use another ring; what others own now is kept for a while."""
        self._take_ring(ring)
        self._moved_at = self._loop.time()

    def hide(self, node: NodeId) -> None:
        """Hide what a node holds that is no member any more; forget it if it does not come back."""
        with self._lock:
            self._directory.leave(node)
        self._heard.pop(node, None)
        self._gone[node] = self._loop.time()

    def welcome(self, node: NodeId) -> None:
        """Keep what a node holds: it is a member."""
        self._gone.pop(node, None)

    def enter(self, store: Store, kind: Kind, names: bytes) -> None:
        """Take note of names that a store holds, or no longer."""
        try:
            with self._lock:
                if kind == "stored":
                    self._directory.announce(store, names)
                else:
                    self._directory.withdraw(store, names)
        except CapacityError as error:
            logger.warning("%s", error)
            self._metrics.count("kvpool_server_refused_names_total", len(names) // HASH_BYTES)

    def tick(self) -> None:
        """Look for nodes that fell silent, and for what is kept no longer. To be called now and then."""
        now = self._loop.time()
        late_s = now - self._ticked - 2 * self._interval_s
        self._ticked = now
        if late_s > 0:  # this process was stopped: nobody could be heard
            self._heard = {node: at + late_s for node, at in self._heard.items()}
        for node, at in list(self._heard.items()):
            if now - at > _SILENT_INTERVALS * self._interval_s:
                logger.warning("node %s is silent: its blocks are hidden until it is heard", node)
                with self._lock:
                    self._directory.leave(node)
                del self._heard[node]
        for node, at in list(self._gone.items()):
            if now - at > _FORGET_S:
                with self._lock:
                    self._directory.forget(node)
                del self._gone[node]
        if self._moved_at and now - self._moved_at > MOVED_S and self._dropping is None:
            self._moved_at = 0.0
            self._dropping = self._loop.create_task(self._drop_moved())
        self._metrics.set("kvpool_server_directory_name_count", len(self._directory))
        self._metrics.set("kvpool_server_node_count", len(self.ring))

    def close(self) -> None:
        """End what is under way."""
        if self._dropping is not None:
            self._dropping.cancel()

    async def _drop_moved(self) -> None:
        """Forget names that other nodes own by now, some at a time."""
        ring, names = self.ring, self._directory.names()
        try:
            gone = await self._loop.run_in_executor(
                self._executor, other_names, ring, names, self._own.node, OWNERS
            )
            step = NAMES_MAX * HASH_BYTES
            for at in range(0, len(gone), step):
                if self.ring is not ring:
                    return  # some may be owned here again
                with self._lock:
                    self._directory.drop(gone[at : at + step])
                await asyncio.sleep(0)
        finally:
            self._dropping = None

    # ---- methods ---------------------------------------------------------------------------------

    async def _on_lookup(self, request: protocol.LookupRequest) -> protocol.LookupReply:
        if len(request.names) > LOOKUP_NAMES_MAX * HASH_BYTES:
            raise UsageError(
                f"a look-up of {len(request.names)} bytes of names: ask for {LOOKUP_NAMES_MAX} at once"
            )
        with self._lock:
            return self._found(request.names)

    def lookup_now(self, request: protocol.LookupRequest) -> protocol.LookupReply | None:
        """Answer a look-up on any thread; None: names come or go now, so it waits for the loop."""
        if len(request.names) > PROMPT_NAMES_MAX * HASH_BYTES or not self._lock.acquire(False):
            return None
        try:
            return self._found(request.names)
        finally:
            self._lock.release()

    def _found(self, names: bytes) -> protocol.LookupReply:
        """Look names up. With the lock held."""
        sets: dict[Stores, int] = {}
        holders: list[int] = []
        last, number = None, 0
        for stores in self._directory.lookup(names):
            if (
                stores is not last
            ):  # neighbours have the same list, mostly: comparing it takes longer
                last, number = stores, sets.setdefault(stores, len(sets))
            holders.append(number)
        nodes = [protocol.NodeSet(nodes=[store.node for store in stores]) for stores in sets]
        return protocol.LookupReply(holders=holders, sets=nodes, ring=self._digest)

    async def _on_announce(self, request: protocol.AnnounceRequest) -> protocol.AnnounceReply:
        protocol.spoken_version(request.version)
        if not calling_tenant.get().operator:
            raise UsageError("only a server of the pool may announce: give it an operator's token")
        node = NodeId(request.node)
        if len(request.incarnation) != len(self._own.identity) or not node:
            raise UsageError("an announcement without a node and its incarnation, 16 bytes")
        life = (request.began, request.incarnation)
        # A clock that was set back makes a later run look like an earlier one. It has to wait until the
        # one before is silent: that is all that tells them apart.
        if life < self._lives.get(node, life) and node in self._heard:
            raise StaleIncarnationError(f"a later run of node {node} has been heard: stop this one")
        self._lives[node] = life
        reply = protocol.AnnounceReply(incarnation=self._own.identity)
        if request.leaving:
            with self._lock:
                self._directory.leave(node)
            self._heard.pop(node, None)
            return reply
        store = Store(node, STORE_NAME, request.incarnation)
        with self._lock:
            self._directory.join(store)
        self._heard[node] = self._loop.time()
        removed = request.kind == protocol.REMOVED
        step = NAMES_MAX * HASH_BYTES
        for at in range(0, len(request.names), step):
            if at:
                await asyncio.sleep(0)  # a sender may say more at once than this one would
            self.enter(store, "removed" if removed else "stored", request.names[at : at + step])
        return reply

    async def _on_watch(self, request: protocol.Done) -> AsyncGenerator[protocol.Change]:
        if not calling_tenant.get().operator:
            raise UsageError("only an operator may watch names come and go")
        changes: asyncio.Queue[Change] = asyncio.Queue(_WATCH_MAX)
        behind = False

        def tell(change: Change) -> None:
            nonlocal behind
            try:
                changes.put_nowait(change)
            except asyncio.QueueFull:
                behind = True

        end = self._directory.subscribe(tell)
        try:
            while not behind:
                change = await changes.get()
                yield protocol.Change(
                    kind=protocol.STORED if change.kind == "stored" else protocol.REMOVED,
                    node=change.store.node,
                    names=change.names,
                )
            raise CapacityError(f"the watcher is more than {_WATCH_MAX} changes behind: begin anew")
        finally:
            end()
