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
from kvpool.block import BlockLayout
from kvpool.client.connect import connect
from kvpool.config import PoolConfig, SsdConfig, TransferConfig
from kvpool.errors import LayoutMismatchError
from kvpool.integration.vllm.options import ConnectorOptions
from kvpool.pool import Pool

logger = logging.getLogger(__name__)

# Stores under way at once: one a request and step, which are small while requests decode.
_STORES_MAX: Final = 1024


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
        shared.pool.close()


POOLS = SharedPools()


def open_pool(options: ConnectorOptions, layout: BlockLayout) -> BlockPool:
    """Open the pool that the options name.

    Raises:
        LayoutMismatchError: The server keeps blocks of another layout.
        KVPoolError: As ``kvpool.connect`` and ``Pool.open``: it cannot be reached, or there is no
            room.
    """
    if options.run_dir is not None:
        config = TransferConfig(
            staging_bytes=max(TransferConfig().staging_bytes, layout.block_bytes),
            stores_max=_STORES_MAX,
        )
        return connect(options.run_dir, layout, config=config)
    ssd = None
    if options.ssd is not None:
        ssd = SsdConfig(folder=options.ssd, capacity_bytes=options.ssd_bytes)
    return Pool.open(layout, PoolConfig(dram_bytes=options.dram_bytes, ssd=ssd))


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
