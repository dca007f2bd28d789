"""Stores: blocks leave the engine's cache layer by layer during the step that completes them.

Owns the copies out of the cache, on one thread, and the stores that follow. When ``finish_step``
returns, nothing reads the engine's blocks any more: they may be overwritten, freed, preempted, and
no request has to wait for a store. What finds no slot is not stored. Who calls it: the worker's side.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

from kvpool.base import Chain, StoreResult
from kvpool.block import Namespace
from kvpool.completion import Completion
from kvpool.errors import KVPoolError
from kvpool.integration.vllm.lane import Lane
from kvpool.integration.vllm.publishing import StoredPart
from kvpool.integration.vllm.shape import BlockRun, part_chain
from kvpool.memory import BlockView

logger = logging.getLogger(__name__)

# How long an engine that ends waits for its last stores: less than vLLM gives its workers, 5 s.
_LAST_STORES_S: Final = 3.0


@dataclass(slots=True, eq=False)
class _Saving:
    """Blocks of one run on their way, in this step."""

    run: BlockRun
    slots: list[int]
    view: BlockView
    copied: set[int] = field(default_factory=set)


class Saver:
    """Safe from the worker's thread; ``_lock`` guards the counts and ``_done``.

    Args:
        lane: What is stored, and through what.
        tell: Whether ``take_stored`` is called.
    """

    def __init__(self, lane: Lane, tell: bool = False) -> None:
        self._lane = lane
        self._tell = tell
        self._lock = threading.Lock()
        self.stored = 0
        self.skipped = 0
        self._layers = {
            name: (group.number, index)
            for group in lane.shape.groups
            for index, name in enumerate(group.layers)
        }
        self._savings: list[_Saving] = []
        self._namespace: Namespace | None = None
        self._copies: list[Future[None]] = []
        self._done: list[StoredPart] = []
        self._thread = ThreadPoolExecutor(1, "kvpool-save")

    def begin_step(self, namespace: Namespace, runs: list[BlockRun]) -> None:
        """Take slots for what this step completes; what finds none is left out."""
        self._namespace, self._savings = namespace, []
        for run in runs:
            group = self._lane.shape.groups[run.group]
            if not group.writes(self._lane.rank):
                continue
            slots = self._lane.slots.take(len(run.block_ids))
            self._count(skipped=len(run.block_ids) - len(slots))
            if slots:
                self._savings.append(_Saving(run, slots, self._lane.slots.view(slots)))

    def save_layer(self, name: str) -> None:
        """Start to copy one layer, which this step has computed."""
        if not self._savings or name not in self._layers:
            return
        number, layer = self._layers[name]
        for saving in self._savings:
            if saving.run.group == number and layer not in saving.copied:
                saving.copied.add(layer)
                self._copies.append(self._thread.submit(self._copy, saving, layer))

    def finish_step(self) -> None:
        """Wait until all layers of this step are copied, then hand the blocks to the pool.

        vLLM ends a step that raised, too: blocks with a layer that was not computed are not stored.
        """
        savings, self._savings = self._savings, []
        copies, self._copies = self._copies, []
        wait(copies)
        failed = [copy.exception() for copy in copies if copy.exception() is not None]
        if failed:
            logger.error("blocks were not copied, nothing of this step is stored: %r", failed[0])
        for saving in savings:
            if failed or len(saving.copied) < self._lane.caches[saving.run.group].layers:
                self._lane.slots.give_back(saving.slots)
                self._count(skipped=len(saving.slots))
            else:
                self._store(saving)

    def counts(self) -> dict[str, int]:
        """Return and clear how many blocks were stored and how many were not."""
        with self._lock:
            counts = {"stored_blocks": self.stored, "skipped_blocks": self.skipped}
            self.stored = self.skipped = 0
            return counts

    def take_stored(self) -> Sequence[StoredPart]:
        """Return the parts that the pool took since the last call, if ``tell``."""
        with self._lock:
            done, self._done = self._done, []
            return done

    def close(self) -> None:
        """End the thread, and give stores under way a moment; the rest end with the pool."""
        self._thread.shutdown(wait=True)
        slots = self._lane.slots
        if not slots.wait_unused(_LAST_STORES_S):
            logger.warning("%d blocks were not stored before the end", slots.count - slots.free)

    def _copy(self, saving: _Saving, layer: int) -> None:
        block_ids = saving.run.block_ids[: len(saving.slots)]
        self._lane.caches[saving.run.group].copy_out(
            block_ids, saving.view, range(layer, layer + 1)
        )

    def _store(self, saving: _Saving) -> None:
        run, slots = saving.run, saving.slots
        assert self._namespace is not None
        part = self._lane.shape.groups[run.group].parts[self._lane.rank]
        names = run.hashes[: len(slots)]
        first = 0 if run.parent is None else 1
        whole = names if run.parent is None else (run.parent, *names)
        chain: Chain = part_chain(self._namespace, part, whole)
        try:
            done = self._lane.pool.store(
                chain, saving.view, first=first, deadline_s=self._lane.timeout_s
            )
        except KVPoolError as error:
            logger.debug("blocks were not stored: %s", error)
            self._lane.slots.give_back(slots)
            self._count(skipped=len(slots))
            return
        told = tuple(StoredPart(run.group, part, name) for name in names) if self._tell else ()
        done.add_done_callback(lambda: self._ended(done, slots, told))

    def _ended(
        self, done: Completion[StoreResult], slots: list[int], told: Sequence[StoredPart]
    ) -> None:
        self._lane.slots.give_back(slots)
        try:
            stored = done.result().stored
        except KVPoolError as error:
            logger.debug("blocks were not stored: %s", error)
            stored = 0
        with self._lock:
            self._done += told[:stored]
        self._count(stored=stored, skipped=len(slots) - stored)

    def _count(self, *, stored: int = 0, skipped: int = 0) -> None:
        with self._lock:
            self.stored += stored
            self.skipped += skipped
