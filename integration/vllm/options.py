"""What ``kv_connector_extra_config`` may say. Owns the names, defaults and limits of its settings.

Never reads the environment. Who calls it: the connector.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvpool.config import parse_size
from kvpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """The connector's settings. One of ``server`` and ``dram_bytes`` is given.

    Attributes:
        server: Where the pool is, as ``kvpool.connect`` takes it: the run directory of the
            kvpool-server of this host, or HOST:PORT of servers of a ring, comma-separated; ""
            means a pool inside the engine.
        token_file, ca_file: Of a ring that asks for them; None means not.
        dram_bytes: DRAM of the pool inside the engine; 0 with a server.
        ssd, ssd_bytes: Folder and room of its SSD tier; None means none.
        staging_bytes: Memory through which blocks pass on their way in, and as much on the way out;
            0 means twice what one step of the engine can complete.
        salt: Secret of the tenant: engines with another one find nothing of this one's.
        lookup_timeout_s: How long a request waits to be told what the pool has of it.
        load_timeout_s: How long it waits for blocks before they are computed instead.
        store_timeout_s: How long blocks may be on their way into the pool.
    """

    server: str = ""
    token_file: Path | None = None
    ca_file: Path | None = None
    dram_bytes: int = 0
    ssd: Path | None = None
    ssd_bytes: int = 0
    staging_bytes: int = 0
    salt: str = ""
    lookup_timeout_s: float = 0.1
    load_timeout_s: float = 5.0
    store_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if bool(self.server) == bool(self.dram_bytes):
            raise ConfigError(
                'give kv_connector_extra_config either "server" (a run directory or HOST:PORT) or '
                '"dram" (of a pool inside the engine)',
                key="server",
            )
        if (self.token_file or self.ca_file) and self.near:
            raise ConfigError(
                '"token_file" and "ca_file" go with a "server" that is HOST:PORT', key="token_file"
            )
        if (self.ssd is None) != (self.ssd_bytes == 0) or (self.ssd and self.server):
            raise ConfigError(
                '"ssd" and "ssd_bytes" go together, and with "dram": a server has its own flags',
                key="ssd",
            )
        for name in ("lookup_timeout_s", "load_timeout_s", "store_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be above 0", key=name)

    @property
    def near(self) -> bool:
        """Whether the pool is on this host: inside the engine, or a server named by its folder."""
        return not self.server or "/" in self.server


def _size(name: str) -> Callable[[Any], int]:
    return lambda value: parse_size(str(value), key=name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("write a text")
    return value


def _path(value: Any) -> Path:
    if not _text(value):
        raise ValueError("name a file or folder, or leave the setting out")
    return Path(value)


def _seconds(value: Any) -> float:
    seconds = float(value)
    if isinstance(value, bool) or not math.isfinite(seconds):
        raise ValueError("write a number of seconds")
    return seconds


# Setting -> (field, how a JSON value becomes the field's).
_SETTINGS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "server": ("server", _text),
    "token_file": ("token_file", _path),
    "ca_file": ("ca_file", _path),
    "dram": ("dram_bytes", _size("dram")),
    "ssd": ("ssd", _path),
    "ssd_bytes": ("ssd_bytes", _size("ssd_bytes")),
    "staging": ("staging_bytes", _size("staging")),
    "salt": ("salt", _text),
    "lookup_timeout_s": ("lookup_timeout_s", _seconds),
    "load_timeout_s": ("load_timeout_s", _seconds),
    "store_timeout_s": ("store_timeout_s", _seconds),
}


def read_options(extra: Mapping[str, Any]) -> ConnectorOptions:
    """Read ``kv_connector_extra_config``.

    Raises:
        ConfigError: A setting is unknown, malformed, or contradicts another.
    """
    values: dict[str, Any] = {}
    for name, value in extra.items():
        if name not in _SETTINGS:
            known = ", ".join(_SETTINGS)
            raise ConfigError(f"unknown setting {name!r}: the connector has {known}", key=name)
        target, convert = _SETTINGS[name]
        try:
            values[target] = convert(value)
        except (TypeError, ValueError) as wrong:
            raise ConfigError(f"{name} is {value!r}: {wrong}", key=name) from wrong
    return ConnectorOptions(**values)
