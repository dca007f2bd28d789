"""Keep the KV of a prompt in a pool of this process, and find it again for a longer prompt.

python examples/embedded_pool.py
"""

import numpy as np

from kvpool import BlockLayout, BlockView, Namespace, Pool, PoolConfig, Span


def main() -> int:
    """Store 4 blocks, then load them for a prompt of 5. Returns the blocks that were loaded."""
    # What one block of 16 tokens looks like: 4 layers, 2 KV heads, 64 numbers of K and of V.
    layout = BlockLayout(num_layers=4, kv_heads=2, block_tokens=16, k_dim=64, v_dim=64)
    # Two processes share blocks only if all of this is equal.
    namespace = Namespace(
        model="example",
        weights="0" * 64,
        compute_dtype="float32",
        kv_dtype="float32",
        block_tokens=16,
    )
    with Pool.open(layout, PoolConfig(dram_bytes=16 << 20)) as pool:
        # What an engine has computed for the prompt; here, noise of the right size.
        prompt = list(range(64))
        computed = np.random.default_rng(0).bytes(4 * layout.block_bytes)
        source = BlockView.of_buffer(layout, Span.of(bytearray(computed)))
        chain = pool.chain(namespace, prompt)
        stored = pool.store(chain, source, deadline_s=5).wait(timeout_s=5)
        print(f"stored {stored.stored} blocks, {stored.new} of them new")

        # A later prompt that begins like the first.
        chain = pool.chain(namespace, [*prompt, *range(1000, 1016)])
        match = pool.match(chain)
        print(f"{match.blocks} of {len(chain)} blocks seem to be there")
        found = bytearray(match.blocks * layout.block_bytes)
        with pool.lease(match, seconds=10) as lease:
            dest = BlockView.of_buffer(layout, Span.of(found)).take(0, lease.blocks)
            delivered = pool.load(lease, dest, deadline_s=2).wait(timeout_s=5)
        same = found[: delivered * layout.block_bytes] == computed[: delivered * layout.block_bytes]
        print(f"loaded {delivered} blocks, equal: {same}; the rest is computed")
        return delivered


if __name__ == "__main__":
    main()
