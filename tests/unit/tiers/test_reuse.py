import random

import pytest

from kvpool.block import BlockHash
from kvpool.errors import UsageError
from kvpool.testing.blocks import key
from kvpool.tiers.eviction import EvictionPolicy, Facts, LRUPolicy
from kvpool.tiers.reuse import ReusePolicy


@pytest.fixture(params=["lru", "reuse"])
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    """Every policy keeps the rules of the contract."""
    return LRUPolicy() if request.param == "lru" else ReusePolicy(64)


def victims(policy: EvictionPolicy) -> list[BlockHash]:
    found: list[BlockHash] = []
    while (victim := policy.victim()) is not None:
        found.append(victim)
    return found


def test_a_chain_goes_from_its_end(policy: EvictionPolicy) -> None:
    policy.admit_run([key(0), key(1), key(2)], None, 0.0)
    policy.use(key(2), 100.0)
    assert victims(policy) == [key(2), key(1), key(0)]
    assert len(policy) == 0


def test_a_pin_covers_the_ancestors(policy: EvictionPolicy) -> None:
    policy.admit_run([key(0), key(1), key(2)], None, 0.0)
    policy.pin_run([key(1)], 1.0)
    policy.pin(key(1))
    assert victims(policy) == [key(2)]
    policy.unpin(key(1))
    assert victims(policy) == []
    policy.unpin_run([key(1), key(9)])
    assert victims(policy) == [key(1), key(0)]


def test_a_parent_may_come_late_or_never(policy: EvictionPolicy) -> None:
    policy.admit(key(1), key(0), 0.0)
    policy.admit(key(3), key(2), 0.0)
    policy.admit(key(0), None, 1.0)
    found = victims(policy)
    assert sorted(found) == sorted([key(0), key(1), key(3)])
    assert found.index(key(1)) < found.index(key(0))


def test_parents_in_a_circle_can_go(policy: EvictionPolicy) -> None:
    policy.admit(key(0), key(1), 0.0)
    policy.admit(key(1), key(0), 0.0)
    assert len(victims(policy)) == 2


def test_a_removed_block_is_forgotten(policy: EvictionPolicy) -> None:
    policy.admit_run([key(0), key(1)], None, 0.0)
    policy.pin(key(1))
    policy.remove(key(1))
    policy.remove(key(1))
    policy.unpin(key(1))
    policy.admit(key(1), key(0), 2.0)
    assert victims(policy) == [key(1), key(0)]


def test_what_is_here_cannot_be_admitted(policy: EvictionPolicy) -> None:
    policy.admit(key(0), None, 0.0)
    for run, parent in (([key(0)], None), ([key(1)], key(1))):
        with pytest.raises(UsageError):
            policy.admit_run(run, parent, 1.0)
    assert len(policy) == 1


def test_random_calls_keep_the_rules(policy: EvictionPolicy) -> None:
    """No victim has a child or a pin, none goes twice, and all go in the end."""
    generator = random.Random(7)
    parents: dict[BlockHash, BlockHash | None] = {}
    pins: list[BlockHash] = []
    now = 0.0
    for turn in range(1500):
        now += generator.expovariate(2)
        here = list(parents)
        step = generator.randrange(8)
        if step < 3:
            run = [key(4 * turn + at) for at in range(generator.randrange(1, 4))]
            parent = generator.choice(here) if here and generator.random() < 0.7 else None
            policy.admit_run(run, parent, now)
            parents.update(zip(run, [parent, *run], strict=False))
        elif step == 3 and here:
            policy.use(generator.choice(here), now)
        elif step == 4 and here and len(pins) < 20:
            pins.append(generator.choice(here))
            policy.pin_run(pins[-1:], now)
        elif step == 5 and pins:
            policy.unpin(pins.pop(generator.randrange(len(pins))))
        elif step == 6 and here and generator.random() < 0.2:
            gone = generator.choice([one for one in here if one not in pins] or [key(0)])
            policy.remove(gone)
            parents.pop(gone, None)
        elif len(parents) > 40:
            victim = policy.victim()
            if victim is not None:
                assert victim in parents and victim not in pins
                del parents[victim]
                assert victim not in parents.values()
        assert len(policy) == len(parents)
    policy.unpin_run(pins)
    assert sorted(victims(policy)) == sorted(parents)


def _visits(policy: EvictionPolicy, minutes: int) -> int:
    """Serve 64 blocks of room: 30 users who come back each minute, and a flood of blocks that do not.

    Returns how many of the users' visits found their block, in the second half of the time.
    """
    here: set[BlockHash] = set()
    found = 0

    def admit(name: BlockHash, run: list[BlockHash], now: float) -> None:
        while len(here) + len(run) > 64:
            victim = policy.victim()
            assert victim is not None
            here.remove(victim)
        policy.admit_run(run, None, now)
        here.update(run)

    for minute in range(minutes):
        for second in range(60):
            now = 60.0 * minute + second
            if second < 30:
                user = key(second)
                if user in here:
                    found += minute >= minutes // 2
                    policy.use(user, now)
                else:
                    admit(user, [user], now)
            flood = [key(1000 + 8 * int(now) + at) for at in range(4)]
            admit(flood[0], flood, now)
    return found


def test_what_comes_back_is_kept_through_a_flood_that_lru_drowns_in() -> None:
    """The flood's requests add four blocks and the users' one: kinds that can be told apart."""
    assert _visits(LRUPolicy(), 12) == 0
    assert _visits(ReusePolicy(64), 12) > 0.8 * 30 * 6


def test_a_block_that_costs_more_for_its_bytes_is_kept() -> None:
    policy = ReusePolicy(8)
    policy.admit(key(0), None, 0.0, Facts(size_bytes=100, cost_s=3.0))
    policy.admit(key(1), None, 0.0, Facts(size_bytes=100, cost_s=1.0))
    policy.admit(key(2), None, 0.0, Facts(size_bytes=100, cost_s=2.0))
    assert victims(policy) == [key(1), key(2), key(0)]


def test_runs_of_one_request_are_of_one_kind() -> None:
    """By the request's name, or by the parent: a prompt that is stored in pieces is one prompt."""
    named, chained = ReusePolicy(64), ReusePolicy(64)
    for at in range(0, 16, 4):
        run = [key(number) for number in range(at, at + 4)]
        parent = key(at - 1) if at else None
        named.admit_run(run, None, 0.0, Facts(request="r"))
        chained.admit_run(run, parent, 0.0)
    for policy in (named, chained):
        assert len(set(policy._kinds)) == 1
    chained.admit_run([key(100)], key(15), 1000.0)  # another turn: a request of its own
    assert len(set(chained._kinds)) == 2


def test_memory_is_bounded() -> None:
    policy = ReusePolicy(16)
    for number in range(6000):
        while len(policy) >= 16:
            assert policy.victim() is not None
        policy.admit(key(number), None, number / 100)
    assert len(policy._numbers) <= 16 + 8 * 16
    assert len(policy._keys) <= 16 + 8 * 16 + 1
    assert len(policy._heap) <= 8 * 16 + 65


def test_a_policy_for_no_room_is_refused() -> None:
    with pytest.raises(UsageError):
        ReusePolicy(0)
