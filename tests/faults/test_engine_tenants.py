"""Two tenants' engines on one server: each names blocks with its own salt, as the server asks."""

from contextlib import ExitStack, closing
from pathlib import Path

from kvpool.block import Part
from kvpool.integration.vllm.options import read_options
from kvpool.integration.vllm.pools import named_by, open_pool
from kvpool.integration.vllm.shape import part_chain
from kvpool.testing.blocks import namespace, view_of
from tests.faults.pool_client import LAYOUT, WAIT_S, blocks_of
from tests.faults.test_access import start

PART = Part(group=0, layer_begin=0, layer_end=8, head_begin=0, head_end=2)
HASHES = [bytes([number]) * 32 for number in range(4)]


def test_engines_of_two_tenants_store_the_same_prompt(tmp_path: Path) -> None:
    """The engine's own hash of a prompt is the same for both: without a salt, one is refused."""
    made = start(tmp_path)
    names: set[bytes] = set()
    with made.process, ExitStack() as stack:
        for tenant in ("red", "blue"):
            options = read_options(
                {
                    "server": made.address,
                    "token_file": str(tmp_path / tenant),
                    "ca_file": str(made.authority.ca),
                    "lookup_timeout_s": WAIT_S,
                    "load_timeout_s": WAIT_S,
                }
            )
            pool = stack.enter_context(closing(open_pool(options, LAYOUT)))
            chain = part_chain(named_by(pool, namespace(LAYOUT)), PART, HASHES)
            assert pool.match(chain).blocks == 0
            source = view_of(LAYOUT, blocks_of(1, len(HASHES)))
            stored = pool.store(chain, source, deadline_s=WAIT_S).wait(WAIT_S)
            assert stored.stored == len(HASHES)
            names.add(chain.hashes)
        assert made.counter("tenant") == 0
    assert len(names) == 2
