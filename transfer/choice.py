"""Which transport a process uses: ``host`` between processes of one host, ``ucx`` between hosts.

Owns the names that command lines take, and nothing else. Who calls it: the launchers of processes.
"""

from pathlib import Path
from typing import Final, Literal, get_args

from kvpool.block import Incarnation
from kvpool.config import TransferConfig
from kvpool.transfer.base import Transport
from kvpool.transfer.host import HostTransport

TransportKind = Literal["host", "ucx"]
TRANSPORT_KINDS: Final[tuple[TransportKind, ...]] = get_args(TransportKind)


def open_transport(
    kind: TransportKind,
    name: str,
    config: TransferConfig | None = None,
    *,
    incarnation: Incarnation | None = None,
) -> Transport:
    """Open a transport.

    Args:
        kind: Which.
        name: Names its threads.
        config: Where UCX binds; None means loopback.
        incarnation: Of this process, where another transport of it has one already: for ``host``.

    Raises:
        ConfigError: UCX cannot be used here; the message says why.
    """
    if kind == "host":
        return HostTransport(name, incarnation=incarnation)
    from kvpool.transfer.ucx import UcxTransport  # only who wants UCX pays for it

    settings = config or TransferConfig()
    return UcxTransport(
        name,
        host=settings.ucx_host,
        trusted_network=settings.trusted_network,
        advertise=settings.advertise or None,
        library=settings.ucx_library or None,
        tls=settings.ucx_transports,
    )


def listen_address(kind: TransportKind, path: Path, config: TransferConfig | None = None) -> str:
    """Return where to listen: ``path`` for a socket of this host, else a free port of UCX's host."""
    host = (config or TransferConfig()).ucx_host
    return str(path) if kind == "host" else f"ucx://{f'[{host}]' if ':' in host else host}:0"
