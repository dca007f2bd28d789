"""What the scheduler's side tells the workers for one step. Plain data; pickled by vLLM.

Who calls it: both sides of the connector.
"""

from dataclasses import dataclass, field

from kvpool.block import Namespace
from kvpool.integration.vllm.shape import BlockRun


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Blocks to be loaded for a request that waits for them.

    Attributes:
        request: Its name: the worker says once, with it, how the load ended.
        runs: At most one a group.
    """

    request: str
    runs: tuple[BlockRun, ...]


@dataclass(slots=True)
class StepPlan:
    """The orders of one step.

    Attributes:
        namespace: Of every block hash in it.
        loads: To be started.
        stores: Blocks that are whole when this step's forward pass is over.
        idle: Nothing is computed in this step: requests wait, for lookups and loads above all.
    """

    namespace: Namespace
    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[BlockRun] = field(default_factory=list)
    idle: bool = False
