"""Rules of our own: the policy slack-aware, and patience."""

import random
from dataclasses import asdict, replace

import msgspec

from kvpool.errors import ConfigError
from kvpool.integration.conductor.patience import PatientPlanner
from kvpool.integration.conductor.plan import Decision, Plan, Reason, Rejection
from kvpool.integration.conductor.snapshot import Objectives, WorkerState
from tests.unit.integration.planning import oracle
from tests.unit.integration.planning.scene import (
    EXACT,
    INF,
    Scene,
    build,
    decide,
    draw_scene,
    idle,
    look,
    names,
    two_nodes,
)
from tests.unit.integration.planning.subject import Subject


def long_prompts_wait_less(subject: Subject, chance: random.Random) -> None:
    """slack-aware: the longer a prompt computes, the shorter the queue that rejects it."""
    scene = idle(1, chance, policy="slack-aware", admission="baseline", slack_exponent=2.0)
    scene = scene.changed(profile=EXACT)
    objective_s = 2 * oracle.computing_s(scene, 0)
    scene = scene.changed(objectives=Objectives(ttft_s=objective_s, tbt_s=INF))
    slack_s = objective_s * 0.25
    for busy_s, admitted in ((slack_s, True), (slack_s + 2.0**-20, False)):
        busy = scene.changed(prefill=(replace(scene.prefill[0], busy_s=busy_s),))
        assert isinstance(decide(subject, busy), Plan) == admitted


def work_has_a_price(subject: Subject, chance: random.Random) -> None:
    """slack-aware waits for a worker where there is less to compute; at no price it does not."""
    scene, blocks = two_nodes(chance, policy="slack-aware", admission="none", work_price=3.0)
    held = replace(scene.nodes[0], held=names(range(blocks)), sends_s=1000.0)
    saved_s = oracle.computing_s(scene, 0) - oracle.computing_s(
        scene.changed(nodes=(held, scene.nodes[1])), blocks
    )
    busy = replace(scene.prefill[0], busy_s=3 * saved_s)
    scene = scene.changed(nodes=(held, scene.nodes[1]), prefill=(busy, scene.prefill[1]))
    for price, chosen in ((3.0, 0), (1.0, 1), (0.0, 1)):
        decided = decide(subject, scene.changed(options=replace(scene.options, work_price=price)))
        assert isinstance(decided, Plan)
        assert (decided.prefill, decided.transfer) == (chosen, None)
    for policy in ("cache-aware", "kvcache-centric"):
        options = replace(scene.options, policy=policy, balancing_threshold=INF)
        decided = decide(subject, scene.changed(options=options))
        assert isinstance(decided, Plan)
        assert decided.prefill == 1


def copies_when_it_is_cheaper(subject: Subject, chance: random.Random) -> None:
    """slack-aware copies when that costs less than computing, and computes when it is the same."""
    price = chance.choice((0.0, 0.5, 3.0))
    scene, blocks = two_nodes(chance, policy="slack-aware", admission="none", work_price=price)
    scene = scene.changed(profile=EXACT)
    gone = replace(scene.prefill[0], state=WorkerState.DRAINING)
    saved_s = oracle.computing_s(scene, 0) - oracle.computing_s(scene, blocks)
    held = replace(scene.nodes[0], held=names(range(blocks)))
    scene = scene.changed(nodes=(held, scene.nodes[1]), prefill=(gone, scene.prefill[1]))
    moving_s = oracle.copying_s(scene, scene.prefill[1], 0, blocks)
    for sooner_s, copies in ((0.0, False), (2.0**-20, True)):
        busy = replace(held, sends_s=(1 + price) * saved_s - moving_s - sooner_s)
        decided = decide(subject, scene.changed(nodes=(busy, scene.nodes[1])))
        assert isinstance(decided, Plan)
        assert (decided.transfer is not None) == copies


def our_own_is_never_later_at_no_price(subject: Subject, chance: random.Random) -> None:
    """slack-aware without a price on work predicts a TTFT no later than the papers' algorithm."""
    scene = draw_scene(chance, admission="none", work_price=0.0, slack_exponent=1.0)
    ours = decide(subject, scene.changed(options=replace(scene.options, policy="slack-aware")))
    papers = decide(
        subject, scene.changed(options=replace(scene.options, policy="kvcache-centric"))
    )
    if isinstance(ours, Plan) and isinstance(papers, Plan):
        assert ours.ttft_s <= papers.ttft_s + 1e-9


def waits_for_decode_while_ttft_allows(subject: Subject, chance: random.Random) -> None:
    """A patient planner rejects who could not join the batch within its share of the TTFT."""
    share, room = chance.choice((0.25, 0.5, 1.0)), chance.choice((1, 2, 5))
    running, joining = chance.randint(0, 5), chance.randint(0, 5)
    ahead, tokens = running + joining, 1 << 15
    scene = idle(1, chance, policy="cache-aware", admission="predicted", balancing_threshold=INF)
    # Each request adds 1/256 s to a step, so that `room` of them meet the objective exactly.
    step = EXACT.decode
    quick = msgspec.structs.replace(EXACT.prefill, token_s=0.0, attention_s=0.0)
    objective_s = step.base_s + room * (step.request_s + tokens * step.token_s)
    wait_s = max(0, ahead + 1 - room) * scene.decode_s / room
    scene = scene.changed(
        profile=msgspec.structs.replace(EXACT, prefill=quick),
        request=replace(scene.request, tokens=tokens, chain=b""),
        prefill=(replace(scene.prefill[0], tokens_max=tokens),),
        decode=(
            replace(
                scene.decode[0],
                running=running,
                context_tokens=running * tokens,
                joining=joining,
                joining_tokens=joining * tokens,
                free_tokens=10**6,
            ),
        ),
    )
    ttft_s = oracle.computing_s(scene, 0)
    tbt_s = oracle.promised_tbt_s(scene, 0)
    for part in (0.0, 0.5):
        objectives = Objectives(ttft_s=INF, tbt_s=objective_s + part * 2.0**-8)
        given = scene.changed(objectives=objectives)
        snapshot, patient = (
            look(build(subject, given), given),
            _patient_planner(subject, given, share),
        )
        due_s = max(0, ahead + 1 - room - part) * scene.decode_s / room
        assert patient.decode_wait_s(snapshot, scene.request, 0) == due_s
    for patience_s in (wait_s, wait_s - 2.0**-20, ttft_s, ttft_s - 2.0**-20):
        if patience_s <= 0:
            continue
        objectives = Objectives(ttft_s=patience_s / share, tbt_s=objective_s)
        decided = _patient(subject, scene.changed(objectives=objectives), share)
        if ttft_s > patience_s:
            assert decided == Rejection(Reason.TTFT, ttft_s, tbt_s)
        elif wait_s > patience_s:
            assert decided == Rejection(Reason.TBT, max(ttft_s, wait_s), tbt_s)
        else:
            assert isinstance(decided, Plan)
    endless = Objectives(ttft_s=1e9, tbt_s=objective_s)
    scene = scene.changed(objectives=endless)
    missed = replace(endless, tbt_s=step.base_s + 2.0**-8 - 2.0**-20)
    decided = _patient(subject, scene.changed(objectives=missed), share)
    assert decided == Rejection(Reason.TBT, INF, tbt_s)
    free = msgspec.structs.replace(step, request_s=0.0, token_s=0.0)
    profile = msgspec.structs.replace(EXACT, decode=free)
    assert isinstance(_patient(subject, scene.changed(profile=profile), share), Plan)
    _rechecks_only_death(subject, scene, share)


def _patient(subject: Subject, scene: Scene, share: float) -> Decision:
    snapshot = look(build(subject, scene), scene)
    return _patient_planner(subject, scene, share).decide(snapshot, scene.request)


def _patient_planner(subject: Subject, scene: Scene, share: float) -> PatientPlanner:
    options = subject.PatienceOptions(
        planner=subject.PlannerOptions(**asdict(scene.options)), ttft_share=share
    )
    return subject.PatientPlanner(options, subject.ProfiledCost(scene.profile))


def _rechecks_only_death(subject: Subject, scene: Scene, share: float) -> None:
    plan = Plan(0, 0, 0, None, 0.0, 0.0, 1.0, 1.0, 0.1)
    cluster, planner = build(subject, scene), _patient_planner(subject, scene, share)
    for state in WorkerState:
        cluster.decode.state[0] = state
        refused = planner.recheck(cluster.snapshot(0.0), scene.request, plan)
        dead = Rejection(Reason.NO_WORKER, 1.0, INF)
        assert refused == (dead if state is WorkerState.DEAD else None)
    for wrong in (0.0, 1.001, -1.0):
        try:
            _patient_planner(subject, scene, wrong)
        except ConfigError:
            continue
        raise AssertionError(f"a share of {wrong} was taken")
