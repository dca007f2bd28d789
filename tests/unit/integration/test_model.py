"""What a model folder is read as, what is refused, and what keeps the KV of two models apart."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, PreTrainedConfig

from kvpool.errors import UsageError
from kvpool.integration.runtime.model import (
    SUPPORTED_TYPES,
    fingerprint,
    load_model,
    load_tokenizer,
    read_spec,
    unsupported,
)
from tests.unit.integration.tiny import CONTEXT, EOS, VOCABULARY, save_tiny, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_spec_says_what_the_model_is(folder: Path) -> None:
    spec = read_spec(folder)
    assert (spec.name, spec.kind) == ("tiny", "llama")
    assert (spec.num_layers, spec.kv_heads, spec.head_dim) == (3, 2, 8)
    assert (spec.context_tokens, spec.vocabulary, spec.dtype) == (CONTEXT, VOCABULARY, "float32")
    assert spec.eos_tokens == EOS
    layout = spec.layout(32)
    assert (layout.block_tokens, layout.k_dim, layout.v_dim) == (32, 8, 8)
    assert layout.block_bytes == 3 * 2 * 2 * 32 * 8 * 4


def test_eos_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    rewrite(tmp_path / "generation_config.json", eos_token_id=7)
    assert read_spec(tmp_path).eos_tokens == (7,)
    (tmp_path / "generation_config.json").unlink()
    assert read_spec(tmp_path).eos_tokens == EOS
    rewrite(tmp_path / "config.json", eos_token_id=None)
    assert read_spec(tmp_path).eos_tokens == ()


def test_a_name_in_the_config_goes_before_the_folders(tmp_path: Path) -> None:
    save_tiny(tmp_path / "somewhere")
    rewrite(tmp_path / "somewhere" / "config.json", _model_name_or_path="people/Known-As")
    assert read_spec(tmp_path / "somewhere").name == "Known-As"


def test_namespaces_tell_configurations_apart(folder: Path, tmp_path: Path) -> None:
    spec = read_spec(folder)
    digests = {
        spec.namespace(16).digest,
        spec.namespace(32).digest,
        spec.namespace(16, "salt").digest,
        read_spec(folder, dtype="bfloat16").namespace(16).digest,
        read_spec(save_tiny(tmp_path, seed=1)).namespace(16).digest,
    }
    assert len(digests) == 5


def test_a_copy_elsewhere_shares(folder: Path, tmp_path: Path) -> None:
    copy = save_tiny(tmp_path / "another-name")
    assert read_spec(copy).namespace(16) == read_spec(folder).namespace(16)


def test_every_tensor_is_in_the_fingerprint(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    seen = {fingerprint(tmp_path)}
    for name in tensors:
        changed = dict(tensors)
        changed[name] = tensors[name] + 1
        save_file(changed, file, metadata={"format": "pt"})
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 1 + len(tensors)


def test_any_byte_of_a_tensor_is_in_the_fingerprint(tmp_path: Path) -> None:
    """Training a few rows of a table changes the KV of their tokens alone."""
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    places = [begin, len(whole) - 1, *(rng.randrange(begin, len(whole)) for _ in range(30))]
    seen = {fingerprint(tmp_path)}
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 1 + len(set(places))


@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_that_was_not_copied_whole_is_refused(tmp_path: Path, more: int) -> None:
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:more] if more < 0 else whole + bytes(more))
    with pytest.raises(UsageError, match="copy the model again"):
        fingerprint(tmp_path)


def test_the_config_is_in_the_fingerprint(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    before = fingerprint(tmp_path)
    rewrite(tmp_path / "config.json", rms_norm_eps=1e-3)
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff" * 7, b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little")],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(UsageError, match="no valid header"):
        fingerprint(tmp_path)


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        read_spec(tmp_path)
    save_tiny(tmp_path)
    with pytest.raises(UsageError, match="dtype"):
        read_spec(tmp_path, dtype="int3")
    with pytest.raises(UsageError, match="tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="safetensors"):
        read_spec(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused_before_serving(folder: Path) -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        load_model(folder)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_supported_types(kind: str) -> None:
    assert unsupported(tiny_config(kind)) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: tiny_config("mistral", sliding_window=64), "sliding window of 64"),
        (lambda: AutoConfig.for_model("gemma3_text"), "sliding_attention"),
        (lambda: AutoConfig.for_model("deepseek_v3"), "MLA"),
        (lambda: AutoConfig.for_model("t5"), "encoder-decoder"),
        (lambda: AutoConfig.for_model("qwen3_next"), "linear_attention"),
        (lambda: AutoConfig.for_model("gpt2"), "'gpt2' is not one of"),
        (
            lambda: tiny_config(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "dynamic rotary",
        ),
    ],
)
def test_unsupported_models_are_named(config: Callable[[], PreTrainedConfig], reason: str) -> None:
    said = unsupported(config())
    assert said is not None
    assert reason in said
