"""The scheduler's side: what a request can load, and what of it is to be stored.

Owns what is known of each request from its arrival to its end. Nothing here waits, and nothing here
moves bytes: it writes orders for the workers. One thread, the scheduler's. Who calls it: the
connector, as vLLM's scheduler calls that.
"""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvpool.block import Namespace
from kvpool.integration.vllm.lookup import Lookups
from kvpool.integration.vllm.plan import LoadOrder, StepPlan
from kvpool.integration.vllm.publishing import Claim, Ended, Ledger, StoredPart
from kvpool.integration.vllm.shape import EngineShape, block_runs

logger = logging.getLogger(__name__)

# A request whose loads failed this often computes the rest itself.
_FAILURES_MAX: Final = 2


@dataclass(slots=True, eq=False)
class _Tracked:
    """One request.

    Attributes:
        request: vLLM's.
        local: Tokens that the engine had when the request was last asked about.
        stored: Leading blocks that the pool has, or was given.
        failures: Loads that failed.
        apart: It has nothing to do with the pool: nothing is loaded for it, nothing stored.
    """

    request: Any
    local: int = 0
    stored: int = 0
    failures: int = 0
    apart: bool = False


class SchedulerSide:
    """See the module. Not safe from several threads.

    Args:
        shape: What the engine's blocks are.
        namespace: What engines must have in common to share them.
        lookups: Asks the pool; None if there is no pool to be used: every request is a miss.
        ledger: Of what is published; None means nothing is.
    """

    def __init__(
        self,
        shape: EngineShape,
        namespace: Namespace,
        lookups: Lookups | None,
        ledger: Ledger | None = None,
    ) -> None:
        self._shape = shape
        self._first_namespace = self._namespace = namespace
        self._lookups = lookups
        self._ledger = ledger
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []

    def arrived(self, request: Any) -> None:
        """Start to look for a new request, so that the answer is there when it is scheduled."""
        # An adapter's name does not tell its weights.
        tracked = _Tracked(request, apart=request.lora_request is not None)
        self._tracked[request.request_id] = tracked
        self._ask(tracked)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return tokens that can be loaded beyond ``local_tokens``, and whether it takes time.

        None means that the pool has not answered yet. May be called again and again.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.local = local_tokens
        blocks = self._ask(tracked)
        if blocks is None:
            return None, False
        more = blocks * self._shape.block_tokens - local_tokens
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Order the load of ``tokens`` tokens into the blocks that the request was given.

        With 0 tokens nothing is loaded; vLLM then only says what the request has.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if self._lookups is not None:
            answer = self._lookups.answer(request.request_id)
            if answer is not None:
                tracked.stored = answer
            self._forget(tracked)  # if it is asked about again, things have changed
        if not tokens:
            return
        size = self._shape.block_tokens
        begin, end = tracked.local // size, (tracked.local + tokens) // size
        hashes = request.block_hashes
        runs = [
            run
            for group in self._shape.groups
            for run in block_runs(group.number, hashes, tables[group.number], begin, end)
        ]
        self._loads.append(LoadOrder(request.request_id, tuple(runs)))

    def plan(self, output: Any) -> StepPlan:
        """Write the orders of one step: the loads that were asked for, and what becomes whole."""
        plan = StepPlan(self._namespace, self._loads)
        plan.idle = not output.total_num_scheduled_tokens
        self._loads = []
        if self._lookups is None:
            return plan
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            state = output.kv_connector_block_state
            tables = None if state is None else state.get_block_ids(name)
            if tracked is None or tracked.apart or tables is None:
                continue
            hashes = tracked.request.block_hashes
            whole = min((computed[name] + tokens) // self._shape.block_tokens, len(hashes))
            for group in self._shape.groups:
                table = tables[group.number]
                end = min(whole, len(table))
                runs = block_runs(group.number, hashes, table, tracked.stored, end)
                plan.stores += runs
                if self._ledger is not None:
                    for run in runs:
                        self._ledger.ordered(tracked.request, run)
            tracked.stored = max(tracked.stored, whole)
        return plan

    def failed(self, requests: Sequence[str]) -> None:
        """Note loads that did not deliver all they should: look anew once, then compute."""
        for name in requests:
            tracked = self._tracked.get(name)
            if tracked is not None:
                tracked.failures += 1
                tracked.stored = 0
                self._forget(tracked)

    def stored(self, parts: Sequence[StoredPart]) -> None:
        """Note parts that the pool took."""
        if self._ledger is not None:
            self._ledger.stored(parts)

    def news(self, now_s: float) -> Sequence[Claim | Ended]:
        """Return what has changed of what is published, and have some of it looked at again."""
        if self._ledger is None or self._lookups is None:
            return ()
        looked = self._lookups.take_looked()
        self._ledger.missing(looked.lost)
        self._ledger.put_first(looked.unseen)
        doubts = self._ledger.due(now_s)
        if doubts and self._lookups.check(self._namespace, doubts):
            self._ledger.looked_at(doubts, now_s)
        return self._ledger.take()

    def finished(self, request: Any) -> None:
        """Forget a request. Its blocks are the engine's: nothing here reads them any more."""
        self._tracked.pop(request.request_id, None)
        if self._lookups is not None:
            self._lookups.forget(request.request_id)

    def reset(self) -> None:
        """Start afresh: nothing stored before is found by this engine again.

        The blocks stay in the pool, under names that nobody asks for any more, until they are
        evicted; an engine started anew from the same weights finds them. Requests under way may
        have been computed with weights that are gone: nothing of them is stored.
        """
        salt = f"{self._first_namespace.salt}/reset-{secrets.token_hex(16)}"
        self._namespace = replace(self._first_namespace, salt=salt)
        if self._ledger is not None:
            self._ledger.clear()
        for tracked in self._tracked.values():
            tracked.apart = True
            self._forget(tracked)

    def _ask(self, tracked: _Tracked) -> int | None:
        """Return leading blocks of a request that can be loaded, None if that is not known yet."""
        request, lookups = tracked.request, self._lookups
        # At least one token is computed, to have something to sample from.
        most = min(len(request.block_hashes), (request.num_tokens - 1) // self._shape.block_tokens)
        if lookups is None or most <= 0 or tracked.apart or tracked.failures >= _FAILURES_MAX:
            return 0
        return lookups.ask(request.request_id, self._namespace, request.block_hashes[:most])

    def _forget(self, tracked: _Tracked) -> None:
        if self._lookups is not None:
            self._lookups.forget(tracked.request.request_id)
