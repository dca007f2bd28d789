"""One vLLM engine that answers how long it takes to run prompts that it has run before.

    python job.py (none | kvpool) RUN_DIR

Says "kvpool:ready", then for each line it reads: empties the engine's own prefix cache, runs the
prompts one after another for one token each, and says "kvpool:SECONDS". The model is made here, of random numbers. Ends with its standard input.
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

PROMPTS, TOKENS, VOCABULARY = 4, 513, 512
BLOCK_TOKENS = 32


def make_model(folder: Path) -> str:
    """Write a model of 12 layers: 96 KiB of KV a block and layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return str(folder)


def connector(run_dir: str) -> dict[str, Any]:
    """Return what vLLM is told of kvpool's connector."""
    return {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "kvpool.integration.vllm.connector",
        "kv_connector_extra_config": {"run_dir": run_dir, "lookup_timeout_s": 5},
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def main() -> None:
    """Answer until there is nobody to ask."""
    kind, run_dir = sys.argv[1], sys.argv[2]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(**connector(run_dir)) if kind == "kvpool" else None
    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            model=make_model(Path(folder)),
            kv_transfer_config=transfer,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            block_size=BLOCK_TOKENS,
            max_num_seqs=4,
            max_num_batched_tokens=1024,
            skip_tokenizer_init=True,
            seed=0,
        )
    source = random.Random(0)
    prompts: list[Any] = [
        {"prompt_token_ids": [source.randrange(3, VOCABULARY) for _ in range(TOKENS)]}
        for _ in range(PROMPTS)
    ]
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    print("kvpool:ready", file=out, flush=True)
    for _ in sys.stdin:
        engine.reset_prefix_cache()
        begin = time.perf_counter()
        for prompt in prompts:
            engine.generate([prompt], sampling, use_tqdm=False)
        print(f"kvpool:{time.perf_counter() - begin}", file=out, flush=True)


if __name__ == "__main__":
    main()
