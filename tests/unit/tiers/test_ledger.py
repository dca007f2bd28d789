"""The ledger's Python face; the rules are held against a model in native/tests/test_ledger.c."""

import numpy as np
import pytest

from kvpool.arena import Slots
from kvpool.errors import UsageError
from kvpool.testing.blocks import key
from kvpool.tiers.ledger import NO_PARENT, Ledger, Listing, chained, count_of, own_parent, select


def keys_of(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def filled(ledger: Ledger, *numbers: int) -> Slots:
    """Commit a chain."""
    slots = ledger.reserve(len(numbers))
    keys = keys_of(*numbers)
    assert ledger.commit(slots, keys, chained(keys, None)).all()
    return slots


def test_a_chain_goes_from_its_end() -> None:
    ledger = Ledger(4)
    filled(ledger, 0, 1, 2)
    assert (ledger.match(keys_of(0, 1, 2, 3)), ledger.rooted(keys_of(1, 2))) == (3, 2)
    assert ledger.evict(2) == 2
    assert ledger.match(keys_of(0, 1)) == 1
    counts = ledger.counts()
    assert (counts.free, counts.ready, counts.stale) == (3, 1, 2)
    assert sorted(ledger.stale(10).tolist()) == [1, 2]


def test_a_key_that_is_here_gives_its_slot_back() -> None:
    ledger = Ledger(3)
    filled(ledger, 0)
    slots = ledger.reserve(2)
    assert ledger.commit(slots, keys_of(0, 1), NO_PARENT * 2).tolist() == [False, True]
    assert ledger.counts().free == 1


def test_a_run_is_committed_whole_or_not_at_all() -> None:
    ledger = Ledger(3)
    slots = ledger.reserve(2)
    ledger.release(slots[1])
    with pytest.raises(UsageError, match="not reserved"):
        ledger.commit(slots, keys_of(0, 1), NO_PARENT * 2)
    assert ledger.match(key(0)) == 0
    with pytest.raises(UsageError):
        ledger.commit(slots, keys_of(0), NO_PARENT * 2)


def test_pins_and_drops() -> None:
    ledger = Ledger(3)
    filled(ledger, 0)
    slots = ledger.pin(keys_of(0, 1))
    assert len(slots) == 1
    assert (ledger.evict(1), ledger.drop(key(0)), ledger.drop(key(0))) == (0, True, False)
    keys, _, ready = ledger.names(slots)
    assert (keys, ready.tolist()) == (key(0), [False])
    ledger.unpin(slots)
    with pytest.raises(UsageError, match="not pinned"):
        ledger.unpin(slots)
    assert ledger.counts().free == 3


def test_blocks_are_listed_and_restored() -> None:
    ledger = Ledger(5)
    filled(ledger, 0, 1, 2)
    ledger.drop(key(1))
    listing, following = ledger.blocks(0, 1)
    rest, _ = ledger.blocks(following, 10)
    assert (listing.keys, rest.keys, rest.parents) == (key(0), key(2), key(1))
    again = Ledger(5, 1 << 40)
    assert again.restore(rest).all()
    assert again.match(key(2)) == 1
    assert again.rooted(key(2)) == 0  # its parent is not here
    assert again.reserve(1).generations[0] == 1 << 40


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError):
        Ledger(0)
    with pytest.raises(UsageError):
        Ledger(3).match(b"short")
    with pytest.raises(UsageError):
        Ledger(3).drop(key(0) + key(1))  # type: ignore[arg-type]


def test_keys_as_rows() -> None:
    keys = keys_of(0, 1, 2)
    assert count_of(keys) == 3
    assert chained(keys, None) == NO_PARENT + keys_of(0, 1)
    assert chained(keys, key(9)) == keys_of(9, 0, 1)
    assert select(keys, np.array([True, False, True])) == keys_of(0, 2)
    assert own_parent(keys, keys_of(5, 1, 5))
    assert not own_parent(keys, chained(keys, None))
    slots = Slots(np.arange(3, dtype=np.uint32), np.arange(3, dtype=np.uint64))
    taken = Listing(slots, keys, keys).take(np.array([2, 0]))
    assert (taken.slots.indices.tolist(), taken.keys) == ([2, 0], keys_of(2, 0))
