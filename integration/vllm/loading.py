"""Loads: blocks come out of the pool, verified, and enter the engine's cache.

Owns the threads of loads and how each ended. Exactly one end is reported for each order, whatever
happens: vLLM keeps a request's blocks until then, and nobody reads them. A pool of this host writes
into them itself, checking what it wrote; a load that failed leaves zeros, and its end is told when
nothing writes any more, a moment after its deadline at most. What comes from another host may be late
for long: it lands in slots, enters when it is whole, and slots that the pool may still write stay out
of use until it is done. Who calls it: the worker's side.
"""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvpool.base import Lease, Match
from kvpool.block import Namespace
from kvpool.completion import Completion, Deadline
from kvpool.errors import KVPoolError, TransferTimeoutError
from kvpool.integration.vllm.lane import Lane
from kvpool.integration.vllm.plan import LoadOrder
from kvpool.integration.vllm.shape import BlockRun, part_chain

logger = logging.getLogger(__name__)

_THREADS: Final = 2
# Loads that may wait for a thread, or run: more than an engine has requests.
LOADS_MAX: Final = 4096
# A lease outlives the load's deadline by this much.
_LEASE_SPARE_S: Final = 1.0
# A pool of this host ends a load so soon after its deadline: it finishes the batch that it copies.
_END_SPARE_S: Final = 1.0


class Loader:
    """Safe from the worker's thread; ``_changed`` guards what has ended, the counts and ``_waiting``.

    Args:
        lane: What is loaded, and through what.
        near: The pool is on this host: it writes into the engine's cache itself.
    """

    def __init__(self, lane: Lane, near: bool) -> None:
        self._lane = lane
        self._near = near
        self._changed = threading.Condition()
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._loaded = 0
        self._failures = 0
        self._waiting = 0
        self._threads = ThreadPoolExecutor(_THREADS, "kvpool-load")

    def start(self, namespace: Namespace, order: LoadOrder) -> None:
        """Start a load. Never waits; behind ``LOADS_MAX`` others it has failed at once."""
        with self._changed:
            full = self._waiting >= LOADS_MAX
            if full:
                self._ended.add(order.request)
                self._failed.add(order.request)
                self._failures += 1
            else:
                self._waiting += 1
        if not full:
            self._threads.submit(self._run, namespace, order, Deadline(self._lane.timeout_s))

    def take_ended(self, patience_s: float = 0.0) -> tuple[set[str], set[str]]:
        """Return the requests whose loads ended since the last call, and those that failed.

        With none, wait for up to ``patience_s`` until one has.
        """
        with self._changed:
            if patience_s:
                self._changed.wait_for(lambda: self._ended, patience_s)
            ended, self._ended = self._ended, set()
            failed, self._failed = self._failed, set()
            return ended, failed

    def counts(self) -> dict[str, int]:
        """Return and clear how many blocks were loaded and how many loads failed."""
        with self._changed:
            counts = {"loaded_blocks": self._loaded, "failed_loads": self._failures}
            self._loaded = self._failures = 0
            return counts

    def close(self) -> None:
        """End the threads. Loads under way end with the pool, or at their deadline."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, namespace: Namespace, order: LoadOrder, deadline: Deadline) -> None:
        whole = False
        late: list[Completion[int]] = []
        try:
            whole = all(self._load(namespace, run, deadline, late) for run in order.runs)
        except KVPoolError as error:
            logger.warning("a load failed, the request is computed: %s", error)
        except Exception:
            logger.exception("a load failed, the request is computed")
        if late:
            late[0].add_done_callback(lambda: self._end(order, whole=False))
        else:
            self._end(order, whole)

    def _end(self, order: LoadOrder, whole: bool) -> None:
        """Tell the end of a load. Nothing of it writes any more."""
        if not whole and self._near:
            for run in order.runs:
                self._lane.caches[run.group].clear(run.block_ids)
        with self._changed:
            self._waiting -= 1
            self._ended.add(order.request)
            if whole:
                self._loaded += sum(len(run.block_ids) for run in order.runs)
            else:
                self._failed.add(order.request)
                self._failures += 1
            self._changed.notify_all()

    def _load(
        self,
        namespace: Namespace,
        run: BlockRun,
        deadline: Deadline,
        late: list[Completion[int]],
    ) -> bool:
        """Load one run; say whether all of it came. In ``late`` is left what may still write."""
        if deadline.passed():  # it waited in line behind loads that got no answer
            raise TransferTimeoutError("no load was free in time")
        part = self._lane.shape.groups[run.group].parts[self._lane.rank]
        chain = part_chain(namespace, part, run.hashes)
        seconds = deadline.remaining_s() + _LEASE_SPARE_S
        with self._lane.pool.lease(Match(chain, len(chain)), seconds) as lease:
            if lease.blocks < len(chain):
                return False
            if self._near and self._lane.caches[run.group].whole:
                return self._load_straight(lease, run, deadline, late)
            begin = 0
            while begin < len(chain):
                slots = self._lane.slots.wait_take(len(chain) - begin, deadline)
                if not self._load_some(lease, run, begin, slots, deadline):
                    return False
                begin += len(slots)
        return True

    def _load_straight(
        self, lease: Lease, run: BlockRun, deadline: Deadline, late: list[Completion[int]]
    ) -> bool:
        """Have the pool write into the engine's cache."""
        dest = self._lane.caches[run.group].view.with_ids(list(run.block_ids))
        done = self._lane.pool.load(lease, dest, deadline_s=deadline.remaining_s())
        try:
            return done.wait(deadline.remaining_s() + _END_SPARE_S) == len(dest)
        finally:
            if not done.done():
                done.cancel()
                late.append(done)

    def _load_some(
        self, lease: Lease, run: BlockRun, begin: int, slots: list[int], deadline: Deadline
    ) -> bool:
        """Load as many blocks as there are slots, and give the slots back when the pool is done."""
        view = self._lane.slots.view(slots)
        try:
            done = self._lane.pool.load(lease, view, first=begin, deadline_s=deadline.remaining_s())
        except BaseException:
            self._lane.slots.give_back(slots)
            raise
        copied = False
        try:
            delivered = done.wait(deadline.remaining_s())
            if delivered < len(slots):
                return False
            block_ids = run.block_ids[begin : begin + len(slots)]
            self._lane.caches[run.group].copy_in(block_ids, view)
            copied = True
            return True
        except TransferTimeoutError:
            done.cancel()
            raise
        finally:
            if not copied:
                logger.debug("%d blocks did not come", len(slots))
            done.add_done_callback(lambda: self._lane.slots.give_back(slots))
