"""What vLLM's configuration says about the engine's KV cache, in kvpool's words.

Owns which engines are supported and why others are not: where it is not sure that equal names mean
equal bytes, it refuses. Who calls it: the connector.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in an environment of its own: make env-vllm.

import hashlib
import json
import platform
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvpool.block import BlockLayout, Namespace, Part
from kvpool.errors import ConfigError
from kvpool.integration.runtime.model import fingerprint
from kvpool.integration.vllm.shape import EngineShape, Group

# Checked by tests/vllm with this release; others may order bytes, or call, otherwise.
SUPPORTED_RELEASE: Final = "0.32"
# Hashes that nobody can find a second prompt for.
_STRONG_HASHES: Final = ("sha256", "sha256_cbor")
# Formats whose weights are those of the folder's safetensors.
_FOLDER_FORMATS: Final = ("auto", "hf", "safetensors")
# Rotary embeddings by PyTorch, not by vLLM's operator.
_OWN_ROTATION: Final = "-rotary_embedding"
# These rotate otherwise for another longest sequence.
_UNSTABLE_ROPE: Final = ("dynamic", "longrope")


def require_supported(vllm_config: Any) -> None:
    """Raise ConfigError, saying what to change, unless this engine can use the pool."""
    release = ".".join(str(vllm.__version__).split("+")[0].split(".")[:2])
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    rules = (
        (release == SUPPORTED_RELEASE, f"vLLM is {vllm.__version__}: use {SUPPORTED_RELEASE}"),
        (
            # For latent attention vLLM has it on CPUs with AMX only. What comes from the pool is one
            # more prefix of a request to it, which it computes on alike.
            cache.enable_prefix_caching or vllm_config.model_config.use_mla,
            "prefix caching is off: use --enable-prefix-caching",
        ),
        (
            _rotates_rightly(vllm_config),
            "on CPUs vLLM's plain rotary embedding turns the wrong rows of a latent, so that its "
            + "answers depend on how prompts are cut into steps: use --compilation-config "
            + """'{"custom_ops": ["-rotary_embedding"]}'""",
        ),
        (current_platform.is_cpu(), "no accelerator has been run yet: use vLLM for CPUs"),
        (
            cache.prefix_caching_hash_algo in _STRONG_HASHES,
            f"block hashes are {cache.prefix_caching_hash_algo}, which can be made to collide: use "
            + f"--prefix-caching-hash-algo {_STRONG_HASHES[0]}",
        ),
        (
            vllm_config.kv_transfer_config.kv_role == "kv_both",
            f'kv_role is {vllm_config.kv_transfer_config.kv_role}: use "kv_both"',
        ),
        (
            not getattr(vllm_config.model_config.hf_text_config, "num_kv_shared_layers", 0),
            "layers that use the KV of others",
        ),
        (parallel.pipeline_parallel_size == 1, "pipeline parallel size: use 1"),
        (
            parallel.decode_context_parallel_size == 1
            and parallel.prefill_context_parallel_size == 1,
            "context parallel size: use 1",
        ),
        (vllm_config.speculative_config is None, "speculative decoding: switch it off"),
        (
            vllm_config.load_config.load_format in _FOLDER_FORMATS,
            f"load format {vllm_config.load_config.load_format}: use {_FOLDER_FORMATS[0]}",
        ),
        (
            Path(vllm_config.model_config.model).is_dir(),
            f"model {vllm_config.model_config.model!r} is no local folder, whose weights can be read",
        ),
    )
    for holds, why in rules:
        if not holds:
            raise ConfigError(f"kvpool's connector does not support this engine: {why}")


def _rotates_rightly(vllm_config: Any) -> bool:
    """Say whether keys of a latent are rotated where they lie: their rows are 576 apart, not 64.

    vLLM's operator for CPUs takes the first stride that it finds (csrc/cpu/pos_encoding.cpp). Other
    kinds of rotation, such as YaRN, which every DeepSeek has, are computed by PyTorch.
    """
    model = vllm_config.model_config
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    operators = vllm_config.compilation_config.custom_ops
    return (
        not model.use_mla
        or rope.get("rope_type", "default") != "default"
        or _OWN_ROTATION in operators
    )


def require_one_process(vllm_config: Any) -> None:
    """Raise ConfigError unless scheduler and worker share a process, for a pool inside it."""
    parallel = vllm_config.parallel_config
    if parallel.world_size != 1 or parallel.distributed_executor_backend not in (None, "uni"):
        raise ConfigError(
            "this engine's workers are processes of their own: start a kvpool-server and name its "
            'run directory as "server" instead of "dram", or, with one worker, set '
            "VLLM_ENABLE_V1_MULTIPROCESSING=0",
            key="dram",
        )


def read_shape(vllm_config: Any, kv_cache_config: Any) -> EngineShape:
    """Read groups and layout. Equal on the scheduler's side and on every worker.

    Raises:
        ConfigError: A group is of a kind whose blocks cannot be shared by prefix alone.
    """
    tokens = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    model = vllm_config.model_config
    # Latent attention has one head, which every rank has.
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    groups: list[Group] = []
    sizes: set[int] = set()
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if (
            type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
            or spec.block_size != tokens
            or not group.enable_kv_transfer
            or group.is_eagle_group
        ):
            raise ConfigError(
                f"KV cache group {number} is {type(spec).__name__} with blocks of "
                f"{spec.block_size} tokens: full, latent and sliding-window attention "
                f"are supported, with blocks of {tokens} tokens"
            )
        sizes.add(spec.page_size_bytes)
        parts = tuple(
            _part(number, len(group.layer_names), spec.num_kv_heads, heads, tp_size, rank)
            for rank in range(tp_size)
        )
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        if window is not None:
            window += spec.extra_retained_tokens
        groups.append(
            Group(
                number=number,
                layers=tuple(group.layer_names),
                window_tokens=window,
                parts=parts,
            )
        )
    size = sizes.pop()
    if sizes or size % tokens:
        raise ConfigError(f"blocks of its layers have different sizes: {sorted({size, *sizes})}")
    layout = BlockLayout(
        num_layers=max(len(group.layers) for group in groups),
        kv_heads=1,
        block_tokens=tokens,
        k_dim=size // tokens,
        v_dim=0,
        dtype="uint8",
    )
    step = vllm_config.scheduler_config
    return EngineShape(
        layout=layout,
        groups=tuple(groups),
        block_tokens=tokens,
        step_blocks=len(groups) * (step.max_num_batched_tokens // tokens + step.max_num_seqs),
    )


def _part(group: int, layers: int, own: int, heads: int, tp_size: int, rank: int) -> Part:
    """Say which heads of a group a rank holds; ranks with the same heads hold the same bytes."""
    first = rank * own if heads >= tp_size else rank * heads // tp_size
    return Part(
        group=group, layer_begin=0, layer_end=layers, head_begin=first, head_end=first + own
    )


def cpu_kind() -> tuple[str, ...]:
    """Return what vLLM chooses the order of bytes in a block by: the same words, the same order.

    Two CPUs of one capability may differ: with AMX, bfloat16 lies otherwise than with AVX-512.
    """
    return (
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        f"avx512={torch.cpu._is_avx512_supported()}",
        f"amx={torch.cpu._is_amx_tile_supported()}",
    )


def read_namespace(
    vllm_config: Any, kv_cache_config: Any, shape: EngineShape, salt: str
) -> Namespace:
    """Name everything that must be equal before two engines may share a block.

    Raises:
        UsageError: The model's folder holds no safetensors.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_json_string(use_diff=False)
    if any(kind in config for kind in _UNSTABLE_ROPE):
        config += f"/{model.max_model_len}"
    folder = Path(model.model)
    weights = hashlib.sha256(fingerprint(folder).encode() + config.encode())
    # The model's own code, and what makes tensors of images: neither is in its config.
    for file in sorted({*folder.glob("*.py"), *folder.glob("*processor_config.json")}):
        weights.update(hashlib.sha256(file.read_bytes()).digest())
    groups = [
        (type(group.kv_cache_spec).__name__, repr(group.kv_cache_spec), group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    ]
    layout = (
        f"vllm-{vllm.__version__}",
        torch.__version__,
        *cpu_kind(),
        str(kv_cache_config.kv_cache_layout),
        cache.prefix_caching_hash_algo,
        # What vLLM will root its block hashes in: it does so after it made the connectors.
        kv_cache_utils.resolve_none_hash_seed(get_hash_fn_by_name(cache.prefix_caching_hash_algo)),
        hashlib.sha256(json.dumps(groups).encode()).hexdigest(),
    )
    return Namespace(
        model=str(model.hf_config.model_type),
        weights=weights.hexdigest(),
        compute_dtype=str(model.dtype),
        kv_dtype=str(cache.cache_dtype),
        # What is not quantised, and how each layer is, changes the weights that are computed with.
        quantisation=f"{model.quantization or ''}/{model.quantization_config or ''}".strip("/"),
        block_tokens=shape.block_tokens,
        layout="/".join(layout),
        salt=salt,
    )
