"""Pools of several models over one memory: each has its own kind of block, and none a fixed share.

Owns how they are opened together. Who calls it: whoever embeds kvpool for more than one model.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from kvpool.block import BlockLayout, Incarnation, new_incarnation
from kvpool.clock import Clock
from kvpool.config import PoolConfig
from kvpool.errors import ConfigError, UsageError
from kvpool.events import EventSink
from kvpool.pool import Pool
from kvpool.tiers.classes import ChunkMemory, ClassTier

# What moves between models at once: some 8 blocks of 16 tokens of a large model, or 64 of a small one.
CHUNK_BYTES: Final = 16 << 20


def open_pools(
    layouts: Sequence[BlockLayout],
    config: PoolConfig | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    incarnation: Incarnation | None = None,
    clock: Clock | None = None,
    events: EventSink | None = None,
    copy_threads: int = 2,
) -> list[Pool]:
    """Make a pool for each layout, all over ``config.dram_bytes``, taken and touched at once.

    Each is a pool as any. Memory moves between them in whole chunks, to where blocks are used: a pool
    that has no room takes a chunk of another in which nothing was used since its own coldest one was;
    the blocks in that go. No pool is ever without a chunk. Close them all; the memory goes with the last.

    Args:
        layouts: One a model, in any order; two may be equal.
        config: ``dram_bytes`` is for all of them together; the limits of leases are for each.
        chunk_bytes: What moves at once: whole pages, and at least a block of each layout.
        incarnation: This run of this process; None means another one.
        clock: Decides when leases run out; None means the machine's clock.
        events: Told of what leaves the pools; None means nobody.
        copy_threads: Of each pool.

    Raises:
        UsageError: There is no layout, or chunks are not whole pages.
        ConfigError: ``dram_bytes`` is less than one chunk for each layout, a chunk does not hold one
            block, or ``config.ssd`` is set: an SSD tier holds blocks of one layout.
        CapacityError: The machine does not give that much shared memory.
    """
    config = config or PoolConfig()
    if not layouts:
        raise UsageError("pools of no layout: name at least one")
    if config.ssd is not None:
        raise ConfigError(
            "pool.ssd is set, and an SSD tier holds blocks of one layout: open a pool for each model",
            key="pool.ssd",
        )
    chunk_count = config.dram_bytes // chunk_bytes if chunk_bytes > 0 else 0
    if chunk_bytes > 0 and chunk_count < len(layouts):
        raise ConfigError(
            f"pool.dram_bytes is {config.dram_bytes}: {len(layouts)} layouts need a chunk of "
            f"{chunk_bytes} each",
            key="pool.dram_bytes",
            size_bytes=len(layouts) * chunk_bytes,
        )
    memory = ChunkMemory(
        chunk_bytes,
        chunk_count,
        incarnation or new_incarnation(),
        numa_node=config.numa_node,
        locked=config.locked,
    )
    with ExitStack() as undo:
        undo.callback(memory.close)
        pools: list[Pool] = []
        for layout in layouts:
            tier = ClassTier(memory, layout, clock=clock, events=events)
            undo.callback(tier.close)
            pools.append(Pool(tier, config, clock=clock, copy_threads=copy_threads))
        undo.pop_all()
    return pools
