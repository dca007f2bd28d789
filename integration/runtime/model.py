"""Models: read from a local folder, checked, and named so that their KV can be shared.

Owns which models are supported and why others are not, and the fingerprint that keeps the KV of
different weights apart. Never reaches a network and never runs code that came with a model. Who
calls it: the workers (model and tokenizer), and the Conductor (``read_spec`` and the tokenizer).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvpool._native import ffi, lib
from kvpool.block import BlockLayout, Namespace
from kvpool.config import COMPUTE_DTYPES
from kvpool.errors import UsageError

# Decoders with plain rotary attention over all tokens. Each is compared with its own `generate` in
# tests/unit/integration/test_runner.py; add one there to support it.
SUPPORTED_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")

# These change the rotation of earlier tokens as a sequence grows: their KV is not a function of the
# prefix alone, so it cannot be shared.
_UNSTABLE_ROPE: Final = ("dynamic", "longrope")


# The fingerprint has a CRC of each piece of a file, so that a change in several has many bits to show.
_PIECE_BYTES: Final = 1 << 20

# A safetensors header is JSON; the format itself allows 100 MB.
_HEADER_BYTES_MAX: Final = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the runtime and the pool need to know of a model.

    Attributes:
        name: What people call it: what its config says, or the folder's name. Hosts may differ.
        kind: Transformers' type of model, such as ``"llama"``.
        num_layers, kv_heads, head_dim: Of its KV.
        dtype: Of the forward pass and of the KV.
        context_tokens: The longest sequence it takes.
        vocabulary: How many tokens it knows.
        eos_tokens: Tokens that end its output.
        weights: Fingerprint of config and weights, 64 hex digits.
    """

    name: str
    kind: str
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    context_tokens: int
    vocabulary: int
    eos_tokens: tuple[int, ...]
    weights: str

    def layout(self, block_tokens: int) -> BlockLayout:
        """Return the shape of this model's blocks. Raises UsageError if not a multiple of 16."""
        return BlockLayout(
            num_layers=self.num_layers,
            kv_heads=self.kv_heads,
            block_tokens=block_tokens,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            dtype=self.dtype,
        )

    def namespace(self, block_tokens: int, salt: str = "") -> Namespace:
        """Return what a process must agree on to share this model's blocks."""
        # Not `name`: a folder may be called otherwise on another host. The fingerprint tells.
        return Namespace(
            model=self.kind,
            weights=self.weights,
            compute_dtype=self.dtype,
            kv_dtype=self.dtype,
            block_tokens=block_tokens,
            salt=salt,
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, its tokenizer and what it is."""

    model: Any
    tokenizer: Any
    spec: ModelSpec


def load_model(folder: Path, *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Load weights and tokenizer from a local folder.

    Args:
        folder: A folder as ``save_pretrained`` writes it, with safetensors.
        dtype: One of ``COMPUTE_DTYPES``. On a CPU float32 is several times faster than bfloat16.
        device: A torch device.

    Raises:
        UsageError: The folder or the model is not supported; the message says why.

    Blocks for reading the weights.
    """
    from transformers import AutoModelForCausalLM

    spec = read_spec(folder, dtype=dtype)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as unreadable:
        raise UsageError(
            f"Transformers cannot load the model: {unreadable}", path=str(folder)
        ) from unreadable
    model.eval().requires_grad_(False)
    return LoadedModel(model.to(device), load_tokenizer(folder), spec)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder. Raises UsageError if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as unreadable:
        raise UsageError(
            f"no tokenizer in {folder.name}: {unreadable}", path=str(folder)
        ) from unreadable


def read_spec(folder: Path, *, dtype: str = "float32") -> ModelSpec:
    """Read what a model folder holds, without its weights.

    Raises:
        UsageError: The folder or the model is not supported; the message says why.
    """
    from transformers import AutoConfig, GenerationConfig

    if dtype not in COMPUTE_DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {COMPUTE_DTYPES}")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json: give a model's folder", path=str(folder))
    try:
        config: Any = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as unreadable:
        raise UsageError(
            f"Transformers cannot read the config: {unreadable}", path=str(folder)
        ) from unreadable
    if (reason := unsupported(config)) is not None:
        raise UsageError(f"{folder.name} is not supported: {reason}", path=str(folder))
    eos: Any = config.eos_token_id
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    heads = config.num_attention_heads
    return ModelSpec(
        name=_name(folder),
        kind=config.model_type,
        num_layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
        context_tokens=config.max_position_embeddings,
        vocabulary=config.vocab_size,
        eos_tokens=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        weights=fingerprint(folder),
    )


def _name(folder: Path) -> str:
    written = json.loads((folder / "config.json").read_bytes()).get("_model_name_or_path")
    return Path(written).name if written else folder.resolve().name


def unsupported(config: Any) -> str | None:
    """Say why a model of this config cannot be served, for a person; None if it can.

    Args:
        config: A ``PreTrainedConfig`` of Transformers.
    """
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    rope = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; only decoders have a KV cache that is a prefix"
    if getattr(config, "kv_lora_rank", None):
        return "it has latent attention (MLA), whose K and V differ in width"
    if kinds:
        return f"it has layers of {', '.join(kinds)}; every layer must be full attention"
    if windowed:
        return f"it has a sliding window of {config.sliding_window} tokens"
    if config.model_type not in SUPPORTED_TYPES:
        return f"its type {config.model_type!r} is not one of {', '.join(SUPPORTED_TYPES)}"
    if isinstance(rope, Mapping) and rope.get("rope_type") in _UNSTABLE_ROPE:
        return f"its {rope['rope_type']} rotary embedding changes earlier KV as a sequence grows"
    return None


def fingerprint(folder: Path) -> str:
    """Hash a model's config and every byte of its safetensors files; 64 hex digits.

    It reads the files whole, at the speed of CRC-32C (several GB/s where the page cache has them).

    Raises:
        UsageError: There are no safetensors files, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no *.safetensors: other formats are not read")
    digest = hashlib.sha256(b"kvpool-weights-2")
    digest.update(hashlib.sha256((folder / "config.json").read_bytes()).digest())
    for file in files:
        _update(digest, file)
    return digest.hexdigest()


def _update(digest: Any, file: Path) -> None:  # hashlib's own type has no public name
    """Add a file to the digest: its header, then the CRC-32C of each piece of its tensors."""
    piece = bytearray(_PIECE_BYTES)
    data = ffi.from_buffer(piece)
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        raw = stream.read(size) if size <= _HEADER_BYTES_MAX else b""
        try:
            header: dict[str, Any] = json.loads(raw)
            end = max(
                entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as damaged:
            raise UsageError(f"{file.name} has no valid header", path=str(file)) from damaged
        digest.update(hashlib.sha256(raw).digest())
        read = 0
        while count := stream.readinto(piece):
            read += count
            digest.update(lib.kvp_crc32c(0, data, count).to_bytes(4, "little"))
        if read != end:
            raise UsageError(
                f"{file.name} has {read} bytes of tensors where its header says {end}: "
                "copy the model again",
                path=str(file),
            )
