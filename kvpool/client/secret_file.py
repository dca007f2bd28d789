"""Secrets in files: a token, or the secret that salts are made of, read once and never shown.

Owns what such a file must look like: of this user, closed to others, one line. Who calls it: the
server and the command line, at their start.
"""

import os
import stat
from pathlib import Path
from typing import Final

from kvpool.errors import ConfigError

# 128 bits in hexadecimal digits at least. `openssl rand -hex 32` writes 64.
SECRET_BYTES_MIN: Final = 32
SECRET_BYTES_MAX: Final = 4096


def read_secret(path: Path, key: str) -> str:
    """Return the secret in a file, without the end of its line.

    Args:
        path: Of mode 0600 or 0400, of this user.
        key: The setting that names it, for messages. The secret is in none.

    Raises:
        ConfigError: It cannot be read, others can read it, or it is no secret of one line.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}", key=key) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{key}: {path} is no file", key=key)
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
            raise ConfigError(
                f"{key}: others may read {path}: say chmod 600 {path}, make a new secret, and give "
                "the file to the user that runs this",
                key=key,
            )
        data = os.read(fd, SECRET_BYTES_MAX + 1)
    finally:
        os.close(fd)
    return _checked(data, path, key)


def _checked(data: bytes, path: Path, key: str) -> str:
    line = data.removesuffix(b"\n").removesuffix(b"\r")
    if not SECRET_BYTES_MIN <= len(line) <= SECRET_BYTES_MAX:
        raise ConfigError(
            f"{key}: {path} has {len(line)} characters, a secret has {SECRET_BYTES_MIN} to "
            f"{SECRET_BYTES_MAX}: write one with openssl rand -hex 32",
            key=key,
        )
    if not (line.isascii() and all(0x21 <= byte <= 0x7E for byte in line)):
        raise ConfigError(
            f"{key}: {path} is not one line of printable ASCII without spaces: write one with "
            "openssl rand -hex 32",
            key=key,
        )
    return line.decode()
