"""``connect``: the Pool interface over one server, or over all of a ring.

Owns what a place to connect to looks like. Who calls it: engines and workers.
"""

import os
import re
from pathlib import Path
from typing import Final, overload

from kvpool.base import BlockPool
from kvpool.block import BlockLayout
from kvpool.client.access import OPEN, ClientAccess
from kvpool.client.cluster import ClusterPool
from kvpool.client.link import Place
from kvpool.client.nodes import Nodes
from kvpool.client.remote import RemotePool
from kvpool.client.ways import Ways
from kvpool.clock import SystemClock
from kvpool.completion import Deadline
from kvpool.config import TransferConfig
from kvpool.errors import ConfigError, UsageError
from kvpool.transfer.base import Transport

_ADDRESS: Final = re.compile(r"[^/\s]+:\d{1,5}", re.ASCII)


@overload
def connect(
    target: Path,
    layout: BlockLayout,
    timeout_s: float = 30.0,
    *,
    transport: Transport | None = None,
    config: TransferConfig | None = None,
) -> RemotePool: ...


@overload
def connect(
    target: list[str],
    layout: BlockLayout,
    timeout_s: float = 30.0,
    *,
    config: TransferConfig | None = None,
    access: ClientAccess = OPEN,
) -> ClusterPool: ...


@overload
def connect(
    target: str,
    layout: BlockLayout,
    timeout_s: float = 30.0,
    *,
    transport: Transport | None = None,
    config: TransferConfig | None = None,
    access: ClientAccess = OPEN,
) -> BlockPool: ...


def connect(
    target: Path | str | list[str],
    layout: BlockLayout,
    timeout_s: float = 30.0,
    *,
    transport: Transport | None = None,
    config: TransferConfig | None = None,
    access: ClientAccess = OPEN,
) -> BlockPool:
    """Connect to a server of this host, or to all servers of a ring, and return a pool.

    Args:
        target: The folder given to ``kvpool-server --run-dir``: that server alone. Or ``"host:port"``
            of some servers of a ring, comma-separated or in a list: the pool over all of it; one
            that answers is enough, it names the others.
        layout: Of the blocks. The first client's layout opens a server's arena; each server keeps one.
        timeout_s: Longest wait for the server; opening its arena takes about a second per GiB. Servers
            of a ring that do not answer by then are looked for in the background.
        transport: The transport of this process, if it has one: it stays the caller's. Of the kind
            that the server was started with. None makes what is needed, closed with the pool. For a
            run directory only.
        config: Waits, sizes, replicas, and where UCX binds; None means the defaults.
        access: A token and certificates, where servers ask for them. Not for a run directory, whose
            callers are this user's own processes. A token goes to other hosts over TLS only, unless
            it says ``insecure``.

    Raises:
        LayoutMismatchError: The server keeps another layout.
        UsageError: The server is another version, refuses this client, or is of no ring; ``target``
            is neither; or the token would leave this host in the clear.
        ConfigError: The staging has no room for one block.
        PeerUnreachableError, TransferTimeoutError: No server there, or it did not answer.

    A server that is lost later is looked for again in the background.
    """
    settings = checked(layout, config)
    addresses = _addresses(target)
    if not addresses:
        if access != OPEN:
            raise UsageError("a run directory asks nobody who he is: leave `access` out")
        return _connect_here(Path(str(target)), layout, timeout_s, transport, settings)
    if transport is not None:
        raise UsageError(
            "a ring makes its own transports: leave `transport` out, set `config.ways`"
        )
    return _connect_ring(addresses, layout, timeout_s, settings, access)


def _addresses(target: Path | str | list[str]) -> list[str]:
    """Return the addresses that a target names; none if it is a folder."""
    if isinstance(target, Path):
        return []
    named = target.split(",") if isinstance(target, str) else target
    named = [one.strip() for one in named]
    if named and all(_ADDRESS.fullmatch(one) for one in named):
        return named
    if isinstance(target, str) and ("/" in target or os.path.isdir(target)):
        return []
    raise UsageError(
        f"{target!r} is no run directory and no HOST:PORT: say where a kvpool-server is, by its "
        "folder on this host or by the listen.address of servers of a ring"
    )


def _connect_here(
    run_dir: Path,
    layout: BlockLayout,
    timeout_s: float,
    transport: Transport | None,
    settings: TransferConfig,
) -> RemotePool:
    deadline = Deadline(timeout_s)
    ways = Ways(layout, settings, transport)
    try:
        place = Place.of_run_dir(run_dir)
        return RemotePool(place, layout, ways, settings, deadline.remaining_s())
    except BaseException:
        ways.close()
        raise


def _connect_ring(
    seeds: list[str],
    layout: BlockLayout,
    timeout_s: float,
    settings: TransferConfig,
    access: ClientAccess,
) -> ClusterPool:
    clock = SystemClock()
    ways = Ways(layout, settings)
    nodes = Nodes(seeds, layout, ways, settings, access, clock)
    try:
        nodes.open(timeout_s)
    except BaseException:
        ways.stop()
        nodes.close()
        ways.close()
        raise
    return ClusterPool(nodes, layout, ways, settings, clock)


def checked(layout: BlockLayout, config: TransferConfig | None) -> TransferConfig:
    """Return the settings to use. Raises ConfigError if the staging has no room for one block."""
    settings = config or TransferConfig()
    if settings.staging_bytes < layout.block_bytes:
        raise ConfigError(
            f"transfer.staging_bytes is {settings.staging_bytes}: a block has {layout.block_bytes}",
            key="transfer.staging_bytes",
        )
    return settings
