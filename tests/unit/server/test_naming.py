"""Whoever owns a name is told of it, whatever becomes of the ring meanwhile, and the loop goes on."""

import asyncio
import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.arena import Arena
from kvpool.block import HASH_BYTES, BlockLayout, NodeId, new_incarnation, sha256
from kvpool.index.announce import OWNERS, run_names
from kvpool.index.ring import Ring
from kvpool.metrics import Metrics
from kvpool.reservation import Reservation
from kvpool.server.naming import Naming
from kvpool.tiers.dram import DramTier

LAYOUT = BlockLayout(num_layers=1, kv_heads=1, block_tokens=16, k_dim=8, v_dim=8)
BLOCKS = 300
HASHES = b"".join(sha256(str(number).encode()) for number in range(BLOCKS))
NAMES = HASHES + run_names(HASHES)
ALL = [NodeId(f"n{number}") for number in range(6)]


class Watched(Ring):
    """A ring that notes which threads look up many names in it."""

    def __init__(self, nodes: Iterable[NodeId], threads: list[int]) -> None:
        super().__init__(nodes)
        self._threads = threads

    def owner_numbers(self, names: bytes, count: int) -> NDArray[np.intp]:
        self._threads.append(threading.get_ident())
        return super().owner_numbers(names, count)


def _cut(names: bytes) -> list[bytes]:
    return [names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES)]


def _put(tier: DramTier, hashes: bytes) -> None:
    """Have a tier hold blocks of nothing."""
    count = len(hashes) // HASH_BYTES
    crcs = np.zeros((count, LAYOUT.num_layers, LAYOUT.kv_heads), dtype=np.uint32)
    assert Reservation(tier, hashes, None).finish(crcs).new == count


class Scene:
    """The names of one node, and what the nodes were told so far, as they know it."""

    def __init__(self, ring: Ring, executor: ThreadPoolExecutor) -> None:
        self.told: dict[NodeId, set[bytes]] = {}
        self.naming = Naming(ring, executor, Metrics(), lambda: None)
        self.tier = DramTier(Arena(LAYOUT, 2 * BLOCKS, new_incarnation()))

    async def __aenter__(self) -> Self:
        await self.naming.opened(self.tier)
        assert await self.naming.stored(HASHES, 0, BLOCKS)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.naming.close()
        self.tier.close()

    async def tell(self, ring: Ring) -> None:
        """Tell everybody everything, once nothing is under way."""
        async with asyncio.timeout(20):
            while True:
                for node in self.naming.waiting():
                    await self.naming.renew(node)
                    kind, names = self.naming.take(node)
                    known = self.told.setdefault(node, set())
                    if kind == "stored":
                        known.update(_cut(names))
                    else:
                        known.difference_update(_cut(names))
                await asyncio.sleep(0)
                idle = len(asyncio.all_tasks()) == 1  # this one alone
                if idle and not self.naming.waiting():
                    return

    def check(self, ring: Ring, names: bytes = NAMES) -> None:
        """Every owner knows every name that it owns."""
        for name, owners in zip(_cut(names), ring.owners_of(names, OWNERS), strict=True):
            assert all(name in self.told[node] for node in owners)


CHANGES = [
    [ALL[:3], ALL[:4]],
    [ALL[:3], ALL[1:3]],
    [ALL[:3], ALL[3:]],
    [ALL[:4], ALL[1:4], ALL[:4]],
    [ALL[:2], ALL[:3], ALL[:4], ALL[:5], ALL],
    [ALL[:2], *([ALL, ALL[:2]] * 12), ALL[1:4]],
]


@pytest.mark.parametrize("rings", CHANGES, ids=lambda rings: "-".join(str(len(r)) for r in rings))
def test_owners_are_told_through_changes_that_come_faster_than_they_are_worked_out(
    rings: list[list[NodeId]],
) -> None:
    async def run() -> list[int]:
        threads: list[int] = []
        with ThreadPoolExecutor(1) as executor:
            made = [Watched(nodes, threads) for nodes in rings]
            async with Scene(made[0], executor) as scene:
                await scene.tell(made[0])
                for before, ring in itertools.pairwise(made):
                    scene.naming.turn(ring)
                    for node in set(before.nodes) - set(ring.nodes):
                        scene.told.pop(node, None)  # who comes back has forgotten
                await scene.tell(made[-1])
                scene.check(made[-1])
        return threads

    threads = asyncio.run(run())
    assert threads, "many names were looked up"
    assert threading.get_ident() not in threads, "not in the loop"


def test_what_left_before_its_turn_is_not_told() -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as executor:
            first, second = Ring(ALL[:2]), Ring(ALL[:3])
            async with Scene(first, executor) as scene:
                await scene.tell(first)
                scene.naming.turn(second)
                while len(asyncio.all_tasks()) > 1:  # worked out, and nobody was told
                    await asyncio.sleep(0)
                left = _cut(HASHES)[::3]
                for name in left:
                    scene.naming.missed(name)
                await scene.tell(second)
                assert not scene.told[ALL[2]] & set(left)
                kept = b"".join(name for name in _cut(HASHES) if name not in set(left))
                scene.check(second, kept)
                gone = b"".join(left)
                for name, owners in zip(left, second.owners_of(gone, OWNERS), strict=True):
                    assert not any(name in scene.told[node] for node in owners)

    asyncio.run(run())


def test_who_forgot_is_told_everything_and_news_meanwhile() -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as executor:
            ring = Ring(ALL[:3])
            async with Scene(ring, executor) as scene:
                await scene.tell(ring)
                scene.told.pop(ALL[0])
                scene.naming.lose(ALL[0])
                renewal = asyncio.create_task(scene.naming.renew(ALL[0]))
                await asyncio.sleep(0)
                later = b"".join(sha256(f"later {number}".encode()) for number in range(100))
                assert await scene.naming.stored(later, 0, 100)
                await renewal
                await scene.tell(ring)
                scene.check(ring, NAMES + later)

    asyncio.run(run())


def test_a_renewal_that_is_given_up_is_not_lost() -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as executor:
            ring = Ring(ALL[:3])
            async with Scene(ring, executor) as scene:
                await scene.tell(ring)
                scene.told.pop(ALL[1])
                scene.naming.lose(ALL[1])
                renewal = asyncio.create_task(scene.naming.renew(ALL[1]))
                await asyncio.sleep(0)
                renewal.cancel()
                await asyncio.gather(renewal, return_exceptions=True)
                assert scene.naming.is_behind(ALL[1])
                await scene.tell(ring)
                scene.check(ring)

    asyncio.run(run())


def test_a_name_that_is_missed_is_taken_back_with_the_run_that_it_is_in() -> None:
    async def run() -> None:
        ring = Ring(ALL[:3])
        with ThreadPoolExecutor(1) as executor:
            async with Scene(ring, executor) as scene:
                await scene.tell(ring)
                scene.check(ring)
                scene.naming.missed(HASHES[70 * HASH_BYTES :])
                await scene.tell(ring)
                gone = {_cut(HASHES)[70], run_names(HASHES)[HASH_BYTES : 2 * HASH_BYTES]}
                scene.check(ring, b"".join(name for name in _cut(NAMES) if name not in gone))
                assert not gone & set().union(*scene.told.values())

    asyncio.run(run())


def test_what_left_is_taken_back_and_what_came_again_meanwhile_is_not() -> None:
    async def run() -> None:
        ring, again = Ring(ALL[:3]), HASHES[: 10 * HASH_BYTES]
        with ThreadPoolExecutor(1) as executor:
            async with Scene(ring, executor) as scene:
                _put(scene.tier, HASHES)
                await scene.tell(ring)
                assert scene.tier.evict(BLOCKS) == BLOCKS
                scene.naming.tick()
                await asyncio.sleep(0)
                executor.submit(lambda: None).result(20)  # it has been seen what left
                _put(scene.tier, again)
                assert await scene.naming.stored(again, 0, 10)
                await scene.tell(ring)
                scene.check(ring, again)
                known = set().union(*scene.told.values())
                assert known == set(_cut(again))

    asyncio.run(run())
