"""``kvpool plan``: what the KV of a model takes up, and how much of it fits.

Owns the arithmetic; reads a model's ``config.json`` and nothing else. Who calls it: ``kvpool``.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvpool.block import DTYPE_BYTES, BlockLayout
from kvpool.config import parse_size
from kvpool.errors import UsageError
from kvpool.tiers.ssd_format import slot_bytes

DESCRIPTION: Final = (
    "Say how many bytes a token's KV takes, how many blocks a GiB holds, what fits."
)
_GIB: Final = 1 << 30
_SLOT_ALIGN_BYTES: Final = 4096


_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class _Config(msgspec.Struct):
    """What of a ``config.json`` says the shape of the KV."""

    num_hidden_layers: _Count
    num_attention_heads: _Count
    hidden_size: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    kv_lora_rank: _Count | None = None
    qk_rope_head_dim: _Count | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    max_position_embeddings: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a model's KV takes up.

    Attributes:
        layout: Of its blocks.
        latent: True for latent attention: one head for all, K and V of different widths.
        context_tokens: The longest prompt, or None.
    """

    layout: BlockLayout
    latent: bool
    context_tokens: int | None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self.layout.block_bytes // self.layout.block_tokens

    def blocks(self, size_bytes: int) -> int:
        """Return how many blocks a DRAM arena of so many bytes holds: slots are whole pages."""
        return size_bytes // (-(-self.layout.block_bytes // _SLOT_ALIGN_BYTES) * _SLOT_ALIGN_BYTES)

    def ssd_blocks(self, size_bytes: int) -> int:
        """Return how many blocks an SSD tier of so many bytes holds: each has a header there."""
        return size_bytes // slot_bytes(self.layout)


def plan_of(folder: Path, block_tokens: int, dtype: str = "") -> Plan:
    """Read a model's config and work its plan out.

    Args:
        folder: With a ``config.json``, or that file.
        block_tokens: A multiple of 16.
        dtype: Of the stored numbers; "" means the model's own.

    Raises:
        UsageError: There is no such file, or it does not say the shape.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        text = path.read_bytes()
        nested = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("text_config")
        config = msgspec.json.decode(text if nested is None else bytes(nested), type=_Config)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}: give the folder of a model") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} does not say the shape of the KV: {error}") from error
    kept = dtype or config.dtype or config.torch_dtype or "bfloat16"
    if kept not in DTYPE_BYTES:
        raise UsageError(f"dtype {kept!r}: give --dtype, one of {', '.join(sorted(DTYPE_BYTES))}")
    heads = config.num_key_value_heads or config.num_attention_heads
    wide = config.head_dim or config.hidden_size // config.num_attention_heads
    latent = config.kv_lora_rank
    layout = BlockLayout(
        num_layers=config.num_hidden_layers,
        kv_heads=1 if latent else heads,
        block_tokens=block_tokens,
        k_dim=latent or wide,
        v_dim=(config.qk_rope_head_dim or 0) if latent else wide,
        dtype=kept,
    )
    return Plan(layout=layout, latent=bool(latent), context_tokens=config.max_position_embeddings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvpool plan``."""
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens of a block (16)")
    parser.add_argument("--dtype", default="", help="of the stored KV (default: the model's)")
    parser.add_argument("--dram", default="", metavar="SIZE", help="what fits in so much DRAM?")
    parser.add_argument("--ssd", default="", metavar="SIZE", help="what fits in so much SSD?")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Work out and print; return the exit status."""
    plan = plan_of(arguments.model, arguments.block_tokens, arguments.dtype)
    layout = plan.layout
    found: dict[str, int | str] = {
        "layers": layout.num_layers,
        "kv_heads": layout.kv_heads,
        "dtype": layout.dtype,
        "token_bytes": plan.token_bytes,
        "block_tokens": layout.block_tokens,
        "block_bytes": layout.block_bytes,
        "blocks_a_gib": plan.blocks(_GIB),
        "tokens_a_gib": plan.blocks(_GIB) * layout.block_tokens,
    }
    if plan.context_tokens:
        found["longest_prompt_bytes"] = plan.context_tokens * plan.token_bytes
    for tier, fitting in (("dram", plan.blocks), ("ssd", plan.ssd_blocks)):
        if size := getattr(arguments, tier):
            blocks = fitting(parse_size(size, key=f"--{tier}"))
            found[f"{tier}_blocks"] = blocks
            found[f"{tier}_tokens"] = blocks * layout.block_tokens
    if arguments.json:
        print(msgspec.json.encode(found).decode())
        return 0
    for name, value in found.items():
        print(f"{name:<22} {value:>16,}" if isinstance(value, int) else f"{name:<22} {value:>16}")
    return 0
