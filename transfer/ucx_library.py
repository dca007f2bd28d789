"""Which libucp to load, and from which address it may be used. Pure look-ups: nothing is loaded here.

Who calls it: ``transfer/ucx.py`` and ``kvpool doctor``.
"""

import importlib.util
import ipaddress
import logging
import re
from pathlib import Path

from kvpool.errors import ConfigError

log = logging.getLogger(__name__)


def find_library(explicit: str | None = None) -> str:
    """Return the path of the libucp to load. Loads and imports nothing.

    The first of: ``explicit``; the one already mapped into this process, because a second copy
    beside it does not work; the one of the libucx wheel; the system's, by its name.
    """
    if explicit is not None:
        return explicit
    mapped = re.search(
        r"\s(/\S*/libucp\.so\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE
    )
    if mapped is not None:
        return mapped[1]
    wheel = importlib.util.find_spec("libucx")
    for folder in (wheel and wheel.submodule_search_locations) or ():
        # Not libucp.so.0: the wheel holds copies, and its own loader maps this one.
        path = Path(folder, "lib", "libucp.so")
        if path.is_file():
            return str(path)
    return "libucp.so.0"


def require_trusted(host: str, trusted_network: bool) -> None:
    """Refuse an address beyond loopback unless its network is declared trusted.

    Raises:
        ConfigError: ``host`` is no numeric address, or not loopback and not trusted.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(f"{host} is not a numeric address", key="host") from error
    if loopback:
        return
    if not trusted_network:
        raise ConfigError(
            f"{host} is not loopback, and whoever reaches it could write to this process's memory:"
            " set trusted_network if the network is yours alone",
            key="transfer.trusted_network",
        )
    log.warning("UCX listens beyond loopback, on %s: everybody who can reach it is trusted", host)
