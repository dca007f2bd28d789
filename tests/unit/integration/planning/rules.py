"""The planner's rules: each says what must hold of any planner, in any scene. See `test_rules.py`.

A rule takes the planner that is tested (the shipped one, or a mutated copy) and a source of chance,
and fails by assertion.
"""

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Final

import numpy as np

from kvpool.integration.conductor.plan import Plan, Reason, Rejection
from kvpool.integration.conductor.snapshot import Objectives, WorkerState
from tests.unit.integration.planning import oracle
from tests.unit.integration.planning.own_rules import (
    copies_when_it_is_cheaper,
    long_prompts_wait_less,
    our_own_is_never_later_at_no_price,
    waits_for_decode_while_ttft_allows,
    work_has_a_price,
)
from tests.unit.integration.planning.part_rules import (
    costs_are_the_profile,
    draws_evenly,
    finds_every_prefix,
    keeps_its_books,
    numbers,
    refuses_what_cannot_be,
    starts_empty,
)
from tests.unit.integration.planning.scene import (
    ADMISSIONS,
    BLOCK_TOKENS,
    EXACT,
    INF,
    NOW_S,
    POLICIES,
    Scene,
    build,
    decide,
    draw_scene,
    idle,
    look,
    names,
    planner_of,
    two_nodes,
)
from tests.unit.integration.planning.subject import Subject

Rule = Callable[[Subject, random.Random], None]


def same(one: object, other: object) -> bool:
    """Tell whether two decisions are equal but for rounding."""
    if type(one) is not type(other):
        return False
    for field in fields(one):  # type: ignore[arg-type]  # decisions are dataclasses
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, float):
            if not math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-9):
                return False
        elif ours != theirs:
            return False
    return True


def decides_as_the_algorithms_say(subject: Subject, chance: random.Random) -> None:
    """Each policy and each admission is what the papers, or docs/planner.md, say."""
    scene = draw_scene(chance)
    decided, due = decide(subject, scene), oracle.expected(scene, NOW_S)
    assert same(decided, due), f"{decided}\nis not\n{due}"


def takes_only_workers_that_are_ready(subject: Subject, chance: random.Random) -> None:
    """A dead or draining worker gets nothing; with no other, the request is rejected."""
    scene = draw_scene(chance, admission="none")
    decided = decide(subject, scene)
    if isinstance(decided, Plan):
        assert scene.prefill[decided.prefill].state is WorkerState.READY
        assert scene.decode[decided.decode].state is WorkerState.READY
    for state in (WorkerState.DRAINING, WorkerState.DEAD):
        for kind in ("prefill", "decode"):
            base = idle(3, chance, admission="none")
            workers = tuple(replace(worker, state=state) for worker in getattr(base, kind))
            gone = decide(subject, base.changed(**{kind: workers}))
            assert isinstance(gone, Rejection)
            assert gone.reason is Reason.NO_WORKER
            left = (replace(workers[0], state=WorkerState.READY), *workers[1:])
            decided = decide(subject, base.changed(**{kind: left}))
            assert isinstance(decided, Plan)
            assert getattr(decided, kind) == 0


def stays_within_memory_and_queues(subject: Subject, chance: random.Random) -> None:
    """A plan fits where it goes; what just fits is taken, and one token more is not."""
    scene = draw_scene(chance, admission="none")
    needed = scene.request.tokens + scene.request.output_tokens
    decided = decide(subject, scene)
    if isinstance(decided, Plan):
        prefill, decode = scene.prefill[decided.prefill], scene.decode[decided.decode]
        assert scene.request.tokens <= prefill.tokens_max
        assert prefill.queued < prefill.queued_max
        assert needed <= decode.free_tokens
        assert decode.running + decode.joining < decode.running_max
    base = idle(1, chance, admission="none")
    (prefill,), (decode,) = base.prefill, base.decode
    needed = base.request.tokens + base.request.output_tokens
    for workers, fit, reason in (
        ({"decode": (replace(decode, free_tokens=needed),)}, True, None),
        ({"decode": (replace(decode, free_tokens=needed - 1),)}, False, Reason.MEMORY),
        ({"decode": (replace(decode, tokens_max=needed - 1, free_tokens=0),)}, False, None),
        ({"decode": (replace(decode, tokens_max=needed, free_tokens=0),)}, False, Reason.MEMORY),
        ({"decode": (replace(decode, running=60, joining=3),)}, True, None),
        ({"decode": (replace(decode, running=60, joining=4),)}, False, Reason.MEMORY),
        ({"prefill": (replace(prefill, tokens_max=base.request.tokens),)}, True, None),
        ({"prefill": (replace(prefill, tokens_max=base.request.tokens - 1),)}, False, None),
        ({"prefill": (replace(prefill, queued=63),)}, True, None),
        ({"prefill": (replace(prefill, queued=64),)}, False, Reason.QUEUE),
        (
            {"prefill": (replace(prefill, queued=64, tokens_max=base.request.tokens),)},
            False,
            Reason.QUEUE,
        ),
    ):
        decided = decide(subject, base.changed(**workers))
        assert isinstance(decided, Plan) == fit
        if isinstance(decided, Rejection):
            assert decided.reason is (reason or Reason.TOO_LONG)


def spreads_ties(subject: Subject, chance: random.Random) -> None:
    """Among workers that are alike, each is chosen about as often, whatever the policy."""
    workers = 4
    scene = idle(workers, chance, admission="none")
    scene = scene.changed(nodes=(replace(scene.nodes[0], held=scene.request.chain),) * workers)
    planner, snapshot = planner_of(subject, scene), look(build(subject, scene), scene)
    counts = np.zeros((2, workers), dtype=int)
    for number in range(40 * workers):
        decided = planner.decide(snapshot, replace(scene.request, number=number))
        assert isinstance(decided, Plan)
        counts[0, decided.prefill] += 1
        counts[1, decided.decode] += 1
    assert counts.min() > 15, counts  # 40 are expected; 15 is more than four deviations off
    assert counts.max() < 70, counts


def starves_nobody(subject: Subject, chance: random.Random) -> None:
    """What can be in time on an idle cluster is admitted there; and no worker is left idle."""
    scene = idle(3, chance)
    needed_s = oracle.computing_s(scene, 0)
    tbt_s = oracle.cost(scene).decode_step_s(1, scene.request.tokens)
    for objectives, admitted in (
        (Objectives(ttft_s=needed_s + 1e-6, tbt_s=tbt_s + 1e-6), True),
        (Objectives(ttft_s=INF, tbt_s=INF), True),
        (Objectives(ttft_s=needed_s - 1e-6, tbt_s=INF), scene.options.admission == "none"),
    ):
        decided = decide(subject, scene.changed(objectives=objectives))
        assert isinstance(decided, Plan) == admitted
        if isinstance(decided, Rejection):
            assert decided.reason is Reason.TTFT
    _feeds_all_workers(subject, scene.changed(objectives=Objectives(ttft_s=INF, tbt_s=INF)))


def _feeds_all_workers(subject: Subject, scene: Scene) -> None:
    """Requests of one hot prefix come faster than a worker computes: every worker gets some."""
    cluster, planner = build(subject, scene), planner_of(subject, scene)
    fed_prefill, fed_decode = set(), set()
    for number in range(40):
        now_s = NOW_S + number * 0.01
        request = replace(scene.request, number=number)
        decided = planner.decide(cluster.snapshot(now_s), request)
        assert isinstance(decided, Plan)
        cluster.commit(now_s, request, decided)
        cluster.caches.add(int(cluster.prefill.node[decided.prefill]), request.chain)
        fed_prefill.add(decided.prefill)
        fed_decode.add(decided.decode)
    assert len(fed_prefill) == len(scene.prefill)
    assert len(fed_decode) == len(scene.decode)


def defines_zero_matches(subject: Subject, chance: random.Random) -> None:
    """With nothing cached anywhere, or no blocks at all, everything is computed, nothing moved."""
    scene = draw_scene(chance, admission="none")
    nodes = tuple(replace(node, held=b"") for node in scene.nodes)
    short = replace(scene.request, tokens=1, chain=b"")
    for bare in (scene.changed(nodes=nodes), scene.changed(request=short)):
        decided = decide(subject, bare)
        if isinstance(decided, Plan):
            assert decided.cached_tokens == 0
            assert decided.transfer is None
            assert decided.transfer_s == 0
            due = oracle.cost(bare).prefill_s(bare.request.tokens, 0)
            assert math.isclose(decided.prefill_s, due)


def equal_inputs_give_equal_plans(subject: Subject, chance: random.Random) -> None:
    """A decision depends on its arguments alone, and changes none of them."""
    scene = draw_scene(chance)
    cluster, planner = build(subject, scene), planner_of(subject, scene)
    snapshot = look(cluster, scene)
    before = numbers(snapshot)
    decided = planner.decide(snapshot, scene.request)
    other = draw_scene(chance)
    planner.decide(look(build(subject, other), other), other.request)
    assert planner.decide(snapshot, scene.request) == decided
    assert decide(subject, scene) == decided
    assert numbers(snapshot) == before


def copies_only_what_somebody_gives(subject: Subject, chance: random.Random) -> None:
    """A transfer comes from a live node that holds the blocks, to one that lacks them."""
    scene = draw_scene(chance, admission="none", policy=chance.choice(POLICIES[-2:]))
    decided = decide(subject, scene)
    if isinstance(decided, Rejection) or (transfer := decided.transfer) is None:
        return
    assert scene.nodes[transfer.source].alive
    stop = transfer.first_block + transfer.block_count
    assert transfer.block_count > 0
    assert stop <= oracle.held_blocks(scene, transfer.source)
    assert transfer.first_block == oracle.held_blocks(scene, transfer.target)
    assert transfer.target == scene.prefill[decided.prefill].node != transfer.source
    assert decided.cached_tokens == min(stop * BLOCK_TOKENS, scene.request.tokens - 1)
    if scene.options.policy == "kvcache-centric":
        ratio = stop / transfer.first_block if transfer.first_block else INF
        assert ratio > scene.options.balancing_threshold


def moves_hot_prefixes(subject: Subject, chance: random.Random) -> None:
    """A busy holder's prefix is copied to an idle worker, unless the threshold is infinite."""
    scene = idle(2, chance, admission="none", policy=chance.choice(POLICIES[-2:]))
    blocks = 16
    request = replace(scene.request, tokens=blocks * BLOCK_TOKENS, chain=names(range(blocks)))
    busy = replace(scene.prefill[0], busy_s=20.0, tokens_max=10**6)
    free = replace(scene.prefill[1], tokens_max=10**6)
    decode = tuple(replace(worker, free_tokens=10**6) for worker in scene.decode)
    hot = replace(scene.nodes[0], held=request.chain)
    scene = scene.changed(
        nodes=(hot, scene.nodes[1]), prefill=(busy, free), decode=decode, request=request
    )
    options = replace(scene.options, balancing_threshold=2.0)
    decided = decide(subject, scene.changed(options=options))
    assert isinstance(decided, Plan)
    assert decided.transfer is not None
    assert (decided.prefill, decided.transfer.source, decided.transfer.block_count) == (1, 0, 16)
    if scene.options.policy == "kvcache-centric":
        decided = decide(subject, scene.changed(options=replace(options, balancing_threshold=INF)))
        assert isinstance(decided, Plan)
        assert decided.transfer is None


def meets_objectives_to_the_letter(subject: Subject, chance: random.Random) -> None:
    """An objective just met is met, and one just missed rejects, as the admission says."""
    admission = chance.choice(ADMISSIONS)
    scene = draw_scene(chance, admission=admission, slack_exponent=1.0)
    free = decide(subject, scene.changed(objectives=Objectives(ttft_s=INF, tbt_s=INF)))
    if isinstance(free, Rejection) or scene.options.policy == "slack-aware":
        return
    met = Objectives(ttft_s=free.ttft_s, tbt_s=INF)
    assert decide(subject, scene.changed(objectives=met)) == free
    missed = scene.changed(objectives=Objectives(ttft_s=free.ttft_s * (1 - 1e-12), tbt_s=INF))
    _rejects(decide(subject, missed), Reason.TTFT if admission != "none" else None)
    tbt_s = {
        "early": oracle.current_tbt_s(scene, free.decode),
        "predicted": oracle.predicted_tbt_s(scene, NOW_S + free.ttft_s),
    }.get(admission, 1.0)
    met = Objectives(ttft_s=INF, tbt_s=tbt_s)
    assert decide(subject, scene.changed(objectives=met)) == free
    missed = scene.changed(objectives=Objectives(ttft_s=INF, tbt_s=tbt_s * (1 - 1e-9)))
    _rejects(decide(subject, missed), Reason.TBT if admission in ("early", "predicted") else None)


def _rejects(decided: object, reason: Reason | None) -> None:
    assert (decided.reason if isinstance(decided, Rejection) else None) is reason


def predicts_to_the_moment(subject: Subject, chance: random.Random) -> None:
    """Early rejection by prediction counts who decodes at the moment when the prefill ends."""
    scene = idle(1, chance, admission="predicted", policy="cache-aware").changed(profile=EXACT)
    end_s = NOW_S + oracle.computing_s(scene, 0)
    alone_s = oracle.cost(scene).decode_step_s(1, scene.request.tokens)
    scene = scene.changed(objectives=Objectives(ttft_s=INF, tbt_s=alone_s))
    soon_s, begun_s = 2.0**-20, end_s - scene.decode_s
    for prefill_ends_s, decode_starts_s, counted in (
        ((), (), False),
        ((end_s,), (), True),
        ((end_s + soon_s,), (), False),
        ((begun_s,), (), False),
        ((begun_s + soon_s,), (), True),
        ((), (begun_s,), False),
        ((), (begun_s + soon_s,), True),
    ):
        decided = decide(
            subject,
            scene.changed(prefill_ends_s=prefill_ends_s, decode_starts_s=decode_starts_s),
        )
        _rejects(decided, Reason.TBT if counted else None)


def rechecks_after_prefill(subject: Subject, chance: random.Random) -> None:
    """The planned decode worker is refused if it died, or if the request would now miss TBT."""
    scene = draw_scene(chance, admission=chance.choice(ADMISSIONS))
    planner, cluster = planner_of(subject, scene), build(subject, scene)
    at = chance.randrange(len(scene.decode))
    plan = Plan(0, at, 0, None, 0.0, 0.0, 1.0, 1.0, 0.1)
    tbt_s = oracle.current_tbt_s(scene, at)
    for objective_s, admitted in ((tbt_s, True), (tbt_s * (1 - 1e-12), False)):
        cluster.objectives = Objectives(ttft_s=INF, tbt_s=objective_s)
        refused = planner.recheck(cluster.snapshot(NOW_S), scene.request, plan)
        if scene.decode[at].state is WorkerState.DEAD:
            assert refused == Rejection(Reason.NO_WORKER, 1.0, INF)
        elif admitted or scene.options.admission == "none":
            assert refused is None
        else:
            assert refused == Rejection(Reason.TBT, 1.0, tbt_s)


def threshold_is_a_ratio(subject: Subject, chance: random.Random) -> None:
    """kvcache-centric copies when the longest match is more than threshold times the worker's."""
    scene, blocks = two_nodes(chance, policy="kvcache-centric", admission="none")
    gone = replace(scene.prefill[0], state=WorkerState.DRAINING)
    for held, threshold, copies in (
        (blocks // 2, 2.0, False),
        (blocks // 2, 1.99, True),
        (blocks, 1.0, False),
        (blocks - 1, 1.0, True),
        (0, 1e9, True),
    ):
        nodes = (
            replace(scene.nodes[0], held=names(range(blocks))),
            replace(scene.nodes[1], held=names(range(held)), link_bytes_per_s=2.0**33),
        )
        options = replace(scene.options, balancing_threshold=threshold)
        given = scene.changed(nodes=nodes, prefill=(gone, scene.prefill[1]), options=options)
        decided = decide(subject, given)
        assert isinstance(decided, Plan)
        moved = decided.transfer.block_count if decided.transfer else 0
        assert moved == (blocks - held if copies else 0)
        due_s = oracle.copying_s(given, given.prefill[1], 0, moved)
        assert math.isclose(decided.transfer_s, due_s)


def copies_from_the_idlest(subject: Subject, chance: random.Random) -> None:
    """Of equal holders, the one whose link is free first gives; idle ones take turns."""
    scene = idle(4, chance, admission="none", policy=chance.choice(POLICIES[-2:]))
    request = replace(scene.request, tokens=16 * BLOCK_TOKENS, chain=names(range(16)))
    prefill = tuple(
        replace(
            worker,
            tokens_max=10**6,
            state=WorkerState.DRAINING if worker.node else WorkerState.READY,
        )
        for worker in scene.prefill
    )
    decode = tuple(replace(worker, tokens_max=10**6, free_tokens=10**6) for worker in scene.decode)
    scene = scene.changed(request=request, prefill=prefill, decode=decode)
    options = replace(scene.options, balancing_threshold=2.0)
    for sends_s, holders in (
        ((0.25, 0.125, 0.375), {2}),
        ((0.25, -3.0, 0.125), {2}),
        ((-1.0, -3.0, 0.5), {1, 2}),
    ):
        nodes = [scene.nodes[0]]
        nodes += [replace(nodes[0], held=request.chain, sends_s=busy_s) for busy_s in sends_s]
        given = scene.changed(nodes=tuple(nodes), options=options)
        planner, snapshot = planner_of(subject, given), look(build(subject, given), given)
        found = set()
        for number in range(12):
            decided = planner.decide(snapshot, replace(request, number=number))
            assert isinstance(decided, Plan)
            assert decided.transfer is not None
            found.add(decided.transfer.source)
        assert found == holders


RULES: Final[tuple[Rule, ...]] = (
    decides_as_the_algorithms_say,
    finds_every_prefix,
    keeps_its_books,
    costs_are_the_profile,
    draws_evenly,
    rechecks_after_prefill,
    predicts_to_the_moment,
    meets_objectives_to_the_letter,
    stays_within_memory_and_queues,
    takes_only_workers_that_are_ready,
    copies_only_what_somebody_gives,
    moves_hot_prefixes,
    defines_zero_matches,
    equal_inputs_give_equal_plans,
    long_prompts_wait_less,
    waits_for_decode_while_ttft_allows,
    work_has_a_price,
    copies_when_it_is_cheaper,
    threshold_is_a_ratio,
    copies_from_the_idlest,
    starts_empty,
    refuses_what_cannot_be,
    our_own_is_never_later_at_no_price,
    spreads_ties,
    starves_nobody,
)
