"""Patience: who finds decode full waits while TTFT allows; nobody is turned away too soon."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.integration.conductor.cluster import Cluster
from kvpool.integration.conductor.patience import PatienceOptions, PatientPlanner
from kvpool.integration.conductor.plan import Plan, Policy, Reason, Rejection
from kvpool.integration.conductor.planner import PlannerOptions
from kvpool.integration.conductor.snapshot import Objectives, Request, Snapshot, WorkerState
from kvpool.integration.simulator.machine import papers_machine

COST = papers_machine()
OBJECTIVES = Objectives(ttft_s=30.0, tbt_s=0.1)
# (0.1 - base) / (what one request of 1,000 tokens adds): 18 requests fit, a nineteenth does not.
ROOM = 18


def planner(ttft_share: float = 0.5) -> PatientPlanner:
    return PatientPlanner(PatienceOptions(planner=PlannerOptions(), ttft_share=ttft_share), COST)


def request(number: int, tokens: int = 1000) -> Request:
    return Request(number=number, tokens=tokens, chain=b"", output_tokens=100)


def cluster(running: int, queue_s: float = 0.0, decode_s: float = 10.0) -> Cluster:
    """Make one prefill and one decode worker, with so many running and so long a queue."""
    made = Cluster(objectives=OBJECTIVES, block_tokens=16, decode_s=decode_s)
    for _ in range(2):
        made.add_node(link_bytes_per_s=1e11)
    made.add_prefill_worker(0, queued_max=100, tokens_max=10**6)
    made.add_decode_worker(1, running_max=1000, tokens_max=10**8)
    made.prefill.free_at_s[0] = queue_s
    made.decode.running[0] = running
    made.decode.context_tokens[0] = running * 1000
    return made


def decide(running: int, share: float = 0.5, queue_s: float = 0.0) -> Plan | Rejection:
    return planner(share).decide(cluster(running, queue_s).snapshot(0.0), request(0))


def test_room_is_where_the_step_meets_the_objective() -> None:
    assert COST.decode_step_s(ROOM, ROOM * 1000) <= 0.1 < COST.decode_step_s(ROOM + 1, 19_000)
    patient = planner()
    for running in (0, 5, ROOM - 1):
        assert patient.decode_wait_s(cluster(running).snapshot(0.0), request(0), 0) == 0.0
    waits = [
        patient.decode_wait_s(cluster(running).snapshot(0.0), request(0), 0)
        for running in range(ROOM, ROOM + 40)
    ]
    assert waits[0] > 0
    assert waits == sorted(waits)
    # A full batch takes a decode time to leave: whoever has a batch ahead waits about that long.
    assert waits[ROOM] == pytest.approx(10.0, rel=0.1)


def test_who_can_wait_is_admitted() -> None:
    assert isinstance(decide(ROOM), Plan)
    assert isinstance(decide(2 * ROOM), Plan)


def test_whose_turn_comes_too_late_is_rejected_for_tbt() -> None:
    rejected = decide(5 * ROOM)
    assert isinstance(rejected, Rejection)
    assert rejected.reason is Reason.TBT
    assert rejected.ttft_s > 15.0
    assert isinstance(decide(5 * ROOM, share=1.0), Rejection)
    assert isinstance(decide(2 * ROOM, share=0.2), Rejection)


def test_only_its_share_of_the_ttft_is_planned_with() -> None:
    assert isinstance(decide(0, queue_s=14.0), Plan)
    late = decide(0, queue_s=16.0)
    assert isinstance(late, Rejection)
    assert late.reason is Reason.TTFT
    assert isinstance(decide(0, share=1.0, queue_s=16.0), Plan)


def test_no_batch_helps_what_misses_tbt_alone() -> None:
    made = cluster(0)
    made.objectives = replace(OBJECTIVES, tbt_s=0.03)
    long = request(0, tokens=1_000_000)
    made.prefill.tokens_max[0] = 10**7
    rejected = planner(1.0).decide(made.snapshot(0.0), replace(long, tokens=300_000))
    assert isinstance(rejected, Rejection)


def test_after_prefill_only_a_dead_worker_refuses() -> None:
    made = cluster(5 * ROOM)
    plan = decide(0)
    assert isinstance(plan, Plan)
    patient: Policy = planner()
    assert patient.recheck(made.snapshot(0.0), request(0), plan) is None
    made.decode.state[0] = WorkerState.DEAD
    refused = patient.recheck(made.snapshot(0.0), request(0), plan)
    assert refused is not None
    assert refused.reason is Reason.NO_WORKER


@given(st.integers(0, 200), st.floats(0, 40), st.floats(0.05, 1))
def test_what_is_admitted_is_predicted_in_time(running: int, queue_s: float, share: float) -> None:
    shown: Snapshot = cluster(running, queue_s).snapshot(0.0)
    patient = planner(share)
    decision = patient.decide(shown, request(0))
    assert decision == patient.decide(shown, request(0))
    in_time = (
        queue_s + COST.prefill_s(1000, 0) <= share * 30.0
        and patient.decode_wait_s(shown, request(0), 0) <= share * 30.0
    )
    assert isinstance(decision, Plan) == in_time


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01, float("nan")])
def test_a_share_that_means_nothing_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="ttft_share"):
        PatienceOptions(planner=PlannerOptions(), ttft_share=share)
