"""A real vLLM engine in this process, with the connector or without it."""

import gc
import json
import random
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory

from tests.server_process import ServerProcess
from tests.waiting import until

# A CPU engine's smallest; latent attention has 16.
BLOCK_TOKENS = 32
TOKENS = 8
# Ends a test whose engine hangs: one starts in seconds, alone on a machine.
START_S = 600


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
    engine.settle()
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
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    return [
        Answer(tuple(sampled), cached, reason)
        for sampled, cached, reason in json.loads(line.removeprefix("ANSWERS"))
    ]


def free_port() -> int:
    """Return a port that nobody has, and that no outgoing connection is given meanwhile."""
    for port in random.SystemRandom().sample(range(12_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


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
                # Longer than any pause of a busy machine: no clock decides a test.
                kv_connector_extra_config={"lookup_timeout_s": 60, "load_timeout_s": 60, **extra},
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
            "kv_cache_memory_bytes": 64 << 20,
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

    def add(self, prompt: list[int], name: str, tokens: int = TOKENS) -> str:
        """Hand a prompt in, and return its name in the scheduler; nothing is run."""
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return str([*self.scheduler.requests][-1])

    def begin(self, prompt: list[int], name: str) -> str:
        """Hand a prompt in, and wait until the pool has said what it has of it: something."""
        inner = self.add(prompt, name)
        until(lambda: self.connector._lookups.answer(inner), "the answer of the lookup")
        return inner

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

    def settle(self) -> None:
        """Wait until nothing is on its way into the pool: stores go on in the background."""

        def at_rest(_: Any) -> bool:  # of one worker, which may be another process
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            side = get_kv_transfer_group()._worker
            return side is None or side.saving_slots.free == side.saving_slots.count

        if self.transfer is not None:
            until(lambda: all(self.llm.collective_rpc(at_rest)), "the end of stores")

    def forget(self, settled: bool = True) -> None:
        """Empty the engine's own cache; the pool keeps what it has, after the end of all stores."""
        if settled:
            self.settle()
        assert self.llm.reset_prefix_cache()

    def counter(self, name: str) -> int:
        """Return one of vLLM's counters; 0 before it counted anything."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

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
