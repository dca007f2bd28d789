"""The servers of a ring, as a client knows them: who they are, who answers, and who holds what.

Owns a pool of each server, the ring for look-ups, the thread that follows the members
(``kvpool-members``), and what failed reads taught. Asks the directory; moves no blocks. Who calls it:
the pool over many servers.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvpool.block import HASH_BYTES, BlockHash, BlockLayout, NodeId
from kvpool.client import protocol
from kvpool.client.access import ClientAccess
from kvpool.client.breaker import Breaker
from kvpool.client.link import Place
from kvpool.client.patience import Patience
from kvpool.client.remote import RemotePool
from kvpool.client.rpc import Asked, Caller
from kvpool.client.settling import Settling
from kvpool.client.ways import Ways
from kvpool.clock import Clock
from kvpool.completion import Deadline
from kvpool.config import TransferConfig
from kvpool.errors import (
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.index.directory import Store
from kvpool.index.lookup import Lookup, Piece, Question
from kvpool.index.ring import BoundedLoad, Ring

logger = logging.getLogger(__name__)

# How often the members are asked for, news or not.
_REFRESH_S: Final = 1.0
# How long look-ups go by the ring before a change: shards have to be told first.
_SETTLE_S: Final = 3.0
# A shard that had less than this part of what a read waits is slow perhaps, and no sign of silence.
_SILENT_SHARE: Final = 0.25
# How long one member after the other is waited for while none is connected.
_LOOK_S: Final = 0.1
# How long a failed read is remembered, and how many are.
_ABSENT_S: Final = 2.0
_ABSENT_MAX: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One server.

    Attributes:
        node, address: Its name, and where it is asked.
        pool: Its blocks.
        caller: Its shard of the directory.
        breaker: Of that shard.
    """

    node: NodeId
    address: str
    pool: RemotePool
    caller: Caller
    breaker: Breaker

    def is_avoided(self) -> bool:
        """Say whether its shard is asked only where there is no other owner."""
        return self.pool.silent() or self.breaker.open()

    def may_be_asked(self) -> bool:
        """Say whether its shard may be asked now: a silent one is a wait that a read has not to make.

        While it fails, True is this pause's one try.
        """
        return not self.pool.silent() and self.breaker.allows()

    def close(self) -> None:
        """Close its pool and connection."""
        self.pool.close()
        self.caller.close()


class Nodes:
    """The servers of one ring. Safe from any thread.

    One condition, ``_changed``, guards the table, the ring and what is absent; nobody is asked and
    nothing is closed under it.

    Args:
        seeds: Addresses of some of the servers.
        layout, ways, config: Of the pools.
        access: How this client shows who it is.
        clock: Of pauses.
    """

    def __init__(
        self,
        seeds: Sequence[str],
        layout: BlockLayout,
        ways: Ways,
        config: TransferConfig,
        access: ClientAccess,
        clock: Clock,
    ) -> None:
        self._seeds = tuple(seeds)
        self._layout = layout
        self._ways = ways
        self._config = config
        self._access = access
        self._clock = clock
        self._changed = threading.Condition()
        self._nodes: dict[NodeId, Node] = {}
        self._ring = Ring([])
        self._digest = b""
        self._load = BoundedLoad([])
        self._settling = Settling(_SETTLE_S)
        self._absent: dict[tuple[NodeId, bytes], float] = {}
        self._closed = self._poked = False
        self.lookups = self.rounds = 0
        self._thread = threading.Thread(target=self._follow, name="kvpool-members", daemon=True)

    def open(self, timeout_s: float) -> None:
        """Find the members, and wait for each until it is connected or one fails to answer.

        Raises:
            PeerUnreachableError, TransferTimeoutError: No server answers.
            UsageError: A server refuses this client, or is of no ring.
        """
        deadline = Deadline(timeout_s)
        self._refresh(deadline)
        self._thread.start()
        first: KVPoolError | None = None
        for node in self.all():
            try:
                wait_s = min(deadline.remaining_s(), self._config.request_timeout_s)
                node.pool.wait_connected(wait_s if first is None else 0.0)
            except TransferTimeoutError as error:
                first = error
        if first is not None and not any(node.pool.usable() for node in self.all()):
            self._wait_for_one(deadline)
        if not any(node.pool.usable() for node in self.all()):
            raise first or PeerUnreachableError("no server of the ring answers")

    def _wait_for_one(self, deadline: Deadline) -> None:
        """Wait until one of the members is connected, or the time is over."""
        while not deadline.passed():
            for node in self.all():
                with suppress(TransferTimeoutError):
                    node.pool.wait_connected(min(_LOOK_S, deadline.remaining_s()))
                    return

    def all(self) -> list[Node]:
        """Return all members, by name."""
        with self._changed:
            return [self._nodes[name] for name in sorted(self._nodes)]

    def get(self, node: NodeId) -> Node | None:
        """Return a member if it can be asked now."""
        with self._changed:
            found = self._nodes.get(node)
        return found if found is not None and found.pool.usable() else None

    def usable(self) -> list[Node]:
        """Return the members that can be asked now, those of this host first."""
        return sorted(
            (node for node in self.all() if node.pool.usable()),
            key=lambda node: not node.pool.is_near(),
        )

    def owners(self, name: BlockHash) -> list[Node]:
        """Return the members that can be asked now, in the order of the ring from a name on."""
        with self._changed:
            names = self._ring.owners(name, len(self._ring)) if len(self._ring) else ()
        return [node for node in (self.get(one) for one in names) if node is not None]

    def sole(self) -> Store | None:
        """Return the store of the only member: what anybody holds, it does. None: there are others."""
        with self._changed:
            nodes = self._ring.nodes
            alone = len(nodes) == len(self._nodes) == 1 and nodes[0] in self._nodes
        return Store(nodes[0], "pool", b"") if alone else None

    def lookup(self, hashes: bytes, patience: Patience) -> list[Piece]:
        """Ask who holds the leading blocks, for at most ``match_timeout_s``.

        A shard that does not answer in time costs the read of ``patience``, and nobody asks it for a
        while. Stores of members that cannot be asked now are left out, and reads that failed lately.
        """
        deadline = Deadline(self._config.match_timeout_s)
        with self._changed:
            if not len(self._ring):
                return []
            avoid = {node for node, one in self._nodes.items() if one.is_avoided()}
            avoid |= set(self._ring.nodes) - set(self._nodes)  # they left
            lookup = Lookup(hashes, self._ring, self._load, avoid=avoid)
        while True:
            with self._changed:
                questions = lookup.ask()
            if not questions:
                break
            answers, failed = self._ask(questions, patience, deadline)
            if failed:
                others = lookup.ask_others(failed)
                answers.update(self._ask(others, patience, deadline)[0])
            lookup.answer(answers)
        with self._changed:
            self.lookups += 1
            self.rounds += lookup.rounds
        return self._present(hashes, lookup.pieces())

    def absent(self, node: NodeId, block: BlockHash) -> None:
        """Remember for a while that a node did not have a block that it was said to hold."""
        now = self._clock.now()
        with self._changed:
            if len(self._absent) >= _ABSENT_MAX:
                self._absent.clear()
            self._absent[node, block] = now + _ABSENT_S

    def close(self) -> None:
        """End the thread and close every pool. Idempotent, bounded."""
        with self._changed:
            self._closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
            self._changed.notify_all()
        # Side by side: each may take its time.
        threads = [threading.Thread(target=node.close, name="kvpool-close") for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._thread.is_alive():
            self._thread.join(self._config.match_timeout_s + 1.0)

    # ---- look-ups --------------------------------------------------------------------------------

    def _ask(
        self, questions: Iterable[Question], patience: Patience, deadline: Deadline
    ) -> tuple[dict[NodeId, Sequence[tuple[Store, ...]]], set[NodeId]]:
        """Ask shards side by side, at most as long as for one; return their answers, and who gave none."""
        asked: dict[NodeId, tuple[Node, Asked[protocol.LookupReply]]] = {}
        failed: set[NodeId] = set()
        silent_s = _SILENT_SHARE * self._config.read_timeout_s
        timeout_s = min(patience.share_s(), deadline.remaining_s() / 2)
        give_up, began = Deadline(timeout_s), time.monotonic()
        for question in questions:
            with self._changed:
                node = self._nodes.get(question.node)
            if node is None or not node.may_be_asked():
                failed.add(question.node)
                continue
            request = protocol.LookupRequest(names=question.names)
            try:
                caller = node.pool.caller() or node.caller
                call = caller.ask(protocol.LOOKUP, request, give_up.remaining_s())
                asked[question.node] = node, call
            except KVPoolError:  # its connection or channel has ended, or takes no more
                failed.add(question.node)
        answers: dict[NodeId, Sequence[tuple[Store, ...]]] = {}
        for name, (node, call) in asked.items():
            try:
                reply = call.reply()
            except KVPoolError as error:
                logger.debug("the directory at %s does not answer: %s", name, error)
                node.breaker.failed()
                if isinstance(error, TransferTimeoutError) and timeout_s >= silent_s:
                    node.pool.note_silence()  # a read waits for one process once
                failed.add(name)
                continue
            node.breaker.succeeded()
            answers[name] = _stores(reply)
            if reply.ring != self._digest:
                self._poke()
        if failed:
            patience.spend(time.monotonic() - began, timeout_s)
        return answers, failed

    def _present(self, hashes: bytes, pieces: list[Piece]) -> list[Piece]:
        """Leave out stores that cannot be read, and what is behind the first gap."""
        now = self._clock.now()
        with self._changed:
            self._absent = {key: until for key, until in self._absent.items() if until > now}
            absent = {node: set[bytes]() for node, _ in self._absent}
            for node, block in self._absent:
                absent[node].add(block)
        usable = {node.node for node in self.usable()}
        found: list[Piece] = []
        for piece in pieces:
            stores = [store for store in piece.stores if store.node in usable]
            ends = {
                store: _first_absent(hashes, piece, absent.get(store.node, set()))
                for store in stores
            }
            begin = piece.begin
            for end in sorted({*ends.values(), piece.end}):
                left = tuple(store for store in stores if ends[store] > begin)
                if begin < end and left:
                    found.append(Piece(begin, end, left))
                elif begin < end:
                    return found
                begin = max(begin, end)
        return found

    # ---- members ---------------------------------------------------------------------------------

    def _poke(self) -> None:
        with self._changed:
            self._poked = True
            self._changed.notify_all()

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._poked, _REFRESH_S)
                if self._closed:
                    return
                self._poked = False
            try:
                self._refresh(Deadline(self._config.request_timeout_s))
            except KVPoolError as error:
                logger.debug("the members of the ring are not known anew: %s", error)
            except Exception:  # whatever a server says: who follows the ring goes on
                logger.exception("the members of the ring are not known anew")
            with self._changed:  # not at once again, however many look-ups say so
                self._changed.wait_for(lambda: self._closed, _REFRESH_S / 4)

    def _refresh(self, deadline: Deadline) -> None:
        """Ask one server after the other who there is."""
        failed: KVPoolError = PeerUnreachableError(f"no server at {', '.join(self._seeds)}")
        known = self.all()
        usable = [node for node in known if node.pool.usable()]
        for number, node in enumerate(usable):
            try:
                wait_s = deadline.remaining_s() / (len(usable) - number + 1)
                self._take(node.caller.call(protocol.MEMBERS, protocol.Done(), wait_s))
                return
            except KVPoolError as error:
                failed = error
        for number, seed in enumerate(self._seeds):
            caller = Caller(seed, self._access)
            try:
                wait_s = deadline.remaining_s() / (len(self._seeds) - number)
                self._take(caller.call(protocol.MEMBERS, protocol.Done(), wait_s))
                return
            except KVPoolError as error:
                failed = error
            finally:
                caller.close()
        raise failed

    def _take(self, reply: protocol.MembersReply) -> None:
        """Take the members: they are used at once, and look-ups follow when shards were told."""
        told = {NodeId(one.node): one.address for one in reply.members}
        if not told:
            raise UsageError("the server is of no ring: connect to its run directory")
        for address in told.values():
            self._access.require_safe(address)
        now = self._clock.now()
        opened = [
            self._open(node, address)
            for node, address in told.items()
            if self._is_new(node, address)
        ]
        with self._changed:
            gone = [one for name, one in self._nodes.items() if told.get(name) != one.address]
            for one in gone:
                del self._nodes[one.node]
            for one in opened:
                self._nodes[one.node] = one
            closed = self._closed
            asked = self._settling.take(told, [one.node for one in opened], now)
            if asked and set(asked) != set(self._ring.nodes):
                self._ring = Ring(asked)
                self._load = BoundedLoad(asked)
            if set(self._ring.nodes) == set(told):
                self._digest = reply.ring
        for one in [*gone, *(opened if closed else [])]:
            one.close()

    def _is_new(self, node: NodeId, address: str) -> bool:
        with self._changed:
            known = self._nodes.get(node)
        return known is None or known.address != address

    def _open(self, node: NodeId, address: str) -> Node:
        pool = RemotePool(
            Place(address, self._access),
            self._layout,
            self._ways,
            self._config,
            None,
            clock=self._clock,
            owns_ways=False,
        )
        breaker = Breaker(
            self._clock, min_s=self._config.backoff_min_s, max_s=self._config.backoff_max_s
        )
        return Node(node, address, pool, Caller(address, self._access), breaker)


def _stores(reply: protocol.LookupReply) -> list[tuple[Store, ...]]:
    """Return the holders of each leading name; what does not fit ends them."""
    sets = [tuple(Store(NodeId(node), "pool", b"") for node in one.nodes) for one in reply.sets]
    found: list[tuple[Store, ...]] = []
    for number in reply.holders:
        if number >= len(sets):
            break
        found.append(sets[number])
    return found


def _first_absent(hashes: bytes, piece: Piece, absent: set[bytes]) -> int:
    """Return where the first block of a piece is that is absent; its end if none is."""
    if absent:
        for index in range(piece.begin, piece.end):
            if hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES] in absent:
                return index
    return piece.end
