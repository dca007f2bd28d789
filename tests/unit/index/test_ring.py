"""The ring: everybody comes to the same owners, shares are even, little moves, hot names spread."""

import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.block import HASH_BYTES, BlockHash, NodeId, sha256
from kvpool.errors import UsageError
from kvpool.index.ring import LOAD_FACTOR, BoundedLoad, Ring

# Of six names among five nodes: by the number of the node.
OWNERS_OF_VERSION_1 = [(2, 1), (2, 0), (3, 4), (1, 0), (4, 1), (1, 0)]
NAMES = b"".join(sha256(str(number).encode()) for number in range(20_000))


def nodes(count: int) -> list[NodeId]:
    return [NodeId(f"host-{number}") for number in range(count)]


def test_the_order_of_the_nodes_does_not_matter() -> None:
    first, second = Ring(nodes(9)), Ring(reversed(nodes(9)))
    assert first.owners_of(NAMES, 3) == second.owners_of(NAMES, 3)


def test_owners_are_the_ones_of_every_version() -> None:
    """Another placement would hide every block from servers of the version before."""
    names = b"".join(sha256(bytes([number])) for number in range(6))
    assert Ring(nodes(5)).owners_of(names, 2) == [
        tuple(NodeId(f"host-{number}") for number in pair) for pair in OWNERS_OF_VERSION_1
    ]


@given(st.integers(0, 12), st.integers(1, 5), st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES))
def test_owners_are_distinct_and_as_many_as_there_are(count: int, wanted: int, name: bytes) -> None:
    owners = Ring(nodes(count)).owners(BlockHash(name), wanted)
    assert len(owners) == len(set(owners)) == min(count, wanted)


def test_a_smaller_count_is_a_prefix() -> None:
    ring = Ring(nodes(7))
    three, one = ring.owners_of(NAMES, 3), ring.owners_of(NAMES, 1)
    assert [owners[:1] for owners in three] == one


@pytest.mark.parametrize("count", [2, 5, 8, 64])
def test_shares_are_even(count: int) -> None:
    shares = Counter(owners[0] for owners in Ring(nodes(count)).owners_of(NAMES, 1))
    mean = len(NAMES) / HASH_BYTES / count
    assert 0.7 * mean < min(shares.values()) <= max(shares.values()) < 1.35 * mean


@pytest.mark.parametrize("count", [2, 5, 8, 20])
def test_only_the_share_of_a_node_that_comes_moves(count: int) -> None:
    before, after = Ring(nodes(count)), Ring(nodes(count + 1))
    old, new = before.owners_of(NAMES, 1), after.owners_of(NAMES, 1)
    moved = [now for was, now in zip(old, new, strict=True) if was != now]
    assert set(moved) == {(NodeId(f"host-{count}"),)}, "a name moved between old nodes"
    assert len(moved) <= 1.3 * len(old) / (count + 1)


def test_when_a_node_goes_its_successor_is_who_was_second() -> None:
    ring, rest = Ring(nodes(6)), Ring(nodes(5))
    gone = NodeId("host-5")
    pairs = zip(ring.owners_of(NAMES, 2), rest.owners_of(NAMES, 1), strict=True)
    for (first, second), (owner,) in pairs:
        assert owner == (second if first == gone else first)


def test_nobody_owns_anything_in_an_empty_ring() -> None:
    ring = Ring([])
    assert (len(ring), ring.owners(BlockHash(bytes(32)), 2)) == (0, ())
    assert ring.owners_of(bytes(64), 1) == [(), ()]


def test_names_of_any_kind_are_nodes() -> None:
    odd = [NodeId(name) for name in ("", "a" * 300, "../x", "\0", "\ud800", "Z\u00fcrich")]
    assert set(Ring(odd).owners(BlockHash(os.urandom(32)), 6)) == set(odd)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        Ring([NodeId("a"), NodeId("a")])
    with pytest.raises(UsageError, match="at least one"):
        Ring(nodes(2), virtual_nodes=0)
    for names, count in ((bytes(33), 1), (bytes(32), 0), (bytes(32), -1)):
        with pytest.raises(UsageError):
            Ring(nodes(2)).owners_of(names, count)
    with pytest.raises(UsageError, match="more than 1"):
        BoundedLoad(nodes(2), factor=1.0)


def test_a_hot_name_spreads_over_its_owners_and_cold_ones_stay() -> None:
    ring, load = Ring(nodes(8)), BoundedLoad(nodes(8))
    hot = BlockHash(NAMES[:HASH_BYTES])
    asked: Counter[NodeId] = Counter()
    away = 0
    for begin in range(0, 400_000, HASH_BYTES):
        for name in (hot, BlockHash(NAMES[begin : begin + HASH_BYTES])):
            owners = ring.owners(name, 2)
            chosen = load.choose(owners)
            asked[chosen] += 1
            away += name != hot and chosen not in owners[:1]
    mean = asked.total() / 8
    hottest = asked.most_common(2)
    assert {node for node, _ in hottest} == set(ring.owners(hot, 2))
    # Half of everything is one name, and only two nodes know it.
    assert hottest[0][1] - hottest[1][1] < 0.1 * mean
    calm = BoundedLoad(nodes(8))
    for begin in range(0, len(NAMES), HASH_BYTES):
        calm.choose(ring.owners(BlockHash(NAMES[begin : begin + HASH_BYTES]), 2))
    counts = calm.counts()
    assert max(counts.values()) <= LOAD_FACTOR * sum(counts.values()) / 8 + 1


def test_old_load_is_forgotten() -> None:
    load = BoundedLoad(nodes(2), window=64)
    first, second = nodes(2)
    for _ in range(1000):
        load.choose([first])
    assert sum(load.counts().values()) < 64
    assert load.choose([first, second]) == second
