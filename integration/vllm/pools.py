"""The pool behind an engine: its own, or a server's, opened once a process.

vLLM makes two connectors in one process when it has one worker: they share one pool. Who calls it:
the connector.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool.base import BlockPool
from kvpool.block import BlockLayout, Namespace
from kvpool.client.access import ClientAccess
from kvpool.client.connect import connect
from kvpool.client.secret_file import read_secret
from kvpool.config import PoolConfig, SsdConfig, TransferConfig
from kvpool.errors import ConfigError, LayoutMismatchError, PeerUnreachableError
from kvpool.integration.vllm.options import ConnectorOptions
from kvpool.pool import Pool
from kvpool.tiers.stack import StackTier

logger = logging.getLogger(__name__)

# Stores under way at once: one a request and step, which are small while requests decode.
_STORES_MAX: Final = 1024
# How long an engine that ends waits for its SSD tier.
_FLUSH_S: Final = 15.0


@dataclass(slots=True, eq=False)
class _Shared:
    pool: BlockPool
    users: int


class SharedPools:
    """Pools of this process by engine. vLLM makes an engine's connectors one after the other.

    ``_lock`` guards ``_pools``; nothing is called under it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, _Shared] = {}

    def attach(self, engine: str, make: Callable[[], BlockPool]) -> BlockPool:
        """Return the engine's pool; the first to ask makes it. Raises what ``make`` raises."""
        with self._lock:
            shared = self._pools.get(engine)
            if shared is not None:
                shared.users += 1
                return shared.pool
        made = _Shared(make(), 1)
        with self._lock:
            self._pools[engine] = made
        return made.pool

    def detach(self, engine: str) -> None:
        """Give the pool up; the last to do so closes it."""
        with self._lock:
            shared = self._pools.get(engine)
            if shared is None:
                return
            shared.users -= 1
            if shared.users:
                return
            del self._pools[engine]
        _let_flush(shared.pool)
        shared.pool.close()


def _let_flush(pool: BlockPool) -> None:
    """Give blocks that wait for the SSD tier a moment: an engine that ends in peace loses none."""
    if isinstance(pool, Pool) and isinstance(pool.tier, StackTier):
        pool.tier.flusher.wait_idle(_FLUSH_S)


POOLS = SharedPools()


def open_pool(options: ConnectorOptions, layout: BlockLayout) -> BlockPool:
    """Open the pool that the options name.

    Raises:
        LayoutMismatchError: The server keeps blocks of another layout.
        KVPoolError: As ``kvpool.connect`` and ``Pool.open``: it cannot be reached, or there is no
            room.
    """
    if options.server:
        config = TransferConfig(
            staging_bytes=max(TransferConfig().staging_bytes, layout.block_bytes),
            stores_max=_STORES_MAX,
            # Whoever waits for it gives up before, and knows then that the server is slow.
            match_timeout_s=2 * options.lookup_timeout_s,
            request_timeout_s=options.load_timeout_s,
            read_timeout_s=options.load_timeout_s / 4,  # there may be other replicas to ask
        )
        try:
            return connect(options.server, layout, config=config, access=_access(options))
        except PeerUnreachableError as error:
            raise PeerUnreachableError(
                f"no kvpool-server answers at {options.server}: start it before the engine: {error}"
            ) from error
    ssd = None
    if options.ssd is not None:
        ssd = SsdConfig(folder=options.ssd, capacity_bytes=options.ssd_bytes)
    return Pool.open(layout, PoolConfig(dram_bytes=options.dram_bytes, ssd=ssd))


def _access(options: ConnectorOptions) -> ClientAccess:
    """Read the files that the options name. Raises ConfigError if one cannot be read."""
    token, ca = "", b""
    if options.token_file is not None:
        token = read_secret(options.token_file, "token_file")
    if options.ca_file is not None:
        try:
            ca = options.ca_file.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"ca_file: {options.ca_file} cannot be read: {error.strerror}", key="ca_file"
            ) from error
    return ClientAccess(token=token, ca=ca)


def named_by(pool: BlockPool, namespace: Namespace) -> Namespace:
    """Return the namespace as the pool has it: with a tenant's salt, where servers tell tenants apart.

    Raises:
        PeerUnreachableError: No server of the ring answers.
    """
    return pool.chain(namespace, ()).namespace


def attach_pool(engine: str, options: ConnectorOptions, layout: BlockLayout) -> BlockPool | None:
    """Return the engine's pool, or None if it keeps blocks of another layout.

    An engine whose blocks the pool cannot keep runs without it: every lookup is a miss. Other
    errors are raised, as ``open_pool`` says.
    """
    try:
        return POOLS.attach(engine, lambda: open_pool(options, layout))
    except LayoutMismatchError as error:
        logger.error("this engine runs without the pool, every lookup is a miss: %s", error)
        return None
