"""Membership through etcd: a key with a lease for each node, and a view that follows them.

Owns two threads: ``kvpool-etcd-watch`` reads all members and then watches for changes, and reads anew
whenever the watch ends, fails or is silent for a while, so no lost event, compaction, restart or new
cluster can lead it astray; ``kvpool-etcd-lease`` keeps this node's key there, and puts it back when it
is missing. What the view makes of what etcd says is in ``index/membership.py``. Who calls it: servers
and clients of a pool that spans hosts; needs the extra ``kvpool[etcd]``.
"""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Final

import msgspec

from kvpool.block import Incarnation, NodeId
from kvpool.clock import Clock, SystemClock
from kvpool.errors import ClosedError, KVPoolError, UsageError
from kvpool.index.etcd_gateway import Gateway, Pair
from kvpool.index.membership import Member, Members, MemberView, Subscribers, Told, node_id

logger = logging.getLogger(__name__)

# Of the keys and values below. Readers skip what they do not know.
FORMAT_VERSION: Final = 1
_PAUSE_MIN_S: Final = 0.1
_PAUSE_MAX_S: Final = 2.0
_CLOSE_TIMEOUT_S: Final = 4.0
_KEEPS_PER_LIFE: Final = 3


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """What the key of a node says. Unknown fields are ignored, so that later versions may add some."""

    version: int
    address: str
    incarnation: str
    leaving: bool = False


@dataclass(slots=True)
class _Registration:
    """The key of this node, and how far the lease thread is with it."""

    member: Member
    lease: str = ""
    revision: int = 0  # of the put that stands; 0: to be put
    leaving: bool = False
    superseded: bool = False  # another process uses the name


class EtcdMembership:
    """The members of one pool, kept in etcd.

    One condition, ``_changed``, guards the view and the registration; no call to etcd is made and
    nobody is told under it.

    Args:
        gateway: To etcd; closed with this.
        pool: Name of the pool, so that several may share one etcd. As a node's name.
        life_s: How long a node's key outlives its last sign of life, whole seconds.
        grace_s: How much longer a vanished node stays in the view; None: ``life_s``.
        silence_s: After this long without an event everything is read anew.
        clock: For the grace time.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        pool: str = "default",
        life_s: int = 10,
        grace_s: float | None = None,
        silence_s: float = 3.0,
        clock: Clock | None = None,
    ) -> None:
        if life_s < 2:
            raise UsageError(f"a life of {life_s} s: etcd's leases need 2 s or more")
        self._gateway = gateway
        self._prefix = f"/kvpool/{FORMAT_VERSION}/{node_id(pool)}/nodes/".encode()
        self._life_s = life_s
        self._silence_s = silence_s
        self._clock = clock or SystemClock()
        self._view = MemberView(life_s if grace_s is None else grace_s)
        self._subscribers = Subscribers()
        self._changed = threading.Condition()
        self._own: _Registration | None = None
        self._troubles: dict[str, str] = {}
        self._cluster = ""
        self._closed = False
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._follow, "kvpool-etcd-watch"),
                (self._keep, "kvpool-etcd-lease"),
            )
        ]
        for thread in self._threads:
            thread.start()

    # ---- the contract ----------------------------------------------------------------------------

    def members(self) -> Members:
        """Return the members, sorted by name: this node alone, or none, while etcd never answered."""
        with self._changed:
            self._require_open()
            return self._view.members()

    def subscribe(self, told: Told) -> None:
        """Have every change of the members told, from a thread of this or from ``join``."""
        with self._changed:
            self._require_open()
        self._subscribers.add(told, self._known)

    def join(self, member: Member) -> None:
        """Become a member: here at once, in etcd as soon as it answers."""
        if not member.incarnation:
            raise UsageError("a node joins etcd with its incarnation: give the transport's")
        with self._changed:
            self._require_open()
            if self._own is not None and self._own.member.node != member.node:
                name = self._own.member.node
                raise UsageError(f"node {name} has joined here: one process is one node")
            lease = "" if self._own is None else self._own.lease
            self._own = _Registration(member, lease)
            self._view.own(member)
            self._changed.notify_all()
        self._subscribers.tell(self._known)

    def leave(self, timeout_s: float) -> None:
        """Say in etcd that this node leaves, and remove its key."""
        with self._changed:
            if self._closed or self._own is None:
                return
            self._own.leaving = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._own is None, timeout_s)
            self._own = None
            self._view.own(None)
        self._subscribers.tell(self._known)

    def trouble(self) -> str:
        """Return why etcd is not followed, or this node not kept in it; empty: all is well."""
        with self._changed:
            return "; ".join(self._troubles.values())

    def close(self) -> None:
        """End both threads; the node's key stays until its lease is over."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._stop.set()
            self._changed.notify_all()
        self._gateway.end()
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        self._gateway.close()

    def _known(self) -> Members:
        with self._changed:
            return self._view.members()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this membership was closed: open another")

    def _say(self, thread: str, trouble: str) -> None:
        with self._changed:
            if trouble and thread not in self._troubles:
                logger.warning("%s; the members known last stay in use", trouble)
            if trouble:
                self._troubles[thread] = trouble
            elif self._troubles.pop(thread, None) is not None:
                logger.info("etcd answers again")

    # ---- following the others --------------------------------------------------------------------

    def _follow(self) -> None:
        resumed, pause_s = True, _PAUSE_MIN_S
        while not self._stop.is_set():
            began = self._clock.now()
            try:
                found = self._gateway.read(self._prefix)
                self._take(found.cluster, found.pairs, resumed)
                resumed = False
                self._say("watch", "")
                with self._gateway.watch(
                    self._prefix, found.revision + 1, self._silence_s
                ) as changes:
                    for batch in changes:
                        self._apply(batch)
            except ClosedError:
                return
            except KVPoolError as error:
                resumed = True
                self._say("watch", str(error))
            except Exception as error:  # whatever etcd says: who follows it goes on
                logger.exception("a look at etcd failed")
                resumed = True
                self._say("watch", f"a look at etcd failed: {error!r}")
            if not resumed and self._clock.now() - began >= self._silence_s:
                pause_s = _PAUSE_MIN_S
                continue
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S) if resumed else _PAUSE_MIN_S

    def _take(self, cluster: str, pairs: list[Pair], resumed: bool) -> None:
        with self._changed:
            if self._cluster not in ("", cluster):
                logger.warning("etcd is another cluster than before: nobody leaves the view for it")
            self._cluster = cluster
            found: dict[NodeId, Member] = {}
            for pair in pairs:
                read = self._read(pair)
                if read is not None and self._is_other(read[0], pair.revision):
                    found[read[0].node] = read[0]
                    if read[1]:
                        self._view.left(read[0].node)
                        del found[read[0].node]
            now = self._clock.now()
            self._view.whole(found, now, resumed=resumed)
            self._view.expire(now)
            own = self._own
            if own is not None and own.revision and not self._named(own.member, pairs):
                own.revision = 0
                self._changed.notify_all()
        self._subscribers.tell(self._known)

    def _apply(self, batch: list[Pair]) -> None:
        with self._changed:
            for pair in batch:
                read = self._read(pair)
                if read is not None and self._is_other(read[0], pair.revision):
                    member, leaving = read
                    if leaving:
                        self._view.left(member.node)
                    else:
                        self._view.put(member)
                elif pair.value is None:
                    self._vanished(pair)
            self._view.expire(self._clock.now())
        self._subscribers.tell(self._known)

    def _vanished(self, pair: Pair) -> None:
        name = pair.key[len(self._prefix) :].decode("utf-8", "replace")
        own = self._own
        if own is not None and own.member.node == name:
            if own.revision and pair.revision > own.revision:
                own.revision = 0
                self._changed.notify_all()
            return
        self._view.vanished(NodeId(name), self._clock.now())

    def _is_other(self, member: Member, revision: int) -> bool:
        """Say whether a member is another node than this. Notice one that took this node's name."""
        own = self._own
        if own is None or member.node != own.member.node:
            return True
        if member.incarnation != own.member.incarnation and 0 < own.revision < revision:
            own.superseded = True
            self._troubles["name"] = (
                f"another process has joined as node {member.node} from {member.address}: "
                "give every node a name of its own, and restart this one"
            )
            logger.error("%s", self._troubles["name"])
        return False

    def _named(self, own: Member, pairs: list[Pair]) -> bool:
        return any(pair.key == self._prefix + own.node.encode() for pair in pairs)

    def _read(self, pair: Pair) -> tuple[Member, bool] | None:
        """Return the member that a pair names and whether it leaves; None if it is none."""
        if pair.value is None:
            return None
        try:
            node = node_id(pair.key[len(self._prefix) :].decode())
            value = msgspec.json.decode(pair.value, type=_Value)
            incarnation = Incarnation(bytes.fromhex(value.incarnation))
            member = Member(node=node, address=value.address, incarnation=incarnation)
        except (msgspec.DecodeError, ValueError, UsageError) as error:
            logger.debug("a key of etcd below %s is no node: %s", self._prefix, error)
            return None
        return member, value.leaving

    # ---- staying a member ------------------------------------------------------------------------

    def _keep(self) -> None:
        """Do what the registration needs next; after it is done, wait until it is due again."""
        wait_s, failures = 0.0, 0
        while True:
            with self._changed:
                self._changed.wait_for(self._is_due, wait_s or None)
                if self._stop.is_set():
                    return
                own = self._own
            if own is None or (own.superseded and not own.leaving):
                wait_s = 0.0
                continue
            try:
                if own.leaving:
                    self._unregister(own)
                    wait_s = 0.0
                else:
                    self._register(own)
                    wait_s = self._life_s / _KEEPS_PER_LIFE
                failures = 0
                self._say("lease", "")
            except ClosedError:
                return
            except KVPoolError as error:
                if isinstance(error, UsageError):
                    own.lease = ""  # etcd does not know the lease: another one, then
                failures += 1
                wait_s = self._failed(str(error), failures)
            except Exception as error:  # this node must stay a member
                logger.exception("a call to etcd failed")
                failures += 1
                wait_s = self._failed(f"a call to etcd failed: {error!r}", failures)
            if own.leaving:
                with self._changed:  # said or not: the lease ends it
                    if self._own is own:
                        self._own = None
                    self._changed.notify_all()

    def _failed(self, trouble: str, failures: int) -> float:
        """Say what is wrong, wait a little, and return how long until the next try."""
        self._say("lease", trouble)
        self._stop.wait(min(_PAUSE_MIN_S * 2 ** min(failures, 10), _PAUSE_MAX_S))
        return _PAUSE_MIN_S

    def _is_due(self) -> bool:
        own = self._own
        if self._stop.is_set():
            return True
        return own is not None and (own.leaving or not (own.superseded or own.revision))

    def _register(self, own: _Registration) -> None:
        if own.lease and own.revision and not self._gateway.keep_alive(own.lease):
            own.lease = ""
        if not own.lease:
            own.lease = self._gateway.grant(self._life_s)
            own.revision = 0
        if not own.revision:
            revision = self._gateway.put(self._own_key(own), _encode(own), own.lease)
            with self._changed:
                own.revision = revision

    def _unregister(self, own: _Registration) -> None:
        if own.lease and not own.superseded:
            self._gateway.put(self._own_key(own), _encode(own), own.lease)
        if own.lease:
            self._gateway.revoke(own.lease)

    def _own_key(self, own: _Registration) -> bytes:
        return self._prefix + own.member.node.encode()


def _encode(own: _Registration) -> bytes:
    value = _Value(
        version=FORMAT_VERSION,
        address=own.member.address,
        incarnation=own.member.incarnation.hex(),
        leaving=own.leaving,
    )
    return msgspec.json.encode(value)
