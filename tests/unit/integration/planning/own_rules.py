"""Rules of our own policy, slack-aware."""

import random
from dataclasses import replace

from kvpool.integration.conductor.plan import Plan
from kvpool.integration.conductor.snapshot import Objectives, WorkerState
from tests.unit.integration.planning import oracle
from tests.unit.integration.planning.scene import (
    EXACT,
    INF,
    decide,
    draw_scene,
    idle,
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
    held = replace(scene.nodes[0], held=tuple(range(blocks)), sends_s=1000.0)
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
    held = replace(scene.nodes[0], held=tuple(range(blocks)))
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
