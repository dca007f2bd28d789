"""Rules of what stands under a decision: the block index, the cluster's books, costs, draws."""

import math
import random
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial

import numpy as np

from kvpool.errors import UsageError
from kvpool.integration.conductor.plan import Plan, Reason, Rejection
from kvpool.integration.conductor.snapshot import Objectives, Snapshot, WorkerState
from tests.unit.integration.planning.books import Books
from tests.unit.integration.planning.scene import (
    INF,
    NOW_S,
    blocks_of,
    build,
    draw_scene,
    idle,
    names,
    planner_of,
)
from tests.unit.integration.planning.subject import Subject


def finds_every_prefix(subject: Subject, chance: random.Random) -> None:
    """The index counts, for each node, the leading blocks that were added and not removed."""
    nodes = chance.choice((1, 2, 9, 64, 65, 140))
    length = chance.choice((0, 1, 5, 64, 65, 129, 300))
    size = chance.choice((8, 20, 32))
    index, held = subject.BlockIndex(1, size), [set[bytes]() for _ in range(nodes)]
    whole = names(range(length), size)
    index.add(0, whole[:size])
    held[0].update(blocks_of(whole[:size], size))
    index.grow(nodes)
    for node in range(nodes):
        added = whole[: size * chance.choice((0, 1, length // 2, length, length))]
        index.add(node, added)
        index.add(node, added[: 2 * size])
        held[node].update(blocks_of(added, size))
        gone = names([chance.randrange(length + 1)], size) if chance.random() < 0.4 else b""
        index.remove(node, gone)
        index.remove(node, gone)
        held[node].difference_update(blocks_of(gone, size))
    if chance.random() < 0.3:
        cleared = chance.randrange(nodes)
        index.clear(cleared)
        held[cleared].clear()
    chain = [*blocks_of(whole, size), names([length + 1], size)]
    matched = index.match(b"".join(chain))
    assert matched.tolist() == [
        next(at for at, block in enumerate(chain) if block not in one) for one in held
    ]
    assert index.match(b"").tolist() == [0] * nodes
    assert index.node_count == nodes
    assert len(index) == len(set().union(*held))
    for node in range(nodes):
        for block in (chain[0], chance.choice(chain)):
            assert index.holds(node, block) == (block in held[node])
    for node, blocks in enumerate(held):
        index.remove(node, b"".join(blocks))
    assert len(index) == 0
    for refused in (
        partial(index.add, nodes, whole[:size]),
        partial(index.remove, -1, whole[:size]),
        partial(index.clear, nodes),
        partial(index.holds, -1, chain[0]),
        partial(index.match, b"short"),
    ):
        assert _refuses(refused)
    assert not index.holds(0, b"")
    index.grow(0)
    assert index.node_count == nodes


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
    cluster.caches.add(0, names([1]))
    cluster.lose_node(0)
    assert not cluster.nodes.alive[0]
    assert not cluster.caches.holds(0, names([1]))


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
        before = numbers(cluster.snapshot(NOW_S))
        for name in set(events) - allowed:
            assert _refuses(events[name]), name
        assert numbers(cluster.snapshot(NOW_S)) == before
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


def draws_evenly(subject: Subject, chance: random.Random) -> None:
    """A draw depends on seed and number alone, leaves nobody out, and never changes.

    Another draw would be as good, but every table that a simulation ever wrote would change.
    """
    assert [subject.draw(seed, number, 10**6) for seed in (0, 1, 7) for number in (0, 12345)] == [
        761537,
        585635,
        737428,
        620766,
        318721,
        813977,
    ]
    count = chance.randint(2, 9)
    for several in (
        [subject.draw(5, number, count) for number in range(400)],
        [subject.draw(seed, 5, count) for seed in range(400)],
    ):
        counts = np.bincount(several, minlength=count)
        assert len(counts) == count
        assert counts.min() > 400 / count / 2.5, counts


def numbers(snapshot: Snapshot) -> dict[str, object]:
    columns: dict[str, object] = {}
    for name in ("nodes", "prefill", "decode"):
        for field in fields(getattr(snapshot, name)):
            column = getattr(getattr(snapshot, name), field.name)
            assert not column.flags.writeable
            columns[f"{name}.{field.name}"] = column.tolist()
    return {**columns, "flow": asdict(snapshot.flow), "objectives": snapshot.objectives}
