"""How look-ups of conversations spread over shards, and how little moves when a node comes.

Prompts of one service share their beginning: named by what comes first, one shard would be asked for
all of them. The prompts are those of a public trace, Mooncake's ``conversation_trace.jsonl``, whose
shape ``conversations.txt`` has: of each request another one that it begins like, for how many of the
trace's blocks of 512 tokens, and how many of its own follow.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import HASH_BYTES, BlockHash, NodeId, sha256
from kvpool.index.announce import OWNERS, Announcer, run_names
from kvpool.index.directory import Store, Stores
from kvpool.index.lookup import Lookup, leading_blocks
from kvpool.index.ring import BoundedLoad, Ring
from tests.conftest import Count

NODES = [NodeId(f"host-{number}") for number in range(8)]
HOLDER: Stores = (Store(NODES[0], "pool", bytes(16)),)


def spread(prompts: Iterable[bytes]) -> tuple[Counter[NodeId], int]:
    """Look each prompt up, then store it. Return the names asked of each shard, and the most rounds."""
    ring, load = Ring(NODES), BoundedLoad(NODES)
    known: set[bytes] = set()
    asked: Counter[NodeId] = Counter()
    rounds = 0
    for hashes in prompts:
        lookup = Lookup(hashes, ring, load)
        while questions := lookup.ask():
            answers: dict[NodeId, list[Stores]] = {}
            for question in questions:
                asked[question.node] += len(question.names) // HASH_BYTES
                answers[question.node] = list(_found(question.names, known))
            lookup.answer(answers)
        rounds = max(rounds, lookup.rounds)
        held = sum(1 for _ in _found(hashes, known))
        assert leading_blocks(lookup.pieces()) == held
        known |= set(_cut(hashes)) | set(_cut(run_names(hashes)))
    return asked, rounds


def _cut(names: bytes) -> Iterator[bytes]:
    for begin in range(0, len(names), HASH_BYTES):
        yield names[begin : begin + HASH_BYTES]


def _found(names: bytes, known: set[bytes]) -> Iterator[Stores]:
    for name in _cut(names):
        if name not in known:
            return
        yield HOLDER


def conversations(count: int, blocks: int) -> Iterator[bytes]:
    """Yield the prompts of the first requests of the trace, each of its blocks cut into ``blocks``."""
    lines = Path(__file__).with_name("conversations.txt").read_text().splitlines()
    prompts: list[list[int]] = []
    names: list[bytes] = []
    for line in lines[:count]:
        like, alike, own = map(int, line.split())
        prompts.append(prompts[like][:alike] if alike else [])
        for each in range(len(names), len(names) + own):
            prompts[-1].append(each)
            names.append(b"".join(sha256(b"%d %d" % (each, part)) for part in range(blocks)))
        yield b"".join(names[each] for each in prompts[-1])


@pytest.mark.parametrize("blocks", [1, 32], ids=["512 tokens", "16 tokens"])
def test_conversations_that_begin_alike_spread_over_the_shards(blocks: int, count: Count) -> None:
    requests = count(500 if blocks > 1 else 3000, 12_031)
    asked, rounds = spread(conversations(requests, blocks))
    mean = asked.total() / len(NODES)
    assert rounds <= 2
    worst = max(asked[node] for node in NODES) / mean
    assert worst <= 1.5
    print(
        f"{requests} prompts, {asked.total()} names asked, {worst:.2f} of the mean, {rounds} rounds"
    )


def test_named_by_its_first_block_one_shard_would_be_asked_of_everybody() -> None:
    """The test above can fail: with all prompts' first name alike, its owners get most of it."""
    ring, asked = Ring(NODES), Counter[NodeId]()
    for hashes in conversations(1000, 1):
        asked[ring.owners(BlockHash(hashes[:HASH_BYTES]), 1)[0]] += 1
    assert max(asked.values()) > 1.5 * asked.total() / len(NODES)


def test_of_200_000_blocks_little_more_than_a_new_nodes_share_moves() -> None:
    count = 200_000
    hashes = np.random.default_rng(3).integers(0, 256, count * HASH_BYTES, dtype=np.uint8).tobytes()
    announcer = Announcer(count, Ring(NODES))
    announcer.restored(hashes, bytes(len(hashes)))  # first blocks, all of them: no runs
    moved = announcer.change_ring(Ring([*NODES, NodeId("new")]))
    share = count * OWNERS / (len(NODES) + 1)
    print(f"{moved} of {count * OWNERS} entries move, {moved / share:.3f} of the new node's share")
    assert 0.7 * share < moved <= 1.3 * share
