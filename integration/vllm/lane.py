"""What loads and stores of a worker have in common. Who calls it: the worker's side."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.base import BlockPool
from kvpool.integration.vllm.cache import GroupCache
from kvpool.integration.vllm.shape import EngineShape
from kvpool.integration.vllm.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One direction between the engine's cache and the pool.

    Attributes:
        pool: Gives or takes the blocks.
        shape, rank: What this worker has of them.
        caches: The engine's tensors by group.
        slots: What blocks pass through.
        timeout_s: Of one load or store.
    """

    pool: BlockPool
    shape: EngineShape
    rank: int
    caches: Mapping[int, GroupCache]
    slots: Slots
    timeout_s: float
