"""What a simulated cluster consists of: frozen data, checked where it is made.

Owns the settings' names, units and limits. Who calls it: the cluster, the figures, the command.
"""

import math
from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.integration.conductor.cost import CostModel
from kvpool.integration.conductor.snapshot import Objectives
from kvpool.integration.simulator.trace import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetting:
    """Nodes and links of a simulated cluster. Each worker has a node of its own.

    Attributes:
        prefill_count, decode_count: Workers of each role.
        cache_tokens: Room of a prefill node's store, in tokens.
        pooled: One store for all prefill nodes, as large as theirs together, read over the network;
            instead of one a node.
        port_bytes_per_s: What a node sends, and what it receives, per second at most.
        layers: Layers of the model: with ``layer_wise``, what is left to wait for is one of them.
        layer_wise: Transfers overlap with the computation, layer by layer; else they follow it.
        chunk_tokens: Tokens of one forward pass of prefill.
        prompt_tokens_max: Longest prompt.
        queued_max: Requests at one prefill worker.
        decode_tokens_max: KV room of a decode worker, in tokens.
        running_max: Largest decode batch.
        held_tbt_s: A decode worker holds a request back while its step would take longer than this
            with it. Infinite: it takes all that have room.
    """

    prefill_count: int = 8
    decode_count: int = 8
    cache_tokens: int = 3_000_000
    pooled: bool = False
    port_bytes_per_s: float = 87e9
    layers: int = 80
    layer_wise: bool = True
    chunk_tokens: int = 8192
    prompt_tokens_max: int = 1 << 20
    queued_max: int = 1 << 20
    decode_tokens_max: int = 1_400_000
    running_max: int = 256
    held_tbt_s: float = math.inf

    def __post_init__(self) -> None:
        for key in self.__dataclass_fields__:
            value = getattr(self, key)
            if isinstance(value, bool) or key == "held_tbt_s":
                continue
            least = BLOCK_TOKENS if key in {"cache_tokens", "chunk_tokens"} else 1
            if not least <= value < math.inf:
                raise ConfigError(f"{key} is {value}: it must be at least {least}", key=key)
        if not self.held_tbt_s > 0:
            raise ConfigError(
                f"held_tbt_s is {self.held_tbt_s}: it must be above 0", key="held_tbt_s"
            )


def check_objectives(objectives: Objectives, cost: CostModel) -> None:
    """Refuse objectives that no request could ever meet.

    Raises:
        ConfigError: ``key`` is the one that is impossible; the message says what would be possible.
    """
    bounds = {
        "ttft_s": (objectives.ttft_s, cost.prefill_s(1, 0)),
        "tbt_s": (objectives.tbt_s, cost.decode_step_s(1, 1)),
    }
    for key, (value, least) in bounds.items():
        if not value > least:
            raise ConfigError(
                f"{key} is {value}: an idle cluster needs {least:.4g} s, so nothing could meet it",
                key=key,
            )
