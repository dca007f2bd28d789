"""A planner with patience: a request may wait for its decode batch as long as its objectives allow.

Owns the admission rule of our own: the papers reject what finds decode full, although most of the
TTFT objective is still unspent. Here a decode batch takes only as many as its TBT objective allows
(the worker holds the others back, first come first served), and a request is rejected only if its
turn would come too late. Pure. Who calls it: the simulator; a Conductor may.
"""

import math
from dataclasses import dataclass, replace

from kvpool.errors import ConfigError
from kvpool.integration.conductor.cost import CostModel
from kvpool.integration.conductor.plan import Decision, Plan, Reason, Rejection
from kvpool.integration.conductor.planner import Planner, PlannerOptions
from kvpool.integration.conductor.snapshot import Request, Snapshot, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class PatienceOptions:
    """Settings of a patient planner.

    Attributes:
        planner: Where requests go; its ``admission`` is not used.
        ttft_share: Share of the TTFT objective that may be planned with: the predicted TTFT, and
            the predicted wait for decode, must be within it. Above 0, at most 1.
    """

    planner: PlannerOptions
    ttft_share: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.ttft_share <= 1:
            raise ConfigError(
                f"ttft_share is {self.ttft_share}: it must be above 0 and at most 1",
                key="ttft_share",
            )


class PatientPlanner:
    """Decides where requests go, and lets them wait for decode. Implements `Policy`; pure.

    The decode workers must hold back what their TBT objective does not allow.
    """

    def __init__(self, options: PatienceOptions, cost: CostModel) -> None:
        self.options = options
        self.cost = cost
        self._planner = Planner(replace(options.planner, admission="baseline"), cost)

    def decide(self, snapshot: Snapshot, request: Request) -> Decision:
        """Plan one request that has just arrived; see `Policy`."""
        objectives = snapshot.objectives
        patience_s = self.options.ttft_share * objectives.ttft_s
        hasty = replace(snapshot, objectives=replace(objectives, ttft_s=patience_s))
        decision = self._planner.decide(hasty, request)
        if isinstance(decision, Rejection):
            return decision
        wait_s = self.decode_wait_s(snapshot, request, decision.decode)
        if wait_s > patience_s:
            return Rejection(Reason.TBT, max(decision.ttft_s, wait_s), decision.tbt_s)
        return decision

    def recheck(self, snapshot: Snapshot, request: Request, plan: Plan) -> Rejection | None:
        """Refuse only if the decode worker is dead: the others wait there; see `Policy`."""
        if snapshot.decode.state[plan.decode] == WorkerState.DEAD:
            return Rejection(Reason.NO_WORKER, plan.ttft_s, math.inf)
        return None

    def decode_wait_s(self, snapshot: Snapshot, request: Request, worker: int) -> float:
        """Predict how long it takes until a decode worker has room for one more within TBT.

        Those that run leave evenly, each after ``flow.decode_s`` on average; those that were
        promised to the worker go first.
        """
        decode, objective_s = snapshot.decode, snapshot.objectives.tbt_s
        ahead = int(decode.running[worker] + decode.joining[worker])
        tokens = int(decode.context_tokens[worker] + decode.joining_tokens[worker])
        context = (tokens + request.tokens) / (ahead + 1)
        base_s = self.cost.decode_step_s(0, 0)
        one_s = self.cost.decode_step_s(1, context) - base_s
        if base_s + one_s > objective_s:
            return math.inf
        room = math.inf if one_s <= 0 else (objective_s - base_s) / one_s
        if ahead + 1 <= room:
            return 0.0
        return (ahead + 1 - room) * snapshot.flow.decode_s / math.floor(room)
