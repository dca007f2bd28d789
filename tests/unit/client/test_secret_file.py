"""A secret's file is this user's alone, and holds one line."""

import os
from pathlib import Path

import pytest

from kvpool.client.secret_file import read_secret
from kvpool.errors import ConfigError


def _file(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_a_secret_is_one_line(tmp_path: Path) -> None:
    for end in (b"", b"\n", b"\r\n"):
        assert read_secret(_file(tmp_path, b"a" * 64 + end), "key") == "a" * 64


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o601])
def test_a_secret_that_others_can_reach_is_none(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="others may read") as caught:
        read_secret(_file(tmp_path, b"a" * 64, mode), "access.secret_file")
    assert "a" * 64 not in str(caught.value)
    assert caught.value.key == "access.secret_file"


@pytest.mark.parametrize(
    "data", [b"", b"short", b"a" * 31, b"a" * 5000, b"a" * 40 + b" b", b"\xff" * 64, b"\0" * 64]
)
def test_what_is_no_secret_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        read_secret(_file(tmp_path, data), "key")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(tmp_path / "missing", "key")
    with pytest.raises(ConfigError, match="is no file"):
        read_secret(tmp_path, "key")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is no file"):
        read_secret(tmp_path / "pipe", "key")
