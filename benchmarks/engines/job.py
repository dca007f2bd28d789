"""One vLLM engine that answers how long it takes to run prompts that it has run before.

    python job.py (none | kvpool | lmcache) (ttft | reload) WHERE

Says "kvpool:ready", then for each line it reads: empties the engine's own prefix cache, runs the
prompts one after another for one token each, and says "kvpool:SECONDS CACHED BYTES": tokens that
were not computed, and the KV of them. WHERE is a run directory of kvpool-server, or the port of
LMCache's server. The model is made here, of random numbers. Ends with its standard input.
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

PROMPTS, VOCABULARY = 4, 512
BLOCK_TOKENS = 32
# What is measured -> tokens of a prompt, and the model: one that takes time to compute, or one whose
# KV is large beside what there is to compute, so that moving it is what takes the time.
JOBS: dict[str, tuple[int, dict[str, int]]] = {
    "ttft": (
        513,
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
            "head_dim": 64,
        },
    ),
    "reload": (
        1025,
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}


def make_model(folder: Path, sizes: dict[str, int]) -> str:
    """Write a model in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, **sizes)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return str(folder)


def connector(kind: str, where: str) -> dict[str, Any]:
    """Return what vLLM is told of its KV connector."""
    if kind == "kvpool":
        chosen: dict[str, Any] = {
            "kv_connector": "KvpoolConnector",
            "kv_connector_module_path": "kvpool.integration.vllm.connector",
            "kv_connector_extra_config": {"server": where, "lookup_timeout_s": 5},
        }
    else:
        chosen = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": int(where),
            },
        }
    return {**chosen, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def let_numba_be() -> None:
    """Keep vLLM from looking into numba's objects, which LMCache has loaded by then, and dying of it.

    vLLM 0.32 for CPUs asks everything in every module for its attributes when its worker starts.
    """
    from vllm.triton_utils import dispatcher

    def careful(value: object) -> dict[str, object]:
        found = vars(value)
        return found if isinstance(found, dict) else {}

    dispatcher.vars = careful  # type: ignore[attr-defined]


def main() -> None:
    """Answer until there is nobody to ask."""
    kind, job, where = sys.argv[1:4]
    tokens, sizes = JOBS[job]
    sizes_bytes = sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * 8
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if kind == "lmcache":
        let_numba_be()
    transfer = None if kind == "none" else KVTransferConfig(**connector(kind, where))
    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            model=make_model(Path(folder), sizes),
            kv_transfer_config=transfer,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            block_size=BLOCK_TOKENS,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            skip_tokenizer_init=True,
            seed=0,
        )
    source = random.Random(0)
    prompts: list[Any] = [
        {"prompt_token_ids": [source.randrange(3, VOCABULARY) for _ in range(tokens)]}
        for _ in range(PROMPTS)
    ]
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    print("kvpool:ready", file=out, flush=True)
    for _ in sys.stdin:
        engine.reset_prefix_cache()
        begin, cached = time.perf_counter(), 0
        for prompt in prompts:
            (answer,) = engine.generate([prompt], sampling, use_tqdm=False)
            cached += answer.num_cached_tokens or 0
        seconds = time.perf_counter() - begin
        print(f"kvpool:{seconds} {cached} {cached * sizes_bytes}", file=out, flush=True)


if __name__ == "__main__":
    main()
