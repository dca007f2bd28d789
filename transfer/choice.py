"""Which transport a process uses: ``host`` between processes of one host, ``ucx`` between hosts.

Owns the names that command lines take, and nothing else. Who calls it: the launchers of processes.
"""

from pathlib import Path
from typing import Final, Literal, get_args

from kvpool.transfer.base import Transport
from kvpool.transfer.host import HostTransport

TransportKind = Literal["host", "ucx"]
TRANSPORT_KINDS: Final[tuple[TransportKind, ...]] = get_args(TransportKind)

_UCX_LOOPBACK: Final = "ucx://127.0.0.1:0"


def open_transport(kind: TransportKind, name: str) -> Transport:
    """Open a transport; ``name`` names its threads.

    Raises:
        ConfigError: UCX cannot be used here; the message says why.
    """
    if kind == "host":
        return HostTransport(name)
    from kvpool.transfer.ucx import UcxTransport  # only who wants UCX pays for it

    return UcxTransport(name)


def listen_address(kind: TransportKind, path: Path) -> str:
    """Return where to listen: ``path`` for a socket of this host, else a free port of loopback."""
    return str(path) if kind == "host" else _UCX_LOOPBACK
