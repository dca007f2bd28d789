"""kvpool: a tiered pool of KV cache blocks, found by prefix and moved layer by layer."""
