"""What a decision should be, by the algorithms' text: one worker at a time, in plain numbers."""

from dataclasses import dataclass

from kvpool.integration.conductor.cost import ProfiledCost
from kvpool.integration.conductor.plan import Decision, Plan, PrefixTransfer, Reason, Rejection
from kvpool.integration.conductor.prefill_choice import draw
from kvpool.integration.conductor.snapshot import WorkerState
from tests.unit.integration.planning.scene import BLOCK_TOKENS, INF, Prefill, Scene, blocks_of


def cost(scene: Scene) -> ProfiledCost:
    """Return the scene's costs, which have a rule of their own."""
    return ProfiledCost(scene.profile)


@dataclass(frozen=True)
class Meets:
    """What a request meets at one prefill worker."""

    local: int
    moved: int
    wait_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float
    in_time: bool
    score: float


def held_blocks(scene: Scene, node: int) -> int:
    """Count the leading blocks that a node's store gives."""
    held = blocks_of(scene.nodes[node].held) if scene.nodes[node].alive else []
    chain = blocks_of(scene.request.chain)
    return next((count for count, block in enumerate(chain) if block not in held), len(chain))


def drawn(scene: Scene, scores: list[float]) -> int:
    """Return one of the lowest."""
    ties = [at for at, score in enumerate(scores) if score == min(scores)]
    return ties[draw(scene.seed, scene.request.number, len(ties))]


def holder_of(scene: Scene) -> tuple[int, int]:
    """Return the longest match and who gives it: the one whose link is free first."""
    held = [held_blocks(scene, node) for node in range(len(scene.nodes))]
    busy = [
        max(node.sends_s, 0.0) if count == max(held) else INF
        for node, count in zip(scene.nodes, held, strict=True)
    ]
    return max(held), drawn(scene, busy)


def computing_s(scene: Scene, blocks: int) -> float:
    """Time to compute the prompt when its first blocks are there."""
    tokens = scene.request.tokens
    return cost(scene).prefill_s(tokens, min(blocks * BLOCK_TOKENS, tokens - 1))


def copying_s(scene: Scene, worker: Prefill, holder: int, blocks: int) -> float:
    """Time to copy blocks to a worker, behind what is in flight at both ends."""
    if blocks <= 0:
        return 0.0
    source, target = scene.nodes[holder], scene.nodes[worker.node]
    link = min(source.link_bytes_per_s, target.link_bytes_per_s)
    tokens = min(blocks * BLOCK_TOKENS, scene.request.tokens)
    return max(source.sends_s, target.receives_s, 0.0) + cost(scene).transfer_s(tokens, link)


def meets(scene: Scene, worker: Prefill) -> Meets:
    """Tell what the request meets at one worker under the scene's policy."""
    policy, objective_s = scene.options.policy, scene.objectives.ttft_s
    best, holder = holder_of(scene)
    local = held_blocks(scene, worker.node)
    wait_s = max(worker.busy_s, 0.0)
    lacking = max(best - local, 0)
    moved, transfer_s, prefill_s = 0, 0.0, computing_s(scene, local)
    ttft_s = wait_s + prefill_s
    if policy == "kvcache-centric" and best > scene.options.balancing_threshold * local:
        moved, transfer_s = lacking, copying_s(scene, worker, holder, lacking)
        prefill_s = computing_s(scene, best)
        ttft_s = transfer_s + wait_s + prefill_s
    if policy == "slack-aware" and lacking:
        price, copy_s = scene.options.work_price, copying_s(scene, worker, holder, lacking)
        rest_s, start_s = computing_s(scene, best), max(wait_s, copy_s)
        if start_s + (1 + price) * rest_s < wait_s + (1 + price) * prefill_s:
            moved, transfer_s, prefill_s, ttft_s = lacking, copy_s, rest_s, start_s + rest_s
    in_time = ttft_s <= objective_s
    score = {"random": 0.0, "load-balancing": wait_s}.get(policy, ttft_s)
    if policy == "slack-aware":
        left = max(1 - prefill_s / objective_s, 0.0)
        slack_s = objective_s * left**scene.options.slack_exponent
        in_time = in_time and ttft_s - prefill_s <= slack_s
        price = scene.options.work_price
        score = ttft_s + price * prefill_s if in_time else 1e12 + ttft_s
    return Meets(local, moved, wait_s, transfer_s, prefill_s, ttft_s, in_time, score)


def takes_prefill(scene: Scene, worker: Prefill) -> bool:
    """Tell whether a prefill worker may get the request."""
    fits = scene.request.tokens <= worker.tokens_max
    return worker.state is WorkerState.READY and fits and worker.queued < worker.queued_max


def takes_decode(scene: Scene, at: int) -> bool:
    """Tell whether a decode worker may get the request."""
    worker = scene.decode[at]
    needed = scene.request.tokens + scene.request.output_tokens
    place = worker.running + worker.joining < worker.running_max
    return worker.state is WorkerState.READY and place and needed <= worker.free_tokens


def promised_tbt_s(scene: Scene, at: int) -> float:
    """TBT at a decode worker with all that was promised to it, and the request."""
    worker = scene.decode[at]
    context = worker.context_tokens + worker.joining_tokens + scene.request.tokens
    return cost(scene).decode_step_s(worker.running + worker.joining + 1, context)


def current_tbt_s(scene: Scene, at: int) -> float:
    """TBT at a decode worker as it is, and the request."""
    worker = scene.decode[at]
    context = worker.context_tokens + scene.request.tokens
    return cost(scene).decode_step_s(worker.running + 1, context)


def predicted_tbt_s(scene: Scene, end_s: float) -> float:
    """Mean TBT when the request's prefill ends."""
    requests = 1.0
    for start_s in scene.decode_starts_s:
        requests += start_s > end_s - scene.decode_s
    for prefill_end_s in scene.prefill_ends_s:
        requests += end_s - scene.decode_s < prefill_end_s <= end_s
    all_requests = 1 + sum(worker.running + worker.joining for worker in scene.decode)
    tokens = scene.request.tokens + sum(
        worker.context_tokens + worker.joining_tokens for worker in scene.decode
    )
    share = requests / sum(worker.state is not WorkerState.DEAD for worker in scene.decode)
    return cost(scene).decode_step_s(share, share * tokens / all_requests)


def why_none(scene: Scene) -> Reason | None:
    """Say why no worker may get the request, if so."""
    tokens, needed = scene.request.tokens, scene.request.tokens + scene.request.output_tokens
    for takes, fits, states, busy in (
        (
            [takes_prefill(scene, worker) for worker in scene.prefill],
            [worker.tokens_max >= tokens for worker in scene.prefill],
            [worker.state for worker in scene.prefill],
            Reason.QUEUE,
        ),
        (
            [takes_decode(scene, at) for at in range(len(scene.decode))],
            [worker.tokens_max >= needed for worker in scene.decode],
            [worker.state for worker in scene.decode],
            Reason.MEMORY,
        ),
    ):
        if any(takes):
            continue
        if fits and not any(fits):
            return Reason.TOO_LONG
        up = [fit and state is WorkerState.READY for fit, state in zip(fits, states, strict=True)]
        return busy if any(up) else Reason.NO_WORKER
    return None


def expected(scene: Scene, now_s: float) -> Decision:
    """Decide as the algorithms' text says."""
    if (reason := why_none(scene)) is not None:
        return Rejection(reason, INF, INF)
    found = [meets(scene, worker) for worker in scene.prefill]
    prefill = drawn(
        scene,
        [
            one.score if takes_prefill(scene, worker) else INF
            for worker, one in zip(scene.prefill, found, strict=True)
        ],
    )
    decode = drawn(
        scene,
        [
            promised_tbt_s(scene, at) if takes_decode(scene, at) else INF
            for at in range(len(scene.decode))
        ],
    )
    chosen, tbt_s = found[prefill], promised_tbt_s(scene, decode)
    admission, objective_s = scene.options.admission, scene.objectives.tbt_s
    if admission != "none" and not chosen.in_time:
        return Rejection(Reason.TTFT, chosen.ttft_s, tbt_s)
    if admission == "early" and current_tbt_s(scene, decode) > objective_s:
        return Rejection(Reason.TBT, chosen.ttft_s, current_tbt_s(scene, decode))
    later_s = predicted_tbt_s(scene, now_s + chosen.ttft_s)
    if admission == "predicted" and later_s > objective_s:
        return Rejection(Reason.TBT, chosen.ttft_s, later_s)
    transfer = None
    if chosen.moved:
        target = scene.prefill[prefill].node
        transfer = PrefixTransfer(holder_of(scene)[1], target, chosen.local, chosen.moved)
    cached = (chosen.local + chosen.moved) * BLOCK_TOKENS
    return Plan(
        prefill=prefill,
        decode=decode,
        cached_tokens=min(cached, scene.request.tokens - 1),
        transfer=transfer,
        wait_s=chosen.wait_s,
        transfer_s=chosen.transfer_s,
        prefill_s=chosen.prefill_s,
        ttft_s=chosen.ttft_s,
        tbt_s=tbt_s,
    )
