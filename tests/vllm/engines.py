"""A real vLLM engine in this process, with the connector or without it."""

import gc
import itertools
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory

# A CPU engine's smallest; latent attention has 16.
BLOCK_TOKENS = 32
TOKENS = 8

_engines = itertools.count()


@dataclass(frozen=True)
class Answer:
    """What one request came to.

    Attributes:
        tokens: Sampled greedily.
        cached: Prompt tokens that were not computed.
        reason: Why it ended.
    """

    tokens: tuple[int, ...]
    cached: int
    reason: str


class Engine:
    """One engine, from construction to ``close``.

    Args:
        model: Folder.
        extra: Of the connector; None means no connector.
        **settings: Of vLLM, over those of these tests.
    """

    def __init__(self, model: Path, extra: dict[str, Any] | None, **settings: Any) -> None:
        self.transfer = None
        if extra is not None:
            self.transfer = KVTransferConfig(
                kv_connector="KvpoolConnector",
                kv_connector_module_path="kvpool.integration.vllm.connector",
                kv_role="kv_both",
                kv_connector_extra_config={"lookup_timeout_s": 20, "load_timeout_s": 20, **extra},
                kv_load_failure_policy="recompute",
            )
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "block_size": BLOCK_TOKENS,
            "enable_prefix_caching": True,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 256,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        self.llm = LLM(model=str(model), kv_transfer_config=self.transfer, **(defaults | settings))

    @property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The connector of the scheduler."""
        return self.scheduler.connector

    @property
    def worker_side(self) -> Any:
        """The connector's side in the worker, which is in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def generate(self, *prompts: list[int], tokens: int = TOKENS, salt: str = "") -> list[Answer]:
        """Run prompts to their end, together."""
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        inputs: list[Any] = [
            {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
            for prompt in prompts
        ]
        return [
            Answer(
                tuple(output.outputs[0].token_ids),
                output.num_cached_tokens,
                str(output.outputs[0].finish_reason),
            )
            for output in self.llm.generate(inputs, sampling, use_tqdm=False)
        ]

    def forget(self) -> None:
        """Empty the engine's own cache; the pool keeps what it has."""
        assert self.llm.reset_prefix_cache()

    def free_blocks(self) -> int:
        """How many blocks of the engine's cache nobody uses."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
