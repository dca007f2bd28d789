"""Scenes: a small cluster in any state, and a request. Drawn at random, from any source of chance.

Times are short binary fractions: sums of them are exact, so that ties are ties in any order.
"""

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import msgspec

from kvpool.block import HASH_BYTES
from kvpool.integration.conductor.cluster import Cluster
from kvpool.integration.conductor.papers import papers_profile
from kvpool.integration.conductor.plan import Decision
from kvpool.integration.conductor.planner import Admission, Planner, PlannerOptions
from kvpool.integration.conductor.prefill_choice import PolicyName
from kvpool.integration.conductor.profile import DecodeFit, PrefillFit, Profile, TransferFit
from kvpool.integration.conductor.snapshot import (
    Flow,
    Objectives,
    Request,
    Snapshot,
    WorkerState,
)
from tests.unit.integration.planning.subject import Subject

BLOCK_TOKENS = 512
NOW_S = 100.0
STATES = (WorkerState.READY,) * 6 + (WorkerState.DRAINING, WorkerState.DEAD)
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
ADMISSIONS: tuple[Admission, ...] = get_args(Admission)
INF = float("inf")
PAPERS = papers_profile()
# All its times are short binary fractions: 1/8 s to compute a block, 1/64 s to copy one at 1 GiB/s.
EXACT = msgspec.structs.replace(
    PAPERS,
    kv_bytes_per_token=2.0**15,
    prefill=PrefillFit(
        base_s=0.25, token_s=2.0**-12, attention_s=2.0**-24, error=PAPERS.prefill.error
    ),
    decode=DecodeFit(
        base_s=2.0**-6, request_s=2.0**-9, token_s=2.0**-24, error=PAPERS.decode.error
    ),
    transfer=TransferFit(base_s=2.0**-7, bytes_per_s=2.0**30, error=PAPERS.transfer.error),
)


@dataclass(frozen=True)
class Node:
    alive: bool
    sends_s: float
    receives_s: float
    link_bytes_per_s: float
    held: bytes


@dataclass(frozen=True)
class Prefill:
    node: int
    state: WorkerState
    busy_s: float
    queued: int
    queued_max: int
    tokens_max: int


@dataclass(frozen=True)
class Decode:
    node: int
    state: WorkerState
    running: int
    context_tokens: int
    joining: int
    joining_tokens: int
    running_max: int
    free_tokens: int
    tokens_max: int


@dataclass(frozen=True)
class Scene:
    """Everything a decision depends on, as plain values."""

    nodes: tuple[Node, ...]
    prefill: tuple[Prefill, ...]
    decode: tuple[Decode, ...]
    request: Request
    objectives: Objectives
    decode_s: float
    prefill_ends_s: tuple[float, ...]
    decode_starts_s: tuple[float, ...]
    seed: int
    profile: Profile
    options: PlannerOptions

    def changed(self, **changes: object) -> "Scene":
        """Return the scene with other values."""
        fields: dict[str, Any] = changes
        return replace(self, **fields)


def names(numbers: Iterable[int], size_bytes: int = HASH_BYTES) -> bytes:
    """Make a hash of each number; concatenated."""
    return b"".join(number.to_bytes(size_bytes, "little") for number in numbers)


def blocks_of(chain: bytes, size_bytes: int = HASH_BYTES) -> list[bytes]:
    """List the hashes that are concatenated."""
    return [chain[at : at + size_bytes] for at in range(0, len(chain), size_bytes)]


def draw_scene(chance: random.Random, **options: object) -> Scene:
    """Draw a scene. ``options`` are set in the planner's options; the others are drawn."""
    set_options: dict[str, Any] = options
    blocks = chance.randint(0, 8)
    request = Request(
        number=chance.randint(0, 1000),
        tokens=max(1, blocks * BLOCK_TOKENS - chance.choice((0, 0, 1, 300))),
        chain=names(range(blocks)),
        output_tokens=chance.choice((1, 100)),
    )
    nodes = tuple(_draw_node(chance, blocks) for _ in range(chance.randint(1, 6)))
    drawn = PlannerOptions(
        policy=chance.choice(POLICIES),
        admission=chance.choice(ADMISSIONS),
        balancing_threshold=chance.choice((1.0, 1.5, 2.0, 4.0, INF)),
        work_price=chance.choice((0.0, 0.5, 1.0, 3.0)),
        slack_exponent=chance.choice((1.0, 2.0, 3.5)),
    )
    return Scene(
        nodes=nodes,
        prefill=tuple(
            _draw_prefill(chance, len(nodes), request) for _ in range(chance.randint(1, 6))
        ),
        decode=tuple(
            _draw_decode(chance, len(nodes), request) for _ in range(chance.randint(1, 6))
        ),
        request=request,
        objectives=Objectives(
            ttft_s=chance.choice((0.375, 0.5, 1.0, 2.0, 30.0, 30.0, INF)),
            tbt_s=chance.choice((0.03125, 0.0625, 0.125, 0.3, INF)),
        ),
        decode_s=chance.choice((0.5, 2.0, 10.0)),
        prefill_ends_s=_draw_moments(chance, 99, 103),
        decode_starts_s=_draw_moments(chance, 88, 100),
        seed=chance.randint(0, 5),
        profile=chance.choice((PAPERS, EXACT)),
        options=replace(drawn, **set_options),
    )


def _draw_node(chance: random.Random, blocks: int) -> Node:
    held = list(range(chance.randint(0, blocks)))
    if held and chance.random() < 0.2:
        del held[chance.randrange(len(held))]
    return Node(
        alive=chance.random() < 0.85,
        sends_s=chance.choice((-5.0, 0.0, 0.125, 0.75)),
        receives_s=chance.choice((-5.0, 0.0, 0.0625, 0.375)),
        link_bytes_per_s=chance.choice((2.0**30, 2.0**33, 2.0**35)),
        held=names(held),
    )


def _draw_prefill(chance: random.Random, nodes: int, request: Request) -> Prefill:
    queued = chance.randint(0, 3)
    return Prefill(
        node=chance.randrange(nodes),
        state=chance.choice(STATES),
        busy_s=chance.choice((-3.0, 0.0, chance.randint(0, 4096) / 1024)),
        queued=queued,
        queued_max=max(1, queued + chance.choice((0, 1, 5, 5))),
        tokens_max=request.tokens + chance.choice((-1, 0, 0, 1, 10_000, 10_000)),
    )


def _draw_decode(chance: random.Random, nodes: int, request: Request) -> Decode:
    needed = request.tokens + request.output_tokens
    running, joining = chance.randint(0, 6), chance.randint(0, 3)
    free = max(0, needed + chance.choice((-1, 0, 0, 1, 50_000, 50_000)))
    return Decode(
        node=chance.randrange(nodes),
        state=chance.choice(STATES),
        running=running,
        context_tokens=running * chance.choice((0, 1000, 40_000)),
        joining=joining,
        joining_tokens=joining * chance.choice((500, 30_000)),
        running_max=max(1, running + joining + chance.choice((0, 1, 2, 20, 20))),
        free_tokens=free,
        tokens_max=free + chance.choice((0, 1000)),
    )


def _draw_moments(chance: random.Random, begin: int, end: int) -> tuple[float, ...]:
    return tuple(
        sorted(chance.randint(begin * 64, end * 64) / 64 for _ in range(chance.randint(0, 12)))
    )


def build(subject: Subject, scene: Scene) -> Cluster:
    """Make the scene's cluster. What the scene states as promised is written into the columns."""
    cluster = subject.Cluster(
        objectives=scene.objectives,
        block_tokens=BLOCK_TOKENS,
        decode_s=scene.decode_s,
        seed=scene.seed,
    )
    for node in scene.nodes:
        at = cluster.add_node(link_bytes_per_s=node.link_bytes_per_s)
        cluster.nodes.alive[at] = node.alive
        cluster.nodes.send_free_at_s[at] = NOW_S + node.sends_s
        cluster.nodes.receive_free_at_s[at] = NOW_S + node.receives_s
        cluster.caches.add(at, node.held)
    for worker in scene.prefill:
        at = cluster.add_prefill_worker(
            worker.node, queued_max=worker.queued_max, tokens_max=worker.tokens_max
        )
        cluster.prefill.state[at] = worker.state
        cluster.prefill.free_at_s[at] = NOW_S + worker.busy_s
        cluster.prefill.queued[at] = worker.queued
    for decode in scene.decode:
        at = cluster.add_decode_worker(
            decode.node, running_max=decode.running_max, tokens_max=decode.tokens_max
        )
        columns = cluster.decode
        columns.state[at] = decode.state
        columns.running[at] = decode.running
        columns.context_tokens[at] = decode.context_tokens
        columns.joining[at] = decode.joining
        columns.joining_tokens[at] = decode.joining_tokens
        columns.free_tokens[at] = decode.free_tokens
    return cluster


def look(cluster: Cluster, scene: Scene) -> Snapshot:
    """Show the cluster at the scene's moment, with the requests that the scene has on their way."""
    flow = Flow(scene.prefill_ends_s, scene.decode_starts_s, scene.decode_s)
    return replace(cluster.snapshot(NOW_S), flow=flow)


def planner_of(subject: Subject, scene: Scene) -> Planner:
    """Make the scene's planner, with the scene's costs."""
    return subject.Planner(
        subject.PlannerOptions(**asdict(scene.options)), subject.ProfiledCost(scene.profile)
    )


def decide(subject: Subject, scene: Scene) -> Decision:
    """Build the scene and decide."""
    return planner_of(subject, scene).decide(look(build(subject, scene), scene), scene.request)


def idle(workers: int, chance: random.Random, **options: object) -> Scene:
    """Draw a scene with so many workers of each kind, all alike, idle and large."""
    scene = draw_scene(chance, **options)
    tokens = scene.request.tokens + scene.request.output_tokens
    return scene.changed(
        nodes=(Node(True, -1.0, -1.0, 2.0**35, b""),) * workers,
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


def two_nodes(chance: random.Random, **options: object) -> tuple[Scene, int]:
    """Draw two idle nodes with large workers, and a request of an even number of blocks."""
    scene, blocks = idle(2, chance, **options), 2 * chance.randint(4, 8)
    request = replace(scene.request, tokens=blocks * BLOCK_TOKENS - 1, chain=names(range(blocks)))
    return scene.changed(
        request=request,
        objectives=Objectives(ttft_s=INF, tbt_s=INF),
        prefill=tuple(replace(worker, tokens_max=10**6) for worker in scene.prefill),
        decode=tuple(replace(worker, free_tokens=10**6) for worker in scene.decode),
    ), blocks
