"""The ledger of tenants against a dict: whose each block is, and how much each tenant has."""

import asyncio
import contextlib
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.block import HASH_BYTES
from kvpool.errors import CapacityError, UsageError
from kvpool.metrics import Metrics
from kvpool.server.quotas import CALL_NAMES_MAX, TenantLedger
from kvpool.server.tenancy import Tenancy
from kvpool.server.tenant import Tenant, calling_tenant
from kvpool.testing.blocks import key

RED = Tenant(name="red", store_bytes_max=300)
BLUE = Tenant(name="blue")
BLOCK_BYTES = 100
CAPACITY = 16


class Scene:
    def __init__(self) -> None:
        self.tier: set[bytes] = set()
        self.ledger = TenantLedger(CAPACITY, BLOCK_BYTES, lambda name: int(name in self.tier))

    def store(self, tenant: Tenant, *numbers: int) -> None:
        names = b"".join(key(number) for number in numbers)
        room = self.ledger.take_room(tenant, names)
        self.tier.update(key(number) for number in numbers)
        if self.ledger.is_full(names):
            self.ledger.sweep(CAPACITY)
        self.ledger.stored(tenant, names)
        self.ledger.give_room(tenant, room)


def _names(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def test_another_tenant_sees_nothing_behind_a_block_that_is_not_its_own() -> None:
    scene = Scene()
    scene.store(RED, 2, 3)
    for names, red, blue in (
        (_names(1, 2, 3), 3, 1),
        (_names(2), 1, 0),
        (_names(9, 8), 2, 2),
        (b"", 0, 0),
    ):
        assert scene.ledger.visible(RED, names) == red
        assert scene.ledger.visible(BLUE, names) == blue


def test_a_block_belongs_to_who_stored_it_first() -> None:
    scene = Scene()
    scene.store(RED, 1)
    scene.store(BLUE, 1)
    assert scene.ledger.used_bytes("red") == 100
    assert scene.ledger.used_bytes("blue") == 0


def test_a_quota_refuses_what_is_beyond_it_and_counts_no_block_twice() -> None:
    scene = Scene()
    scene.store(RED, 1, 2, 3)
    scene.store(RED, 1, 2, 3)
    with pytest.raises(CapacityError, match="tenant red has 300 of 300 bytes") as caught:
        scene.store(RED, 4)
    assert caught.value.size_bytes == 100
    assert scene.ledger.used_bytes("red") == 300
    scene.store(BLUE, 4)


def test_stores_at_once_have_one_quota_together() -> None:
    """Each would fit, and none of them has ended: what comes is counted as what is here."""
    scene = Scene()
    first = scene.ledger.take_room(RED, _names(1, 2))
    with pytest.raises(CapacityError, match="tenant red has 200 of 300 bytes"):
        scene.ledger.take_room(RED, _names(3, 4))
    second = scene.ledger.take_room(RED, _names(5))
    assert scene.ledger.take_room(BLUE, _names(*range(10))) == 0
    scene.ledger.give_room(RED, first)
    scene.store(RED, 3)
    scene.ledger.give_room(RED, second)
    scene.store(RED, 3, 4, 5)
    assert scene.ledger.used_bytes("red") == 300


@pytest.mark.parametrize("ends_well", [True, False])
def test_room_that_was_taken_is_given_back_whatever_becomes_of_the_store(ends_well: bool) -> None:
    tenancy = Tenancy(Metrics())
    tenancy.opened(CAPACITY, BLOCK_BYTES, lambda name: 0)

    def store() -> None:
        calling_tenant.set(RED)
        for _ in range(5):
            with contextlib.suppress(ValueError), tenancy.room(_names(1, 2, 3)):
                with pytest.raises(CapacityError), tenancy.room(_names(4)):
                    raise AssertionError
                if not ends_well:
                    raise ValueError

    contextvars.copy_context().run(store)


def test_unknown_names_cost_the_same_however_many_follow() -> None:
    """A prompt that nobody stored is the usual case: what is behind a name is not looked at for it."""
    ledger = TenantLedger(CAPACITY, BLOCK_BYTES, lambda name: 0)
    ledger.stored(RED, _names(*range(CAPACITY)))
    looked = 0

    class Counted(bytes):
        def __getitem__(self, at: object) -> bytes:  # type: ignore[override]
            nonlocal looked
            assert isinstance(at, slice)
            found = bytes(self)[at]
            looked += len(found)
            return found

    names = Counted(_names(*range(1000, 5000)))
    assert ledger.visible(BLUE, names) == 4000
    assert looked < 100 * len(names)


def test_no_call_names_blocks_without_end() -> None:
    ledger = TenantLedger(CAPACITY, BLOCK_BYTES, lambda name: 0)
    assert ledger.visible(RED, bytes(HASH_BYTES * CALL_NAMES_MAX)) == CALL_NAMES_MAX
    with pytest.raises(UsageError, match="65537 blocks in one call: name 65536 at most"):
        ledger.visible(RED, bytes(HASH_BYTES * (CALL_NAMES_MAX + 1)))


def test_blocks_that_left_make_room_again() -> None:
    scene = Scene()
    scene.store(RED, 1, 2, 3)
    scene.tier.discard(key(2))
    scene.store(RED, 4)
    assert scene.ledger.used_bytes("red") == 300
    assert scene.ledger.visible(BLUE, _names(2)) == 1


def test_all_names_are_swept_whatever_was_swept_before() -> None:
    scene = Scene()
    scene.store(RED, 1, 2, 3)
    scene.ledger.sweep(2)
    scene.tier.clear()
    assert scene.ledger.sweep(CAPACITY) == 3


def test_a_sweep_looks_at_the_tiers_on_a_thread() -> None:
    """The tiers are asked once a name: the server's loop has other things to do."""
    threads: list[int] = []

    def present(name: bytes) -> int:
        threads.append(threading.get_ident())
        return int(name != key(7))

    async def swept() -> int:
        with ThreadPoolExecutor(1) as executor:
            tenancy = Tenancy(Metrics())
            tenancy.opened(CAPACITY, BLOCK_BYTES, present)
            calling_tenant.set(RED)
            await tenancy.stored(_names(1, 2, 7), executor)
            await tenancy.sweep(executor)
            return threads.count(threading.get_ident())

    assert asyncio.run(swept()) == 1  # the one that is gone is looked at again
    assert len(threads) == 4


def test_a_chain_that_is_known_in_part_needs_room_for_the_rest_alone() -> None:
    scene = Scene()
    scene.store(BLUE, *range(14))
    scene.store(BLUE, 0, 1, 15)
    assert scene.ledger.used_bytes("blue") == 15 * BLOCK_BYTES


STEP = st.tuples(
    st.sampled_from(["red", "blue", "evict", "sweep"]),
    st.lists(st.integers(0, 19), min_size=1, max_size=4, unique=True),
)


@given(st.lists(STEP, max_size=60))
def test_it_agrees_with_a_dict(steps: list[tuple[str, list[int]]]) -> None:
    scene = Scene()
    tenants = {"red": Tenant(name="red", store_bytes_max=600), "blue": BLUE}
    for kind, numbers in steps:
        if kind == "evict":
            scene.tier.difference_update(key(number) for number in numbers)
        elif kind == "sweep":
            scene.ledger.sweep(numbers[0] + 1)
        elif len(scene.tier | {key(number) for number in numbers}) <= CAPACITY:
            try:
                scene.store(tenants[kind], *numbers)
            except CapacityError:
                assert kind == "red"
        assert scene.ledger.used_bytes("red") <= 600
    scene.ledger.sweep(CAPACITY)
    scene.ledger.sweep(CAPACITY)
    used = scene.ledger.used_bytes("red") + scene.ledger.used_bytes("blue")
    assert used == len(scene.tier) * BLOCK_BYTES
