"""The planner's rules: each says what must hold of any planner, in any scene. See `test_rules.py`.

A rule takes the planner that is tested (the shipped one, or a mutated copy) and a source of chance,
and fails by assertion.
"""

import math
import random
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Final

import numpy as np

from kvpool.errors import UsageError
from kvpool.integration.conductor.plan import Plan, Reason, Rejection
from kvpool.integration.conductor.snapshot import Objectives, Snapshot, WorkerState
from tests.unit.integration.planning import oracle
from tests.unit.integration.planning.books import Books
from tests.unit.integration.planning.scene import (
    ADMISSIONS,
    BLOCK_TOKENS,
    EXACT,
    INF,
    NOW_S,
    POLICIES,
    Decode,
    Node,
    Prefill,
    Scene,
    build,
    decide,
    draw_scene,
    look,
    planner_of,
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


def idle(workers: int, chance: random.Random, **options: object) -> Scene:
    """Draw a scene with so many workers of each kind, all alike, idle and large."""
    scene = draw_scene(chance, **options)
    tokens = scene.request.tokens + scene.request.output_tokens
    return scene.changed(
        nodes=(Node(True, -1.0, -1.0, 2.0**35, ()),) * workers,
        prefill=tuple(
            Prefill(node, WorkerState.READY, -1.0, 0, 64, 10 * tokens) for node in range(workers)
        ),
        decode=tuple(
            Decode(node, WorkerState.READY, 0, 0, 0, 0, 64, 100 * tokens, 100 * tokens)
            for node in range(workers)
        ),
        prefill_ends_s=(),
        decode_starts_s=(),
    )


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


def draws_evenly(subject: Subject, chance: random.Random) -> None:
    """A draw depends on seed and number alone, and neither leaves anybody out."""
    count = chance.randint(2, 9)
    for several in (
        [subject.draw(5, number, count) for number in range(400)],
        [subject.draw(seed, 5, count) for seed in range(400)],
    ):
        counts = np.bincount(several, minlength=count)
        assert len(counts) == count
        assert counts.min() > 400 / count / 2.5, counts


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
    nodes = tuple(replace(node, held=()) for node in scene.nodes)
    short = replace(scene.request, tokens=1, chain=())
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
    before = _numbers(snapshot)
    decided = planner.decide(snapshot, scene.request)
    other = draw_scene(chance)
    planner.decide(look(build(subject, other), other), other.request)
    assert planner.decide(snapshot, scene.request) == decided
    assert decide(subject, scene) == decided
    assert _numbers(snapshot) == before


def _numbers(snapshot: Snapshot) -> dict[str, object]:
    columns: dict[str, object] = {}
    for name in ("nodes", "prefill", "decode"):
        for field in fields(getattr(snapshot, name)):
            column = getattr(getattr(snapshot, name), field.name)
            assert not column.flags.writeable
            columns[f"{name}.{field.name}"] = column.tolist()
    return {**columns, "flow": asdict(snapshot.flow), "objectives": snapshot.objectives}


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
    request = replace(scene.request, tokens=blocks * BLOCK_TOKENS, chain=tuple(range(blocks)))
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
    """An objective that is just met is met, and one that is just missed rejects, as admission says."""
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
            replace(scene.nodes[0], held=tuple(range(blocks))),
            replace(scene.nodes[1], held=tuple(range(held))),
        )
        options = replace(scene.options, balancing_threshold=threshold)
        decided = decide(
            subject,
            scene.changed(nodes=nodes, prefill=(gone, scene.prefill[1]), options=options),
        )
        assert isinstance(decided, Plan)
        moved = decided.transfer.block_count if decided.transfer else 0
        assert moved == (blocks - held if copies else 0)
        assert math.isclose(decided.transfer_s, oracle.copying_s(scene, scene.prefill[1], 0, moved))


def copies_from_the_idlest(subject: Subject, chance: random.Random) -> None:
    """Of equal holders, the one whose link is free first gives; idle ones take turns."""
    scene = idle(4, chance, admission="none", policy=chance.choice(POLICIES[-2:]))
    request = replace(scene.request, tokens=16 * BLOCK_TOKENS, chain=tuple(range(16)))
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
        found = set()
        for number in range(20):
            decided = decide(
                subject,
                scene.changed(
                    nodes=tuple(nodes), request=replace(request, number=number), options=options
                ),
            )
            assert isinstance(decided, Plan)
            assert decided.transfer is not None
            found.add(decided.transfer.source)
        assert found == holders


def two_nodes(chance: random.Random, **options: object) -> tuple[Scene, int]:
    """Draw two idle nodes with large workers, and a request of an even number of blocks."""
    scene, blocks = idle(2, chance, **options), 2 * chance.randint(4, 8)
    request = replace(scene.request, tokens=blocks * BLOCK_TOKENS - 1, chain=tuple(range(blocks)))
    return scene.changed(
        request=request,
        objectives=Objectives(ttft_s=INF, tbt_s=INF),
        prefill=tuple(replace(worker, tokens_max=10**6) for worker in scene.prefill),
        decode=tuple(replace(worker, free_tokens=10**6) for worker in scene.decode),
    ), blocks


def our_own_is_never_later_at_no_price(subject: Subject, chance: random.Random) -> None:
    """slack-aware without a price on work predicts a TTFT no later than the papers' algorithm."""
    scene = draw_scene(chance, admission="none", work_price=0.0, slack_exponent=1.0)
    ours = decide(subject, scene.changed(options=replace(scene.options, policy="slack-aware")))
    papers = decide(
        subject, scene.changed(options=replace(scene.options, policy="kvcache-centric"))
    )
    if isinstance(ours, Plan) and isinstance(papers, Plan):
        assert ours.ttft_s <= papers.ttft_s + 1e-9


def costs_are_the_profile(subject: Subject, chance: random.Random) -> None:
    """Predicted times are the formulas of the profile, for numbers and for columns alike."""
    profile = draw_scene(chance).profile
    cost = subject.ProfiledCost(profile)
    tokens, cached = chance.randint(1, 100_000), chance.randint(0, 100_000)
    fit = profile.prefill
    due_s = (
        fit.base_s
        + fit.token_s * (tokens - cached)
        + fit.attention_s * (tokens * tokens - cached * cached)
    )
    assert math.isclose(cost.prefill_s(tokens, cached), due_s, rel_tol=1e-9)
    column = cost.prefill_s(tokens, np.array([cached, tokens]))
    assert np.allclose(column, [due_s, fit.base_s], rtol=1e-9)
    running, context = chance.randint(1, 200), chance.randint(0, 1_000_000)
    step = profile.decode
    due_s = step.base_s + step.request_s * running + step.token_s * context
    assert math.isclose(cost.decode_step_s(running, context), due_s, rel_tol=1e-9)
    link = chance.uniform(1e8, 1e11)
    due_s = profile.transfer.base_s + tokens * profile.kv_bytes_per_token / link
    assert math.isclose(cost.transfer_s(tokens, link), due_s, rel_tol=1e-9)
    assert cost.transfer_s(0, link) == 0
    column = cost.transfer_s(np.array([tokens, 0, 1]), np.array([link, link, link]))
    one_s = profile.transfer.base_s + profile.kv_bytes_per_token / link
    assert np.allclose(column, [due_s, 0, one_s], rtol=1e-9)
    assert cost.kv_bytes_per_token == profile.kv_bytes_per_token


def finds_every_prefix(subject: Subject, chance: random.Random) -> None:
    """The index counts, for each node, the leading blocks that were added and not removed."""
    nodes = chance.choice((1, 2, 9, 40))
    length = chance.choice((0, 1, 5, 255, 256, 257, 258, 513, 600))
    index, held = subject.BlockIndex(1), [set[int]() for _ in range(nodes)]
    index.grow(nodes)
    for node in range(nodes):
        added = range(chance.choice((0, 1, length // 2, length, length)))
        index.add(node, added)
        index.add(node, added[:2])
        held[node].update(added)
        gone = [chance.randrange(length + 1)] if chance.random() < 0.4 else []
        index.remove(node, gone)
        index.remove(node, gone)
        held[node].difference_update(gone)
    if chance.random() < 0.3:
        cleared = chance.randrange(nodes)
        index.clear(cleared)
        held[cleared].clear()
    chain = [*range(length), -1]
    matched = index.match(chain)
    assert matched.tolist() == [
        next(at for at, block in enumerate(chain) if block not in one) for one in held
    ]
    assert index.match([]).tolist() == [0] * nodes
    assert index.node_count == nodes
    assert len(index) == len(set().union(*held))
    for node in range(nodes):
        for block in {0, 1, chance.randint(0, length)}:
            assert index.holds(node, block) == (block in held[node])
    for node, blocks in enumerate(held):
        index.remove(node, blocks)
    assert len(index) == 0


def keeps_its_books(subject: Subject, chance: random.Random) -> None:
    """Whatever happens to requests, the columns are the sums over those that are under way."""
    scene = idle(3, chance, admission="none", policy="slack-aware")
    scene = scene.changed(nodes=(replace(scene.nodes[0], held=scene.request.chain),) * 3)
    cluster, planner = build(subject, scene), planner_of(subject, scene)
    cluster.caches.clear(1)
    cluster.caches.clear(2)
    books, now_s = Books(cluster, scene.decode_s), NOW_S
    for number in range(30):
        now_s += chance.choice((0.0, 0.05, 0.5))
        request = replace(scene.request, number=number)
        decided = planner.decide(cluster.snapshot(now_s), request)
        assert isinstance(decided, Plan)
        books.commit(now_s, request, decided)
        for _ in range(chance.randint(0, 3)):
            now_s += chance.choice((0.0, 0.1))
            books.event(chance, now_s)
        books.check(cluster.snapshot(now_s))
    while books.under_way:
        books.event(chance, now_s)
        books.check(cluster.snapshot(now_s))
    assert (cluster.decode.free_tokens == cluster.decode.tokens_max).all()
    assert not cluster.prefill.queued.any()


def starts_empty(subject: Subject, chance: random.Random) -> None:
    """A new node's store and links, and a new worker, are empty, idle and ready at any moment."""
    cluster = subject.Cluster(
        objectives=Objectives(ttft_s=1.0, tbt_s=1.0), block_tokens=512, decode_s=1.0
    )
    planner = planner_of(subject, draw_scene(chance))
    request = draw_scene(chance).request
    assert cluster.caches.node_count == 0
    assert planner.decide(cluster.snapshot(0.0), request) == Rejection(Reason.NO_WORKER, INF, INF)
    assert cluster.add_node(link_bytes_per_s=3.0) == 0
    assert cluster.add_prefill_worker(0, queued_max=4, tokens_max=5) == 0
    assert cluster.add_decode_worker(0, running_max=6, tokens_max=7) == 0
    shown = cluster.snapshot(0.0)
    rows = {
        field.name: getattr(columns, field.name).tolist()
        for columns in (shown.nodes, shown.prefill, shown.decode)
        for field in fields(columns)
        if field.name not in ("node", "state", "tokens_max")
    }
    assert rows == {
        "alive": [True],
        "send_free_at_s": [0.0],
        "receive_free_at_s": [0.0],
        "link_bytes_per_s": [3.0],
        "free_at_s": [0.0],
        "queued": [0],
        "queued_max": [4],
        "running": [0],
        "context_tokens": [0],
        "joining": [0],
        "joining_tokens": [0],
        "running_max": [6],
        "free_tokens": [7],
    }
    assert shown.prefill.tokens_max.tolist() == [5]
    assert shown.decode.tokens_max.tolist() == [7]
    assert shown.prefill.state.tolist() == shown.decode.state.tolist() == [WorkerState.READY]
    cluster.caches.add(0, [1])
    cluster.lose_node(0)
    assert not cluster.nodes.alive[0]
    assert not cluster.caches.holds(0, 1)


def refuses_what_cannot_be(subject: Subject, chance: random.Random) -> None:
    """Events that cannot follow are refused and change nothing; so are settings out of range."""
    scene = idle(1, chance, admission="none")
    cluster, planner = build(subject, scene), planner_of(subject, scene)
    plan = planner.decide(cluster.snapshot(NOW_S), scene.request)
    assert isinstance(plan, Plan)
    number = scene.request.number
    events: dict[str, Callable[[], object]] = {
        "commit": lambda: cluster.commit(NOW_S, scene.request, plan),
        "prefill_done": lambda: cluster.prefill_done(number, NOW_S),
        "joined": lambda: cluster.joined(number, NOW_S),
        "left": lambda: cluster.left(number, NOW_S, 0),
        "cancel": lambda: cluster.cancel(number, NOW_S),
    }
    for allowed in (
        {"commit"},
        {"prefill_done", "cancel"},
        {"joined", "cancel"},
        {"left"},
    ):
        before = _numbers(cluster.snapshot(NOW_S))
        for name in set(events) - allowed:
            assert _refuses(events[name]), name
        assert _numbers(cluster.snapshot(NOW_S)) == before
        events[min(allowed, key=list(events).index)]()
    for wrong in (
        {"policy": "best"},
        {"admission": "late"},
        {"balancing_threshold": 0.999},
        {"balancing_threshold": math.nan},
        {"work_price": -0.001},
        {"slack_exponent": 0.999},
    ):
        assert _refuses(partial(replace, subject.PlannerOptions(), **wrong)), wrong
    subject.PlannerOptions(balancing_threshold=1.0, work_price=0.0, slack_exponent=1.0)
    for node in (-1, 1):
        assert _refuses(partial(cluster.add_prefill_worker, node, queued_max=1, tokens_max=1))
        assert _refuses(partial(cluster.add_decode_worker, node, running_max=1, tokens_max=1))


def _refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except UsageError as error:
        return bool(str(error))
    return False


RULES: Final[tuple[Rule, ...]] = (
    decides_as_the_algorithms_say,
    finds_every_prefix,
    keeps_its_books,
    costs_are_the_profile,
    draws_evenly,
    rechecks_after_prefill,
    meets_objectives_to_the_letter,
    stays_within_memory_and_queues,
    takes_only_workers_that_are_ready,
    copies_only_what_somebody_gives,
    moves_hot_prefixes,
    defines_zero_matches,
    equal_inputs_give_equal_plans,
    long_prompts_wait_less,
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
