"""`kvpool profile` measures a model as workers run it, and writes what the planner reads."""

from pathlib import Path

import pytest

from kvpool.cli.main import main
from kvpool.integration.conductor.cost import ProfiledCost
from kvpool.integration.conductor.profile import read_profile
from kvpool.integration.runtime.measure import doubling
from tests.tiny_model import tiny_model


def test_a_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tiny_model(tmp_path / "model"), tmp_path / "profile.json"
    # One round of each kind is made, and no other begins after that little time.
    flags = ["--tokens-max", "128", "--running-max", "2", "--threads", "1"]
    flags += ["--repeats", "100000", "--seconds-max", "0.001"]
    assert main(["profile", "--model", str(model), "--out", str(out), *flags]) == 0
    profile = read_profile(out)
    measured = {(one.tokens, one.cached_tokens) for one in profile.samples.prefill}
    assert measured == {(64, 0), (64, 32), (64, 48), (128, 0), (128, 64), (128, 112)}
    assert {(one.running, one.context_tokens) for one in profile.samples.decode} == {
        (1, 64),
        (1, 128),
        (2, 128),
        (2, 256),
    }
    # 3 layers of 2 KV heads of 8 numbers, K and V, 4 bytes each.
    assert profile.kv_bytes_per_token == 3 * 2 * 8 * 2 * 4
    assert len(profile.samples.transfer) == 5
    cost = ProfiledCost(profile)
    assert cost.prefill_s(128, 0) > 0
    assert "left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tokens-max", "63"], "tokens-max is 63"),
        (["--tokens-max", "2048"], "64 to 2047"),
        (["--running-max", "0"], "at least 1"),
        (["--repeats", "0"], "at least 1"),
        (["--seconds-max", "0"], "seconds-max is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    model, out = tiny_model(tmp_path / "model"), tmp_path / "profile.json"
    command = ["profile", "--model", str(model), "--out", str(out), "--threads", "1", *flags]
    assert main(command) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_lengths_double_up_to_the_last() -> None:
    assert doubling(64, 300) == [64, 128, 256, 300]
    assert doubling(64, 64) == [64]
