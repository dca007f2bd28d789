import random

import pytest

from kvpool.block import BlockHash
from kvpool.errors import UsageError
from kvpool.testing.blocks import key
from kvpool.tiers.eviction import LRUPolicy, _Node


def victims(policy: LRUPolicy) -> list[BlockHash]:
    found: list[BlockHash] = []
    while (victim := policy.victim()) is not None:
        found.append(victim)
    return found


def admit_chain(policy: LRUPolicy, *numbers: int, now: float = 0.0) -> None:
    for before, number in zip((None, *numbers), numbers, strict=False):
        policy.admit(key(number), None if before is None else key(before), now)


def test_the_least_recently_used_goes_first() -> None:
    policy = LRUPolicy()
    for number in range(4):
        policy.admit(key(number), None, float(number))
    policy.use(key(0), 10.0)
    policy.use(key(2), 11.0)
    assert victims(policy) == [key(1), key(3), key(0), key(2)]
    assert len(policy) == 0


def test_uses_at_the_same_time_keep_their_order() -> None:
    policy = LRUPolicy()
    for number in (3, 1, 2):
        policy.admit(key(number), None, 0.0)
    policy.use(key(3), 0.0)
    assert victims(policy) == [key(1), key(2), key(3)]


def test_a_chain_goes_from_its_end() -> None:
    policy = LRUPolicy()
    admit_chain(policy, 0, 1, 2)
    policy.use(key(2), 100.0)
    assert victims(policy) == [key(2), key(1), key(0)]


def test_an_old_leaf_goes_before_a_young_one_and_the_root_last() -> None:
    policy = LRUPolicy()
    admit_chain(policy, 0, 1)
    policy.admit(key(2), key(0), 1.0)
    policy.use(key(1), 2.0)
    assert victims(policy) == [key(2), key(1), key(0)]


def test_a_parent_that_comes_after_its_child_is_covered() -> None:
    policy = LRUPolicy()
    policy.admit(key(1), key(0), 5.0)
    policy.admit(key(0), None, 1.0)
    assert victims(policy) == [key(1), key(0)]


def test_a_parent_elsewhere_does_no_harm() -> None:
    policy = LRUPolicy()
    policy.admit(key(1), key(0), 0.0)
    policy.admit(key(2), key(0), 1.0)
    assert victims(policy) == [key(1), key(2)]
    policy.admit(key(0), None, 2.0)
    assert victims(policy) == [key(0)]


def test_pins_cover_the_block_and_its_ancestors() -> None:
    policy = LRUPolicy()
    admit_chain(policy, 0, 1, 2)
    policy.pin(key(1))
    policy.pin(key(1))
    assert victims(policy) == [key(2)]
    policy.unpin(key(1))
    assert victims(policy) == []
    policy.unpin(key(1))
    assert victims(policy) == [key(1), key(0)]


def test_a_removed_block_frees_its_parent_and_may_come_back() -> None:
    policy = LRUPolicy()
    admit_chain(policy, 0, 1)
    policy.remove(key(1))
    policy.remove(key(1))
    policy.unpin(key(1))
    policy.use(key(1), 9.0)
    policy.admit(key(1), key(0), 9.0)
    assert victims(policy) == [key(1), key(0)]


def test_a_block_removed_while_pinned_comes_back_without_the_pin() -> None:
    policy = LRUPolicy()
    policy.admit(key(0), None, 0.0)
    policy.pin(key(0))
    policy.remove(key(0))
    policy.admit(key(0), None, 1.0)
    assert victims(policy) == [key(0)]


def test_a_second_admission_or_an_own_parent_is_refused() -> None:
    policy = LRUPolicy()
    policy.admit(key(0), None, 0.0)
    with pytest.raises(UsageError):
        policy.admit(key(0), None, 0.0)
    with pytest.raises(UsageError):
        policy.admit(key(1), key(1), 0.0)
    assert len(policy) == 1


@pytest.mark.parametrize("length", [2, 3, 7])
def test_parents_in_a_circle_can_all_go(length: int) -> None:
    policy = LRUPolicy()
    for number in range(length):
        policy.admit(key(number), key((number + 1) % length), float(number))
    assert sorted(victims(policy)) == sorted(key(number) for number in range(length))
    assert not policy._children


def test_admissions_without_evictions_do_not_grow_the_heap() -> None:
    policy = LRUPolicy()
    for turn in range(2000):
        policy.admit(key(0), None, float(turn))
        policy.remove(key(0))
    assert len(policy._heap) < 100


@pytest.mark.parametrize("seed", range(20))
def test_against_a_scan_of_all_blocks(seed: int) -> None:
    """The same victims as the rule, applied by looking at everything."""
    choose = random.Random(seed)
    policy = LRUPolicy()
    parents: dict[int, int | None] = {}
    used: dict[int, int] = {}
    pins: dict[int, int] = {}

    def forget(number: int) -> None:
        for table in (parents, used, pins):
            table.pop(number, None)

    for now in range(400):
        number = choose.randrange(24)
        action = choose.choice(["admit", "admit", "use", "pin", "unpin", "remove", "victim"])
        if action == "admit" and number not in parents:
            parents[number] = choose.choice([None, *range(number)])
            used[number] = now
            parent = parents[number]
            policy.admit(key(number), None if parent is None else key(parent), now)
        elif action == "use" and number in parents:
            used[number] = now
            policy.use(key(number), now)
        elif action == "pin" and number in parents:
            pins[number] = pins.get(number, 0) + 1
            policy.pin(key(number))
        elif action == "unpin" and pins.get(number):
            pins[number] -= 1
            policy.unpin(key(number))
        elif action == "remove":
            forget(number)
            policy.remove(key(number))
        elif action == "victim":
            free = [n for n in parents if not pins.get(n) and n not in parents.values()]
            expected = min(free, key=used.__getitem__, default=None)
            assert policy.victim() == (None if expected is None else key(expected))
            if expected is not None:
                forget(expected)


class _CountingPolicy(LRUPolicy):
    looks = 0

    def _may_go(self, node: _Node) -> bool:
        self.looks += 1
        return super()._may_go(node)


def test_a_victim_does_not_cost_a_look_at_every_block() -> None:
    policy = _CountingPolicy()
    for number in range(1000):
        policy.admit(key(number), None, float(number))
        policy.pin(key(number))
    policy.victim()  # looks through those once
    policy.looks = 0
    for number in range(1000, 1050):
        policy.admit(key(number), None, 1e9)
        policy.use(key(number), 2e9)
        assert policy.victim() == key(number)
    assert policy.looks <= 50 * 4


def test_a_run_is_admitted_as_its_blocks_one_by_one() -> None:
    one_by_one, run = LRUPolicy(), LRUPolicy()
    admit_chain(one_by_one, 1, 2, 3)
    run.admit_run([key(1), key(2), key(3)], None, 0.0)
    run.pin_run([key(3)], 1.0)
    assert run.victim() is None
    run.unpin_run([key(3)])
    assert victims(run) == victims(one_by_one) == [key(3), key(2), key(1)]


def test_a_run_whose_parents_go_in_a_circle_can_be_evicted() -> None:
    policy = LRUPolicy()
    policy.admit_run([key(1), key(2)], key(2), 0.0)
    assert sorted(victims(policy)) == sorted([key(1), key(2)])
