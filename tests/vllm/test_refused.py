"""Engines that cannot use the pool are told why, before anything is loaded; nothing heavy is imported."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvpool.errors import ConfigError
from kvpool.integration.vllm.engine import cpu_kind, require_one_process, require_supported
from tests.vllm.models import make_model

IMPORTS = """
import sys
import vllm, vllm.v1.core.sched.scheduler, vllm.distributed.kv_transfer.kv_connector.factory
import transformers
before = set(sys.modules)
import kvpool.integration.vllm.connector
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert not new & {"numba", "llvmlite", "cupy", "pycuda"}, new
import torch
assert not torch.cuda.is_initialized()
"""


def transfer(role: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="KvpoolConnector",
        kv_connector_module_path="kvpool.integration.vllm.connector",
        kv_role=role,
    )


def configured(model: Path, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "block_size": 32,
        "max_model_len": 512,
        "kv_transfer_config": transfer("kv_both"),
    }
    return EngineArgs(model=str(model), **(defaults | settings)).create_engine_config()


def test_a_plain_engine_is_supported(llama: Path) -> None:
    require_supported(configured(llama))
    require_one_process(configured(llama))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "collide"),
        ({"load_format": "dummy"}, "load format dummy"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
    ],
)
def test_an_engine_is_refused(llama: Path, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        require_supported(configured(llama, **settings))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_half_a_role_is_refused(llama: Path, role: str) -> None:
    with pytest.raises(ConfigError, match="kv_both"):
        require_supported(configured(llama, kv_transfer_config=transfer(role)))


def test_layers_that_share_kv_are_refused(llama: Path) -> None:
    config = configured(llama)
    config.model_config.hf_text_config.num_kv_shared_layers = 2
    with pytest.raises(ConfigError, match="KV of others"):
        require_supported(config)


def test_cpus_that_order_bytes_otherwise_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """One capability, AVX512, covers CPUs with AMX and without: vLLM packs bfloat16 otherwise."""
    kinds = {cpu_kind()}
    monkeypatch.setattr(
        "torch.cpu._is_amx_tile_supported", lambda: "amx=True" not in next(iter(kinds))
    )
    assert cpu_kind() not in kinds


def test_a_hub_name_is_refused(llama: Path) -> None:
    config = configured(llama)
    config.model_config.model = "somebody/something"
    with pytest.raises(ConfigError, match="local folder"):
        require_supported(config)


@pytest.mark.parametrize("release", ["0.31.4", "0.33.0", "1.32.0"])
def test_another_release_is_refused(
    release: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(llama)
    monkeypatch.setattr("vllm.__version__", release)
    with pytest.raises(ConfigError, match=r"use 0\.32"):
        require_supported(config)


def test_workers_of_their_own_need_a_server(llama: Path) -> None:
    config = configured(llama)
    config.parallel_config = replace(config.parallel_config, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="kvpool-server"):
        require_one_process(config)


def test_importing_the_connector_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_latent_attention_that_vllm_rotates_wrongly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's operator for CPUs takes rows of a latent for others; PyTorch's rotation does not."""
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    model = make_model("deepseek", tmp_path / "deepseek")
    config = configured(model, block_size=16)
    assert not config.cache_config.enable_prefix_caching  # vLLM has none for it without AMX
    require_supported(config)
    config.model_config.hf_text_config.rope_parameters = {"rope_type": "default"}
    with pytest.raises(ConfigError, match="rotary"):
        require_supported(config)
    config.compilation_config.custom_ops.append("-rotary_embedding")
    require_supported(config)


def test_a_model_without_prefix_caching_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="enable-prefix-caching"):
        require_supported(configured(llama, enable_prefix_caching=False))
