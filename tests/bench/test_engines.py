"""The rows inside engines: their names, and what is said where an engine is not installed."""

from pathlib import Path

import pytest

from kvpool.cli import bench, bench_engines
from kvpool.errors import UsageError


def test_the_names_are_stable() -> None:
    assert [case.name for case in bench.cases_of("engines", True)] == [
        "engines.vllm.ttft",
        "engines.vllm.reload",
        "engines.vllm.hung",
    ]


def test_an_engine_that_is_not_installed_is_named_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="make env-vllm"):
        bench_engines.interpreter(tmp_path, "make env-vllm")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.touch()
    assert bench_engines.interpreter(tmp_path, "make env-vllm") == python
