"""One node of the ring: its shard of the directory, and what it tells the other nodes.

Owns the ring as it is now, the directory shard, the names of this node's blocks, and one task for
each other node that tells it what it has to know. All of it is soft state: a node that restarts is
told anew by everybody, and tells everybody anew. Everything here runs in the server's event loop;
only scans of a tier run beside it. Who calls it: the daemon; the service, of blocks that come.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final

from kvpool.block import HASH_BYTES, BlockHash, Incarnation, NodeId
from kvpool.client import protocol
from kvpool.client.rpc import OPEN, AsyncCaller, ClientAccess, Service
from kvpool.config import ServerConfig
from kvpool.errors import (
    CapacityError,
    KVPoolError,
    PeerUnreachableError,
    StaleIncarnationError,
    UsageError,
)
from kvpool.index.announce import Announcer, gone
from kvpool.index.directory import Change, Directory, Store
from kvpool.index.membership import Member, Members, Membership
from kvpool.index.ring import Ring
from kvpool.metrics import Metrics
from kvpool.server.tenant import calling_tenant
from kvpool.tiers.base import Tier
from kvpool.tiers.dram import DramTier
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.stack import StackTier, stats_of

logger = logging.getLogger(__name__)

# The one store of a node: its tiers together.
STORE_NAME: Final = "pool"
# Names of one announcement. Its taker's event loop, which answers look-ups, stands for some 25 ms.
_NAMES_MAX: Final = 2048
# Longest wait of one announcement.
_ANNOUNCE_TIMEOUT_S: Final = 2.0
# Longest that a store waits until other nodes know of it. Behind it they hear a little later.
_TOLD_TIMEOUT_S: Final = 0.25
# A node that was silent for so many intervals is hidden until it is heard again.
_SILENT_INTERVALS: Final = 5
# How long the entries of a node that is gone are kept, in case it comes back.
_FORGET_S: Final = 600.0
# How long names that moved to other owners are kept here, while readers learn of the new ring.
_MOVED_S: Final = 60.0
# Changes that one watcher may be behind.
_WATCH_MAX: Final = 1024


class Node:
    """A server as a member of the ring.

    Args:
        config: Its name, where it listens, its limits.
        incarnation: Of this process.
        membership: Who else there is. It stays the caller's.
        executor: For scans of a tier.
        metrics: Told of names, nodes and announcements.
        access: How it shows other servers who it is.
    """

    def __init__(
        self,
        config: ServerConfig,
        incarnation: Incarnation,
        membership: Membership,
        executor: Executor,
        *,
        metrics: Metrics,
        access: ClientAccess = OPEN,
    ) -> None:
        self._config = config
        self._membership = membership
        self._executor = executor
        self._metrics = metrics
        self._access = access
        self._loop = asyncio.get_running_loop()
        self._began = time.time_ns()
        self.store = Store(NodeId(config.node), STORE_NAME, incarnation)
        self._directory = Directory(config.directory_names_max)
        self._directory.join(self.store)
        self._members: Members = ()
        self._ring = Ring([self.store.node])
        self._announcer: Announcer | None = None
        self._tier: Tier | None = None
        self._peers: dict[NodeId, _Peer] = {}
        self._lives: dict[NodeId, tuple[int, bytes]] = {}
        self._heard: dict[NodeId, float] = {}
        self._gone: dict[NodeId, float] = {}
        self._moved_at = 0.0
        self._ticked = self._loop.time()
        self._lost = 0
        self._scan: asyncio.Future[list[BlockHash]] | None = None
        self._closed = False

    def serve(self, service: Service) -> None:
        """Add the directory's methods to a gRPC service."""
        service.add(protocol.MEMBERS, self._on_members)
        service.add(protocol.LOOKUP, self._on_lookup)
        service.add(protocol.ANNOUNCE, self._on_announce)
        service.add(protocol.WATCH, self._on_watch)

    def join(self, address: str) -> None:
        """Become a member of the ring that answers at ``address``."""
        self._membership.join(
            Member(
                node=self.store.node,
                address=address,
                incarnation=Incarnation(self.store.identity),
            )
        )
        self._membership.subscribe(self._post)

    async def leave(self, timeout_s: float) -> None:
        """Leave the ring, and tell the others so that nobody looks here for blocks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        farewells = [peer.say_farewell(timeout_s / 2) for peer in self._peers.values()]
        await asyncio.gather(*farewells, return_exceptions=True)
        with suppress(TimeoutError):
            leaving = self._loop.run_in_executor(
                self._executor, self._membership.leave, timeout_s / 2
            )
            await asyncio.wait_for(leaving, timeout_s)
        for peer in self._peers.values():
            await peer.close()
        self._peers.clear()

    # ---- blocks of this node ---------------------------------------------------------------------

    async def opened(self, tier: Tier) -> None:
        """Take note of what the tier holds from earlier runs. See ``Holdings``."""
        capacity = sum(stats.slots for _, stats in stats_of(tier))
        announcer = Announcer(capacity, self._ring)
        if isinstance(tier, StackTier) and isinstance(tier.slow, SsdTier):
            keys, parents = tier.slow.blocks()
            await self._loop.run_in_executor(self._executor, announcer.restored, keys, parents)
        self._tier = tier
        announcer.change_ring(self._ring)  # it may have changed meanwhile
        self._announcer = announcer
        self._spread()

    async def stored(self, chain: bytes, first: int, count: int) -> None:
        """Tell who has to know of blocks that came; wait a little until they do. See ``Holdings``."""
        if self._announcer is None or not count:
            return
        if not self._name(self._announcer, chain, first, count):
            return
        self._spread()
        telling = [peer.told() for peer in self._peers.values() if peer.news()]
        if telling:
            await asyncio.wait(
                [asyncio.ensure_future(each) for each in telling], timeout=_TOLD_TIMEOUT_S
            )

    def _name(self, announcer: Announcer, chain: bytes, first: int, count: int) -> bool:
        """Name blocks that came. Names of blocks that have left since the last scan give way first."""
        try:
            announcer.stored(chain, first, count)
            return True
        except CapacityError:
            assert self._tier is not None
            self._remove(gone(announcer.names(), _keys(self._tier)))
        try:
            announcer.stored(chain, first, count)
            return True
        except CapacityError as error:
            logger.warning("%d blocks are here and not named: %s", count, error)
            self._metrics.count("kvpool_server_refused_names_total", count)
            return False

    def missed(self, name: bytes) -> None:
        """Take back a name that is not here. See ``Holdings``."""
        self._remove([BlockHash(name)])

    def tick(self) -> None:
        """Look for blocks that left, and for nodes that fell silent. To be called now and then."""
        now = self._loop.time()
        late_s = now - self._ticked - 2 * self._config.announce_interval_s
        self._ticked = now
        if late_s > 0:  # this process was stopped: nobody could be heard
            self._heard = {node: at + late_s for node, at in self._heard.items()}
        silent_s = _SILENT_INTERVALS * self._config.announce_interval_s
        for node, at in list(self._heard.items()):
            if now - at > silent_s:
                logger.warning("node %s is silent: its blocks are hidden until it is heard", node)
                self._directory.leave(node)
                del self._heard[node]
        for node, at in list(self._gone.items()):
            if now - at > _FORGET_S:
                self._directory.forget(node)
                del self._gone[node]
        if self._moved_at and now - self._moved_at > _MOVED_S:
            self._moved_at = 0.0
            self._drop_moved()
        self._metrics.set("kvpool_server_directory_name_count", len(self._directory))
        self._metrics.set("kvpool_server_node_count", len(self._ring))
        self._look_for_gone()

    def _look_for_gone(self) -> None:
        """Scan the tiers for names that are not there any more, if blocks have left since."""
        if self._announcer is None or self._tier is None or self._scan is not None:
            return
        try:
            lost = sum(stats.evictions + stats.corruptions for _, stats in stats_of(self._tier))
        except KVPoolError:
            return  # closed
        if lost == self._lost:
            return
        self._lost = lost
        named, tier = self._announcer.names(), self._tier

        def scan() -> list[BlockHash]:
            return gone(named, _keys(tier))

        self._scan = self._loop.run_in_executor(self._executor, scan)
        self._scan.add_done_callback(self._scanned)

    def _scanned(self, scan: "asyncio.Future[list[BlockHash]]") -> None:
        self._scan = None
        if scan.cancelled():
            return
        error = scan.exception()
        if error is None:
            self._remove(scan.result())
        elif not isinstance(error, KVPoolError):
            logger.error("a scan of the tiers failed", exc_info=error)

    def _remove(self, names: list[BlockHash]) -> None:
        """Take back names whose blocks are not here now: stores and this run in the same loop."""
        if self._announcer is None or self._tier is None or self._closed:
            return
        try:
            for name in names:
                if not self._tier.match(name):
                    self._announcer.removed(name)
        except KVPoolError:
            return  # closed
        self._spread()

    def _spread(self) -> None:
        """Put what this node owns into its own shard; wake those who tell the others."""
        announcer = self._announcer
        if announcer is None:
            return
        for node in announcer.waiting():
            if node == self.store.node:
                self._tell_self(announcer)
            elif node in self._peers:
                self._peers[node].wake()

    def _tell_self(self, announcer: Announcer) -> None:
        while True:
            kind, names = announcer.take(self.store.node, _NAMES_MAX)
            if not names:
                return
            self._enter(self.store, kind, names)

    def _enter(self, store: Store, kind: str, names: bytes) -> None:
        try:
            if kind == "stored":
                self._directory.announce(store, names)
            else:
                self._directory.withdraw(store, names)
        except CapacityError as error:
            logger.warning("%s", error)
            self._metrics.count("kvpool_server_refused_names_total", len(names) // HASH_BYTES)

    # ---- other nodes -----------------------------------------------------------------------------

    def _post(self, members: Members) -> None:
        """Take the members. From any thread."""
        with suppress(RuntimeError):  # the loop is at its end
            self._loop.call_soon_threadsafe(self._change, members)

    def _change(self, members: Members) -> None:
        """Use another ring, and tell new owners what they own now."""
        if self._closed or not members:
            return
        self._members = members
        nodes = {member.node for member in members} | {self.store.node}
        now = self._loop.time()
        for node in set(self._peers) - nodes:
            self._loop.create_task(self._peers.pop(node).close())
            self._directory.leave(node)
            self._heard.pop(node, None)
            self._gone[node] = now
        for member in members:
            known = self._peers.get(member.node)
            if member.node == self.store.node or (known and known.address == member.address):
                continue
            if known is not None:
                self._loop.create_task(known.close())
            self._gone.pop(member.node, None)
            self._peers[member.node] = _Peer(self, member.node, member.address)
        if nodes != set(self._ring.nodes):
            self._ring = Ring(nodes)
            self._moved_at = now
            if self._announcer is not None:
                moved = self._announcer.change_ring(self._ring)
                self._metrics.count("kvpool_server_moved_names_total", moved)
                logger.info("the ring has %d nodes: %d names to tell", len(nodes), moved)
            self._spread()

    def _drop_moved(self) -> None:
        """Forget names that other nodes own by now."""
        names = self._directory.names()
        mine = self.store.node
        owners = self._ring.owners_of(names, 2)
        gone = b"".join(
            names[index * HASH_BYTES : (index + 1) * HASH_BYTES]
            for index, owned in enumerate(owners)
            if mine not in owned
        )
        self._directory.drop(gone)

    def take(self, node: NodeId) -> tuple[str, bytes]:
        """Return what to tell a node next."""
        if self._announcer is None:
            return "stored", b""
        return self._announcer.take(node, _NAMES_MAX)

    def news(self, node: NodeId) -> bool:
        """Say whether there is something to tell a node."""
        return self._announcer is not None and node in self._announcer.waiting()

    def lose(self, node: NodeId) -> None:
        """Take note that a node has to be told everything anew."""
        if self._announcer is not None:
            self._announcer.lose(node)

    def announcement(self, kind: str, names: bytes, *, leaving: bool) -> protocol.AnnounceRequest:
        """Return the message that says what this node holds."""
        self._metrics.count("kvpool_server_announced_names_total", len(names) // HASH_BYTES)
        return protocol.AnnounceRequest(
            version=protocol.PROTOCOL_VERSION,
            node=self.store.node,
            incarnation=self.store.identity,
            began=self._began,
            kind=protocol.STORED if kind == "stored" else protocol.REMOVED,
            names=names,
            leaving=leaving,
        )

    def caller(self, address: str) -> AsyncCaller:
        """Return what calls another server."""
        return AsyncCaller(address, self._access)

    @property
    def interval_s(self) -> float:
        """How often others hear from this node."""
        return self._config.announce_interval_s

    # ---- methods ---------------------------------------------------------------------------------

    def _digest(self) -> bytes:
        return hashlib.sha256("\n".join(self._ring.nodes).encode()).digest()[:8]

    async def _on_members(self, request: protocol.Done) -> protocol.MembersReply:
        members = [
            protocol.Member(
                node=one.node,
                incarnation=one.incarnation,
                address=one.address,
                heard=one.node in self._heard or one.node == self.store.node,
            )
            for one in self._members
        ]
        return protocol.MembersReply(members=members, ring=self._digest())

    async def _on_lookup(self, request: protocol.LookupRequest) -> protocol.LookupReply:
        sets: dict[tuple[NodeId, ...], int] = {}
        holders: list[int] = []
        for stores in self._directory.lookup(request.names):
            nodes = tuple(store.node for store in stores)
            holders.append(sets.setdefault(nodes, len(sets)))
        return protocol.LookupReply(
            holders=holders,
            sets=[protocol.NodeSet(nodes=nodes) for nodes in sets],
            ring=self._digest(),
        )

    async def _on_announce(self, request: protocol.AnnounceRequest) -> protocol.AnnounceReply:
        protocol.spoken_version(request.version)
        if not calling_tenant.get().operator:
            raise UsageError("only a server of the pool may announce: give it an operator's token")
        node = NodeId(request.node)
        if len(request.incarnation) != len(self.store.identity) or not node:
            raise UsageError("an announcement without a node and its incarnation, 16 bytes")
        life = (request.began, request.incarnation)
        if life < self._lives.get(node, life):
            raise StaleIncarnationError(f"a later run of node {node} has been heard: stop this one")
        self._lives[node] = life
        if request.leaving:
            self._directory.leave(node)
            self._heard.pop(node, None)
            return protocol.AnnounceReply(incarnation=self.store.identity)
        store = Store(node, STORE_NAME, request.incarnation)
        self._directory.join(store)
        self._heard[node] = self._loop.time()
        if request.names:
            self._enter(
                store, "removed" if request.kind == protocol.REMOVED else "stored", request.names
            )
        return protocol.AnnounceReply(incarnation=self.store.identity)

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


class _Peer:
    """Tells one other node what it has to know, one announcement at a time."""

    def __init__(self, own: Node, node: NodeId, address: str) -> None:
        self._own = own
        self.node = node
        self.address = address
        self._caller = own.caller(address)
        self._awake = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._incarnation = b""
        self._fails = False
        self._task = asyncio.get_running_loop().create_task(self._tell())

    def wake(self) -> None:
        """Say that there is news."""
        self._awake.set()

    def news(self) -> bool:
        """Say whether it is to be told something and is known to listen."""
        return not self._fails and self._own.news(self.node)

    async def told(self) -> None:
        """Wait until it was told all there is to tell now, or does not listen."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(told)
        self.wake()
        await told

    async def say_farewell(self, timeout_s: float) -> None:
        """Say that this node leaves."""
        farewell = self._own.announcement("stored", b"", leaving=True)
        await self._caller.call(protocol.ANNOUNCE, farewell, timeout_s)

    async def close(self) -> None:
        """End its task and connection."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._release()
        await self._caller.close()

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for told in waiting:
            if not told.done():
                told.set_result(None)

    async def _tell(self) -> None:
        names, kind = b"", "stored"
        while True:
            try:
                reply = await self._caller.call(
                    protocol.ANNOUNCE,
                    self._own.announcement(kind, names, leaving=False),
                    _ANNOUNCE_TIMEOUT_S,
                )
            except StaleIncarnationError as error:
                logger.error("node %s: %s", self.node, error)
                self._failed()
            except PeerUnreachableError as error:
                logger.debug("node %s is out of reach: %s", self.node, error)
                self._failed()
            except KVPoolError as error:
                logger.warning("node %s took no announcement: %s", self.node, error)
                self._failed()
            except asyncio.CancelledError:
                raise
            except Exception:
                logger.exception("node %s could not be told", self.node)
                self._failed()
            else:
                self._fails = False
                if self._incarnation not in (b"", reply.incarnation):
                    self._own.lose(self.node)  # another run of it: it has forgotten
                self._incarnation = reply.incarnation
            names = b""
            if not self._fails:
                kind, names = self._own.take(self.node)
                if names:
                    continue
            self._release()
            self._awake.clear()
            with suppress(TimeoutError):
                wait_s = self._own.interval_s
                if self._fails:
                    await asyncio.sleep(wait_s)
                else:
                    await asyncio.wait_for(self._awake.wait(), wait_s)
                    kind, names = self._own.take(self.node)

    def _failed(self) -> None:
        self._fails = True
        self._own.lose(self.node)


def _keys(tier: Tier) -> bytes:
    """Return the keys of all blocks of a tier and of what it is made of, in no order."""
    if isinstance(tier, StackTier):
        below = tier.slow.blocks()[0] if isinstance(tier.slow, SsdTier) else b""
        return tier.fast.keys() + below
    return tier.keys() if isinstance(tier, DramTier) else b""
