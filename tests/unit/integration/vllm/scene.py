"""An engine's shape, requests and steps as vLLM's scheduler would show them, without vLLM."""

import hashlib
from collections.abc import Mapping
from types import SimpleNamespace

from kvpool.block import BlockLayout, Namespace, Part
from kvpool.integration.vllm.shape import EngineShape, Group

SIZE = 16
LAYOUT = BlockLayout(num_layers=2, kv_heads=1, block_tokens=SIZE, k_dim=8, v_dim=0, dtype="uint8")
NAMESPACE = Namespace(
    model="m", weights="w", compute_dtype="float32", kv_dtype="auto", block_tokens=SIZE
)


def part(group: int, head: int = 0) -> Part:
    return Part(group=group, layer_begin=0, layer_end=2, head_begin=head, head_end=head + 1)


FULL = Group(number=0, layers=("a", "b"), window_tokens=None, parts=(part(0),))
# The next token sees itself and 19 before it: two blocks, or three.
WINDOW = Group(number=1, layers=("c", "d"), window_tokens=20, parts=(part(1),))


def shape(*groups: Group) -> EngineShape:
    return EngineShape(layout=LAYOUT, groups=groups, block_tokens=SIZE, step_blocks=8)


def hashes(count: int, seed: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{seed}{index}".encode()).digest() for index in range(count)]


def request(name: str, tokens: int, **fields: object) -> SimpleNamespace:
    values: dict[str, object] = {
        "request_id": name,
        "num_tokens": tokens,
        "block_hashes": hashes(tokens // SIZE),
        "lora_request": None,
    }
    return SimpleNamespace(**(values | fields))


def step(
    tables: Mapping[str, tuple[list[int], ...]], computed: dict[str, tuple[int, int]]
) -> SimpleNamespace:
    """One step: requests with (tokens computed before it, tokens scheduled in it)."""
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(computed), num_computed_tokens=[begin for begin, _ in computed.values()]
        ),
        num_scheduled_tokens={name: tokens for name, (_, tokens) in computed.items()},
        total_num_scheduled_tokens=sum(tokens for _, tokens in computed.values()),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )
