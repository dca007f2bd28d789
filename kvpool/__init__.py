"""kvpool: a tiered pool of KV cache blocks, found by prefix and moved layer by layer.

The names that an engine needs, in one place. ``connect`` loads gRPC when it is first used; nothing
here loads torch.
"""

from typing import TYPE_CHECKING

from kvpool.base import BlockPool, Chain, Lease, Match, PoolStats, StoreResult
from kvpool.block import BlockLayout, Namespace
from kvpool.completion import Completion
from kvpool.config import PoolConfig, SsdConfig, TransferConfig
from kvpool.errors import KVPoolError
from kvpool.memory import BlockView, Span
from kvpool.pool import Pool

if TYPE_CHECKING:
    from kvpool.client.connect import connect

__all__ = [
    "BlockLayout",
    "BlockPool",
    "BlockView",
    "Chain",
    "Completion",
    "KVPoolError",
    "Lease",
    "Match",
    "Namespace",
    "Pool",
    "PoolConfig",
    "PoolStats",
    "Span",
    "SsdConfig",
    "StoreResult",
    "TransferConfig",
    "connect",
]


def __getattr__(name: str) -> object:
    if name == "connect":
        from kvpool.client.connect import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
