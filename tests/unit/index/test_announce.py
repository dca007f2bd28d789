"""What a store tells: earlier runs of it, nodes that forgot, blocks that went; whom a reader asks next."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvpool.block import HASH_BYTES, BlockHash, NodeId, sha256
from kvpool.index.announce import OWNERS, Announcer, gone, run_name, run_names
from kvpool.index.lookup import Lookup
from kvpool.index.ring import BoundedLoad, Ring

NODES = [NodeId(f"n{number}") for number in range(5)]


def chain(count: int, seed: int = 0) -> bytes:
    return b"".join(sha256(f"{seed}/{number}".encode()) for number in range(count))


def cut(names: bytes) -> list[BlockHash]:
    return [
        BlockHash(names[begin : begin + HASH_BYTES]) for begin in range(0, len(names), HASH_BYTES)
    ]


def told(announcer: Announcer, node: NodeId) -> set[BlockHash]:
    """Take all that a node is to be told."""
    names: set[BlockHash] = set()
    while node in announcer.waiting():
        kind, some = announcer.take(node, 50)
        assert kind == "stored"
        names |= set(cut(some))
    return names


@pytest.mark.parametrize("count", [1, 63, 64, 130, 200])
def test_an_earlier_runs_blocks_are_named_as_if_they_had_just_been_stored(count: int) -> None:
    hashes, ring = chain(count), Ring(NODES[:1])
    live, later = Announcer(1000, ring), Announcer(1000, ring)
    live.stored(hashes, 0, count)
    order = np.random.default_rng(count).permutation(count)
    keys, parents = cut(hashes), [BlockHash(bytes(HASH_BYTES)), *cut(hashes)[:-1]]
    later.restored(
        b"".join(keys[index] for index in order), b"".join(parents[index] for index in order)
    )
    assert told(later, NODES[0]) == told(live, NODES[0])


def test_a_restored_fragment_names_no_run() -> None:
    hashes = chain(128)
    announcer = Announcer(1000, Ring(NODES[:1]))
    keys = cut(hashes)
    announcer.restored(b"".join(keys[10:]), b"".join(keys[9:-1]))
    assert told(announcer, NODES[0]) == set(keys[10:])


def test_blocks_that_are_their_own_ancestors_end_no_run_and_no_loop() -> None:
    hashes = chain(128)
    announcer = Announcer(1000, Ring(NODES[:1]))
    announcer.restored(hashes, hashes[-HASH_BYTES:] + hashes[:-HASH_BYTES])
    assert told(announcer, NODES[0]) == set(cut(hashes))


def test_a_node_that_forgot_is_told_everything_anew() -> None:
    hashes, ring = chain(200), Ring(NODES)
    announcer = Announcer(1000, ring)
    announcer.stored(hashes, 0, 200)
    first = {node: told(announcer, node) for node in NODES}
    assert announcer.waiting() == []
    announcer.lose(NODES[2])
    announcer.lose(NodeId("nobody"))
    assert announcer.waiting() == [NODES[2]]
    assert told(announcer, NODES[2]) == first[NODES[2]]
    assert sum(len(names) for names in first.values()) == OWNERS * (200 + 200 // 64)


STEP = st.tuples(
    st.sampled_from(["store", "remove", "arrives", "unsure", "lost", "forgot", "ring"]),
    st.integers(0, 1),
)


@given(st.lists(STEP, max_size=20))
def test_whoever_owns_a_name_knows_in_the_end_what_is_here_and_what_left(
    steps: list[tuple[str, int]],
) -> None:
    """However often what it is told does not arrive, or arrives unacknowledged, or it forgets."""
    rings = [Ring(NODES[:2]), Ring(NODES[:3])]
    announcer = Announcer(1000, rings[0])
    known: dict[NodeId, set[BlockHash]] = {node: set() for node in NODES}
    here: set[BlockHash] = set()

    def tell(node: NodeId, how: str) -> None:
        kind, names = announcer.take(node, 6)
        if how != "lost":
            some = set(cut(names))
            known[node] = known[node] | some if kind == "stored" else known[node] - some
        if how in ("lost", "unsure"):
            announcer.lose(node, (kind, names))

    for kind, number in steps:
        node = NODES[number]
        if kind == "store":
            announcer.stored(chain(4, number), 0, 4)
            here.update(cut(chain(4, number)))
        elif kind == "remove":
            left = cut(chain(4, number))[2:]
            announcer.removed(b"".join(left))
            here.difference_update(left)
        elif kind == "forgot":
            known[node].clear()
            announcer.lose(node)
        elif kind == "ring":
            announcer.change_ring(rings[number])
        elif node in announcer.waiting():
            tell(node, kind)
    announcer.change_ring(rings[0])
    while announcer.waiting():
        for node in announcer.waiting():
            tell(node, "arrives")
    for node in NODES[:2]:
        owned = {name for name in here if node in rings[0].owners(name, OWNERS)}
        assert owned <= known[node]
        assert known[node] <= here  # names that it owned in another ring it drops by itself


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_removal_that_may_not_have_arrived_is_told_again(again: int) -> None:
    hashes, node = chain(4), NODES[0]
    announcer = Announcer(1000, Ring([node]))
    announcer.stored(hashes, 0, 4)
    assert told(announcer, node) == set(cut(hashes))
    left = cut(hashes)[3]
    announcer.removed(left)
    for _ in range(again + 1):
        taken = announcer.take(node, 50)
        assert taken == ("removed", left)
        announcer.lose(node, taken)
        announcer.lose(node)
    assert announcer.take(node, 50) == ("removed", left)
    assert told(announcer, node) == set(cut(hashes)[:3])
    announcer.stored(hashes, 3, 1)
    announcer.lose(node, ("removed", left))  # it is here again: what is told anew says so
    assert told(announcer, node) == set(cut(hashes))


def test_a_name_that_nobody_was_told_of_is_taken_back_where_it_is_said() -> None:
    announcer = Announcer(1000, Ring(NODES))
    block = cut(chain(1))[0]
    announcer.denied(block)
    for name in (block, run_name(block)):
        for node in Ring(NODES).owners(name, OWNERS):
            assert name in announcer_takes(announcer, node, "removed")
            announcer.denied(block)


def test_a_run_with_a_gap_is_no_run_until_it_is_whole_again() -> None:
    hashes, ring = chain(64), Ring(NODES[:1])
    announcer = Announcer(1000, ring)
    announcer.stored(hashes, 0, 64)
    last, seven = cut(hashes)[-1], cut(hashes)[7]
    assert run_name(last) in told(announcer, NODES[0])
    announcer.denied(seven)
    announcer.broken(last)
    assert announcer_takes(announcer, NODES[0], "removed") == {
        *(seven, run_name(seven), run_name(last)),
    }
    announcer.stored(hashes, 7, 1)
    assert told(announcer, NODES[0]) == {seven}
    announcer.stored(hashes, 7, 57)
    assert told(announcer, NODES[0]) == {run_name(last)}


def announcer_takes(announcer: Announcer, node: NodeId, kind: str) -> set[BlockHash]:
    """Take what a node is to be told next, of one kind."""
    said, names = announcer.take(node, 50)
    assert said == kind
    return set(cut(names))


def test_what_is_gone_is_said_and_runs_that_are_whole_are_not() -> None:
    hashes = chain(130)
    names = hashes + run_names(hashes)
    assert gone(names, hashes) == []
    lost = set(gone(names, hashes[: 100 * HASH_BYTES]))
    assert lost == {*cut(hashes)[100:], *cut(run_names(hashes))[1:]}
    assert len(gone(names, b"")) == 132


def test_numbers_and_names_of_owners_agree() -> None:
    ring, names = Ring(NODES), chain(500)
    numbered = [tuple(NODES[number] for number in row) for row in ring.owner_numbers(names, 3)]
    assert numbered == ring.owners_of(names, 3)
    assert Ring([]).owner_numbers(names, 2).shape == (500, 0)


def test_a_ring_of_other_nodes_is_told_what_it_owns() -> None:
    announcer, hashes = Announcer(1000, Ring(NODES[:2])), chain(150)
    announcer.stored(hashes, 0, 150)
    after, names = Ring(NODES[1:]), hashes + run_names(hashes)
    owned = after.owners_of(names, OWNERS)
    assert announcer.change_ring(after) == sum(len(set(each) & set(NODES[2:])) for each in owned)


def test_names_of_a_node_that_does_not_answer_are_asked_of_others_in_the_same_round() -> None:
    ring, hashes = Ring(NODES), chain(64)
    lookup = Lookup(hashes[: 40 * HASH_BYTES], ring, BoundedLoad(NODES))
    first = lookup.ask()
    dead = first[0].node
    again = lookup.ask_others({dead})
    assert dead not in {question.node for question in again}
    answers = {question.node: question for question in [*first[1:], *again]}
    asked = [name for question in answers.values() for name in cut(question.names)]
    assert sorted(asked) == sorted(cut(hashes)[:40])
    assert lookup.rounds == 1


def test_nobody_left_to_ask_is_no_question() -> None:
    lookup = Lookup(chain(3), Ring(NODES[:1]), BoundedLoad(NODES[:1]))
    lookup.ask()
    assert lookup.ask_others({NODES[0]}) == []


def test_who_was_silent_is_asked_only_if_nobody_else_is_left() -> None:
    ring, hashes = Ring(NODES), chain(60)
    lookup = Lookup(hashes, ring, BoundedLoad(NODES), avoid={NODES[0], NODES[1]})
    names = {name: question.node for question in lookup.ask() for name in cut(question.names)}
    for name, owned in zip(cut(hashes), ring.owners_of(hashes, OWNERS), strict=True):
        alive = [node for node in owned if node not in {NODES[0], NODES[1]}]
        assert names[name] in (alive or owned)
