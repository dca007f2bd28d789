"""A tiny random model with a tokenizer of bytes, in a folder: for whole processes."""

from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.unit.integration.tiny import tiny_config

_SPECIAL: Final = ("<unk>", "<s>", "</s>")
CONTEXT: Final = 2048


def tiny_model(folder: Path, kind: str = "llama") -> Path:
    """Write model and tokenizer; random weights never end an output on purpose.

    ``kind`` is a model type of Transformers: llama, mistral, qwen2 or qwen3.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
        "{% endfor %}assistant:"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = tiny_config(
        kind, vocab_size=len(vocabulary), max_position_embeddings=CONTEXT, eos_token_id=2
    )
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.save_pretrained(folder)
    return folder
