"""kvpool: a tiered pool of KV cache blocks, found by prefix and moved layer by layer.

Re-exports the names that an engine needs, each loaded when it is first used, so that ``import
kvpool`` loads neither gRPC nor an accelerator's libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpool.base import BlockPool as BlockPool
    from kvpool.base import Chain as Chain
    from kvpool.base import Lease as Lease
    from kvpool.base import Match as Match
    from kvpool.base import PoolStats as PoolStats
    from kvpool.base import StoreResult as StoreResult
    from kvpool.block import BlockLayout as BlockLayout
    from kvpool.block import Namespace as Namespace
    from kvpool.client.remote import connect as connect
    from kvpool.completion import Completion as Completion
    from kvpool.config import PoolConfig as PoolConfig
    from kvpool.config import TransferConfig as TransferConfig
    from kvpool.memory import BlockView as BlockView
    from kvpool.memory import Span as Span
    from kvpool.pool import Pool as Pool

_HOMES: Final = {
    "BlockPool": "kvpool.base",
    "Chain": "kvpool.base",
    "Lease": "kvpool.base",
    "Match": "kvpool.base",
    "PoolStats": "kvpool.base",
    "StoreResult": "kvpool.base",
    "BlockLayout": "kvpool.block",
    "Namespace": "kvpool.block",
    "connect": "kvpool.client.remote",
    "Completion": "kvpool.completion",
    "PoolConfig": "kvpool.config",
    "TransferConfig": "kvpool.config",
    "BlockView": "kvpool.memory",
    "Span": "kvpool.memory",
    "Pool": "kvpool.pool",
}


def __getattr__(name: str) -> object:
    """Load an exported name from its module."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvpool' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
