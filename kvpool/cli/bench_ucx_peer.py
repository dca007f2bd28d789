"""The other process of the UCX rows: it owns what is written into, or what is read.

Owns nothing but its memory: it answers until its standard input ends, which is also how a parent's
death ends it. Speaks one line of JSON, where it listens. Who calls it: ``bench_ucx``, as
``python -m kvpool.cli.bench_ucx_peer ROLE BYTES [LAYERS]``.
"""

import json
import sys
from collections.abc import Callable
from typing import Final

from kvpool.arena import Arena, Slots
from kvpool.block import BlockLayout
from kvpool.cli.bench_tiers import aligned_room
from kvpool.memory import BlockView, copy_blocks
from kvpool.transfer.base import Transport
from kvpool.transfer.ucx import UcxTransport
from kvpool.transfer.ucx_engine import UcxEngine


def layout(layers: int) -> BlockLayout:
    """Return blocks of 64 KiB a layer: 16 tokens of 8 KV heads of 128 bfloat16 numbers."""
    return BlockLayout(
        num_layers=layers, kv_heads=8, block_tokens=16, k_dim=128, v_dim=128, dtype="bfloat16"
    )


def serve_inbox(size: int, layers: int) -> None:
    """Be written into: an inbox of ``size`` bytes."""
    with UcxEngine(inbox=aligned_room(size), endpoint_max=1) as engine:
        _until_the_end({"port": engine.listen(lambda other: other.on_notification(_ignore))})


def serve_blocks(size: int, layers: int) -> None:
    """Be read from: ``size`` bytes of blocks, in slots 0 and up."""
    with UcxTransport("bench-owner") as transport:
        _until_the_end(offer_blocks(transport, "ucx://127.0.0.1:0", size, layers))


def offer_blocks(transport: Transport, address: str, size: int, layers: int) -> dict[str, object]:
    """Fill an arena, let it be read, and return what a reader must know."""
    shape = layout(layers)
    arena = Arena(shape, size // shape.block_bytes, transport.incarnation)
    slots = publish_noise(arena)
    transport.register(arena)  # which keeps the memory
    return _told(transport.listen(address, lambda endpoint: None), slots)


def publish_noise(arena: Arena) -> Slots:
    """Fill every slot of an arena, and make it ready; return them."""
    shape = arena.layout
    slots = arena.reserve_some(arena.slot_count)
    source = BlockView.of_buffer(shape, aligned_room(arena.slot_count * shape.block_bytes))
    crcs = copy_blocks(arena.view(slots), source)
    arena.commit_all(slots, crcs, bytes(32 * len(slots)))
    return slots


def serve_slots(size: int, layers: int) -> None:
    """Be written into, slot by slot: ``size`` bytes of them, all reserved."""
    with UcxTransport("bench-owner") as transport:
        shape = layout(layers)
        arena = Arena(shape, size // shape.block_bytes, transport.incarnation)
        slots = arena.reserve_some(arena.slot_count)
        transport.register(arena, writable=True)  # which keeps the memory
        where = transport.listen(
            "ucx://127.0.0.1:0", lambda endpoint: endpoint.on_notification(_ignore)
        )
        _until_the_end(_told(where, slots))


def _told(address: str, slots: Slots) -> dict[str, object]:
    return {
        "address": address,
        "slots": slots.indices.tolist(),
        "generations": slots.generations.tolist(),
    }


def _ignore(note: bytes) -> None:
    """Take a note."""


def _until_the_end(where: dict[str, object]) -> None:
    print(json.dumps(where), flush=True)
    sys.stdin.read()


ROLES: Final[dict[str, Callable[[int, int], None]]] = {
    "inbox": serve_inbox,
    "blocks": serve_blocks,
    "slots": serve_slots,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
