"""``connect`` and ``connect_ring``: the Pool interface over one server, or over all of a ring.

Owns what a place to connect to looks like. Who calls it: engines and workers.
"""

from collections.abc import Sequence
from pathlib import Path

from kvpool.block import BlockLayout
from kvpool.client.cluster import ClusterPool
from kvpool.client.link import Place
from kvpool.client.nodes import Nodes
from kvpool.client.remote import RemotePool
from kvpool.client.rpc import OPEN, ClientAccess
from kvpool.client.ways import Ways
from kvpool.clock import SystemClock
from kvpool.completion import Deadline
from kvpool.config import TransferConfig
from kvpool.errors import ConfigError
from kvpool.transfer.base import Transport


def connect(
    run_dir: Path | str,
    layout: BlockLayout,
    timeout_s: float = 30.0,
    *,
    transport: Transport | None = None,
    config: TransferConfig | None = None,
) -> RemotePool:
    """Connect to the server that runs in a folder, and return it as a pool.

    Args:
        run_dir: The folder given to ``kvpool-server --run-dir``.
        layout: Of the blocks. The first client's layout opens the server's arena.
        timeout_s: Longest wait for the server; opening its arena takes about a second per GiB.
        transport: The transport of this process, if it has one: it stays the caller's. Of the kind
            that the server was started with. None makes one of that kind, which is closed with the
            pool.
        config: Waits and sizes; None means the defaults.

    Raises:
        LayoutMismatchError, UsageError: The server keeps another layout, or is another version.
        ConfigError: The staging has no room for one block.
        PeerUnreachableError, TransferTimeoutError: No server there, or it did not answer.

    A server that is lost later is looked for again in the background.
    """
    settings = checked(layout, config)
    deadline = Deadline(timeout_s)
    ways = Ways(layout, settings, transport)
    try:
        place = Place.of_run_dir(Path(run_dir))
        return RemotePool(place, layout, ways, settings, deadline.remaining_s())
    except BaseException:
        ways.close()
        raise


def connect_ring(
    seeds: str | Sequence[str],
    layout: BlockLayout,
    timeout_s: float = 30.0,
    *,
    config: TransferConfig | None = None,
    access: ClientAccess = OPEN,
) -> ClusterPool:
    """Connect to all servers of a ring, and return them as one pool.

    Args:
        seeds: ``host:port`` of some of the servers, one that answers is enough; comma-separated, or
            in a list.
        layout: Of the blocks. Each server keeps one layout, that of its first client.
        timeout_s: Longest wait for the servers; those that do not answer by then are looked for in the
            background.
        config: Waits, sizes, replicas, and where UCX binds; None means the defaults.
        access: A token and certificates, where the servers ask for them.

    Raises:
        UsageError: A server refuses this client, or is of no ring.
        ConfigError: The staging has no room for one block.
        PeerUnreachableError, TransferTimeoutError: No server answers.
    """
    settings = checked(layout, config)
    clock = SystemClock()
    listed = seeds.split(",") if isinstance(seeds, str) else list(seeds)
    ways = Ways(layout, settings)
    nodes = Nodes(listed, layout, ways, settings, access, clock)
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
