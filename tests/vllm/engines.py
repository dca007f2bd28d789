"""A real vLLM engine in this process, with the connector or without it."""

import gc
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory

from tests.server_process import ServerProcess, until

# A CPU engine's smallest; latent attention has 16.
BLOCK_TOKENS = 32
TOKENS = 8


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


# Runs in a process of its own: an engine that nobody else has anything in common with.
_OTHER = """
import json, sys
from pathlib import Path
import tests.vllm.conftest
from tests.vllm.engines import Engine
model, extra, settings, asked = json.loads(sys.stdin.read())
with Engine(Path(model), extra, **settings) as engine:
    answers = engine.one_by_one(asked)
print("ANSWERS", json.dumps([[a.tokens, a.cached, a.reason] for a in answers]))
"""


def answers_of_another_process(
    model: Path, extra: dict[str, Any], asked: list[list[int]], **settings: Any
) -> list[Answer]:
    """Run prompts one after another in an engine of another process, which ends then."""
    done = subprocess.run(
        [sys.executable, "-c", _OTHER],
        input=json.dumps([str(model), extra, settings, asked]),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    return [
        Answer(tuple(sampled), cached, reason)
        for sampled, cached, reason in json.loads(line.removeprefix("ANSWERS"))
    ]


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
        answers = [
            Answer(
                tuple(output.outputs[0].token_ids),
                output.num_cached_tokens,
                str(output.outputs[0].finish_reason),
            )
            for output in self.llm.generate(inputs, sampling, use_tqdm=False)
        ]
        assert all(a.cached < len(p) for a, p in zip(answers, prompts, strict=True))
        return answers

    def one_by_one(self, asked: list[list[int]]) -> list[Answer]:
        """Run prompts one after another."""
        return [self.generate(prompt)[0] for prompt in asked]

    def begin(self, prompt: list[int], name: str) -> None:
        """Hand a prompt in, and wait until the pool has said what it has of it; nothing is run."""
        sampling = SamplingParams(
            max_tokens=TOKENS, temperature=0, detokenize=False, ignore_eos=True
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        (tracked,) = self.connector._scheduler._tracked
        until(lambda: self.connector._lookups.answer(tracked), "the answer of the lookup")

    def run_out(self) -> Answer:
        """Run what is under way to its end."""
        core = self.llm.llm_engine
        outputs = [done for _ in iter(core.has_unfinished_requests, False) for done in core.step()]
        last = outputs[-1]
        ends = last.outputs[0]
        return Answer(tuple(ends.token_ids), last.num_cached_tokens, str(ends.finish_reason))

    def lose_in_mid_load(self, server: ServerProcess, prompt: list[int]) -> Answer:
        """Stop the server once it has said what it has of a prompt; kill it while that loads."""
        self.begin(prompt, "mid-load")
        server.halt()
        core = self.llm.llm_engine
        core.step()  # orders the load
        waiting = [request.status.name for request in self.scheduler.requests.values()]
        assert waiting == ["WAITING_FOR_REMOTE_KVS"]
        assert not core.step()
        server.kill()
        return self.run_out()

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
