"""Tiny models made in code, seeded: one of each kind of attention."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 512
# Of Gemma3: a prompt of several blocks goes well beyond it.
WINDOW_TOKENS = 64

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama() -> Any:
    config = LlamaConfig(**_COMMON, num_hidden_layers=4, num_key_value_heads=2, head_dim=32)
    return LlamaForCausalLM(config)


def _gemma() -> Any:
    layers = ["sliding_attention"] * 2 + ["full_attention"]
    config = Gemma3TextConfig(
        **_COMMON,
        pad_token_id=0,
        num_hidden_layers=6,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=layers * 2,
    )
    return Gemma3ForCausalLM(config)


def _deepseek() -> Any:
    config = DeepseekV2Config(
        **_COMMON,
        num_hidden_layers=2,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        n_shared_experts=1,
        first_k_dense_replace=2,
        rope_parameters={  # YaRN, as in every DeepSeek: vLLM's plain rotation on CPUs is wrong for it
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    )
    return DeepseekV2ForCausalLM(config)


MAKERS = {"llama": _llama, "gemma3": _gemma, "deepseek": _deepseek}


def make_model(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write a model whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    model = MAKERS[kind]()
    for weight in model.parameters():
        if weight.dim() > 1:  # wide enough that tokens depend on what is attended to
            weight.data.normal_(0, 0.08)
    model.to(torch.float32).save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """Write a tokenizer beside a model: a token for each byte, for the HTTP server."""
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{number}>" for number in range(VOCABULARY - len(words))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
