"""Transformers alone, in a process of its own: what kvpool-serve is compared with.

Owns one model on some threads, asked over stdin and answering over stdout, a JSON object a line:
``{"forward": [tokens]}`` for one forward pass, ``{"generate": [[tokens], ...], "max_tokens": n}`` for
``generate_batch``. Who starts it: ``kvpool.integration.bench``.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvpool.integration.runtime.model import load_model


def main() -> None:
    """Answer until stdin ends."""
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(options.model).model
    answer({"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        began = time.perf_counter()
        if "forward" in question:
            with torch.inference_mode():
                model(torch.tensor([question["forward"]]), use_cache=True, logits_to_keep=1)
            tokens = 1
        else:
            tokens = generated(model, question["generate"], question["max_tokens"])
        answer({"seconds": time.perf_counter() - began, "tokens": tokens})


def generated(model: Any, prompts: list[list[int]], max_tokens: int) -> int:
    """Run ``generate_batch`` without sampling; return how many tokens came of it."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    greedy = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=model.config.eos_token_id
    )
    # Room for what these requests need; the default is a share of all memory.
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512)
    outputs = model.generate_batch(
        prompts,
        generation_config=greedy,
        continuous_batching_config=batching,
        persistent_manager=True,
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


def answer(message: dict[str, object]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
