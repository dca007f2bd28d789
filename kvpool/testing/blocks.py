"""Small blocks with known bytes, for suites and tests."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.arena import Slot
from kvpool.block import BlockHash, BlockLayout, Namespace, sha256
from kvpool.memory import BlockView, Span, copy_blocks
from kvpool.tiers.base import Tier

Payload = NDArray[np.uint8]  # [blocks, block_bytes], canonical order

SMALL_LAYOUT = BlockLayout(num_layers=3, kv_heads=2, block_tokens=16, k_dim=4, v_dim=4)


def namespace(layout: BlockLayout, salt: str = "") -> Namespace:
    """Return a namespace whose blocks have ``layout``; each ``salt`` makes another one."""
    return Namespace(
        model="test",
        weights="0" * 64,
        compute_dtype=layout.dtype,
        kv_dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        salt=salt,
    )


def payload(layout: BlockLayout, blocks: int, seed: int) -> Payload:
    """Return random payloads; different seeds differ in every block."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (blocks, layout.block_bytes), dtype=np.uint8)


def view_of(layout: BlockLayout, blocks: Payload) -> BlockView:
    """Describe payloads for a copy."""
    return BlockView.of_buffer(layout, Span.of(blocks))


def key(number: int) -> BlockHash:
    """Return the key of a made-up block."""
    return BlockHash(sha256(number.to_bytes(8, "little")))


def write(tier: Tier, name: BlockHash, blocks: Payload, parent: BlockHash | None = None) -> bool:
    """Store one payload, [1, block_bytes], in a tier; return what ``commit`` said."""
    slot = tier.reserve()
    crcs = copy_blocks(tier.view([slot], writable=True), view_of(tier.layout, blocks))
    return tier.commit(slot, name, parent, crcs[0])


def read(tier: Tier, slots: Sequence[Slot]) -> Payload:
    """Copy pinned slots out, with their checksums checked."""
    out = np.zeros((len(slots), tier.layout.block_bytes), dtype=np.uint8)
    view = tier.view(slots, writable=False)
    copy_blocks(view_of(tier.layout, out), view, crcs=tier.crcs(slots))
    return out
