"""What a model's KV takes up: known models, and configs that do not say."""

import json
from pathlib import Path

import pytest

from kvpool.cli.main import main
from kvpool.cli.plan import plan_of
from kvpool.errors import UsageError
from kvpool.tiers.ssd import SsdTier

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
# Of these two models: each is a count.
SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"),
    *("head_dim", "kv_lora_rank", "qk_rope_head_dim"),
)


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_grouped_heads(tmp_path: Path) -> None:
    plan = plan_of(write(tmp_path, LLAMA_8B), 16)
    assert plan.token_bytes == 2 * 32 * 8 * 128 * 2 == 131072
    assert plan.layout.block_bytes == 2 << 20
    assert plan.blocks(1 << 30) == 512


def test_latent_heads_are_one(tmp_path: Path) -> None:
    plan = plan_of(write(tmp_path, DEEPSEEK_V3), 16)
    assert plan.latent and plan.token_bytes == 61 * (512 + 64) * 2


def test_the_text_part_of_a_model_of_several_is_meant(tmp_path: Path) -> None:
    whole = {"vision_config": {}, "text_config": LLAMA_8B}
    assert plan_of(write(tmp_path, whole), 16) == plan_of(write(tmp_path, LLAMA_8B), 16)


def test_the_stored_dtype_may_be_another(tmp_path: Path) -> None:
    plan = plan_of(write(tmp_path, LLAMA_8B), 16, "float8_e4m3")
    assert plan.token_bytes == 65536


@pytest.mark.parametrize(
    ("config", "block_tokens", "dtype"),
    [
        ({"hidden_size": 1}, 16, ""),
        ([], 16, ""),
        ({**LLAMA_8B, "torch_dtype": "int3"}, 16, ""),
        *(({**LLAMA_8B, size: wrong}, 16, "") for size in SIZES for wrong in (0, -1, "8", 1 << 70)),
        (LLAMA_8B, 7, ""),
        (LLAMA_8B, 16, "int3"),
    ],
)
def test_what_does_not_say_the_shape_is_refused(
    tmp_path: Path, config: object, block_tokens: int, dtype: str
) -> None:
    with pytest.raises(UsageError):
        plan_of(write(tmp_path, config), block_tokens, dtype)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give the folder"):
        plan_of(tmp_path, 16)


def test_the_command_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write(tmp_path, LLAMA_8B))
    flags = ["plan", "--model", folder, "--dram", "64GiB", "--ssd", "1TiB", "--json"]
    assert main(flags) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["token_bytes"] == 131072
    assert (shown["blocks_a_gib"], shown["dram_blocks"]) == (512, 64 * 512)
    layout = plan_of(Path(folder), 16).layout
    assert (
        shown["ssd_blocks"] == SsdTier.slots_in(layout, 1 << 40) < 1024 * 512
    )  # headers take room
    assert shown["ssd_tokens"] == shown["ssd_blocks"] * 16
    assert shown["longest_prompt_bytes"] == 1 << 30
    assert main(flags[:-1]) == 0
    assert "131,072" in capsys.readouterr().out
