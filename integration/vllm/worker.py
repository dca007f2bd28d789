"""The worker's side: carries out the orders of each step with this worker's part of the blocks.

Owns the staging in both directions, the loader and the saver. Who calls it: the connector, as
vLLM's model runner calls that, from one thread.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from kvpool.base import BlockPool
from kvpool.integration.vllm.cache import GroupCache
from kvpool.integration.vllm.lane import Lane
from kvpool.integration.vllm.loading import Loader
from kvpool.integration.vllm.options import ConnectorOptions
from kvpool.integration.vllm.plan import StepPlan
from kvpool.integration.vllm.publishing import StoredPart
from kvpool.integration.vllm.saving import Saver
from kvpool.integration.vllm.shape import EngineShape
from kvpool.integration.vllm.slots import Slots
from kvpool.memory import Crew

# That copy a load's blocks into the engine's cache together.
_COPY_THREADS: Final = 2
# How long a step that computes nothing waits for a load.
_IDLE_S: Final = 0.001


class WorkerSide:
    """See the module.

    Args:
        pool: This worker's way to the pool.
        shape: What the engine's blocks are.
        rank: This worker's tensor-parallel rank.
        options: Sizes and waits.
        tensors: vLLM's KV tensors by layer.
        tell: Whether ``take_stored`` is called.

    Raises ConfigError and LayoutMismatchError as ``GroupCache.of_tensors`` and ``Slots``.
    """

    def __init__(
        self,
        pool: BlockPool,
        shape: EngineShape,
        rank: int,
        options: ConnectorOptions,
        tensors: Mapping[str, torch.Tensor],
        tell: bool = False,
    ) -> None:
        crew = Crew(_COPY_THREADS)
        caches = {
            group.number: GroupCache.of_tensors(shape.layout, group, tensors, crew)
            for group in shape.groups
        }
        size_bytes = options.staging_bytes or 2 * shape.step_blocks * shape.layout.block_bytes
        self.loading_slots = Slots(shape.layout, size_bytes)
        self.saving_slots = Slots(shape.layout, size_bytes)

        def lane(slots: Slots, timeout_s: float) -> Lane:
            return Lane(
                pool=pool, shape=shape, rank=rank, caches=caches, slots=slots, timeout_s=timeout_s
            )

        self._loader = Loader(lane(self.loading_slots, options.load_timeout_s), options.near)
        self._idle = False
        self._saver = Saver(lane(self.saving_slots, options.store_timeout_s), tell)

    def begin_step(self, plan: StepPlan) -> None:
        """Take the orders of a step, before its forward pass."""
        self._saver.begin_step(plan.namespace, plan.stores)

    def start_loads(self, plan: StepPlan) -> None:
        """Start the loads of a step."""
        self._idle = plan.idle
        for order in plan.loads:
            self._loader.start(plan.namespace, order)

    def save_layer(self, name: str) -> None:
        """Start to copy a layer out that was just computed."""
        self._saver.save_layer(name)

    def finish_step(self) -> None:
        """End the step: afterwards nothing reads the engine's blocks."""
        self._saver.finish_step()

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads ended since the last call, and those that failed.

        In a step that computes nothing it waits for one, a moment: an engine that only turns round
        would keep the interpreter from the threads that it waits for.
        """
        return self._loader.take_ended(_IDLE_S if self._idle else 0.0)

    def take_stored(self) -> Sequence[StoredPart]:
        """Return the parts that the pool took since the last call, if ``tell``."""
        return self._saver.take_stored()

    def counts(self) -> dict[str, int]:
        """Return and clear the counts of this worker."""
        return {**self._loader.counts(), **self._saver.counts()}

    def close(self) -> None:
        """End the threads; loads under way end first, within their deadline."""
        self._loader.close()
        self._saver.close()
