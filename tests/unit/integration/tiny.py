"""A tiny random model, made in code, for the runtime's tests."""

from pathlib import Path
from typing import Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

VOCABULARY: Final = 96
CONTEXT: Final = 256
EOS: Final = (3, 5)


def tiny_config(kind: str = "llama", **changes: object) -> PreTrainedConfig:
    """Return the config of a model of 3 layers and 2 KV heads for 6 query heads."""
    fields: dict[str, object] = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": list(EOS),
        "pad_token_id": 0,
        "sliding_window": None,
    }
    if kind == "llama":
        del fields["sliding_window"]
    return AutoConfig.for_model(kind, **fields | changes)


def tiny_model(kind: str = "llama", seed: int = 0) -> torch.nn.Module:
    """Make the model with weights that depend on ``seed`` alone, large enough to tell apart."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype="float32")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.25)
    return model.eval()


def save_tiny(folder: Path, kind: str = "llama", seed: int = 0) -> Path:
    """Write the model, without a tokenizer, to ``folder``."""
    tiny_model(kind, seed).save_pretrained(folder)
    return folder
