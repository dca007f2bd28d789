"""The planner: which workers a request goes to, what is copied first, or why it is rejected.

Owns the decision. It is a pure function of a snapshot and a request, used to the letter by the
live Conductor and by the simulator: no clock, no I/O, no state, and no randomness but the
snapshot's seed. docs/planner.md tells the algorithms and where they come from.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from kvpool.errors import ConfigError
from kvpool.integration.conductor import decode_choice, prefill_choice
from kvpool.integration.conductor.cost import CostModel
from kvpool.integration.conductor.plan import Decision, Plan, PrefixTransfer, Reason, Rejection
from kvpool.integration.conductor.prefill_choice import PolicyName, PrefillEstimates, lowest
from kvpool.integration.conductor.snapshot import (
    Bools,
    Floats,
    Ints,
    Request,
    Snapshot,
    WorkerState,
)

Admission = Literal["none", "baseline", "early", "predicted"]

# Put before the score of a worker that would be late, so that it comes after all that are in time.
_LATE_S: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """Settings of a planner.

    Attributes:
        policy: How a prefill worker is chosen. ``random``; ``load-balancing``: the shortest
            queue; ``cache-aware``: the lowest TTFT with what each node holds itself;
            ``kvcache-centric``: the papers' algorithm 1, which may copy a prefix first;
            ``slack-aware``: our own, see docs/planner.md.
        admission: When a request is rejected for its objectives. ``none``: never. ``baseline``:
            on arrival for TTFT, after prefill for TBT. ``early``: on arrival for both, by the
            decode load at that moment. ``predicted``: on arrival for both, by the decode load
            that is predicted for the end of the prefill. All but ``none`` check TBT once more
            after prefill.
        balancing_threshold: ``kvcache-centric`` copies a prefix to a worker whose own match is
            shorter than the longest by more than this factor. At least 1; infinite: never.
        work_price: ``slack-aware``: how many seconds of a request's own TTFT one second of
            prefill work is worth, as others wait for it. At least 0.
        slack_exponent: ``slack-aware``: how much sooner long prompts are rejected than short
            ones when queues are long. At least 1; at 1, all alike.
    """

    policy: PolicyName = "kvcache-centric"
    admission: Admission = "predicted"
    balancing_threshold: float = 2.0
    work_price: float = 1.0
    slack_exponent: float = 2.0

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("policy", self.policy, get_args(PolicyName)),
            ("admission", self.admission, get_args(Admission)),
        ):
            if value not in allowed:
                raise ConfigError(f"{key} is {value!r}: use one of {', '.join(allowed)}", key=key)
        for key, number, least in (
            ("balancing_threshold", self.balancing_threshold, 1),
            ("work_price", self.work_price, 0),
            ("slack_exponent", self.slack_exponent, 1),
        ):
            if not number >= least:
                raise ConfigError(f"{key} is {number}: it must be at least {least}", key=key)


class Planner:
    """Decides where requests go. Implements `Policy`; pure, so it may be shared.

    Args:
        options: What to decide by.
        cost: How long things take.
    """

    def __init__(self, options: PlannerOptions, cost: CostModel) -> None:
        self.options = options
        self.cost = cost

    def decide(self, snapshot: Snapshot, request: Request) -> Decision:
        """Plan one request that has just arrived; see `Policy`.

        A few array operations over all workers and one pass over the chain.
        """
        takes_prefill = _takes_prefill(snapshot, request)
        if not takes_prefill.any():
            return Rejection(_why_no_prefill(snapshot, request), math.inf, math.inf)
        takes_decode = _takes_decode(snapshot, request)
        if not takes_decode.any():
            return Rejection(_why_no_decode(snapshot, request), math.inf, math.inf)
        estimates = self._estimate(snapshot, request)
        in_time = self._in_time(snapshot, estimates)
        scores = np.where(takes_prefill, self._scores(estimates, in_time), np.inf)
        prefill = lowest(scores, snapshot.seed, request.number)
        tbt_s = decode_choice.promised_tbt_s(snapshot, request, self.cost)
        scores = np.where(takes_decode, tbt_s, np.inf)
        decode = lowest(scores, snapshot.seed, request.number)
        plan = _plan(snapshot, estimates, prefill, decode, float(tbt_s[decode]))
        if self.options.admission != "none" and not in_time[prefill]:
            return Rejection(Reason.TTFT, plan.ttft_s, plan.tbt_s)
        return self._overload(snapshot, request, plan) or plan

    def recheck(self, snapshot: Snapshot, request: Request, plan: Plan) -> Rejection | None:
        """Decide again, when prefill is done, whether the decode worker takes it; see `Policy`."""
        if snapshot.decode.state[plan.decode] == WorkerState.DEAD:
            return Rejection(Reason.NO_WORKER, plan.ttft_s, math.inf)
        if self.options.admission == "none":
            return None
        tbt_s = decode_choice.current_tbt_s(snapshot, request, self.cost, plan.decode)
        if tbt_s > snapshot.objectives.tbt_s:
            return Rejection(Reason.TBT, plan.ttft_s, tbt_s)
        return None

    def _estimate(self, snapshot: Snapshot, request: Request) -> PrefillEstimates:
        """Estimate every prefill worker, by what the policy may copy."""
        options, cost = self.options, self.cost
        if options.policy == "kvcache-centric":
            return prefill_choice.balance(snapshot, request, cost, options.balancing_threshold)
        if options.policy == "slack-aware":
            return prefill_choice.weigh(snapshot, request, cost, options.work_price)
        return prefill_choice.stay(snapshot, request, cost)

    def _scores(self, estimates: PrefillEstimates, in_time: Bools) -> Floats:
        """Score every prefill worker, the lowest best, by the policy's rule."""
        policy = self.options.policy
        if policy == "random":
            return np.zeros_like(estimates.wait_s)
        if policy == "load-balancing":
            return estimates.wait_s
        if policy == "slack-aware":
            work_s = self.options.work_price * estimates.prefill_s
            return np.where(in_time, estimates.ttft_s + work_s, _LATE_S + estimates.ttft_s)
        return estimates.ttft_s

    def _in_time(self, snapshot: Snapshot, estimates: PrefillEstimates) -> Bools:
        """Tell where the TTFT objective is met, and the wait leaves the slack that is asked for.

        What is left of the objective after prefill may be spent waiting; ``slack-aware`` lets a
        request that takes the share r of the objective for itself wait ``(1 - r) ** exponent`` of
        it, which is less. An idle worker keeps nobody waiting, so it is always in time for what
        can be in time at all.
        """
        objective_s = snapshot.objectives.ttft_s
        met: Bools = estimates.ttft_s <= objective_s
        if self.options.policy != "slack-aware":
            return met
        left = np.maximum(1 - estimates.prefill_s / objective_s, 0.0)
        slack_s = objective_s * left**self.options.slack_exponent
        return met & (estimates.ttft_s - estimates.prefill_s <= slack_s)

    def _overload(self, snapshot: Snapshot, request: Request, plan: Plan) -> Rejection | None:
        """Reject on arrival for the TBT objective, if early rejection is on."""
        if self.options.admission == "early":
            tbt_s = decode_choice.current_tbt_s(snapshot, request, self.cost, plan.decode)
        elif self.options.admission == "predicted":
            end_s = snapshot.now_s + plan.ttft_s
            tbt_s = decode_choice.predicted_tbt_s(snapshot, request, self.cost, end_s)
        else:
            return None
        if tbt_s > snapshot.objectives.tbt_s:
            return Rejection(Reason.TBT, plan.ttft_s, tbt_s)
        return None


def _takes_prefill(snapshot: Snapshot, request: Request) -> Bools:
    workers = snapshot.prefill
    ready: Bools = workers.state == WorkerState.READY
    return ready & (workers.tokens_max >= request.tokens) & (workers.queued < workers.queued_max)


def _takes_decode(snapshot: Snapshot, request: Request) -> Bools:
    ready: Bools = snapshot.decode.state == WorkerState.READY
    return ready & decode_choice.with_room(snapshot, request)


def _why_no_prefill(snapshot: Snapshot, request: Request) -> Reason:
    workers = snapshot.prefill
    return _why_none(workers.state, workers.tokens_max >= request.tokens, Reason.QUEUE)


def _why_no_decode(snapshot: Snapshot, request: Request) -> Reason:
    workers = snapshot.decode
    fits = workers.tokens_max >= request.tokens + request.output_tokens
    return _why_none(workers.state, fits, Reason.MEMORY)


def _why_none(state: Ints, fits: Bools, busy: Reason) -> Reason:
    """Say why no worker takes a request: none is large enough, none of those is up, or all busy."""
    if len(state) and not fits.any():
        return Reason.TOO_LONG
    if not (fits & (state == WorkerState.READY)).any():
        return Reason.NO_WORKER
    return busy


def _plan(
    snapshot: Snapshot, estimates: PrefillEstimates, prefill: int, decode: int, tbt_s: float
) -> Plan:
    moved = int(estimates.moved_blocks[prefill])
    transfer = None
    if moved:
        transfer = PrefixTransfer(
            source=estimates.holder,
            target=int(snapshot.prefill.node[prefill]),
            first_block=int(estimates.local_blocks[prefill]),
            block_count=moved,
        )
    return Plan(
        prefill=prefill,
        decode=decode,
        cached_tokens=int(estimates.cached_tokens[prefill]),
        transfer=transfer,
        wait_s=float(estimates.wait_s[prefill]),
        transfer_s=float(estimates.transfer_s[prefill]),
        prefill_s=float(estimates.prefill_s[prefill]),
        ttft_s=float(estimates.ttft_s[prefill]),
        tbt_s=tbt_s,
    )
