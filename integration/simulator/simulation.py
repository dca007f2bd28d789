"""The simulated cluster: requests arrive, the Conductor's planner decides, workers let time pass.

Owns how planner, workers, stores and network act together. Decides nothing: each decision is the
policy's, over the snapshot that the live Conductor would give it. Who calls it: the figures.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Final

import simpy
from simpy.events import Event

from kvpool.block import BlockHash
from kvpool.errors import InternalError, UsageError
from kvpool.integration.conductor.cluster import Cluster
from kvpool.integration.conductor.cost import CostModel
from kvpool.integration.conductor.plan import Plan, Policy, PrefixTransfer, Rejection
from kvpool.integration.conductor.snapshot import Objectives, Request
from kvpool.integration.simulator.cache import NodeCache
from kvpool.integration.simulator.decoding import DecodeWorker
from kvpool.integration.simulator.job import End, Job
from kvpool.integration.simulator.network import Network
from kvpool.integration.simulator.outcome import Outcome
from kvpool.integration.simulator.prefilling import PrefillWorker, Prompt
from kvpool.integration.simulator.setting import ClusterSetting, check_objectives
from kvpool.integration.simulator.trace import BLOCK_TOKENS, NAME_BYTES, Arrival
from kvpool.tiers.eviction import LRUPolicy

# First guesses, until requests have ended.
_DECODE_S: Final = 10.0
_OUTPUT_TOKENS: Final = 256.0
_OUTPUT_SHARE: Final = 0.01  # of each ended request in the mean length of outputs
_TELL_EVERY: Final = 256

# Told how many requests have arrived.
Tell = Callable[[int], None]


class _Indexed:
    """Carries what a store takes in and loses into the planner's index of blocks."""

    def __init__(self, cluster: Cluster, nodes: Sequence[int]) -> None:
        self._caches = cluster.caches
        self._nodes = nodes

    def entered(self, blocks: Sequence[BlockHash]) -> None:
        names = b"".join(blocks)
        for node in self._nodes:
            self._caches.add(node, names)

    def left(self, blocks: Sequence[BlockHash]) -> None:
        names = b"".join(blocks)
        for node in self._nodes:
            self._caches.remove(node, names)


class Simulation:
    """One run of one load on one cluster.

    Args:
        setting: The cluster.
        policy: What decides, of ``kvpool.integration.conductor``.
        cost: How long things take; the policy has its own, which may be another.
        objectives: What the policy holds requests against. Infinite: nothing is rejected.
        seed: Of all random choices. Equal arguments give equal outcomes.
        sample_s: How often the load is sampled; 0 for never.
    """

    def __init__(
        self,
        setting: ClusterSetting,
        policy: Policy,
        cost: CostModel,
        objectives: Objectives,
        seed: int,
        sample_s: float = 0.0,
    ) -> None:
        check_objectives(objectives, cost)
        self._setting = setting
        self._policy = policy
        self._cost = cost
        self._sample_s = sample_s
        self._clock = clock = simpy.Environment()
        self._network = Network(clock, setting.port_bytes_per_s)
        self._cluster = Cluster(
            objectives=objectives,
            block_tokens=BLOCK_TOKENS,
            decode_s=_DECODE_S,
            seed=seed,
            hash_bytes=NAME_BYTES,
        )
        self._outcome = Outcome()
        self._output_tokens = _OUTPUT_TOKENS
        self._under_way = 0
        self._arriving = True
        self._prefill = [self._make_prefill() for _ in range(setting.prefill_count)]
        self._decode = [self._make_decode(index) for index in range(setting.decode_count)]
        self._stores = self._make_stores()

    def run(self, requests: Iterable[Arrival], tell: Tell | None = None) -> Outcome:
        """Let all requests arrive and end. Call once.

        Args:
            requests: In order of arrival, numbered; drawn one by one.
            tell: Told now and then how many have arrived.
        """
        self._clock.process(self._arrive_all(requests, tell))
        if self._sample_s:
            self._clock.process(self._sample())
        self._clock.run()
        self._outcome.sent_bytes = self._network.sent_bytes
        self._check_empty()
        return self._outcome

    def _make_prefill(self) -> PrefillWorker:
        setting = self._setting
        node = self._cluster.add_node(link_bytes_per_s=setting.port_bytes_per_s)
        self._cluster.add_prefill_worker(
            node, queued_max=setting.queued_max, tokens_max=setting.prompt_tokens_max
        )
        return PrefillWorker(self._clock, self._cost, self._network, setting, self._computed)

    def _make_decode(self, index: int) -> DecodeWorker:
        setting = self._setting
        node = self._cluster.add_node(link_bytes_per_s=setting.port_bytes_per_s)
        self._cluster.add_decode_worker(
            node, running_max=setting.running_max, tokens_max=setting.decode_tokens_max
        )
        return DecodeWorker(
            self._clock,
            self._cost,
            setting,
            joined=self._joined,
            advanced=partial(self._cluster.advance, index),
            ended=self._left,
        )

    def _make_stores(self) -> list[NodeCache]:
        setting, nodes = self._setting, range(self._setting.prefill_count)
        blocks = setting.cache_tokens // BLOCK_TOKENS
        if setting.pooled:
            listener = _Indexed(self._cluster, nodes)
            return [NodeCache(blocks * len(nodes), LRUPolicy, listener)] * len(nodes)
        return [NodeCache(blocks, LRUPolicy, _Indexed(self._cluster, [node])) for node in nodes]

    def _arrive_all(
        self, requests: Iterable[Arrival], tell: Tell | None
    ) -> Generator[Event, None, None]:
        for count, request in enumerate(requests, 1):
            if request.arrival_s > self._clock.now:
                yield self._clock.timeout(request.arrival_s - self._clock.now)
            self._arrive(request)
            if tell is not None and count % _TELL_EVERY == 0:
                tell(count)
        self._arriving = False

    def _arrive(self, request: Arrival) -> None:
        now = self._clock.now
        asked = Request(
            number=request.number,
            tokens=request.input_tokens,
            chain=b"".join(request.blocks),
            output_tokens=round(self._output_tokens),
        )
        job = Job(request, asked)
        decision = self._policy.decide(self._cluster.snapshot(now), asked)
        if isinstance(decision, Rejection):
            self._outcome.reasons[decision.reason] += 1
            self._end(job, End.REJECTED)
            return
        self._check_fits(request)
        job.plan = decision
        self._cluster.commit(now, asked, decision)
        self._under_way += 1
        store = self._stores[decision.prefill]
        job.held = store.pin(request.blocks, now)
        copying = None
        if self._setting.pooled:
            copying = self._read_pool(job)
        elif decision.transfer is not None:
            copying = self._copy_prefix(job, decision.transfer)
        cached = partial(self._cached_tokens, job)
        target = self._setting.prefill_count + decision.decode
        self._prefill[decision.prefill].submit(
            Prompt(job, decision.prefill, target, cached, copying)
        )

    def _check_fits(self, request: Arrival) -> None:
        """Refuse an answer that no decode worker can hold: it would wait for room for ever."""
        room = self._setting.decode_tokens_max
        if request.input_tokens + request.output_tokens > room:
            raise UsageError(
                f"request {request.number + 1} of the load has a prompt of {request.input_tokens} "
                f"and an output of {request.output_tokens} tokens, and a decode worker room for "
                f"{room}: take it out of the load"
            )

    def _cached_tokens(self, job: Job) -> int:
        """Return what is not computed: what is here when its turn comes, or on its way."""
        assert job.plan is not None
        here = self._stores[job.plan.prefill].match(job.request.blocks)
        blocks = max(here, job.coming_blocks)
        return min(blocks * BLOCK_TOKENS, job.request.input_tokens - 1)

    def _copy_prefix(self, job: Job, transfer: PrefixTransfer) -> Event:
        """Copy a run of blocks between two prefill nodes' stores; both keep it."""
        chain = job.request.blocks[: transfer.first_block + transfer.block_count]
        source, target = self._stores[transfer.source], self._stores[transfer.target]
        held = source.pin(chain, self._clock.now)  # fewer than planned if some left meanwhile
        if len(job.held) >= transfer.first_block:
            job.coming_blocks = len(held)
        tokens = min(len(held) * BLOCK_TOKENS, job.request.input_tokens)
        job.moved_tokens = max(tokens - transfer.first_block * BLOCK_TOKENS, 0)
        size = job.moved_tokens * self._cost.kv_bytes_per_token
        arrived = self._network.send(transfer.source, transfer.target, size).done

        def keep(_: Event) -> None:
            source.unpin(held)
            target.admit(held, self._clock.now)

        assert arrived.callbacks is not None
        arrived.callbacks.append(keep)
        return arrived

    def _read_pool(self, job: Job) -> Event:
        """Read what the pool has from the other nodes, over this one's port."""
        assert job.plan is not None
        nodes = self._setting.prefill_count
        tokens = min(len(job.held) * BLOCK_TOKENS, job.request.input_tokens)
        job.moved_tokens = tokens * (nodes - 1) // nodes
        size = job.moved_tokens * self._cost.kv_bytes_per_token
        return self._network.send(("pool", job.plan.prefill), job.plan.prefill, size).done

    def _computed(self, prompt: Prompt) -> None:
        """Keep the blocks of a prompt whose first token is there, and hand the request over."""
        job, now = prompt.job, self._clock.now
        plan = job.plan
        assert plan is not None
        store = self._stores[plan.prefill]
        store.admit(job.request.blocks, now)
        store.unpin(job.held)
        job.held = ()
        self._cluster.prefill_done(job.asked.number, now)
        refusal = self._policy.recheck(self._cluster.snapshot(now), job.asked, plan)
        if refusal is not None:
            self._outcome.reasons[refusal.reason] += 1
        if refusal is not None or job.request.output_tokens == 1:
            self._cluster.cancel(job.asked.number, now)
            self._under_way -= 1
            job.first_token_s = now
            self._end(job, End.DONE if refusal is None else End.DROPPED)
            return
        self._clock.process(self._hand_off(prompt, plan))

    def _hand_off(self, prompt: Prompt, plan: Plan) -> Generator[Event, None, None]:
        for shipment in prompt.shipments:
            if not shipment.done.processed:
                yield shipment.done
        if self._setting.layer_wise:  # the last layer left when it was computed
            tokens = min(self._setting.chunk_tokens, prompt.job.request.input_tokens)
            size = tokens * self._cost.kv_bytes_per_token / self._setting.layers
            yield self._clock.timeout(size / self._setting.port_bytes_per_s)
        self._decode[plan.decode].join(prompt.job)

    def _joined(self, job: Job) -> None:
        job.first_token_s = self._clock.now
        self._cluster.joined(job.asked.number, self._clock.now)

    def _left(self, job: Job) -> None:
        output = job.request.output_tokens
        self._cluster.left(job.asked.number, self._clock.now, output - 1)
        self._output_tokens += _OUTPUT_SHARE * (output - self._output_tokens)
        self._under_way -= 1
        self._end(job, End.DONE)

    def _end(self, job: Job, end: End) -> None:
        if job.end is not None:
            raise InternalError(f"request {job.request.number} ended twice")
        job.end = end
        job.ended_s = self._clock.now
        self._outcome.note(job)

    def _sample(self) -> Generator[Event, None, None]:
        pressure, objectives = self._outcome.pressure, self._cluster.objectives
        while self._arriving or self._under_way:
            now = self._clock.now
            waits = self._cluster.prefill.free_at_s - now
            steps = [worker.step_s() for worker in self._decode]
            pressure.at_s.append(now)
            pressure.prefill.append(float(waits.clip(min=0.0).mean()) / objectives.ttft_s)
            pressure.decode.append(sum(steps) / len(steps) / objectives.tbt_s)
            pressure.running.append(sum(worker.running for worker in self._decode))
            yield self._clock.timeout(self._sample_s)

    def _check_empty(self) -> None:
        """Fail loudly if anything was left behind: a simulation that leaks proves nothing."""
        cluster = self._cluster
        left = {
            "requests": self._under_way,
            "prompts": sum(map(len, self._prefill)),
            "decoding": sum(map(len, self._decode)),
            "held tokens": sum(worker.held_tokens for worker in self._decode),
            "context tokens": sum(worker.context_tokens for worker in self._decode),
            "pins": sum(store.pinned for store in self._stores),
            "shipments": self._network.under_way(),
            "queued": int(cluster.prefill.queued.sum()),
            "running": int(cluster.decode.running.sum() + cluster.decode.joining.sum()),
            "promised tokens": int((cluster.decode.tokens_max - cluster.decode.free_tokens).sum()),
        }
        if any(left.values()):
            kept = {name: count for name, count in left.items() if count}
            raise InternalError(f"the simulation left something behind: {kept}")
