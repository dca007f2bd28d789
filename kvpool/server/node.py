"""One node of the ring: who else there is, and that all know what they have to.

Owns the members and the ring as they are now. ``shard`` has what other nodes told this one, ``naming``
what this one holds and owes to others, ``telling`` a task for each other node. All of it is soft state:
a node that restarts is told anew by everybody, and tells everybody anew. Everything here runs in the
server's event loop. Who calls it: the daemon; the service, of blocks that come.
"""

import asyncio
import logging
import time
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final

from kvpool.block import HASH_BYTES, Incarnation, NodeId
from kvpool.client import protocol
from kvpool.client.access import OPEN, ClientAccess
from kvpool.client.rpc_service import Methods
from kvpool.config import ServerConfig
from kvpool.errors import UsageError
from kvpool.index.directory import Kind, Store
from kvpool.index.membership import Member, Members, Membership
from kvpool.index.ring import Ring
from kvpool.metrics import Metrics
from kvpool.server.answering import Answering
from kvpool.server.naming import Naming
from kvpool.server.shard import STORE_NAME, Shard
from kvpool.server.telling import Teller
from kvpool.server.upkeep import Tasks
from kvpool.tiers.base import Tier

logger = logging.getLogger(__name__)

# Longest that a store waits until other nodes know of it. Behind it they hear a little later.
_TOLD_TIMEOUT_S: Final = 0.25
# Pieces of names that this node enters into its own shard before others get their turn.
_PIECES_MAX: Final = 2


class Node:
    """A server as a member of the ring.

    Args:
        config: Its name, where it listens, its limits.
        incarnation: Of this process.
        membership: Who else there is. It stays the caller's.
        executor: For what is linear in the names.
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
        self._shard = Shard(
            self.store,
            config.directory_names_max,
            config.announce_interval_s,
            executor,
            metrics,
        )
        self._naming = Naming(self._shard.ring, executor, metrics, self._spread)
        self._members: Members = ()
        self._peers: dict[NodeId, Teller] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    def serve(self, service: Methods) -> None:
        """Add the directory's methods to what serves them."""
        service.add(protocol.MEMBERS, self._on_members)
        self._shard.serve(service)

    def serve_prompts(self, answering: Answering) -> None:
        """Add what can be answered at once, on the thread of a client's connection."""
        self._shard.serve_prompts(answering)

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
        self._naming.close()
        self._shard.close()
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
        await self._naming.opened(tier)

    async def stored(self, chain: bytes, first: int, count: int) -> None:
        """Tell who has to know of blocks that came; wait a little until they do. See ``Holdings``."""
        if not await self._naming.stored(chain, first, count):
            return
        self._spread()
        telling = [peer.told() for peer in self._peers.values() if peer.news()]
        if telling:
            await asyncio.wait(
                [asyncio.ensure_future(each) for each in telling], timeout=_TOLD_TIMEOUT_S
            )

    def missed(self, names: bytes) -> None:
        """Take back a name that is not here. See ``Holdings``."""
        self._naming.missed(names)

    def upkeep(self) -> Tasks:
        """Return what is to be done now and then, by name: nodes that fell silent, blocks that left."""
        return {"directory": self._shard.tick, "names": self._naming.tick}

    def _spread(self) -> None:
        """Put what this node owns into its own shard; wake those who tell the others."""
        if self._closed:
            return
        for node in self._naming.waiting():
            if node == self.store.node:
                self._tell_self()
            elif node in self._peers:
                self._peers[node].wake()

    def _tell_self(self) -> None:
        if self._naming.is_behind(self.store.node):
            if self._renewing is None:
                self._renewing = self._loop.create_task(self._renew_self())
            return
        for _ in range(_PIECES_MAX):
            kind, names = self._naming.take(self.store.node)
            if not names:
                return
            self._shard.enter(self.store, kind, names)
        self._loop.call_soon(self._spread)  # there may be more

    async def _renew_self(self) -> None:
        try:
            await self._naming.renew(self.store.node)
        except Exception:
            logger.exception("this node's own names are not known; tried again with the next news")
            return
        finally:
            self._renewing = None
        self._spread()

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
        for node in set(self._peers) - nodes:
            self._end(self._peers.pop(node))
            self._shard.hide(node)
        for member in members:
            known = self._peers.get(member.node)
            if member.node == self.store.node or (known and known.address == member.address):
                continue
            if known is not None:
                self._end(known)
            self._shard.welcome(member.node)
            try:
                self._access.require_safe(member.address)
            except UsageError as error:
                logger.error("node %s is told nothing: %s", member.node, error)
                self._peers.pop(member.node, None)
                continue
            self._peers[member.node] = Teller(
                self._naming,
                self._announcement,
                member.node,
                member.address,
                access=self._access,
                interval_s=self._config.announce_interval_s,
            )
        if nodes != set(self._shard.ring.nodes):
            ring = Ring(nodes)
            self._shard.turn(ring)
            self._naming.turn(ring)
            self._spread()

    def _end(self, peer: Teller) -> None:
        """Close the way to a node that is no member any more, or is elsewhere now."""
        ending = self._loop.create_task(peer.close())
        self._ending.add(ending)  # the loop itself would let it go half way
        ending.add_done_callback(self._ending.discard)

    def _announcement(self, kind: Kind, names: bytes, leaving: bool) -> protocol.AnnounceRequest:
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

    async def _on_members(self, request: protocol.Done) -> protocol.MembersReply:
        members = [
            protocol.Member(
                node=one.node,
                incarnation=one.incarnation,
                address=one.address,
                heard=self._shard.heard(one.node),
            )
            for one in self._members
        ]
        return protocol.MembersReply(
            members=members, ring=self._shard.digest(), node=self.store.node
        )
