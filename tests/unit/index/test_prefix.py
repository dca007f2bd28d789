import random

import pytest

from kvpool.errors import CapacityError, UsageError
from kvpool.index.prefix import PrefixIndex
from kvpool.testing.blocks import key


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def test_put_get_remove() -> None:
    index = PrefixIndex(4)
    assert index.get(key(0)) is None
    index.put(key(0), 7)
    index.put(key(0), 8)
    assert (index.get(key(0)), len(index)) == (8, 1)
    assert index.remove(key(0))
    assert not index.remove(key(0))
    assert (index.get(key(0)), len(index)) == (None, 0)


def test_match_is_the_leading_run_and_never_skips_a_hole() -> None:
    index = PrefixIndex(8)
    for number in (0, 1, 2, 4, 5, 6, 7):
        index.put(key(number), 10 + number)
    chain = keys(*range(8))
    assert index.match(chain) == 3
    assert index.numbers(chain).tolist() == [10, 11, 12]
    assert index.match(chain[32 * 4 :]) == 4
    assert index.match(b"") == 0
    assert index.numbers(b"").tolist() == []


def test_many_keys_are_found_and_dropped_wherever_they_are() -> None:
    rng = random.Random("gaps")
    for _ in range(200):
        there = {number: rng.randrange(1 << 64) for number in range(40) if rng.random() < 0.7}
        index = PrefixIndex(40)
        for number, value in there.items():
            index.put(key(number), value)
        asked = [rng.randrange(40) for _ in range(rng.randrange(30))]  # some of them twice
        assert index.find(keys(*asked)) == [there.get(number) for number in asked]
        left = [number for number in dict.fromkeys(asked) if number in there]
        assert index.drop(keys(*asked)) == keys(*left)
        assert len(index) == len(there) - len(left)
        assert index.match(keys(*(there.keys() - set(asked)))) == len(index)
        assert index.drop(keys(*asked)) == b""
    assert (PrefixIndex(1).find(b""), PrefixIndex(1).drop(b"")) == ([], b"")


def test_a_full_index_refuses_and_still_overwrites() -> None:
    index = PrefixIndex(2)
    index.put(key(0), 0)
    index.put(key(1), 1)
    with pytest.raises(CapacityError):
        index.put(key(2), 2)
    index.put(key(1), 5)
    assert index.get(key(1)) == 5


def test_large_numbers_are_kept() -> None:
    index = PrefixIndex(1)
    index.put(key(0), (1 << 64) - 1)
    assert index.get(key(0)) == (1 << 64) - 1


def test_keys_that_are_not_whole_are_refused() -> None:
    index = PrefixIndex(2)
    for call in (
        *(index.match, index.numbers, index.get),
        *(index.remove, index.drop, index.find),
    ):
        with pytest.raises(UsageError):
            call(key(0)[:31])  # type: ignore[arg-type]  # bytes, not a hash
    with pytest.raises(UsageError):
        index.put(key(0)[:31], 1)  # type: ignore[arg-type]  # bytes, not a hash


@pytest.mark.parametrize("capacity", [0, -1])
def test_an_index_of_nothing_is_refused(capacity: int) -> None:
    with pytest.raises(UsageError):
        PrefixIndex(capacity)
