"""The directory: stores come, announce, evict, fall silent, die and come back; look-ups tell the truth.

A model in plain dictionaries says what is held; every shard is a real Directory, every store a real
Announcer, and messages are delivered, late or never, as a test decides.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block import HASH_BYTES, BlockHash, NodeId, sha256
from kvpool.errors import CapacityError, StaleIncarnationError, UsageError
from kvpool.index.announce import OWNERS, RUN_BLOCKS, Announcer, run_name, run_names
from kvpool.index.directory import REPLICAS_MAX, Change, Directory, Store
from kvpool.index.lookup import Lookup, Piece, leading_blocks
from kvpool.index.ring import BoundedLoad, Ring

A, B, C = (NodeId(name) for name in "abc")


def store(node: NodeId, life: int = 0, name: str = "dram") -> Store:
    return Store(node, name, bytes([life]) * 16)


def chain(count: int, seed: int = 0) -> bytes:
    return b"".join(sha256(f"{seed}/{number}".encode()) for number in range(count))


def block(hashes: bytes, index: int) -> BlockHash:
    return BlockHash(hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES])


# ---- one shard ------------------------------------------------------------------------------------


def test_leading_names_and_their_stores() -> None:
    directory, names = Directory(100), chain(5)
    for one in (store(A), store(B)):
        directory.join(one)
    assert directory.announce(store(A), names[: 3 * HASH_BYTES]) == 3
    assert directory.announce(store(B), names[HASH_BYTES : 4 * HASH_BYTES]) == 3
    assert directory.announce(store(B), names[HASH_BYTES : 2 * HASH_BYTES]) == 0
    both = (store(A), store(B))
    assert directory.lookup(names) == [(store(A),), both, both, (store(B),)]
    assert directory.withdraw(store(A), names) == 3
    assert directory.lookup(names) == [], "the first name is nowhere"
    assert directory.lookup(names[HASH_BYTES:]) == [(store(B),)] * 3
    assert len(directory) == 3


def test_a_silent_node_is_hidden_and_comes_back_with_what_it_has() -> None:
    directory, names = Directory(100), chain(4)
    for one in (store(A), store(A, 7, "ssd"), store(B)):
        directory.join(one)
        directory.announce(one, names)
    directory.leave(A)
    directory.leave(A)
    assert directory.lookup(names) == [(store(B),)] * 4
    with pytest.raises(StaleIncarnationError):
        directory.announce(store(A), names)
    # Its process is another one now: DRAM is empty, the SSD is what it was.
    directory.join(store(A, 1))
    directory.join(store(A, 7, "ssd"))
    assert directory.lookup(names) == [(store(A, 7, "ssd"), store(B))] * 4
    with pytest.raises(StaleIncarnationError):
        directory.withdraw(store(A, 0), names)


def test_a_node_that_is_forgotten_leaves_nothing() -> None:
    directory, names = Directory(100), chain(40)
    for one in (store(A), store(B)):
        directory.join(one)
    directory.announce(store(A), names)
    directory.announce(store(B), names[: 10 * HASH_BYTES])
    directory.leave(A)
    directory.forget(A)
    assert len(directory) == 10
    directory.forget(B)
    directory.forget(B)
    assert len(directory) == 0
    # What the lists of stores were numbered with is used again.
    for life in range(200):
        directory.join(store(C, life))
        directory.announce(store(C, life), names)
    assert len(directory) == 40
    assert directory.lookup(names) == [(store(C, 199),)] * 40


def test_a_full_directory_refuses_all_of_a_message() -> None:
    directory, names = Directory(10), chain(12)
    directory.join(store(A))
    directory.announce(store(A), names[: 9 * HASH_BYTES])
    with pytest.raises(CapacityError, match="10 names"):
        directory.announce(store(A), names)
    assert len(directory) == 9
    assert directory.announce(store(A), names[: 10 * HASH_BYTES]) == 1
    assert directory.drop(names[2 * HASH_BYTES :]) == 8
    assert directory.announce(store(A), names[4 * HASH_BYTES :]) == 8


def test_the_oldest_replica_of_too_many_gives_way() -> None:
    directory, name = Directory(10), chain(1)
    stores = [store(NodeId(str(number))) for number in range(REPLICAS_MAX + 3)]
    for one in stores:
        directory.join(one)
        directory.announce(one, name)
    assert directory.lookup(name) == [tuple(stores[3:])]


def test_subscribers_hear_what_changed_and_nothing_else() -> None:
    directory, names = Directory(10), chain(3)
    heard: list[Change] = []
    directory.subscribe(heard.append)
    directory.join(store(A))
    directory.announce(store(A), names[: 2 * HASH_BYTES])
    directory.announce(store(A), names)
    directory.withdraw(store(A), names[: 1 * HASH_BYTES])
    directory.withdraw(store(A), names[: 1 * HASH_BYTES])
    assert heard == [
        Change("stored", store(A), names[: 2 * HASH_BYTES]),
        Change("stored", store(A), names[2 * HASH_BYTES :]),
        Change("removed", store(A), names[: 1 * HASH_BYTES]),
    ]


def test_bytes_that_are_no_names_are_refused() -> None:
    directory = Directory(10)
    directory.join(store(A))
    calls: list[Callable[[], object]] = [
        lambda: directory.announce(store(A), bytes(33)),
        lambda: directory.withdraw(store(A), bytes(31)),
        lambda: directory.lookup(bytes(1)),
        lambda: directory.drop(bytes(1)),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_against_a_plain_model(seed: int) -> None:
    draw = random.Random(seed)
    # With room for no more than there is, and with much: names that are new come in in two ways.
    directory, names = Directory(draw.choice((24, 64))), chain(24)
    lives = dict.fromkeys((A, B, C), 0)
    present: set[NodeId] = set()
    model: dict[int, list[Store]] = {}
    for _ in range(120):
        node = draw.choice((A, B, C))
        begin = draw.randrange(24)
        some = list(range(begin, min(24, begin + draw.randrange(1, 9))))
        if draw.random() < 0.3:  # in any order, with gaps, and some of them twice
            some = [draw.randrange(24) for _ in range(draw.randrange(12))]
        part = b"".join(block(names, index) for index in some)
        mine = store(node, lives[node])
        action = draw.choice(
            ("join", "life", "leave", "forget", "announce", "announce", "withdraw")
        )
        if action in ("join", "life"):
            if action == "life":
                lives[node] += 1
                for held in model.values():
                    held[:] = [one for one in held if one.node != node]
            directory.join(store(node, lives[node]))
            present.add(node)
        elif action == "leave":
            directory.leave(node)
            present.discard(node)
        elif action == "forget":
            directory.forget(node)
            present.discard(node)
            for held in model.values():
                held[:] = [one for one in held if one.node != node]
        elif node in present:
            changed = 0
            for index in some:
                held = model.setdefault(index, [])
                if action == "announce" and mine not in held:
                    held.append(mine)
                    changed += 1
                elif action == "withdraw" and mine in held:
                    held.remove(mine)
                    changed += 1
            call = directory.announce if action == "announce" else directory.withdraw
            assert call(mine, part) == changed
        expected = []
        for index in range(begin, 24):
            stores = tuple(one for one in model.get(index, []) if one.node in present)
            if not stores:
                break
            expected.append(stores)
        found = directory.lookup(names[begin * HASH_BYTES :])
        assert [set(one) for one in found] == [set(one) for one in expected]
        assert len(directory) == sum(bool(held) for held in model.values())


# ---- several shards, and who announces to them ----------------------------------------------------


class Cluster:
    """Shards, stores and a reader. Messages arrive when ``deliver`` is called."""

    def __init__(self, nodes: list[NodeId], capacity: int = 4096) -> None:
        self.ring = Ring(nodes)
        self.capacity = capacity
        self.shards = {node: self.shard() for node in nodes}
        self.announcers: dict[Store, Announcer] = {}
        self.load = BoundedLoad(nodes)
        self.asked: Counter[NodeId] = Counter()
        for node in nodes:
            self.add_store(store(node))

    def shard(self) -> Directory:
        return Directory(self.capacity * 4)

    def add_store(self, one: Store) -> None:
        self.announcers[one] = Announcer(self.capacity, self.ring)
        for shard in self.shards.values():
            shard.join(one)

    def change(self, nodes: list[NodeId]) -> int:
        self.ring = Ring(nodes)
        self.load = BoundedLoad(nodes)
        for node in set(nodes) - set(self.shards):
            self.shards[node] = self.shard()
            for one in self.announcers:
                self.shards[node].join(one)
        self.shards = {node: shard for node, shard in self.shards.items() if node in nodes}
        return sum(announcer.change_ring(self.ring) for announcer in self.announcers.values())

    def deliver(self) -> None:
        for one, announcer in self.announcers.items():
            while nodes := announcer.waiting():
                for node in nodes:
                    kind, names = announcer.take(node, 100)
                    shard = self.shards[node]
                    (shard.announce if kind == "stored" else shard.withdraw)(one, names)

    def lookup(self, hashes: bytes, dead: Collection[NodeId] = ()) -> list[Piece]:
        lookup = Lookup(hashes, self.ring, self.load)
        while questions := lookup.ask():
            self.asked.update({q.node: len(q.names) // HASH_BYTES for q in questions})
            lookup.answer(
                {
                    q.node: self.shards[q.node].lookup(q.names)
                    for q in questions
                    if q.node not in dead
                }
            )
        assert lookup.rounds <= 2
        return lookup.pieces()


NODES = [NodeId(f"n{number}") for number in range(5)]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("held", [0, 1, 63, 64, 65, 127, 128, 200])
def test_a_prompt_is_found_as_far_as_it_is_held(count: int, held: int) -> None:
    cluster, hashes = Cluster(NODES), chain(200)
    cluster.announcers[store(NODES[0])].stored(hashes, 0, held)
    cluster.deliver()
    pieces = cluster.lookup(hashes[: count * HASH_BYTES])
    assert leading_blocks(pieces) == min(count, held)
    assert pieces == ([Piece(0, min(count, held), (store(NODES[0]),))] if count and held else [])


def test_a_branch_is_found_by_its_own_runs() -> None:
    """Two prompts that share 100 blocks: the run in which they part is another one for each."""
    cluster, trunk = Cluster(NODES), chain(100)
    first, second = trunk + chain(60, 1), trunk + chain(60, 2)
    cluster.announcers[store(NODES[0])].stored(first, 0, 160)
    cluster.deliver()
    assert leading_blocks(cluster.lookup(first)) == 160
    assert leading_blocks(cluster.lookup(second)) == 100


def test_pieces_say_which_stores_have_all_of_them() -> None:
    cluster, hashes = Cluster(NODES), chain(150)
    one, two = store(NODES[1]), store(NODES[2])
    cluster.announcers[one].stored(hashes, 0, 150)
    cluster.announcers[two].stored(hashes, 0, 70)
    cluster.deliver()
    # The second run is found whole at one of them, and no block of it is asked for.
    assert [(piece.begin, piece.end, set(piece.stores)) for piece in cluster.lookup(hashes)] == [
        (0, 64, {one, two}),
        (64, 150, {one}),
    ]


def test_an_evicted_block_takes_the_run_that_it_ends() -> None:
    cluster, hashes = Cluster(NODES), chain(128)
    announcer = cluster.announcers[store(NODES[0])]
    announcer.stored(hashes, 0, 128)
    cluster.deliver()
    for index in range(127, 99, -1):  # a block goes before its ancestors
        announcer.removed(block(hashes, index))
    cluster.deliver()
    assert leading_blocks(cluster.lookup(hashes)) == 100
    assert len(announcer) == 100 + 1


def test_a_run_is_whole_only_with_its_ancestors() -> None:
    cluster, hashes = Cluster(NODES), chain(128)
    announcer = cluster.announcers[store(NODES[0])]
    announcer.stored(hashes, 64, 64)  # a fragment: its parent lies elsewhere
    cluster.deliver()
    assert leading_blocks(cluster.lookup(hashes)) == 0
    announcer.stored(hashes, 0, 64)
    cluster.deliver()
    assert leading_blocks(cluster.lookup(hashes)) == 128


def test_a_shard_that_does_not_answer_costs_only_its_names() -> None:
    cluster, hashes = Cluster(NODES), chain(40)
    cluster.announcers[store(NODES[0])].stored(hashes, 0, 40)
    cluster.deliver()
    for dead in NODES:
        pieces = cluster.lookup(hashes, {dead})
        assert leading_blocks(pieces) <= 40
        assert all(piece.stores == (store(NODES[0]),) for piece in pieces)
    assert leading_blocks(cluster.lookup(hashes)) == 40


def test_a_ring_change_tells_new_owners_only_and_look_ups_stay_available() -> None:
    blocks, count = 4000, 8
    nodes = [NodeId(f"n{number}") for number in range(count)]
    cluster = Cluster(nodes, capacity=blocks)
    chains = [chain(100, seed) for seed in range(blocks // 100)]
    for number, hashes in enumerate(chains):
        cluster.announcers[store(nodes[number % count])].stored(hashes, 0, 100)
    cluster.deliver()
    names = sum(len(announcer) for announcer in cluster.announcers.values())
    told = cluster.change([*nodes, NodeId("new")])
    # Each name has OWNERS owners of count + 1 nodes.
    assert told <= 1.3 * names * OWNERS / (count + 1)
    found = [leading_blocks(cluster.lookup(hashes)) for hashes in chains]
    assert sum(found) > 0.5 * blocks, "before anything was told, the second owners answer"
    cluster.deliver()
    assert [leading_blocks(cluster.lookup(hashes)) for hashes in chains] == [100] * len(chains)
    cluster.change(nodes[1:])
    cluster.deliver()
    assert [leading_blocks(cluster.lookup(hashes)) for hashes in chains] == [100] * len(chains)


def test_a_node_that_was_out_of_reach_for_long_is_told_everything_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.index.announce.PENDING_MAX", 10)
    cluster, hashes = Cluster(NODES[:2]), chain(100)
    announcer = cluster.announcers[store(NODES[0])]
    announcer.stored(hashes, 0, 100)
    assert announcer.waiting() == NODES[:2]
    cluster.deliver()
    assert leading_blocks(cluster.lookup(hashes)) == 100
    # A shard that was started anew knows nothing.
    cluster.shards[NODES[1]] = cluster.shard()
    for one in cluster.announcers:
        cluster.shards[NODES[1]].join(one)
    announcer.renew(NODES[1])
    cluster.deliver()
    assert len(cluster.shards[NODES[1]]) == len(cluster.shards[NODES[0]]) == len(announcer)


def test_what_was_queued_of_a_name_before_is_void() -> None:
    cluster, hashes = Cluster(NODES[:1]), chain(3)
    announcer = cluster.announcers[store(NODES[0])]
    for _ in range(3):
        announcer.stored(hashes, 0, 3)
        announcer.removed(block(hashes, 2))
    assert announcer.take(NODES[0], 10) == ("stored", hashes[: 2 * HASH_BYTES])
    assert announcer.take(NODES[0], 10) == ("removed", block(hashes, 2))
    assert announcer.take(NODES[0], 10) == ("stored", b"")


def test_the_names_of_runs() -> None:
    hashes = chain(2 * RUN_BLOCKS + 5)
    names = run_names(hashes)
    assert names == run_name(block(hashes, 63)) + run_name(block(hashes, 127))
    assert run_names(hashes[: 63 * HASH_BYTES]) == run_names(b"") == b""
    assert block(names, 0) not in {block(hashes, index) for index in range(133)}


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_is_found_is_held_by_all_it_is_said_of(seed: int) -> None:
    """Random branches, evictions from the leaves, rings that change: never a store too many."""
    draw = random.Random(seed)
    cluster = Cluster(NODES[: draw.randrange(1, 6)], capacity=2000)
    trunk = chain(draw.randrange(0, 150), seed)
    prompts = [trunk + chain(draw.randrange(0, 150), seed + 1 + n) for n in range(4)]
    stores = list(cluster.announcers)
    held: dict[Store, dict[int, int]] = {one: {} for one in stores}
    for _ in range(12):
        one, number = draw.choice(stores), draw.randrange(4)
        length, mine = len(prompts[number]) // HASH_BYTES, held[one]
        if draw.random() < 0.7:
            mine[number] = max(mine.get(number, 0), draw.randrange(length + 1))
            cluster.announcers[one].stored(prompts[number], 0, mine[number])
        elif mine:
            # The leaves of a branch go, down to what other branches of this store share.
            number = draw.choice(list(mine))
            shared = max(
                (min(n, len(trunk) // HASH_BYTES) for k, n in mine.items() if k != number),
                default=0,
            )
            left = (
                draw.randrange(shared, mine[number] + 1) if mine[number] > shared else mine[number]
            )
            for index in range(mine[number] - 1, left - 1, -1):
                cluster.announcers[one].removed(block(prompts[number], index))
            mine[number] = left
        if draw.random() < 0.2:
            cluster.change(NODES[draw.randrange(0, 3) : draw.randrange(4, 6)])
    cluster.deliver()
    for prompt in prompts:
        truth = {
            one: max(
                (
                    _common(prompt, prompts[number][: count * HASH_BYTES])
                    for number, count in mine.items()
                ),
                default=0,
            )
            for one, mine in held.items()
        }
        pieces = cluster.lookup(prompt)
        for piece in pieces:
            assert all(truth[one] >= piece.end for one in piece.stores)
        # One store's own leading blocks are always found.
        assert leading_blocks(pieces) == max(truth.values())


def _common(first: bytes, second: bytes) -> int:
    count = 0
    for index in range(min(len(first), len(second)) // HASH_BYTES):
        if block(first, index) != block(second, index):
            break
        count += 1
    return count
