"""A prefill worker: one prompt after another, in chunks, each on its way as it is computed.

Owns the queue and when each forward pass ends. Who calls it: the cluster.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import simpy
from simpy.events import Event

from kvpool.integration.conductor.cost import CostModel
from kvpool.integration.simulator.job import Job
from kvpool.integration.simulator.network import Network, Shipment
from kvpool.integration.simulator.setting import ClusterSetting


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt in the queue.

    Attributes:
        job: Whose it is.
        source, target: Ports of this worker's node and of the decode worker's.
        cached_tokens: Asked when its turn comes: how many leading tokens are here, or under way.
        copying: What brings them from other nodes, if anything does.
        shipments: Its KV on the way to the decode worker, a shipment a chunk.
    """

    job: Job
    source: int
    target: int
    cached_tokens: Callable[[], int]
    copying: Event | None
    shipments: list[Shipment] = field(default_factory=list)


class PrefillWorker:
    """One prefill worker.

    Args:
        computed: Told of a prompt that is computed.
    """

    def __init__(
        self,
        clock: simpy.Environment,
        cost: CostModel,
        network: Network,
        setting: ClusterSetting,
        computed: Callable[[Prompt], None],
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._network = network
        self._setting = setting
        self._computed = computed
        self._queue: deque[Prompt] = deque()  # the first one is being computed

    def __len__(self) -> int:
        """Return how many prompts wait or are being computed."""
        return len(self._queue)

    def submit(self, prompt: Prompt) -> None:
        """Put a prompt in the queue."""
        self._queue.append(prompt)
        if len(self._queue) == 1:
            self._clock.process(self._work())

    def _work(self) -> Generator[Event, None, None]:
        while self._queue:
            yield from self._compute(self._queue[0])
            self._queue.popleft()

    def _compute(self, prompt: Prompt) -> Generator[Event, None, None]:
        clock, layers = self._clock, self._setting.layers
        job, copying = prompt.job, prompt.copying
        tokens = job.request.input_tokens
        began_s = clock.now
        if copying is not None and not self._setting.layer_wise:
            yield copying
        cached = job.cached_tokens = prompt.cached_tokens()
        spent_s, shipped = 0.0, 0
        for end in self._chunk_ends(cached, tokens):
            upto_s = self._cost.prefill_s(end, cached)
            if self._setting.layer_wise:
                shipped = self._ship(prompt, shipped, end)
            yield clock.timeout(max(upto_s - spent_s, 0.0))
            spent_s = max(upto_s, spent_s)
            if not self._setting.layer_wise:
                shipped = self._ship(prompt, shipped, end)
        if copying is not None and not copying.processed:
            yield copying  # each layer waited for its prefix: the last one came now
            yield clock.timeout(spent_s / layers)
        job.computed_s = clock.now
        job.prefill_s = clock.now - began_s
        self._computed(prompt)

    def _chunk_ends(self, cached: int, tokens: int) -> list[int]:
        step = self._setting.chunk_tokens
        return [*range(cached + step, tokens, step), tokens]

    def _ship(self, prompt: Prompt, shipped: int, end: int) -> int:
        if prompt.job.request.output_tokens > 1:
            size = (end - shipped) * self._cost.kv_bytes_per_token
            prompt.shipments.append(self._network.send(prompt.source, prompt.target, size))
        return end
